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
from keepsight.runtime import methods as known
from keepsight.runtime.methods import SnapKV
from tests.commands.commands import NEEDLES, RUN_FILES, CommandLine, draw, files_of_run, last_of_each_key, tree
from tests.eval.rows import CLOCKS, comparable
from tests.refused import refused

RULER = {"layout": "ruler", "prompt": "{input}{answer_prefix}", "metric": RULER_METRIC}
pytestmark = pytest.mark.usefixtures("here")
TINY = ("model.id=tiny", "model.device=cpu", "adapter=adapter", "out=out")
METHODS = ["full", "oracle", "lookaheadkv", "snapkv", "streamingllm"]


@pytest.fixture(scope="module")
def evaluated(prepared: Path, blank_plots: None) -> tuple[Path, str, list[tuple[str, Any]]]:
    """Folder and printed lines of an evaluation that nothing stops, and the methods that were made for it."""
    made, make = [], variants.make_method

    def noted(name: str, budget: Any, *rest: Any, **options: Any) -> Any:
        made.append((name, budget))
        return make(name, budget, *rest, **options)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.chdir(prepared)
        patch.setattr(variants, "make_method", noted)
        draw(patch)
        assert main(last_of_each_key(["eval", *TINY, "out=whole", *NEEDLES])) == 0
    return prepared / "whole", printed.getvalue(), made


@pytest.fixture
def whole(evaluated: Any) -> list[dict[str, Any]]:
    """Its rows."""
    return rows_without_times(evaluated[0])


def rows_without_times(out: Path) -> list[dict[str, Any]]:
    """Results without what clocks decide."""
    return [row | CLOCKS for row in read_jsonl(out / "results.jsonl")]


def test_every_method_and_budget_has_a_row_and_a_mean(evaluated: Any, whole: Any) -> None:
    out, printed, made = evaluated
    assert files_of_run(out) == RUN_FILES
    cells = [("full", None), *((name, budget) for name in METHODS[1:] for budget in (40, 0.25))]
    assert Counter((row["method"], row["budget"]) for row in whole) == dict.fromkeys(cells, 3)
    assert sorted({row["depth"] for row in whole}) == pytest.approx([0.118, 0.5, 0.736], abs=1e-3)
    with (out / "summary.csv").open() as table:
        summary = list(csv.DictReader(table))
    assert list(summary[0])[:8] == ["task", "length", "method", "budget", "n", "score", "excess_nll", "agreement"]
    assert list(summary[0])[8:10] == ["score_low", "score_high"]
    means = {(row["method"], float(row["budget"]) if row["budget"] else None): row for row in summary}
    assert means.keys() == set(cells) and len(summary) == 9
    for cell, mean in means.items():
        rows = [row for row in whole if (row["method"], row["budget"]) == cell]
        assert (mean["task"], mean["length"], mean["n"]) == ("niah_single", "320", "3")
        for column in ("score", "excess_nll", "agreement"):
            assert float(mean[column]) == pytest.approx(sum(row[column] for row in rows) / 3, abs=1e-4)
        assert mean["method"] in printed
    html = (out / "report.html").read_text("utf-8")
    named = [(name, budget) for name in METHODS[1:] for budget in (40, 0.25)]
    assert made == named, "once, before the model is loaded"
    assert all(name in html for name in METHODS) and "adapter" in html
    plots = [name for name in RUN_FILES if name.endswith("png")]
    first = whole[0]
    head, tail = printed.split("--- head\n")[1].split("\n--- tail\n")
    shown = f"first prompt, niah_single {first['sample']}: {first['prompt_tokens']} tokens, nothing cut\n"
    assert printed.startswith(shown) and head.startswith("<|user|>A special magic number is hidden")
    assert tail.partition("\n---\n")[0].endswith("mentioned in the provided text is")
    assert len(plots) == 4 and all((out / name).read_bytes().startswith(b"\x89PNG") for name in plots)


