"""`keepsight report`, `keepsight compare` and `reuse=`: what is done with evaluations that are there."""

from pathlib import Path

import pytest

from keepsight.commands.cli import main
from keepsight.eval import sweep
from keepsight.files import read_jsonl, write_lines
from tests.commands.commands import NEEDLES, RUN_FILES, CommandLine, files_of_run, last_of_each_key, tree

TINY = ("model.id=tiny", "model.device=cpu")


@pytest.fixture(scope="module")
def runs(prepared: Path) -> Path:
    """`a` with snapkv, `b` with streamingllm, which takes the full cache's rows from `a`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(prepared)
        assert (
            main(last_of_each_key(["eval", *TINY, *NEEDLES, "budgets=[40]", "methods=[snapkv]", "out=a", "pages=1"]))
            == 0
        )
        given = ["methods=[streamingllm]", "out=b", "reuse=[a]", "pages=1"]
        assert main(last_of_each_key(["eval", *TINY, *NEEDLES, "budgets=[40]", *given])) == 0
    return prepared


def test_rows_of_earlier_runs_are_taken_by_digest(
    keepsight: CommandLine, runs: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times included, so nothing was measured again; another name for a method does not matter."""
    first, second = (list(read_jsonl(here / name / "results.jsonl")) for name in "ab")
    assert [row for row in second if row["method"] == "full"] == [row for row in first if row["method"] == "full"]
    assert [row["method"] for row in second] == ["full", "streamingllm"] * 3

    def measured(*_: object, **__: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(sweep, "run_samples", measured)
    methods = "methods=[{name: snapkv, label: mine},streamingllm]"
    keepsight("eval", *TINY, *NEEDLES, "budgets=[40]", methods, "out=c", "reuse=[a,b]", "pages=1")
    columns = first[::2], [row | {"method": "mine"} for row in first[1::2]], second[1::2]
    expected = [row for rows in zip(*columns, strict=True) for row in rows]
    assert list(read_jsonl(here / "c" / "results.jsonl")) == expected
    assert files_of_run(here / "c") == RUN_FILES
    (page,) = (here / "c" / "samples").iterdir()
    assert '"name": "mine, budget 40"' in page.read_text("utf-8")


@pytest.mark.parametrize("change", ["model.dtype=bfloat16", "max_new_tokens=3", "question=unseen"])
def test_other_inputs_are_measured(keepsight: CommandLine, runs: Path, here: Path, change: str) -> None:
    given = [*NEEDLES, "budgets=[40]", "methods=[snapkv]", "samples=1", "reuse=[a]", change, "out=c"]
    keepsight("eval", *TINY, *given)
    before = {row["inputs_digest"] for row in read_jsonl(here / "a" / "results.jsonl")}
    assert not before & {row["inputs_digest"] for row in read_jsonl(here / "c" / "results.jsonl")}


def test_a_report_again_and_of_two_runs(keepsight: CommandLine, runs: Path, here: Path) -> None:
    before = (here / "a" / "report.html").read_text("utf-8")
    (here / "a" / "report.html").unlink()
    said, _, ended = keepsight("report", "a").rpartition("\n\n")
    assert ended == "report: a/report.html\nnext: open the page in a browser\n"
    assert said.startswith("At 40 entries ")
    assert (here / "a" / "report.html").read_text("utf-8") == before
    assert "\n\nreport: both/report.html\nnext: " in keepsight("report", "a", "b", "out=both")
    page = (here / "both" / "report.html").read_text("utf-8")
    assert all(name in page for name in ("KV-cache eviction on tiny", "snapkv", "streamingllm", "settings of b"))
    assert files_of_run(here / "both") == RUN_FILES - {
        "config.yaml",
        "results.jsonl",
        "settings.json",
        "kept/SAMPLE.json",
    }
    summary = (here / "both" / "summary.csv").read_text("utf-8").splitlines()
    assert [line.split(",")[2] for line in summary[1:]] == ["full", "snapkv", "streamingllm"]


def test_a_report_of_runs_that_do_not_go_together(keepsight: CommandLine, runs: Path, here: Path) -> None:
    keepsight("eval", *TINY, *NEEDLES, "budgets=[40]", "methods=[snapkv]", "out=c", "question=unseen")
    assert keepsight.refuses("runs", "conflict", "report", "a", "c").startswith("c: niah_single, 320 tokens, ")
    keepsight.refuses("runs", "missing", "report", "tiny")
    keepsight.refuses("runs", "range", "report")


def test_runs_side_by_side(keepsight: CommandLine, runs: Path, here: Path) -> None:
    printed = keepsight("compare", "a", "b", "out=side")
    assert printed.endswith("report: side/compare.html\nnext: open the page in a browser\n")
    assert "Score, mean over tasks" in printed and " b - a |" in printed
    page = (here / "side" / "compare.html").read_text("utf-8")
    assert "<title>a against b" in page and "methods" in page
    names = [f"tables/{name}{by}.csv" for name in ("score", "excess_nll", "agreement") for by in ("", "_by_task")]
    assert {*names, "compare.html"} <= {*tree(here / "side")}
    header, full, *others = (here / "side" / "tables" / "agreement.csv").read_text("utf-8").splitlines()
    assert header == "budget,method,run0,run0_low,run0_high,run1,run1_low,run1_high,minus1,minus1_low,minus1_high,n"
    assert full.split(",")[:2] == ["", "full"] and full.split(",")[8:] == ["0", "", "", "3"]
    assert {line.split(",")[1]: line.split(",")[8] for line in others} == {"snapkv": "", "streamingllm": ""}


def test_paired_differences_of_two_runs(keepsight: CommandLine, runs: Path, here: Path) -> None:
    rows = [row | {"agreement": row["agreement"] / 2} for row in read_jsonl(here / "a" / "results.jsonl")]
    (here / "half").mkdir()
    write_lines(here / "half" / "results.jsonl", rows)
    (here / "half" / "settings.json").write_bytes((here / "a" / "settings.json").read_bytes())
    keepsight("compare", "a", "half", "out=side")
    line = (here / "side" / "tables" / "agreement.csv").read_text("utf-8").splitlines()[2].split(",")
    values = [row["agreement"] for row in read_jsonl(here / "a" / "results.jsonl") if row["method"] == "snapkv"]
    assert float(line[8]) == pytest.approx(-sum(values) / 6, abs=1e-5)
    assert float(line[9]) <= float(line[8]) <= float(line[10])
    assert "plots/comparison.pdf" in tree(here / "side")


def test_runs_that_cannot_be_compared(keepsight: CommandLine, runs: Path, here: Path) -> None:
    other = [*NEEDLES, "budgets=[40]", "methods=[snapkv]"]
    keepsight("eval", *TINY, *other, "seed=7", "out=seed")
    keepsight("eval", *TINY, *other, "model.dtype=bfloat16", "samples=2", "out=half")
    assert "allow=[samples]" in keepsight.refuses("runs", "range", "compare", "a", "seed")
    printed = keepsight("compare", "a", "seed", "allow=[samples]")
    assert "Score, mean over tasks" in printed and "compare.html" in printed
    keepsight.refuses("runs", "conflict", "compare", "a", "half", "allow=[samples]")
    keepsight.refuses("runs", "range", "compare", "a", "half", "allow=[targets]")
    keepsight("compare", "a", "half", "allow=[targets,samples]", "out=common")
    lines = (here / "common" / "tables" / "score.csv").read_text("utf-8").splitlines()[1:]
    assert [line.split(",")[-1] for line in lines] == ["2", "2"]
    keepsight.refuses("runs", "range", "compare", "a")
    keepsight.refuses("allow", "unknown", "compare", "a", "b", "allow=[seeds]")
