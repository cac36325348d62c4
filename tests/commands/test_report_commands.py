"""`keepsight report`, `keepsight compare` and `reuse=`: what is done with evaluations that are there."""

import csv
from pathlib import Path
from typing import Any

import pytest

from keepsight.commands.cli import main
from keepsight.eval import sweep
from keepsight.files import write_lines
from tests.commands.commands import (
    NEEDLES,
    RUN_FILES,
    CommandLine,
    files_of_run,
    last_of_each_key,
    results_of,
    tree,
)

EVAL = ("eval", "model.id=tiny", "model.device=cpu", *NEEDLES, "budgets=[40]")


@pytest.fixture(scope="module")
def runs(prepared: Path) -> Path:
    """`a` with snapkv, `b` with streamingllm, which takes the full cache's rows from `a`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(prepared)
        run_a = last_of_each_key([*EVAL, "methods=[snapkv]", "out=a", "pages=1"])
        assert main(run_a) == 0
        run_b = last_of_each_key([*EVAL, "methods=[streamingllm]", "out=b", "reuse=[a]", "pages=1"])
        assert main(run_b) == 0
    return prepared


def rows_of(folder: Path, method: str) -> list[dict[str, Any]]:
    return [row for row in results_of(folder) if row["method"] == method]


def digests_of(folder: Path) -> set[str]:
    return {row["inputs_digest"] for row in results_of(folder)}


def table_of(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_rows_of_earlier_runs_are_taken_by_digest(
    keepsight: CommandLine, runs: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times included, so nothing was measured again; another name for a method does not matter."""
    full = rows_of(here / "a", "full")
    snapkv = rows_of(here / "a", "snapkv")
    streamingllm = rows_of(here / "b", "streamingllm")
    assert rows_of(here / "b", "full") == full
    assert [row["method"] for row in results_of(here / "a")] == ["full", "snapkv"] * 3
    assert [row["method"] for row in results_of(here / "b")] == ["full", "streamingllm"] * 3

    monkeypatch.setattr(sweep, "run_samples", lambda *_, **__: pytest.fail("measured again"))
    methods = "methods=[{name: snapkv, label: mine},streamingllm]"
    keepsight(*EVAL, methods, "out=c", "reuse=[a,b]", "pages=1")
    expected: list[dict[str, Any]] = []
    for full_row, snapkv_row, streamingllm_row in zip(full, snapkv, streamingllm, strict=True):
        expected += [full_row, snapkv_row | {"method": "mine"}, streamingllm_row]
    assert results_of(here / "c") == expected
    assert files_of_run(here / "c") == RUN_FILES
    (page,) = (here / "c" / "samples").iterdir()
    assert '"name": "mine, budget 40"' in page.read_text("utf-8")


@pytest.mark.parametrize("change", ["model.dtype=bfloat16", "max_new_tokens=3", "question=unseen"])
def test_other_inputs_are_measured(keepsight: CommandLine, runs: Path, here: Path, change: str) -> None:
    keepsight(*EVAL, "methods=[snapkv]", "samples=1", "reuse=[a]", change, "out=c")
    assert not digests_of(here / "a") & digests_of(here / "c")


def test_a_report_again_and_of_two_runs(keepsight: CommandLine, runs: Path, here: Path) -> None:
    report = here / "a" / "report.html"
    report_of_eval = report.read_text("utf-8")
    report.unlink()
    conclusion, _, ending = keepsight("report", "a").rpartition("\n\n")
    assert conclusion.startswith("At 40 entries ")
    assert ending == "report: a/report.html\nnext: open the page in a browser\n"
    assert report.read_text("utf-8") == report_of_eval

    assert "\n\nreport: both/report.html\nnext: " in keepsight("report", "a", "b", "out=both")
    page = (here / "both" / "report.html").read_text("utf-8")
    for text in ("KV-cache eviction on tiny", "snapkv", "streamingllm", "settings of b"):
        assert text in page
    files_of_eval_alone = {"config.yaml", "results.jsonl", "settings.json", "kept/SAMPLE.json"}
    assert files_of_run(here / "both") == RUN_FILES - files_of_eval_alone
    summary = table_of(here / "both" / "summary.csv")
    assert [row["method"] for row in summary] == ["full", "snapkv", "streamingllm"]


