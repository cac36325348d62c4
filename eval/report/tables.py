"""The tables of an evaluation, which a page shows sortable, and which are saved as Markdown, LaTeX and CSV."""

import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from keepsight.errors import printable
from keepsight.eval.report.intervals import Estimate
from keepsight.eval.report.summary import (
    SummaryRow,
    by_task_and_length,
    differences,
    mean_over_tasks,
    notes_on,
    number_text,
    share_of_full,
)
from keepsight.eval.results import FULL, Row
from keepsight.files import write_csv, write_text

_LATEX = str.maketrans(
    {each: rf"\{each}" for each in "&%#_{}$"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"–": "--", "τ": r"$\tau$"}
)
Cells = Mapping[str, str | int | float | Estimate | None]


class Column(NamedTuple):
    """A column: key of its cells, heading, decimals of its numbers, whether they are signed, whether it holds texts."""

    name: str
    title: str
    digits: int = 3
    is_signed: bool = False
    is_text: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of cells by column; rows also have the keys that a page filters by: `task`, `length`, `method`, `budget`."""

    name: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Cells]

    def save(self, folder: Path) -> None:
        """Write it as Markdown, LaTeX (for the package booktabs) and CSV."""
        write_text(folder / f"{self.name}.md", self.markdown())
        write_text(folder / f"{self.name}.tex", self.latex())
        columns, rows = self.csv_rows()
        write_csv(folder / f"{self.name}.csv", columns, rows)

    def markdown(self) -> str:
        """Numbers to the right, intervals in brackets."""
        columns = []
        for column in self.columns:
            texts = [column.title, *(text_of(row, column) for row in self.rows)]
            cells = [re.sub(r"(\\*)\|", r"\1\1\|", printable(text)) for text in texts]
            width = max(3, *map(len, cells))
            cells = [cell.ljust(width) if column.is_text else cell.rjust(width) for cell in cells]
            rule = "-" * width if column.is_text else "-" * (width - 1) + ":"
            columns.append([cells[0], rule, *cells[1:]])
        lines = (f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))
        return "\n".join([printable(self.caption), "", *lines]) + "\n"

    def latex(self) -> str:
        """A `table` with intervals in small type."""
        rows = [" & ".join(_latex_cell(row, column) for column in self.columns) for row in self.rows]
        lines = [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{printable(self.caption).translate(_LATEX)}}}",
            rf"\label{{tab:{self.name}}}",
            rf"\begin{{tabular}}{{{''.join('l' if column.is_text else 'r' for column in self.columns)}}}",
            r"\toprule",
            " & ".join(printable(column.title).translate(_LATEX) for column in self.columns) + r" \\",
            r"\midrule",
            *(rf"{row} \\" for row in rows),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
        return "\n".join(lines) + "\n"

    def csv_rows(self) -> tuple[list[str], list[dict[str, object]]]:
        """Columns and cells of the CSV: whole numbers as they are, others with 6 digits; two columns an interval."""
        names = [column.name for column in self.columns]
        spans = {name for name in names if any(isinstance(row[name], Estimate) for row in self.rows)}
        rows = []
        for row in self.rows:
            cells: dict[str, object] = {}
            for name in names:
                value = row[name]
                low, high = (isinstance(value, Estimate) and value.interval) or (None, None)
                cells[name] = _plain(value.value if isinstance(value, Estimate) else value)
                cells |= {f"{name}_low": _plain(low), f"{name}_high": _plain(high)} if name in spans else {}
            rows.append(cells)
        return [f"{name}{end}" for name in names for end in ("", "_low", "_high")[: 3 if name in spans else 1]], rows


def value_text(row: Cells, column: Column) -> str:
    """A cell without its interval; a missing budget is that of the full cache."""
    value = row[column.name]
    if isinstance(value, Estimate):
        value = value.value
    if value is None:
        return "all" if column.name == "budget" and row.get("method") == FULL else "–"
    return number_text(value, column.digits, column.is_signed) if isinstance(value, float) else printable(str(value))


def interval_text(row: Cells, column: Column) -> str:
    """`0.12, 0.34`, or nothing where a cell has no interval."""
    value = row[column.name]
    found = value.interval if isinstance(value, Estimate) else None
    ends = [number_text(end, column.digits, column.is_signed) for end in found or ()]
    return "" if len(set(ends)) < 2 else ", ".join(ends)  # the full cache against itself has no width


def text_of(row: Cells, column: Column) -> str:
    """A cell with its interval in brackets."""
    ends = interval_text(row, column)
    return f"{value_text(row, column)} [{ends}]" if ends else value_text(row, column)


def sort_key(row: Cells, column: Column) -> str:
    """The value that a page sorts a cell by."""
    value = row[column.name]
    return repr(value.value) if isinstance(value, Estimate) else "" if value is None else str(value)


def _plain(value: object) -> object:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else value


def _latex_cell(row: Cells, column: Column) -> str:
    text, ends = value_text(row, column).translate(_LATEX), interval_text(row, column)
    return rf"{text} {{\scriptsize [{ends}]}}" if ends else text


# The tables of a report

PLACE = (Column("task", "task", is_text=True), Column("length", "length"))
VARIANT = (Column("budget", "budget"), Column("method", "method", is_text=True))
_SCORES = (
    Column("score", "score"),
    Column("of_full", "of full", digits=2),
    Column("excess_nll", "excess NLL"),
    Column("agreement", "top-1 agreement"),
    Column("recall", "recall@k", digits=2),
    Column("mass", "attention mass", digits=2),
    Column("tau", "τ", digits=2),
    Column("same_tokens", "same tokens", digits=1),
    Column("prompt_tokens", "prompt tokens", digits=0),
    Column("n", "n"),
    Column("not_evicted", "nothing evicted"),
)
_DIFFERENCES = (
    *VARIANT,
    Column("against", "minus", is_text=True),
    Column("score", "score", is_signed=True),
    Column("excess_nll", "excess NLL", is_signed=True),
    Column("agreement", "top-1 agreement", is_signed=True),
    Column("n", "n"),
)
_MEANS = (
    *(Column(phase, f"{phase} (s)") for phase in ("prefill", "draft", "observe", "select")),
    Column("time_to_first_token", "time to first token (s)"),
    Column("question", "question (s)"),
    Column("tokens_per_second", "tokens/s of its batch", digits=1),
    Column("rows", "batch size", digits=1),
    Column("kept", "KV entries kept", digits=1),
    Column("kv_mib", "KV cache (MiB)", digits=2),
    Column("kv_peak_mib", "peak while answering (MiB)", digits=2),
)


def overall_table(summary: Sequence[SummaryRow]) -> Table:
    """The mean over tasks of every method and budget."""
    mean = mean_over_tasks(summary)
    title = f"{mean[0].task}, all lengths" if mean else "no results"
    caption = f"Score and fidelity with 95 % intervals over samples: {title}. {notes_on(mean)}".strip()
    return Table("overall", caption, (*VARIANT, *_SCORES), _score_rows(mean))


def task_table(summary: Sequence[SummaryRow]) -> Table:
    """Every method and budget at each task and length."""
    groups = by_task_and_length(summary).items()
    rows = [{"task": task, "length": length, **row} for (task, length), group in groups for row in _score_rows(group)]
    rest = notes_on([row for _, group in groups for row in group])
    caption = f"Score and fidelity by task and prompt length, with 95 % intervals over samples. {rest}".strip()
    return Table("by_task", caption, (*PLACE, *VARIANT, *_SCORES), rows)


def difference_table(summary: Sequence[SummaryRow]) -> Table:
    """Every pair of methods at equal budget, and each against the full cache, over all tasks."""
    names = ("budget", "method", "against", "n")
    found = differences(mean_over_tasks(summary))
    rows = [{name: getattr(each, name) for name in names} | {**each.estimates} for each in found]
    rest = notes_on([replace(each, not_evicted=0) for each in found])
    caption = f"Paired differences of methods over the same samples, with 95 % intervals. {rest}".strip()
    return Table("differences", caption, _DIFFERENCES, rows)


def cost_table(rows: Sequence[Row]) -> Table:
    """Seconds by phase, decoding speed, KV entries and memory: means over all samples, the full cache first."""
    variants: dict[tuple[float, str], list[Row]] = defaultdict(list)
    for row in rows:
        variants[row["budget"] or 0, row["method"]].append(row)
    cells: list[Cells] = []
    for _, group in sorted(variants.items()):
        made = [{**row, **row["seconds"], **_memory(row)} for row in group]
        known = {column.name: [row[column.name] for row in made if row[column.name] is not None] for column in _MEANS}
        means = {name: statistics.fmean(values) if values else None for name, values in known.items()}
        cells.append({"budget": group[0]["budget"], "method": group[0]["method"]} | means)
    caption = (
        "Time and memory, means over samples. tokens/s counts what the whole batch of an answer decoded, each answer "
        "from where it leaves the full cache's; the batch size is the number of its answers."
    )
    return Table("costs", caption, (*VARIANT, *_MEANS), cells)


def _memory(row: Row) -> dict[str, float | None]:
    """MiB of the entries that were kept, and of their cache at the answer's end; None where that is not known."""
    peak = row.get("kv_peak_bytes")
    return {"kv_mib": row["kv_bytes"] / 2**20, "kv_peak_mib": None if peak is None else peak / 2**20}


def _score_rows(rows: Sequence[SummaryRow]) -> list[Cells]:
    names = ("budget", "method", "n", "not_evicted")
    return [
        {name: getattr(row, name) for name in names}
        | {**row.estimates, **row.means, "of_full": share_of_full(row, rows)}
        for row in rows
    ]
