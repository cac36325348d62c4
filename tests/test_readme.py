"""The Python of README, the guides and their tables is true; README's first snippet: tests/test_examples.py."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from keepsight import checkpoints
from keepsight.eval.tasks.benchmark import TaskRequest
from keepsight.eval.tasks.jsonl import Jsonl
from keepsight.eval.tasks.metrics import METRICS, score
from keepsight.eval.tasks.registry import Benchmarks
from keepsight.runtime.methods import METHODS, make_method
from tests.models.modules import random_module, save
from tests.tiny import prompt_ids, tiny_model, tiny_tokenizer

README = Path(__file__).parent.parent / "README.md"
DOCS = README.parent / "docs"


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the first block has made once its downloads are done."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(METHODS, "value_norm", METHODS["evict"])  # taken out again after the test
    save(random_module(), tmp_path / "smollm2-135m-lookahead", base="")
    head = "smollm2-135m-retrieval"
    (tmp_path / head).symlink_to(README.parent / "checkpoints" / head)
    monkeypatch.setattr(checkpoints, "__path__", [str(tmp_path)])
    model: Any = tiny_model(vocab_size=512, max_position_embeddings=512)
    ids, mask = prompt_ids(100)
    return {"model": model, "tokenizer": tiny_tokenizer(), "inputs": {"input_ids": ids, "attention_mask": mask}}


def run(block: str, names: dict[str, Any]) -> None:
    without_downloads = re.sub(
        r"^(packaged =|target =|model =|(model, )?tokenizer =|inputs =|print).*\n(    .*\n|\)\n)*",
        "",
        block,
        flags=re.MULTILINE,
    )
    smaller = without_downloads.replace("max_new_tokens=64", "max_new_tokens=4").replace("budget=128", "budget=40")
    exec(smaller, names)


def test_readmes_other_blocks_run(names: dict[str, Any]) -> None:
    _, *blocks = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        run(block, names)


def test_the_guides_method_is_made_by_its_name(names: dict[str, Any]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "own_method.md").read_text("utf-8"), flags=re.DOTALL)
    run(block, names)
    assert make_method("value_norm", 40) == names["ValueNorm"](budget=40)


def test_the_samples_of_ones_own_are_read_and_scored(tmp_path: Path) -> None:
    rows, tasks = re.findall(r"```json\n(.*?)```", (DOCS / "evaluation.md").read_text("utf-8"), flags=re.DOTALL)
    (tmp_path / "contracts.jsonl").write_text(rows, "utf-8")
    (tmp_path / "tasks.json").write_text(tasks, "utf-8")
    lease, disputes = Jsonl(str(tmp_path)).samples("", TaskRequest(tiny_tokenizer(), 4096))
    assert lease.task == disputes.task == "contracts" and lease.question.startswith("\n\nQuestion: How long")
    assert score(lease, "9 years.") == score(disputes, "Basel") == 1.0 and score(lease, "Basel") == 0.0


def test_every_benchmark_and_metric_is_named() -> None:
    named = set(re.findall(r"`(\w+)`", (DOCS / "evaluation.md").read_text("utf-8")))
    assert {each.name for each in fields(Benchmarks)} - {"helmet"} <= named
    assert {name for name in METRICS if not name.startswith(("same_", "reaches_"))} <= named


def test_every_method_is_in_the_table() -> None:
    table = (DOCS / "methods.md").read_text("utf-8")
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
