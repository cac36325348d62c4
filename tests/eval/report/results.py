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
    number = int("0" + "".join(filter(str.isdigit, sample)))
    is_full = method == "full"
    columns: dict[str, Any] = {
        "task": "niah_single",
        "length": 512,
        "sample": sample,
        "depth": (number % 10 + 0.5) / 10,
        "method": method,
        "budget": budget,
        "score": score,
        "excess_nll": 0.0 if is_full else 0.25,
        "agreement": 1.0 if is_full else 0.75,
        "kept": budget or 500,
        "kv_bytes": (budget or 500) * 1024,
        "kv_peak_bytes": None,
        "prompt_tokens": 500,
        "answer": f"{method} says 4711",
        "answer_tokens": 5,
        "first_difference": None if is_full else 2,
        "references": ["4711"],
        "asks": "Which number is hidden?",
        "question": "seen",
        "recall": 1.0 if is_full else 0.5,
        "mass": 1.0 if is_full else 0.9,
        "tau": None if is_full else 0.3,
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
    rows: list[ResultRow] = []
    for task, samples, full_score in (("niah_single", 4, 1.0), ("qa, short", 2, 0.5)):
        for sample in range(samples):
            key = {"task": task, "sample": f"s{sample}"}
            rows.append(row("full", None, full_score, **key))
            for budget, lookaheadkv_score in ((64, 0.5), (128, 1.0)):
                rows.append(row("snapkv", budget, float(sample == 0), excess_nll=1.0 + sample, **key))
                rows.append(row("lookaheadkv", budget, lookaheadkv_score, **key))
    return rows


def write_page(runs: Sequence[Run], folder: Path, pages: Mapping[Key, str] | None = None) -> None:
    """`report.html` alone, without the files beside it."""
    rows: list[ResultRow] = []
    for run in runs:
        rows += run.rows
    summary = summarize(rows)
    write_report(runs, folder, pages or {}, plots_of(rows, summary), tables_of(rows, summary), findings(summary))
