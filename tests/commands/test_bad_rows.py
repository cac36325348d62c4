"""One bad row, refused answer or odd plugin: the run goes on and counts it, or ends in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from keepsight.errors import Code
from keepsight.files import read_json, write_json
from keepsight.runtime.methods import METHODS
from tests.commands.commands import CommandLine, results_of
from tests.eval.judging import endpoint

pytestmark = pytest.mark.usefixtures("here")
ADD_METHOD = "from keepsight.runtime.methods import METHODS\nMETHODS['mine'] = "
TINY = ("model.id=tiny", "model.device=cpu", "adapter=null", "out=out", "methods=[snapkv]", "budgets=[40]")


def write_facts(here: Path, *contexts: str | None) -> tuple[str, ...]:
    """Write a folder in LongBench's layout, with a row for each context; returns the keys that evaluate it."""
    (here / "real").mkdir(exist_ok=True)
    task = {"prompt": "{context}\n{input}", "layout": "longbench", "metric": "qa_f1", "max_new_tokens": 4}
    write_json(here / "real" / "tasks.json", {"facts": task})
    rows = [{"input": "Who?", "answers": ["Ada"], "context": context} for context in contexts]
    (here / "real" / "facts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return (*TINY, "tasks=[jsonl]", "jsonl.dir=real")


def test_bad_rows_are_counted_at_the_end(keepsight: CommandLine, here: Path) -> None:
    """And a plugin that changes directory changes nothing."""
    (here / "wandering_plugin.py").write_text("import os\nos.chdir('/')\n")
    keys = (*write_facts(here, "Ada wrote it. " * 9, None, None), "plugins=wandering_plugin")
    printed = keepsight("eval", *keys)
    fault = "real/facts.jsonl:2: field 'context' must be a text, got 'None'"
    assert f"\nrows skipped: 2, such as {fault}; skip=0 makes it an error\nnext: " in printed
    assert {row["sample"] for row in results_of(here / "out")} == {"1"}
    notes = read_json(here / "out" / "settings.json")["notes"]
    assert notes["rows skipped"].startswith("2, such as real/facts")

    keepsight("eval", *keys, "skip=2")  # the results do not depend on it
    for skip in (0, 1):
        message = keepsight.fails("eval", *keys, f"skip={skip}")
        assert message.endswith(f"fix the row, or raise skip={skip}")

    keys_without_a_good_row = write_facts(here, None)
    message = keepsight.fails("eval", *keys_without_a_good_row, "out=other")
    assert message == fault.replace(":2:", ":1:")


def test_answers_without_a_verdict_are_counted_and_asked_about_again(keepsight: CommandLine, here: Path) -> None:
    questions = [{"question_id": n, "category": "writing", "turns": [f"Hello {n}?"]} for n in (1, 2, 3)]
    (here / "question.jsonl").write_text("\n".join(map(json.dumps, questions)))
    refused_questions = {1, 2, 3}

    def verdict(body: dict[str, Any]) -> str | tuple[int, str]:
        prompt = body["messages"][-1]["content"]
        if any(f"Hello {n}?" in prompt for n in refused_questions):
            return (400, "content_filter")
        return "[[7]]"

    def judged_samples() -> list[str]:
        return sorted({row["sample"] for row in results_of(here / "out")})

    with endpoint(verdict) as judge:
        evaluation = ["eval", *TINY, "tasks=[mt_bench]", "mt_bench.file=question.jsonl", "max_new_tokens=4", "pages=0"]
        evaluation.append(f"judge.url={judge.url}")
        assert "judge.url=" in keepsight.fails(*evaluation)

        refused_questions = {2}
        assert "content_filter" in keepsight.fails(*evaluation, "skip=0")
        printed = keepsight(*evaluation)
        assert "\n1 samples have no verdict, such as judge.url=" in printed
        assert judged_samples() == ["1", "3"]

        refused_questions = set()
        assert "no verdict" not in keepsight(*evaluation)
        assert judged_samples() == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("import sys\nsys.exit(0)", "missing"),
        ("import os\nos.chdir('/')\n1 / 0", "missing"),
        (f"{ADD_METHOD}print", "type"),
        (f"{ADD_METHOD}int", "type"),
    ],
)
def test_plugins_that_misbehave(
    keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch, source: str, code: Code
) -> None:
    plugin = f"odd_plugin_{abs(hash(source))}"
    (here / f"{plugin}.py").write_text(source)
    monkeypatch.setitem(METHODS, "mine", METHODS["snapkv"])  # taken out again after the test
    keepsight.refuses("plugins", code, "eval", *write_facts(here, "Ada."), f"plugins={plugin}")
    assert Path.cwd() == here
