"""The report's page and the page of kept tokens as text; examples and costs."""

import base64
import json
import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from keepsight.eval.record import ResultRow
from keepsight.eval.report import pages as report
from keepsight.eval.report.figures import styles_of
from keepsight.eval.report.pages import choose_examples, write_inspect_page
from keepsight.eval.report.summary import summarize
from keepsight.eval.report.tables import cost_table, interval_text
from keepsight.eval.results import Run
from tests.eval.report.results import row, write_page


def test_report_is_one_file_that_needs_nothing_else(rows: list[ResultRow], tmp_path: Path) -> None:
    settings = {
        "command": "keepsight eval x",
        "versions": {"torch": "2.13"},
        "model": {"id": "tiny"},
        "lengths": [1, 2],
    }
    write_page([Run(tmp_path / "out", rows, settings)], tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.html"]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    panels_on_page = re.findall(r'<figure class="panel[^>]*>\s*<figcaption>[^<]*</figcaption><svg', page)
    assert len(panels_on_page) == 11
    assert sum(len(plot.panels) for plot in report.plots_of(rows, summarize(rows))) == 11
    assert not re.search(r"""(?:src|href)=["'](?!#)""", page)
    assert page.count("<script") == page.count("</script") == 1
    for text in (
        "keepsight eval x",
        "torch 2.13",
        "model.id",
        "tiny",
        "1, 2",
        "2-4 for each task and length, 6 in all",
    ):
        assert text in page
    for name in ("niah_single, 512 tokens", "qa, short, 512 tokens", "mean of 2 tasks"):
        assert name in page
    assert "prefers-color-scheme: dark" in page


def test_report_escapes_what_the_model_wrote(rows: list[ResultRow], tmp_path: Path) -> None:
    rows[1] = replace(rows[1], answer="<script>alert(1)</script> & more", references=["<b>4711</b>"])
    write_page([Run(tmp_path, rows, {"note": "<i>settings</i>"})], tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in page
    assert "&lt;i&gt;settings&lt;/i&gt;" in page
    assert page.count("<script") == 1  # the page's own
    assert "<script>" not in page
    assert "<b>4711" not in page


def test_the_length_of_a_prompt_stands_beside_its_bucket(tmp_path: Path) -> None:
    rows = [row("full", None, 1.0), row("snapkv", 64, 0.0)]
    write_page([Run(tmp_path, rows, {})], tmp_path)
    page = " ".join((tmp_path / "report.html").read_text("utf-8").split())
    assert "niah_single, 512 tokens, " in page
    assert "<dt>prompt</dt><dd>500 tokens</dd>" in page
    assert "<dt>prompts</dt><dd>500 to 500 tokens</dd>" in page


def test_a_head_that_no_method_read_is_not_named(tmp_path: Path) -> None:
    without_digest = {"adapter": "shipped:module", "retrieval": "shipped:head", "retrieval_digest": None}
    with_digest = without_digest | {"adapter_digest": "sha256:0123456789abcdef"}
    rows = [row("full", None, 1.0)]
    write_page([Run(tmp_path, rows, with_digest), Run(tmp_path, rows, without_digest)], tmp_path)
    header, _, _ = (tmp_path / "report.html").read_text(encoding="utf-8").partition("</header>")
    assert header.count("shipped:module") == 3  # twice in titles
    assert header.count("shipped:module (0123456789ab)") == 1
    assert "retrieval head" not in header


def test_tables_on_the_page_have_intervals(rows: list[ResultRow], tmp_path: Path) -> None:
    write_page([Run(tmp_path, rows, {})], tmp_path)
    page = (tmp_path / "report.html").read_text("utf-8")
    for table in report.tables_of(rows, summarize(rows))[:3]:
        expected: list[str] = []
        for line in table.rows:
            intervals = [interval_text(line, column) for column in table.columns]
            expected += [interval for interval in intervals if interval]
        assert expected
        _, _, from_table = page.partition(f'id="table-{table.name}"')
        table_on_page, _, _ = from_table.partition("</table>")
        assert re.findall("<small>([^<]+)</small>", table_on_page) == expected


def test_examples_are_those_that_differ_most_taking_tasks_in_turn(rows: list[ResultRow]) -> None:
    examples = choose_examples(rows, count=3)
    assert [example.sample.task for example in examples] == ["niah_single", "qa, short", "niah_single"]
    first = examples[0]
    assert first.sample.sample == "s1"  # snapkv answers s0 rightly
    assert first.difference == 1.0
    assert [answer.method for answer in first.answers] == ["full", "lookaheadkv", "snapkv"]


def test_timings_are_means_with_the_full_cache_first(rows: list[ResultRow]) -> None:
    rows[0] = replace(rows[0], seconds=replace(rows[0].seconds, prefill=7.0))
    lines = cost_table(rows).rows
    assert [(line["method"], line["budget"]) for line in lines] == [
        ("full", None),
        ("lookaheadkv", 64),
        ("snapkv", 64),
        ("lookaheadkv", 128),
        ("snapkv", 128),
    ]
    assert lines[0]["prefill"] == pytest.approx(2.0)
    assert lines[1]["kept"] == 64
    assert lines[1]["kv_mib"] == pytest.approx(64 / 1024)


TOKENS = ["<|im_start|>", "user", "\n", "\t", " the", " </script><script>alert(1)</script>", "�", " 4711", "  "]


def decode(counts: str, layers: int, length: int) -> NDArray[np.uint8]:
    return np.frombuffer(zlib.decompress(base64.b64decode(counts)), np.uint8).reshape(layers, length)


def page_data(page: str) -> dict[str, Any]:
    """The page's data as a browser reads it: an element ends at the first `</script`."""
    element = re.search(r'<script type="application/json" id="data">(.*?)</script', page, re.DOTALL)
    assert element
    return json.loads(element[1])


@pytest.fixture
def kept() -> dict[str, NDArray[np.bool_]]:
    """By method, [layers, heads, tokens]."""
    generator = np.random.default_rng(0)
    methods = ("lookaheadkv", "snapkv", "streamingllm")
    return {method: generator.random((5, 3, len(TOKENS))) < 0.4 for method in methods}


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
