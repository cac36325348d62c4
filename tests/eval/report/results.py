"""Rows of a made-up evaluation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keepsight.eval.record import Key, Phases, ResultRow
from keepsight.eval.report.pages import plots_of, tables_of, write_report
from keepsight.eval.report.summary import findings, summarize
from keepsight.eval.results import Run


def row(method: str, budget: float | None, score: float, **changes: object) -> ResultRow:
    """A row with what `changes` says, under another needle depth for each number in `sample`."""
    sample = str(changes.get("sample", "0"))
    columns: dict[str, Any] = {
        "task": "niah_single",
        "length": 512,
        "sample": sample,
        "depth": (int("0" + "".join(filter(str.isdigit, sample))) % 10 + 0.5) / 10,
        "method": method,
        "budget": budget,
        "score": score,
        "excess_nll": 0.0 if method == "full" else 0.25,
        "agreement": 1.0 if method == "full" else 0.75,
        "kept": budget or 500,
        "kv_bytes": (budget or 500) * 1024,
        "kv_peak_bytes": None,
        "prompt_tokens": 500,
        "answer": f"{method} says 4711",
        "answer_tokens": 5,
        "first_difference": None if method == "full" else 2,
        "references": ["4711"],
        "asks": "Which number is hidden?",
        "question": "seen",
        "recall": 1.0 if method == "full" else 0.5,
        "mass": 1.0 if method == "full" else 0.9,
        "tau": None if method == "full" else 0.3,
        "seconds": Phases(prefill=1.0, draft=0.0, observe=0.5, select=0.25, question=0.0),
        "time_to_first_token": 1.75,
        "tokens_per_second": 20.0,
        "rows": 2,
        "date": "2026-11-22",
        "sample_digest": None,
        "inputs_digest": None,
    }
    return ResultRow(**{**columns, **changes})


def two_tasks() -> list[ResultRow]:
    """Two tasks with different numbers of samples; the full cache, two methods, two budgets."""
    made = []
    for task, samples in (("niah_single", 4), ("qa, short", 2)):
        for sample in range(samples):
            where = {"task": task, "sample": f"s{sample}"}
            made.append(row("full", None, 1.0 if task == "niah_single" else 0.5, **where))
            for budget in (64, 128):
                made.append(row("snapkv", budget, float(sample == 0), excess_nll=1.0 + sample, **where))
                made.append(row("lookaheadkv", budget, 1.0 if budget == 128 else 0.5, **where))
    return made


def write_page(runs: Sequence[Run], folder: Path, pages: Mapping[Key, str] | None = None) -> None:
    """`report.html` alone, without the files beside it."""
    rows = [each for run in runs for each in run.rows]
    summary = summarize(rows)
    write_report(runs, folder, pages or {}, plots_of(rows, summary), tables_of(rows, summary), findings(summary))
