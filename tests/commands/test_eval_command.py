"""`keepsight eval` and `keepsight inspect` from the prompt to their files, stopped and gone on with."""

import base64
import contextlib
import csv
import importlib
import io
import json
import re
import sys
import zlib
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from keepsight.commands import eval as evaluation
from keepsight.commands import variants
from keepsight.commands.cli import main
from keepsight.commands.from_recipe import resources_of, without_weights
from keepsight.commands.parse import parse
from keepsight.commands.recipe import say_once
from keepsight.eval import record
from keepsight.eval.tasks.jsonl import RULER_METRIC
from keepsight.files import append_lines, one_writer, read_json, read_jsonl, write_json, write_lines
from keepsight.models.chat import prompt_text
from keepsight.runtime.methods import METHODS, SnapKV
from tests.commands.commands import (
    NEEDLES,
    RUN_FILES,
    CommandLine,
    draw,
    files_of_run,
    key_of,
    last_of_each_key,
    results_of,
    tree,
)
from tests.eval.rows import CLOCKS, comparable
from tests.refused import refused

RULER = {"layout": "ruler", "prompt": "{input}{answer_prefix}", "metric": RULER_METRIC}
pytestmark = pytest.mark.usefixtures("here")
TINY = ("model.id=tiny", "model.device=cpu", "adapter=adapter", "out=out")
EVICTING = ["oracle", "lookaheadkv", "snapkv", "streamingllm"]
"""The default methods beside the full cache."""


@dataclass
class Evaluation:
    out: Path
    printed: str
    methods_built: list[tuple[str, Any]]
    """Name and budget, in the order of the calls."""
    rows: list[dict[str, Any]]
    """Without what clocks decide."""


@pytest.fixture(scope="module")
def uninterrupted(prepared: Path, blank_plots: None) -> Evaluation:
    """An evaluation that nothing stops."""
    methods_built = []
    make_method = variants.make_method

    def note_and_make_method(name: str, budget: Any, *resources: Any, **options: Any) -> Any:
        methods_built.append((name, budget))
        return make_method(name, budget, *resources, **options)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.chdir(prepared)
        patch.setattr(variants, "make_method", note_and_make_method)
        draw(patch)
        assert main(last_of_each_key(["eval", *TINY, "out=uninterrupted", *NEEDLES])) == 0
    out = prepared / "uninterrupted"
    return Evaluation(out, printed.getvalue(), methods_built, rows_without_times(out))


def rows_without_times(out: Path) -> list[dict[str, Any]]:
    """Results without what clocks decide."""
    return [row | CLOCKS for row in results_of(out)]


def rows_except(rows: list[dict[str, Any]], column: str, value: str) -> list[dict[str, Any]]:
    return [row for row in rows if row[column] != value]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {name: (folder / name).read_bytes() for name in tree(folder)}


def variants_for(*keys: str) -> list[variants.Variant]:
    """The methods at each budget that an evaluation of `tiny` would measure."""
    config = parse(evaluation.Config, [*TINY, "draft.layers=[0,2]", *keys])
    resources = resources_of(config, without_weights(config))
    return variants.variants_of(config.methods, config.budgets, config.bits, resources)


