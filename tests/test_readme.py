"""The README's Python runs as it stands, on a tiny model in place of the one it downloads."""

import re
from pathlib import Path
from typing import Any

import pytest

from keepsight import checkpoints
from keepsight.runtime.methods import METHODS, make_method
from tests.models.modules import random_module, save
from tests.tiny import prompt_ids, tiny_model

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), flags=re.DOTALL)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the first block has made once its downloads are done."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(METHODS, "value_norm", METHODS["evict"])  # taken out again after the test
    save(random_module(), tmp_path / "smollm2-135m-lookahead", base="")
    monkeypatch.setattr(checkpoints, "__path__", [str(tmp_path)])
    model: Any = tiny_model(max_position_embeddings=512)
    ids, mask = prompt_ids(100)
    return {"model": model, "inputs": {"input_ids": ids, "attention_mask": mask}}


def run(block: str, names: dict[str, Any]) -> None:
    without_downloads = re.sub(r"^(from transformers|model =|tokenizer =|inputs =).*\n", "", block, flags=re.MULTILINE)
    smaller = without_downloads.replace("max_new_tokens=64", "max_new_tokens=4").replace("budget=128", "budget=40")
    exec(smaller, names)


def test_it_has_the_blocks_that_are_run_here() -> None:
    assert len(BLOCKS) == 3
    assert all(block.count("\n") < 25 for block in BLOCKS)


def test_every_block_runs_after_those_before(names: dict[str, Any]) -> None:
    for block in BLOCKS:
        run(block, names)
    assert make_method("value_norm", 40) == names["ValueNorm"](budget=40)


def test_every_method_is_in_the_table() -> None:
    table = README.read_text("utf-8").partition("## The methods")[2].partition("\n## ")[0]
    named = set(
        re.findall(r"`([a-z0-9_+]+)`", "\n".join(line.split("|")[1] for line in table.splitlines() if line[:2] == "| "))
    )
    assert set(METHODS) - {"full"} <= named


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_the_paths_that_are_named_exist(name: str) -> None:
    text = re.sub(r"```.*?```", "", (README.parent / name).read_text("utf-8"), flags=re.DOTALL)
    named = set(re.findall(r"`((?:[a-z_]+/)+(?:\w+\.\w+)?)`", text)) - {"runs/"}
    rooms = [README.parent / room for room in (".", "keepsight", "runtime", "train", "eval")]
    assert named
    assert not {path for path in named if "NAME" not in path and not any((room / path).exists() for room in rooms)}