def test_all_methods_are_those_that_can_be_made(
    keepsight: CommandLine, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What lacks trained weights is named before the model is loaded, what refuses the model at the end.

    The methods of the papers' tables keep what their budget says, and tell their time by part.
    """
    say_once.cache_clear()
    small = ("lengths=[320]", "samples=1", "budgets=[80]", "max_new_tokens=3", "pages=0", "question=unseen")
    given = (*TINY, *NEEDLES, "draft.layers=[0,2]", *small)
    assert main(last_of_each_key(["eval", *given, "methods=[all,{name: kivi, group: 8}]"])) == 0
    printed, said = capsys.readouterr()
    (line,) = [each for each in said.splitlines() if each.startswith("methods=all leaves out ")]
    scored = "trimkv, dbtrimkv, locret, dms, duoattention, qfilters, restorekv: needs scorer=FILE_FOLDER_OR_HUB_ID"
    assert scored in line and "r2c: option 'relevance' is missing" in line
    assert "specontext: needs retrieval=FOLDER_OR_HUB_ID; train one with train_retrieval_head.py" in line
    ran = {row["method"] for row in rows_without_times(here / "out")}
    (ending,) = [each for each in printed.splitlines() if "fastv at budget 80 was left out: FastV leaves out" in each]
    refused = {each.split(" at budget ")[0] for each in re.split(r"; (?=\S+ at budget )", ending)}
    left = set(
        re.findall(r"[\w+]+(?=[,:] )", re.sub(r": [^;]*(;|$)", ": ;", line.removeprefix("methods=all leaves out ")))
    )
    assert ran | refused | left | {"evict"} == {*known.METHODS, "kivi group=8"} and not ran & (refused | left)
    assert len(ran) > 30
    papers = {"full", "oracle", "lookaheadkv", "laq", "speckv", "dapq", "specpc"}
    papers |= {"snapkv", "pyramidkv", "adakv", "h2o", "tova", "streamingllm"}
    for row in read_jsonl(here / "out" / "results.jsonl"):
        assert row["time_to_first_token"] == pytest.approx(sum(row["seconds"].values()))
        assert row["tokens_per_second"] is None or row["tokens_per_second"] > 0
        if (name := row["method"]) in papers:
            papers.remove(name)
            assert (row["seconds"]["draft"] > 0) == (name in ("oracle", "speckv", "dapq", "specpc")), name
            assert name in printed
            if row["budget"]:
                assert row["kept"] == row["budget"] and 0 < row["recall"] < 1, name
                assert row["kv_bytes"] == row["budget"] * 3 * 2 * 8 * 2 * 4  # layers, KV heads, floats, key and value
    assert not papers


def test_all_methods_are_made_at_the_budgets_that_they_can_take(capsys: pytest.CaptureFixture[str]) -> None:
    """SpecPC always keeps 64 tokens; the budget of 64 is left out, and the other is not."""
    say_once.cache_clear()
    config = parse(evaluation.Config, [*TINY, "draft.layers=[0,2]", "methods=all", "budgets=[64,128]"])
    made = variants.variants_of(
        config.methods, config.budgets, config.bits, resources_of(config, without_weights(config))
    )
    assert [each.budget for each in made if each.name == "specpc"] == [128]
    assert [each.budget for each in made if each.name == "snapkv"] == [64, 128]
    said = capsys.readouterr().err
    assert "specpc at budget 64: budget 64 must be above the window of 64 tokens" in said


def test_methods_that_the_model_does_not_fit_are_left_out_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Its heads of 8 numbers have no groups of 32, which `kivi` has by default; named, it is refused."""
    say_once.cache_clear()
    config = parse(evaluation.Config, [*TINY, "draft.layers=[0,2]", "methods=all", "bits=[2]", "budgets=[40]"])
    resources = resources_of(config, without_weights(config))
    made = variants.variants_of(config.methods, config.budgets, config.bits, resources)
    assert "snapkv" in {each.name for each in made} and not any(each.name.startswith("kivi") for each in made)
    assert "kivi bits=2, specache bits=2: group 32 does not divide the head dimension 8" in capsys.readouterr().err
    with refused("group", "range"):
        variants.variants_of(["kivi"], config.budgets, config.bits, resources)


def test_wrong_bits_are_refused_with_all_methods() -> None:
    config = parse(evaluation.Config, [*TINY, "draft.layers=[0,2]", "methods=all", "bits=[2,3]"])
    with refused("bits", "unknown"):
        variants.variants_of(config.methods, config.budgets, config.bits, resources_of(config, without_weights(config)))


def test_a_stopped_evaluation_goes_on(
    keepsight: CommandLine, here: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped while it writes the second sample's nine rows: four are whole, the next is torn."""
    written: list[int] = []

    def counted(path: Path, rows: list[dict[str, Any]]) -> None:
        written.append(len(rows))
        append_lines(path, rows)

    def torn(path: Path, rows: list[dict[str, Any]]) -> None:
        written.append(len(rows))
        if len(written) == 1:
            append_lines(path, rows)
            return
        append_lines(path, rows[:4])
        with path.open("a") as stream:
            stream.write(json.dumps(rows[4])[:50])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(record, "append_lines", torn)
        message = keepsight.fails("eval", *TINY, *NEEDLES)
    assert message == "interrupted; what was done is kept: run the same command again to resume"
    assert written == [9, 9]
    assert keepsight("report", "out").startswith("Incomplete: 2 of 3 samples.")
    assert "Incomplete: 2 of 3 samples." in (here / "out" / "report.html").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(record, "append_lines", counted)
        assert "Incomplete" not in keepsight("eval", *TINY, *NEEDLES)
    assert written == [9, 9, 9, 9]
    assert rows_without_times(here / "out") == comparable(whole)
    assert files_of_run(here / "out") == RUN_FILES
    before = (here / "out" / "results.jsonl").read_bytes()
    keepsight("eval", *TINY, *NEEDLES, "max_batch_tokens=1")
    assert (here / "out" / "results.jsonl").read_bytes() == before


def test_only_settings_that_answers_depend_on_may_not_change(keepsight: CommandLine, here: Path) -> None:
    given = [*NEEDLES, "methods=[oracle,snapkv]", "samples=1"]
    keepsight("eval", *TINY, *given)
    before = {name: (here / "out" / name).read_bytes() for name in tree(here / "out")}
    for change in ("budgets=[48]", "seed=7", "methods=[snapkv]", "model.dtype=bfloat16", "question=unseen"):
        key = change.partition("=")[0].partition(".")[0]
        keepsight.refuses(key, "conflict", "eval", *TINY, *given, change)
        assert {name: (here / "out" / name).read_bytes() for name in tree(here / "out")} == before
    settings = read_json(here / "out" / "settings.json")
    assert not {"head_weights", "finetune", "train", "lookahead", "out", "pages"} & settings.keys()
    keepsight("eval", *TINY, *given, "pages=2", "judge.parallel=2", "judge.key=MY_KEY")
    assert (here / "out" / "results.jsonl").read_bytes() == before["results.jsonl"]


REAL = [*TINY, "tasks=[jsonl]", "jsonl.dir=real", "methods=[snapkv]", "budgets=[40]", "max_tokens=512"]


def real_samples(folder: Path) -> None:
    """Three samples in LongBench's layout, and what to do with them."""
    folder.mkdir()
    template = {"prompt": "{context}\n{input}", "layout": "longbench", "metric": "qa_f1", "max_new_tokens": 8}
    write_json(folder / "tasks.json", {"facts": template})
    fields = {"input": "Who?", "answers": ["Ada"], "length": 1, "dataset": "facts", "language": "en"}
    fields["all_classes"] = None
    texts = ["Ada wrote it. " * count for count in (9, 12, 400)]
    rows = [{**fields, "context": text, "_id": str(number)} for number, text in enumerate(texts)]
    append_lines(folder / "facts.jsonl", rows)


def test_real_samples(keepsight: CommandLine, here: Path) -> None:
    real_samples(here / "real")
    whole_file = (here / "real" / "facts.jsonl").read_bytes()
    (here / "real" / "facts.jsonl").write_bytes(whole_file[:-9])
    assert "facts.jsonl:3: not valid JSON" in keepsight.fails("eval", *REAL, "skip=0")
    assert not (here / "out").exists()
    (here / "real" / "facts.jsonl").write_bytes(whole_file)
    printed = keepsight("eval", *REAL)
    assert "facts: 1 samples do not fit max_tokens=512" in printed
    found = [(row["task"], row["length"], row["sample"], row["method"]) for row in rows_without_times(here / "out")]
    expected = [("facts", 512, sample, method) for sample in "10" for method in ("full", "snapkv")]
    assert found == expected, "longest first"


def test_questions_of_real_samples(keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is rendered once: of three samples one is too long; the others come apart at their questions."""
    rendered = Mock(side_effect=prompt_text)
    monkeypatch.setattr("keepsight.eval.tasks.samples.prompt_text", rendered)
    real_samples(here / "real")
    keepsight("eval", *REAL, "question=unseen")
    assert rendered.call_count == 3 + 2
    assert {row["question"] for row in rows_without_times(here / "out")} == {"unseen"}
    row = {"input": "Who wrote it?", "outputs": ["Ada"], "answer_prefix": "It is", "index": 0}
    (here / "real" / "tasks.json").write_text(json.dumps({"facts": {**RULER, "max_new_tokens": 8}}))
    write_lines(here / "real" / "facts.jsonl", [row])
    message = keepsight.fails("eval", *REAL, "question=unseen", "out=other")
    assert message == "sample facts/facts-0 does not say where its question starts; evaluate it with question=seen"
    assert not (here / "other").exists()


@pytest.mark.parametrize("method", ["adakv", "speckv"])
def test_every_eviction_can_be_inspected(keepsight: CommandLine, here: Path, method: str) -> None:
    given = [f"method={method}", "budget=48", "draft.layers=[0,1]", "adapter=null", "out=page.html"]
    printed = keepsight("inspect", *TINY[:2], "prompt=" + "Ada wrote it. " * 20, *given)
    tokens = int(printed.splitlines()[-2].split()[0])
    data = json.loads(re.findall(r">(\{.*\})</script>", (here / "page.html").read_text("utf-8"))[0])
    kept = {each["name"]: zlib.decompress(base64.b64decode(each["counts"])) for each in data["methods"]}
    assert set(kept) == {method, "snapkv"} and len(data["tokens"]) == tokens
    for counts in kept.values():
        assert len(counts) == 3 * tokens and sum(counts) == 3 * 2 * 48


def test_inspect_writes_its_page(keepsight: CommandLine, here: Path) -> None:
    text = 'Ada Lovelace wrote, in 1843, what [some] call the first program; it\'s "famous". ' * 4
    (here / "text.txt").write_text(text)
    given = ["inspect", *TINY[:3], "budget=40"]
    printed = keepsight(*given, "prompt=@text.txt", "out=pages/kept.html")
    assert " tokens, 40 kept per layer and KV head: pages/kept.html\nnext: " in printed
    assert [line.split()[0] for line in printed.splitlines()[-5:-2]] == ["full", "lookaheadkv", "snapkv"]
    page = (here / "pages" / "kept.html").read_text("utf-8")
    assert "lookaheadkv" in page and "snapkv" in page and "<title>tiny: lookaheadkv at budget 40</title>" in page
    answers = page.partition("<h2>Answers</h2>")[2].partition("<h2>")[0]
    assert re.findall('<div class="head"><b>(.*?)</b>', answers) == ["full", "lookaheadkv", "snapkv"]
    keepsight(*given, f"prompt={text}", "out=typed.html")
    assert (here / "typed.html").read_text("utf-8") == page
    keepsight(*given, "prompt=@text.txt", "method=streamingllm", "options={sinks: 2}", "out=other.html")
    assert "streamingllm" in (here / "other.html").read_text("utf-8")
    keepsight.refuses("budget", "range", *given, "prompt=@text.txt", "options={sinks: 50}")


def test_an_evaluation_is_extended(keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured stays, times included, also where the run that extends it is stopped."""
    results, small = here / "out" / "results.jsonl", ["methods=[snapkv]", "samples=2", "budgets=[40]"]
    keepsight("eval", *TINY, *NEEDLES, *small)
    before = list(read_jsonl(results))
    more = ["methods=[snapkv,tova]", "samples=2", "budgets=[48,40]", "lengths=[320,300]"]
    with monkeypatch.context() as patch:
        patch.setattr(record, "append_lines", press_ctrl_c)
        keepsight.fails("eval", *TINY, *NEEDLES, *more)
    assert list(read_jsonl(results)) == before
    keepsight("eval", *TINY, *NEEDLES, *more)
    rows = list(read_jsonl(results))
    assert [row for row in before if row not in rows] == []
    cells = [("full", None), *((name, budget) for name in ("snapkv", "tova") for budget in (40, 48))]
    assert Counter((row["method"], row["budget"]) for row in rows) == dict.fromkeys(cells, 4)
    message = keepsight.refuses("lengths", "conflict", "eval", *TINY, *NEEDLES, *small)
    assert "methods=['snapkv', 'tova']" in message and "budgets=[48, 40]" in message


def test_fewer_samples_are_refused_before_the_model_is_loaded(
    keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [*NEEDLES, "methods=[snapkv]", "budgets=[40]", "pages=0"]
    keepsight("eval", *TINY, *given, "samples=2")
    before = {name: (here / "out" / name).read_bytes() for name in tree(here / "out")}
    monkeypatch.setattr(evaluation, "target_of", lambda *_: pytest.fail("loaded"))
    keepsight.refuses("samples", "conflict", "eval", *TINY, *given, "samples=1")
    assert {name: (here / "out" / name).read_bytes() for name in tree(here / "out")} == before


def test_all_methods_are_continued_by_a_list_of_names_and_the_reverse(
    keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows count, not the words that name them: what has been measured is not measured again."""
    monkeypatch.setattr(variants, "METHODS", {"snapkv": SnapKV, "tova": known.METHODS["tova"]})
    given = [*NEEDLES, "budgets=[40]", "pages=0", "samples=2"]
    keepsight("eval", *TINY, *given, "methods=[tova]")
    first = list(read_jsonl(here / "out" / "results.jsonl"))
    keepsight("eval", *TINY, *given, "methods=all")
    both = list(read_jsonl(here / "out" / "results.jsonl"))
    assert [row for row in both if row["method"] != "snapkv"] == first and len(both) == 6
    monkeypatch.setattr("keepsight.eval.sweep.run_samples", lambda *_, **__: pytest.fail("measured again"))
    keepsight("eval", *TINY, *given, "methods=[snapkv,tova]")
    assert list(read_jsonl(here / "out" / "results.jsonl")) == both
    keepsight.refuses("methods", "conflict", "eval", *TINY, *given, "methods=[snapkv]")


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
    monkeypatch.setitem(known.METHODS, "mine", SnapKV)  # taken out again after the test
    real_samples(here / "real")
    given = [*REAL, "methods=[mine,snapkv]", "plugins=mine_of_a_test", "samples=2", "pages=0"]
    results = here / "out" / "results.jsonl"

    def evaluated(helper: str, comment: str = "") -> tuple[str, list[dict[str, Any]]]:
        (here / "helper_of_a_test.py").write_text(helper)
        (here / "mine_of_a_test.py").write_text(MINE.format(helper="helper_of_a_test") + comment)
        for name in ("helper_of_a_test", "mine_of_a_test"):
            sys.modules.pop(name, None)  # as in another process
        importlib.invalidate_caches()
        return keepsight("eval", *given), list(read_jsonl(results))

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    printed, first = evaluated("WINDOW = 4")
    assert "measured again" not in printed and {row["method"] for row in first} == {"full", "mine", "snapkv"}
    assert evaluated("WINDOW = 4")[1] == first
    for helper, comment in (("WINDOW = 32", ""), ("WINDOW = 32", "# edited")):
        printed, rows = evaluated(helper, comment)
        said = "out: measured again: mine at budget 40 (2 rows); since then the method, its weights"
        assert said in printed
        assert [row for row in rows if row["method"] != "mine"] == [row for row in first if row["method"] != "mine"]
        before = {row["inputs_digest"] for row in first if row["method"] == "mine"}
        assert not before & {row["inputs_digest"] for row in rows}
        first = rows

    lines = list(read_jsonl(here / "real" / "facts.jsonl"))
    lines[0]["answers"] = ["Grace"]
    write_lines(here / "real" / "facts.jsonl", lines)
    printed, rows = evaluated("WINDOW = 32", "# edited")
    assert "out: measured again: full (1 row), mine at budget 40 (1 row), snapkv at budget 40 (1 row); " in printed
    assert [row for row in rows if row["sample"] != "0"] == [row for row in first if row["sample"] != "0"]
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
    given = [*NEEDLES, "samples=1", "budgets=[0.25]", "pages=0"]
    said = "Truncation: a prompt of 257 tokens is shorter than the window of 300"
    assert f"wide at budget 0.25 was left out: {said}" in keepsight("eval", *TINY, *given, f"methods=[all,{wide}]")
    assert [row["method"] for row in read_jsonl(here / "out" / "results.jsonl")] == ["full", "snapkv"]
    assert keepsight.fails("eval", *TINY, *given, f"methods=[snapkv,{wide}]", "out=other").startswith(said)
    assert not (here / "other").exists()


def test_a_method_that_is_refused_meanwhile_loses_no_row_of_the_others(
    keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "refusing_of_a_test.py").write_text(REFUSING)
    monkeypatch.setitem(known.METHODS, "mine", SnapKV)  # taken out again after the test
    given = [*NEEDLES, "methods=[mine,snapkv]", "budgets=[40]", "plugins=refusing_of_a_test"]
    message = keepsight.fails("eval", *TINY, *given)
    said = "not with these scores"
    assert message == f"mine at budget 40 was left out: {said}; the rows of the other methods are in out"
    rows = list(read_jsonl(here / "out" / "results.jsonl"))
    assert Counter(row["method"] for row in rows) == {"full": 3, "snapkv": 3}
    assert files_of_run(here / "out") == RUN_FILES
    assert read_json(here / "out" / "settings.json")["notes"]["mine at budget 40"] == f"left out: {said}"
    assert keepsight.fails("eval", *TINY, *given) == message
    assert list(read_jsonl(here / "out" / "results.jsonl")) == rows, "nothing is measured twice"
    keepsight.refuses("plugins", "missing", "eval", *TINY, *given, "plugins=no_such_module")


def test_several_answers_are_drawn_to_each_sample(keepsight: CommandLine, here: Path) -> None:
    """A second draw has other tokens, the first is that of a run without draws, which can be extended."""
    sampled = (
        *TINY,
        *NEEDLES,
        "samples=1",
        "budgets=[40]",
        "temperature=5",
        "pages=0",
        "methods=[snapkv]",
        "out=drawn",
    )
    keepsight("eval", *sampled)
    first = [*read_jsonl(here / "drawn" / "results.jsonl")]
    keepsight("eval", *sampled, "draws=2")
    rows = [*read_jsonl(here / "drawn" / "results.jsonl")]
    by_id = {(row["sample"], row["method"]): row for row in rows}
    assert len(by_id) == len(rows) == 4 and [row for row in rows if row in first] == first
    (one, other) = sorted({row["sample"] for row in rows}, key=len)
    assert other == f"{one}, draw 2"
    assert by_id[one, "full"]["answer"] != by_id[other, "full"]["answer"]
    assert by_id[one, "full"]["sample_digest"] != by_id[other, "full"]["sample_digest"]
    keepsight.refuses("draws", "conflict", "eval", *TINY, *NEEDLES, "draws=2", "out=greedy")
