"""One bad row, refused answer or odd plugin: the run goes on and counts it, or ends in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from keepsight.errors import Code
from keepsight.files import read_json, read_jsonl, write_json
from keepsight.runtime.methods import METHODS
from tests.commands.commands import CommandLine
from tests.eval.judging import endpoint

pytestmark = pytest.mark.usefixtures("here")
ADD = "from keepsight.runtime.methods import METHODS\nMETHODS['mine'] = "
TINY = ("model.id=tiny", "model.device=cpu", "adapter=null", "out=out", "methods=[snapkv]", "budgets=[40]")


def write_facts(here: Path, *contexts: str | None) -> tuple[str, ...]:
    """A folder in LongBench's layout; the keys that evaluate it."""
    (here / "real").mkdir(exist_ok=True)
    entry = {"prompt": "{context}\n{input}", "layout": "longbench", "metric": "qa_f1", "max_new_tokens": 4}
    write_json(here / "real" / "tasks.json", {"facts": entry})
    rows = [json.dumps({"input": "Who?", "answers": ["Ada"], "context": context}) for context in contexts]
    (here / "real" / "facts.jsonl").write_text("\n".join(rows))
    return (*TINY, "tasks=[jsonl]", "jsonl.dir=real")


def test_bad_rows_are_counted_at_the_end(keepsight: CommandLine, here: Path) -> None:
    """And a plugin that changes directory changes nothing."""
    keys = (*write_facts(here, "Ada wrote it. " * 9, None, None), "plugins=wandering_plugin")
    (here / "wandering_plugin.py").write_text("import os\nos.chdir('/')\n")
    printed = keepsight("eval", *keys)
    fault = "real/facts.jsonl:2: field 'context' must be a text, got 'None'"
    assert f"\nrows skipped: 2, such as {fault}; skip=0 makes it an error\nnext: " in printed
    assert {row["sample"] for row in read_jsonl(here / "out" / "results.jsonl")} == {"1"}
    assert read_json(here / "out" / "settings.json")["notes"]["rows skipped"].startswith("2, such as real/facts")
    keepsight("eval", *keys, "skip=2")  # no other results
    for skip in (0, 1):
        assert keepsight.fails("eval", *keys, f"skip={skip}").endswith(f"fix the row, or raise skip={skip}")
    assert keepsight.fails("eval", *write_facts(here, None), "out=other") == fault.replace(":2:", ":1:")


def test_answers_without_a_verdict_are_counted_and_asked_about_again(keepsight: CommandLine, here: Path) -> None:
    questions = [{"question_id": n, "category": "writing", "turns": [f"Hello {n}?"]} for n in (1, 2, 3)]
    (here / "question.jsonl").write_text("\n".join(map(json.dumps, questions)))
    keys = [*TINY, "tasks=[mt_bench]", "mt_bench.file=question.jsonl", "max_new_tokens=4", "pages=0"]

    def say(body: dict[str, Any]) -> str | tuple[int, str]:
        asked = body["messages"][-1]["content"]
        return (400, "content_filter") if any(f"Hello {n}?" in asked for n in refused) else "[[7]]"

    def judged() -> list[str]:
        return sorted({row["sample"] for row in read_jsonl(here / "out" / "results.jsonl")})

    with endpoint(say) as judge:
        refused = {1, 2, 3}
        assert "judge.url=" in keepsight.fails("eval", *keys, f"judge.url={judge.url}")
        refused = {2}
        assert "content_filter" in keepsight.fails("eval", *keys, f"judge.url={judge.url}", "skip=0")
        printed = keepsight("eval", *keys, f"judge.url={judge.url}")
        assert "\n1 samples have no verdict, such as judge.url=" in printed and judged() == ["1", "3"]
        refused = set()
        assert "no verdict" not in keepsight("eval", *keys, f"judge.url={judge.url}")
        assert judged() == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("import sys\nsys.exit(0)", "missing"),
        ("import os\nos.chdir('/')\n1 / 0", "missing"),
        (f"{ADD}print", "type"),
        (f"{ADD}int", "type"),
    ],
)
def test_plugins_that_misbehave(
    keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch, source: str, code: Code
) -> None:
    name = f"odd_plugin_{abs(hash(source))}"
    (here / f"{name}.py").write_text(source)
    monkeypatch.setitem(METHODS, "mine", METHODS["snapkv"])  # taken out again after the test
    keepsight.refuses("plugins", code, "eval", *write_facts(here, "Ada."), f"plugins={name}")
    assert Path.cwd() == here
