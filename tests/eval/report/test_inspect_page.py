import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from keepsight.eval.report.figures import styles_of
from keepsight.eval.report.pages import write_inspect_page

TOKENS = ["<|im_start|>", "user", "\n", "\t", " the", " </script><script>alert(1)</script>", "�", " 4711", "  "]


def decode(counts: str, layers: int, length: int) -> NDArray[np.uint8]:
    return np.frombuffer(zlib.decompress(base64.b64decode(counts)), np.uint8).reshape(layers, length)


def page_data(page: str) -> dict[str, Any]:
    """The page's data as a browser reads it: an element ends at the first `</script`."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script', page, re.DOTALL)
    assert found
    return json.loads(found.group(1))


@pytest.fixture
def kept() -> dict[str, NDArray[np.bool_]]:
    generator = np.random.default_rng(0)
    return {name: generator.random((5, 3, len(TOKENS))) < 0.4 for name in ("lookaheadkv", "snapkv", "streamingllm")}


def test_page_holds_every_token_and_the_counts_of_every_method(
    kept: dict[str, NDArray[np.bool_]], tmp_path: Path
) -> None:
    write_inspect_page(
        tmp_path / "a" / "page.html", TOKENS, kept, "Kept <entries>", {"budget": 64, "model": {"id": "x"}}
    )
    page = (tmp_path / "a" / "page.html").read_text(encoding="utf-8")
    data = page_data(page)
    assert data["tokens"] == TOKENS
    assert (data["layers"], data["heads"]) == (5, 3)
    assert [method["name"] for method in data["methods"]] == list(kept)
    for method in data["methods"]:
        counts = decode(method["counts"], 5, len(TOKENS))
        np.testing.assert_array_equal(counts, kept[method["name"]].sum(axis=1))
        assert method["colour"] == styles_of(kept)[method["name"]].colour
    assert "Kept &lt;entries&gt;" in page
    assert "model.id" in page


def test_page_needs_nothing_else_and_prompt_text_cannot_become_markup(
    kept: dict[str, NDArray[np.bool_]], tmp_path: Path
) -> None:
    write_inspect_page(tmp_path / "page.html", TOKENS, kept, "Kept", {})
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"""(?:src|href)=["']""", page)
    assert len(re.findall("<script", page)) == 2  # the data and the code
    assert len(re.findall("</script", page)) == 2