def test_a_report_of_runs_that_do_not_go_together(keepsight: CommandLine, runs: Path, here: Path) -> None:
    keepsight(*EVAL, "methods=[snapkv]", "out=c", "question=unseen")
    message = keepsight.refuses("runs", "conflict", "report", "a", "c")
    assert message.startswith("c: niah_single, 320 tokens, ")
    keepsight.refuses("runs", "missing", "report", "tiny")
    keepsight.refuses("runs", "range", "report")


def test_runs_side_by_side(keepsight: CommandLine, runs: Path, here: Path) -> None:
    printed = keepsight("compare", "a", "b", "out=side")
    assert printed.endswith("report: side/compare.html\nnext: open the page in a browser\n")
    assert "Score, mean over tasks" in printed
    assert " b - a |" in printed
    page = (here / "side" / "compare.html").read_text("utf-8")
    assert "<title>a against b" in page
    assert "methods" in page
    files = tree(here / "side")
    assert "compare.html" in files
    for metric in ("score", "excess_nll", "agreement"):
        assert f"tables/{metric}.csv" in files
        assert f"tables/{metric}_by_task.csv" in files

    table = here / "side" / "tables" / "agreement.csv"
    heading = "budget,method,run0,run0_low,run0_high,run1,run1_low,run1_high,minus1,minus1_low,minus1_high,n"
    assert table.read_text("utf-8").splitlines()[0] == heading
    full, *evicting = table_of(table)
    assert (full["budget"], full["method"], full["n"]) == ("", "full", "3")
    assert (full["minus1"], full["minus1_low"], full["minus1_high"]) == ("0", "", "")
    differences = {row["method"]: row["minus1"] for row in evicting}
    assert differences == {"snapkv": "", "streamingllm": ""}, "each is in one run alone"


def test_paired_differences_of_two_runs(keepsight: CommandLine, runs: Path, here: Path) -> None:
    rows = [row | {"agreement": row["agreement"] / 2} for row in results_of(here / "a")]
    (here / "half").mkdir()
    write_lines(here / "half" / "results.jsonl", rows)
    (here / "half" / "settings.json").write_bytes((here / "a" / "settings.json").read_bytes())
    keepsight("compare", "a", "half", "out=side")
    _, snapkv, *_ = table_of(here / "side" / "tables" / "agreement.csv")
    difference = float(snapkv["minus1"])
    agreements = [row["agreement"] for row in rows_of(here / "a", "snapkv")]
    assert difference == pytest.approx(-sum(agreements) / 6, abs=1e-5)
    assert float(snapkv["minus1_low"]) <= difference <= float(snapkv["minus1_high"])
    assert "plots/comparison.pdf" in tree(here / "side")


def test_runs_that_cannot_be_compared(keepsight: CommandLine, runs: Path, here: Path) -> None:
    keepsight(*EVAL, "methods=[snapkv]", "seed=7", "out=seed")
    keepsight(*EVAL, "methods=[snapkv]", "model.dtype=bfloat16", "samples=2", "out=half")
    assert "allow=[samples]" in keepsight.refuses("runs", "range", "compare", "a", "seed")
    printed = keepsight("compare", "a", "seed", "allow=[samples]")
    assert "Score, mean over tasks" in printed
    assert "compare.html" in printed
    keepsight.refuses("runs", "conflict", "compare", "a", "half", "allow=[samples]")
    keepsight.refuses("runs", "range", "compare", "a", "half", "allow=[targets]")
    keepsight("compare", "a", "half", "allow=[targets,samples]", "out=common")
    scores = table_of(here / "common" / "tables" / "score.csv")
    assert [row["n"] for row in scores] == ["2", "2"]
    keepsight.refuses("runs", "range", "compare", "a")
    keepsight.refuses("allow", "unknown", "compare", "a", "b", "allow=[seeds]")
