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


DOWNLOADS = re.compile(
    r"^(packaged =|target =|model =|(model, )?tokenizer =|inputs =|print).*\n(    .*\n|\)\n)*", flags=re.MULTILINE
)


def run(block: str, names: dict[str, Any]) -> None:
    """Run a block of Python without what it downloads and prints, with short answers and small budgets."""
    code = DOWNLOADS.sub("", block)
    code = code.replace("max_new_tokens=64", "max_new_tokens=4").replace("budget=128", "budget=40")
    exec(code, names)


def blocks_of(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text("utf-8"), flags=re.DOTALL)


def test_readmes_other_blocks_run(names: dict[str, Any]) -> None:
    _, *blocks = blocks_of(README, "python")
    assert blocks
    for block in blocks:
        run(block, names)


def test_the_guides_method_is_made_by_its_name(names: dict[str, Any]) -> None:
    (block,) = blocks_of(DOCS / "own_method.md", "python")
    run(block, names)
    assert make_method("value_norm", 40) == names["ValueNorm"](budget=40)


def test_the_samples_of_ones_own_are_read_and_scored(tmp_path: Path) -> None:
    rows, tasks = blocks_of(DOCS / "evaluation.md", "json")
    (tmp_path / "contracts.jsonl").write_text(rows, "utf-8")
    (tmp_path / "tasks.json").write_text(tasks, "utf-8")
    lease, disputes = Jsonl(str(tmp_path)).samples("", TaskRequest(tiny_tokenizer(), 4096))
    assert lease.task == "contracts"
    assert disputes.task == "contracts"
    assert lease.question.startswith("\n\nQuestion: How long")
    assert score(lease, "9 years.") == 1.0
    assert score(lease, "Basel") == 0.0
    assert score(disputes, "Basel") == 1.0


def test_every_benchmark_and_metric_is_named() -> None:
    mentioned = set(re.findall(r"`(\w+)`", (DOCS / "evaluation.md").read_text("utf-8")))
    assert {benchmark.name for benchmark in fields(Benchmarks)} - {"helmet"} <= mentioned
    assert {name for name in METRICS if not name.startswith(("same_", "reaches_"))} <= mentioned


def test_every_method_is_in_the_table() -> None:
    mentioned = set()
    for line in (DOCS / "methods.md").read_text("utf-8").splitlines():
        if line.startswith("| "):
            first_cell = line.split("|")[1]
            mentioned |= {*re.findall(r"`([a-z0-9_+]+)`", first_cell)}
    assert set(METHODS) - {"full"} <= mentioned


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_the_paths_that_are_named_exist(name: str) -> None:
    root = README.parent
    text = re.sub(r"```.*?```", "", (root / name).read_text("utf-8"), flags=re.DOTALL)
    mentioned = set(re.findall(r"`((?:[a-z_]+/)+(?:\w+\.\w+)?)`", text)) - {"runs/"}
    assert mentioned
    folders = [root / folder for folder in (".", "keepsight", "runtime", "train", "eval")]
    missing = set()
    for path in mentioned:
        if "NAME" not in path and not any((folder / path).exists() for folder in folders):
            missing.add(path)
    assert missing == set()