def test_every_method_and_budget_has_a_row_and_a_mean(uninterrupted: Evaluation) -> None:
    """Beside them there are the first prompt as it was rendered, and the report with its plots."""
    out = uninterrupted.out
    printed = uninterrupted.printed
    rows = uninterrupted.rows
    assert files_of_run(out) == RUN_FILES
    evicting_cells = list(product(EVICTING, (40, 0.25)))
    cells = [("full", None), *evicting_cells]
    assert uninterrupted.methods_built == evicting_cells, "once, before the model is loaded"
    assert Counter((row["method"], row["budget"]) for row in rows) == dict.fromkeys(cells, 3)
    assert sorted({row["depth"] for row in rows}) == pytest.approx([0.118, 0.5, 0.736], abs=1e-3)

    with (out / "summary.csv").open() as table:
        summary = list(csv.DictReader(table))
    columns = ["task", "length", "method", "budget", "n", "score", "excess_nll", "agreement", "score_low", "score_high"]
    assert list(summary[0])[:10] == columns
    means = {(row["method"], float(row["budget"]) if row["budget"] else None): row for row in summary}
    assert means.keys() == set(cells)
    assert len(summary) == 9
    for cell, mean in means.items():
        rows_of_cell = [row for row in rows if (row["method"], row["budget"]) == cell]
        assert (mean["task"], mean["length"], mean["n"]) == ("niah_single", "320", "3")
        for column in ("score", "excess_nll", "agreement"):
            expected = sum(row[column] for row in rows_of_cell) / 3
            assert float(mean[column]) == pytest.approx(expected, abs=1e-4)
        assert mean["method"] in printed

    sample = rows[0]["sample"]
    tokens = rows[0]["prompt_tokens"]
    assert printed.startswith(f"first prompt, niah_single {sample}: {tokens} tokens, nothing cut\n")
    head, tail = printed.split("--- head\n")[1].split("\n--- tail\n")
    assert head.startswith("<|user|>A special magic number is hidden")
    assert tail.partition("\n---\n")[0].endswith("mentioned in the provided text is")

    html = (out / "report.html").read_text("utf-8")
    for method in ("full", *EVICTING):
        assert method in html
    assert "adapter" in html
    plots = [name for name in RUN_FILES if name.endswith("png")]
    assert len(plots) == 4
    for plot in plots:
        assert (out / plot).read_bytes().startswith(b"\x89PNG")


METHODS_OF_PAPERS = {
    "full",
    "oracle",
    "lookaheadkv",
    "laq",
    "speckv",
    "dapq",
    "specpc",
    "snapkv",
    "pyramidkv",
    "adakv",
    "h2o",
    "tova",
    "streamingllm",
}


def test_all_methods_are_those_that_can_be_made(
    keepsight: CommandLine, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What lacks trained weights is named before the model is loaded, what refuses the model at the end.

    The methods of the papers' tables keep what their budget says, and tell their time by part.
    """
    say_once.cache_clear()
    small = ("lengths=[320]", "samples=1", "budgets=[80]", "max_new_tokens=3", "pages=0", "question=unseen")
    methods = "methods=[all,{name: kivi, group: 8}]"
    assert main(last_of_each_key(["eval", *TINY, *NEEDLES, "draft.layers=[0,2]", *small, methods])) == 0
    printed, messages = capsys.readouterr()
    rows = results_of(here / "out")
    measured = {row["method"] for row in rows}
    assert len(measured) > 30

    (line,) = [line for line in messages.splitlines() if line.startswith("methods=all leaves out ")]
    scored = "trimkv, dbtrimkv, locret, dms, duoattention, qfilters, restorekv: needs scorer=FILE_FOLDER_OR_HUB_ID"
    assert scored in line
    assert "r2c: option 'relevance' is missing" in line
    assert "specontext: needs retrieval=FOLDER_OR_HUB_ID; train one with train_retrieval_head.py" in line
    names_without_reasons = re.sub(r": [^;]*(;|$)", ": ;", line.removeprefix("methods=all leaves out "))
    not_made = set(re.findall(r"[\w+]+(?=[,:] )", names_without_reasons))

    fastv = "fastv at budget 80 was left out: FastV leaves out"
    (ending,) = [line for line in printed.splitlines() if fastv in line]
    refusals = re.split(r"; (?=\S+ at budget )", ending)
    refused_methods = {refusal.split(" at budget ")[0] for refusal in refusals}
    assert measured | refused_methods | not_made | {"evict"} == {*METHODS, "kivi group=8"}
    assert not measured & (refused_methods | not_made)

    for row in rows:
        assert row["time_to_first_token"] == pytest.approx(sum(row["seconds"].values()))
        assert row["tokens_per_second"] is None or row["tokens_per_second"] > 0
    rows_of_papers = [row for row in rows if row["method"] in METHODS_OF_PAPERS]
    assert sorted(row["method"] for row in rows_of_papers) == sorted(METHODS_OF_PAPERS)
    for row in rows_of_papers:
        method = row["method"]
        has_draft = method in ("oracle", "speckv", "dapq", "specpc")
        assert (row["seconds"]["draft"] > 0) == has_draft, method
        assert method in printed
        if row["budget"]:
            assert row["kept"] == row["budget"], method
            assert 0 < row["recall"] < 1, method
            assert row["kv_bytes"] == row["budget"] * 3 * 2 * 8 * 2 * 4  # layers, KV heads, floats, key and value


def test_all_methods_are_made_at_the_budgets_that_they_can_take(capsys: pytest.CaptureFixture[str]) -> None:
    """SpecPC always keeps 64 tokens; the budget of 64 is left out, and the other is not."""
    say_once.cache_clear()
    all_variants = variants_for("methods=all", "budgets=[64,128]")
    assert [variant.budget for variant in all_variants if variant.name == "specpc"] == [128]
    assert [variant.budget for variant in all_variants if variant.name == "snapkv"] == [64, 128]
    messages = capsys.readouterr().err
    assert "specpc at budget 64: budget 64 must be above the window of 64 tokens" in messages


def test_methods_that_the_model_does_not_fit_are_left_out_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Its heads of 8 numbers have no groups of 32, which `kivi` has by default; named, it is refused."""
    say_once.cache_clear()
    names = {variant.name for variant in variants_for("methods=all", "bits=[2]", "budgets=[40]")}
    assert "snapkv" in names
    assert not any(name.startswith("kivi") for name in names)
    assert "kivi bits=2, specache bits=2: group 32 does not divide the head dimension 8" in capsys.readouterr().err
    with refused("group", "range"):
        variants_for("methods=kivi", "bits=[2]", "budgets=[40]")


def test_wrong_bits_are_refused_with_all_methods() -> None:
    with refused("bits", "unknown"):
        variants_for("methods=all", "bits=[2,3]")


def test_a_stopped_evaluation_goes_on(
    keepsight: CommandLine, here: Path, uninterrupted: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped while it writes the second sample's nine rows: four are complete, the next is torn."""
    sizes_of_writes: list[int] = []

    def append(path: Path, rows: list[dict[str, Any]]) -> None:
        sizes_of_writes.append(len(rows))
        append_lines(path, rows)

    def append_and_tear_the_second_write(path: Path, rows: list[dict[str, Any]]) -> None:
        if not sizes_of_writes:
            append(path, rows)
            return
        sizes_of_writes.append(len(rows))
        append_lines(path, rows[:4])
        with path.open("a") as stream:
            stream.write(json.dumps(rows[4])[:50])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(record, "append_lines", append_and_tear_the_second_write)
        message = keepsight.fails("eval", *TINY, *NEEDLES)
    assert message == "interrupted; what was done is kept: run the same command again to resume"
    assert sizes_of_writes == [9, 9]
    assert keepsight("report", "out").startswith("Incomplete: 2 of 3 samples.")
    assert "Incomplete: 2 of 3 samples." in (here / "out" / "report.html").read_text()

    with monkeypatch.context() as patch:
        patch.setattr(record, "append_lines", append)
        assert "Incomplete" not in keepsight("eval", *TINY, *NEEDLES)
    assert sizes_of_writes == [9, 9, 9, 9]
    assert rows_without_times(here / "out") == comparable(uninterrupted.rows)
    assert files_of_run(here / "out") == RUN_FILES

    results = (here / "out" / "results.jsonl").read_bytes()
    keepsight("eval", *TINY, *NEEDLES, "max_batch_tokens=1")
    assert (here / "out" / "results.jsonl").read_bytes() == results


def test_only_settings_that_answers_depend_on_may_not_change(keepsight: CommandLine, here: Path) -> None:
    run = ("eval", *TINY, *NEEDLES, "methods=[oracle,snapkv]", "samples=1")
    keepsight(*run)
    files = contents(here / "out")
    for change in ("budgets=[48]", "seed=7", "methods=[snapkv]", "model.dtype=bfloat16", "question=unseen"):
        section = key_of(change).partition(".")[0]
        keepsight.refuses(section, "conflict", *run, change)
        assert contents(here / "out") == files
    settings = read_json(here / "out" / "settings.json")
    assert not {"head_weights", "finetune", "train", "lookahead", "out", "pages"} & settings.keys()
    keepsight(*run, "pages=2", "judge.parallel=2", "judge.key=MY_KEY")
    assert (here / "out" / "results.jsonl").read_bytes() == files["results.jsonl"]


REAL = [*TINY, "tasks=[jsonl]", "jsonl.dir=real", "methods=[snapkv]", "budgets=[40]", "max_tokens=512"]


def write_real_samples(folder: Path) -> None:
    """Three samples in LongBench's layout, and what to do with them."""
    folder.mkdir()
    task = {"prompt": "{context}\n{input}", "layout": "longbench", "metric": "qa_f1", "max_new_tokens": 8}
    write_json(folder / "tasks.json", {"facts": task})
    fields = {
        "input": "Who?",
        "answers": ["Ada"],
        "length": 1,
        "dataset": "facts",
        "language": "en",
        "all_classes": None,
    }
    for number, sentences in enumerate((9, 12, 400)):
        row = {**fields, "context": "Ada wrote it. " * sentences, "_id": str(number)}
        append_lines(folder / "facts.jsonl", [row])


def test_real_samples(keepsight: CommandLine, here: Path) -> None:
    write_real_samples(here / "real")
    file = here / "real" / "facts.jsonl"
    content = file.read_bytes()
    file.write_bytes(content[:-9])
    assert "facts.jsonl:3: not valid JSON" in keepsight.fails("eval", *REAL, "skip=0")
    assert not (here / "out").exists()
    file.write_bytes(content)
    printed = keepsight("eval", *REAL)
    assert "facts: 1 samples do not fit max_tokens=512" in printed
    rows = results_of(here / "out")
    longest_first = ["1", "0"]
    assert [(row["sample"], row["method"]) for row in rows] == list(product(longest_first, ("full", "snapkv")))
    assert {(row["task"], row["length"]) for row in rows} == {("facts", 512)}


def test_questions_of_real_samples(keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is rendered once: of three samples one is too long; the others come apart at their questions."""
    render = Mock(side_effect=prompt_text)
    monkeypatch.setattr("keepsight.eval.tasks.samples.prompt_text", render)
    write_real_samples(here / "real")
    keepsight("eval", *REAL, "question=unseen")
    assert render.call_count == 3 + 2
    assert {row["question"] for row in results_of(here / "out")} == {"unseen"}

    row_of_ruler = {"input": "Who wrote it?", "outputs": ["Ada"], "answer_prefix": "It is", "index": 0}
    (here / "real" / "tasks.json").write_text(json.dumps({"facts": {**RULER, "max_new_tokens": 8}}))
    write_lines(here / "real" / "facts.jsonl", [row_of_ruler])
    message = keepsight.fails("eval", *REAL, "question=unseen", "out=other")
    assert message == "sample facts/facts-0 does not say where its question starts; evaluate it with question=seen"
    assert not (here / "other").exists()


@pytest.mark.parametrize("method", ["adakv", "speckv"])
def test_every_eviction_can_be_inspected(keepsight: CommandLine, here: Path, method: str) -> None:
    keys = [f"method={method}", "budget=48", "draft.layers=[0,1]", "adapter=null", "out=page.html"]
    printed = keepsight("inspect", *TINY[:2], "prompt=" + "Ada wrote it. " * 20, *keys)
    tokens = int(printed.splitlines()[-2].split()[0])
    page = (here / "page.html").read_text("utf-8")
    data = json.loads(re.findall(r">(\{.*\})</script>", page)[0])
    assert len(data["tokens"]) == tokens
    assert {entry["name"] for entry in data["methods"]} == {method, "snapkv"}
    for entry in data["methods"]:
        counts = zlib.decompress(base64.b64decode(entry["counts"]))
        assert len(counts) == 3 * tokens
        assert sum(counts) == 3 * 2 * 48  # layers, KV heads, entries


def test_inspect_writes_its_page(keepsight: CommandLine, here: Path) -> None:
    text = 'Ada Lovelace wrote, in 1843, what [some] call the first program; it\'s "famous". ' * 4
    (here / "text.txt").write_text(text)
    inspect = ["inspect", *TINY[:3], "budget=40"]
    printed = keepsight(*inspect, "prompt=@text.txt", "out=pages/kept.html")
    assert " tokens, 40 kept per layer and KV head: pages/kept.html\nnext: " in printed
    assert [line.split()[0] for line in printed.splitlines()[-5:-2]] == ["full", "lookaheadkv", "snapkv"]
    page = (here / "pages" / "kept.html").read_text("utf-8")
    assert "lookaheadkv" in page
    assert "snapkv" in page
    assert "<title>tiny: lookaheadkv at budget 40</title>" in page
    answers = page.partition("<h2>Answers</h2>")[2].partition("<h2>")[0]
    assert re.findall('<div class="head"><b>(.*?)</b>', answers) == ["full", "lookaheadkv", "snapkv"]

    keepsight(*inspect, f"prompt={text}", "out=typed.html")
    assert (here / "typed.html").read_text("utf-8") == page
    keepsight(*inspect, "prompt=@text.txt", "method=streamingllm", "options={sinks: 2}", "out=other.html")
    assert "streamingllm" in (here / "other.html").read_text("utf-8")
    keepsight.refuses("budget", "range", *inspect, "prompt=@text.txt", "options={sinks: 50}")


def test_an_evaluation_is_extended(keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured stays, times included, also where the run that extends it is stopped."""
    small = ["eval", *TINY, *NEEDLES, "methods=[snapkv]", "samples=2", "budgets=[40]"]
    keepsight(*small)
    measured = results_of(here / "out")
    large = [*small, "methods=[snapkv,tova]", "budgets=[48,40]", "lengths=[320,300]"]
    with monkeypatch.context() as patch:
        patch.setattr(record, "append_lines", press_ctrl_c)
        keepsight.fails(*large)
    assert results_of(here / "out") == measured
    keepsight(*large)
    rows = results_of(here / "out")
    assert [row for row in measured if row not in rows] == []
    cells = [("full", None), *product(("snapkv", "tova"), (40, 48))]
    assert Counter((row["method"], row["budget"]) for row in rows) == dict.fromkeys(cells, 4)
    message = keepsight.refuses("lengths", "conflict", *small)
    assert "methods=['snapkv', 'tova']" in message
    assert "budgets=[48, 40]" in message


def test_fewer_samples_are_refused_before_the_model_is_loaded(
    keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ("eval", *TINY, *NEEDLES, "methods=[snapkv]", "budgets=[40]", "pages=0")
    keepsight(*run, "samples=2")
    files = contents(here / "out")
    monkeypatch.setattr(evaluation, "target_of", lambda *_: pytest.fail("loaded"))
    keepsight.refuses("samples", "conflict", *run, "samples=1")
    assert contents(here / "out") == files


def test_all_methods_are_continued_by_a_list_of_names_and_the_reverse(
    keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows count, not the words that name them: what has been measured is not measured again."""
    monkeypatch.setattr(variants, "METHODS", {"snapkv": SnapKV, "tova": METHODS["tova"]})
    run = ("eval", *TINY, *NEEDLES, "budgets=[40]", "pages=0", "samples=2")
    keepsight(*run, "methods=[tova]")
    rows_of_tova = results_of(here / "out")
    keepsight(*run, "methods=all")
    rows_of_all = results_of(here / "out")
    assert len(rows_of_all) == 6
    assert rows_except(rows_of_all, "method", "snapkv") == rows_of_tova
    monkeypatch.setattr("keepsight.eval.sweep.run_samples", lambda *_, **__: pytest.fail("measured again"))
    keepsight(*run, "methods=[snapkv,tova]")
    assert results_of(here / "out") == rows_of_all
    keepsight.refuses("methods", "conflict", *run, "methods=[snapkv]")


MINE = """
from dataclasses import dataclass
from keepsight.runtime.registry import method
from keepsight.runtime.methods import SnapKV
from {helper} import WINDOW

@method("mine")
@dataclass(frozen=True)
class Mine(SnapKV):
    window: int = WINDOW
"""


def test_what_has_changed_since_is_measured_again(
    keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin, a module beside it, and a row of one's own task: one line says so, and other rows stay."""
    monkeypatch.setitem(METHODS, "mine", SnapKV)  # taken out again after the test
    write_real_samples(here / "real")

    def evaluate(helper: str, comment: str = "") -> tuple[str, list[dict[str, Any]]]:
        """What is printed, and the rows."""
        (here / "helper_of_a_test.py").write_text(helper)
        (here / "mine_of_a_test.py").write_text(MINE.format(helper="helper_of_a_test") + comment)
        for module in ("helper_of_a_test", "mine_of_a_test"):
            sys.modules.pop(module, None)  # as in another process
        importlib.invalidate_caches()
        run = ("eval", *REAL, "methods=[mine,snapkv]", "plugins=mine_of_a_test", "samples=2", "pages=0")
        printed = keepsight(*run)
        return printed, results_of(here / "out")

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    printed, rows = evaluate("WINDOW = 4")
    assert "measured again" not in printed
    assert {row["method"] for row in rows} == {"full", "mine", "snapkv"}
    _, rows_again = evaluate("WINDOW = 4")
    assert rows_again == rows

    for comment in ("", "# edited"):
        rows_before = rows
        printed, rows = evaluate("WINDOW = 32", comment)
        assert "out: measured again: mine at budget 40 (2 rows); since then the method, its weights" in printed
        assert rows_except(rows, "method", "mine") == rows_except(rows_before, "method", "mine")
        digests_before = {row["inputs_digest"] for row in rows_before if row["method"] == "mine"}
        assert not digests_before & {row["inputs_digest"] for row in rows}

    facts = list(read_jsonl(here / "real" / "facts.jsonl"))
    facts[0]["answers"] = ["Grace"]
    write_lines(here / "real" / "facts.jsonl", facts)
    rows_before = rows
    printed, rows = evaluate("WINDOW = 32", "# edited")
    assert "out: measured again: full (1 row), mine at budget 40 (1 row), snapkv at budget 40 (1 row); " in printed
    assert rows_except(rows, "sample", "0") == rows_except(rows_before, "sample", "0")
    assert {tuple(row["references"]) for row in rows if row["sample"] == "0"} == {("Grace",)}


def press_ctrl_c(*_: object) -> None:
    raise KeyboardInterrupt


def test_one_evaluation_writes_to_a_folder_at_a_time(keepsight: CommandLine, here: Path) -> None:
    with one_writer(here / "out"):
        keepsight.refuses("out", "conflict", "eval", *TINY, *NEEDLES)


PACKED = "{name: kivi, group: 8, residual: 32, inner: {name: adakv, budget: 40}}"
REFUSING = """
from keepsight.errors import UserError
from keepsight.runtime.methods import METHODS, SnapKV

def refuse(self, state, importance):
    raise UserError("not with these scores")

METHODS["mine"] = type("Mine", (SnapKV,), {"select": refuse})
"""


def test_what_no_prompt_can_be_packed_with_is_refused_before_the_model_is_loaded(
    keepsight: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "target_of", lambda *_: pytest.fail("loaded"))
    keepsight.refuses("inner", "conflict", "eval", *TINY, *NEEDLES, f"methods=[snapkv,{PACKED}]")


def test_of_all_methods_those_that_refuse_a_prompt_are_left_out(
    keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named alone, such a method ends the run before anything is measured."""
    monkeypatch.setattr(variants, "METHODS", {"snapkv": SnapKV})
    wide = "{name: truncation, window: 300, label: wide}"
    run = ("eval", *TINY, *NEEDLES, "samples=1", "budgets=[0.25]", "pages=0")
    reason = "Truncation: a prompt of 257 tokens is shorter than the window of 300"
    printed = keepsight(*run, f"methods=[all,{wide}]")
    assert f"wide at budget 0.25 was left out: {reason}" in printed
    assert [row["method"] for row in results_of(here / "out")] == ["full", "snapkv"]
    message = keepsight.fails(*run, f"methods=[snapkv,{wide}]", "out=other")
    assert message.startswith(reason)
    assert not (here / "other").exists()


def test_a_method_that_is_refused_meanwhile_loses_no_row_of_the_others(
    keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "refusing_of_a_test.py").write_text(REFUSING)
    monkeypatch.setitem(METHODS, "mine", SnapKV)  # taken out again after the test
    run = ("eval", *TINY, *NEEDLES, "methods=[mine,snapkv]", "budgets=[40]", "plugins=refusing_of_a_test")
    message = keepsight.fails(*run)
    reason = "not with these scores"
    assert message == f"mine at budget 40 was left out: {reason}; the rows of the other methods are in out"
    rows = results_of(here / "out")
    assert Counter(row["method"] for row in rows) == {"full": 3, "snapkv": 3}
    assert files_of_run(here / "out") == RUN_FILES
    notes = read_json(here / "out" / "settings.json")["notes"]
    assert notes["mine at budget 40"] == f"left out: {reason}"
    assert keepsight.fails(*run) == message
    assert results_of(here / "out") == rows, "nothing is measured twice"
    keepsight.refuses("plugins", "missing", *run, "plugins=no_such_module")


def test_several_answers_are_drawn_to_each_sample(keepsight: CommandLine, here: Path) -> None:
    """A second draw has other tokens, the first is that of a run without draws, which can be extended."""
    sampled = ("eval", *TINY, *NEEDLES, "samples=1", "budgets=[40]", "temperature=5", "pages=0", "methods=[snapkv]")
    keepsight(*sampled, "out=drawn")
    rows_of_first_draw = results_of(here / "drawn")
    keepsight(*sampled, "draws=2", "out=drawn")
    rows = results_of(here / "drawn")
    assert len(rows) == 4
    assert [row for row in rows if row in rows_of_first_draw] == rows_of_first_draw
    by_sample_and_method = {(row["sample"], row["method"]): row for row in rows}
    assert len(by_sample_and_method) == 4
    sample, second_draw = sorted({row["sample"] for row in rows}, key=len)
    assert second_draw == f"{sample}, draw 2"
    row = by_sample_and_method[sample, "full"]
    row_of_second_draw = by_sample_and_method[second_draw, "full"]
    assert row["answer"] != row_of_second_draw["answer"]
    assert row["sample_digest"] != row_of_second_draw["sample_digest"]
    keepsight.refuses("draws", "conflict", "eval", *TINY, *NEEDLES, "draws=2", "out=greedy")
