"""The tables of an evaluation, which a page shows sortable, and which are saved as Markdown, LaTeX and CSV."""

import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keepsight.eval.report.figures import in_order
from keepsight.eval.report.intervals import Estimate
from keepsight.eval.report.summary import (
    MEANS,
    MEASURES,
    SummaryRow,
    by_task_and_length,
    differences,
    mean_over_tasks,
    share_of_full,
)
from keepsight.eval.results import FULL, Row
from keepsight.files import write_csv, write_text


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        name: Key of its cells.
        title: Heading.
        digits: Decimals of its numbers.
        is_signed: Whether positive numbers get a plus.
        is_text: Whether its cells are texts.
    """

    name: str
    title: str
    digits: int = 3
    is_signed: bool = False
    is_text: bool = False


_LATEX = str.maketrans(
    {each: rf"\{each}" for each in "&%#_{}$"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"–": "--", "τ": r"$\tau$"}
)
Value = str | int | float | Estimate | None
Cells = Mapping[str, Value]


@dataclass(frozen=True)
class Table:
    """Rows of cells.

    Attributes:
        name: File name without its ending.
        caption: One sentence on what it shows.
        columns: From left to right.
        rows: Cells by column; beside them whatever a page filters by: `task`, `length`, `method`, `budget`.
    """

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
            cells = [_escaped(text, "|") for text in texts]
            width = max(3, *map(len, cells))
            cells = [cell.ljust(width) if column.is_text else cell.rjust(width) for cell in cells]
            rule = "-" * width if column.is_text else "-" * (width - 1) + ":"
            columns.append([cells[0], rule, *cells[1:]])
        lines = (f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))
        return "\n".join([self.caption, "", *lines]) + "\n"

    def latex(self) -> str:
        """A `table` with intervals in small type."""
        heads = " & ".join(_latex(column.title) for column in self.columns)
        rows = [" & ".join(_latex_cell(row, column) for column in self.columns) for row in self.rows]
        return "\n".join(
            [
                r"\begin{table}",
                r"\centering",
                rf"\caption{{{_latex(self.caption)}}}",
                rf"\label{{tab:{self.name}}}",
                rf"\begin{{tabular}}{{{''.join('l' if column.is_text else 'r' for column in self.columns)}}}",
                r"\toprule",
                rf"{heads} \\",
                r"\midrule",
                *(rf"{row} \\" for row in rows),
                r"\bottomrule",
                r"\end{tabular}",
                r"\end{table}",
                "",
            ]
        )

    def csv_rows(self) -> tuple[list[str], list[dict[str, object]]]:
        """Columns and cells of the CSV: whole numbers as they are, others with 6 digits; two columns an interval."""
        spans = {column.name for column in self.columns if any(isinstance(r[column.name], Estimate) for r in self.rows)}
        names = [[name, f"{name}_low", f"{name}_high"] if name in spans else [name] for name in self._names()]
        rows = []
        for row in self.rows:
            cells: dict[str, object] = {}
            for own in names:
                value = row[own[0]]
                low_and_high = (value.interval or (None, None)) if isinstance(value, Estimate) else (None, None)
                parts = (value.value if isinstance(value, Estimate) else value, *low_and_high)
                cells |= {name: _plain(part) for name, part in zip(own, parts, strict=False)}
            rows.append(cells)
        return [name for own in names for name in own], rows

    def _names(self) -> list[str]:
        return [column.name for column in self.columns]


def number_text(value: float, digits: int, is_signed: bool = False) -> str:
    """A number with a fixed number of decimals, never `-0`."""
    return f"{round(value, digits) + 0.0:{'+' if is_signed else ''}.{digits}f}"


def value_text(row: Cells, column: Column) -> str:
    """A cell without its interval; a missing budget is that of the full cache."""
    value = row[column.name]
    if isinstance(value, Estimate):
        value = value.value
    if value is None:
        return "all" if column.name == "budget" and row.get("method") == FULL else "–"
    return number_text(value, column.digits, column.is_signed) if isinstance(value, float) else str(value)


def interval_text(row: Cells, column: Column) -> str:
    """`0.12, 0.34`, or nothing where a cell has no interval."""
    value = row[column.name]
    ends = [
        number_text(end, column.digits, column.is_signed)
        for end in (isinstance(value, Estimate) and value.interval) or ()
    ]
    return "" if len(set(ends)) < 2 else ", ".join(ends)  # the full cache against itself has no width


def text_of(row: Cells, column: Column) -> str:
    """A cell with its interval in brackets."""
    ends = interval_text(row, column)
    return f"{value_text(row, column)} [{ends}]" if ends else value_text(row, column)


def sort_key(row: Cells, column: Column) -> str:
    """What a page sorts a cell by."""
    value = row[column.name]
    if isinstance(value, Estimate):
        return repr(value.value)
    return "" if value is None else str(value)


def _plain(value: Value) -> object:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else value


def _escaped(text: str, symbols: str) -> str:
    return re.sub(f"([{re.escape(symbols)}])", r"\\\1", text.replace("\n", " "))


def _latex(text: str) -> str:
    return text.translate(_LATEX)


def _latex_cell(row: Cells, column: Column) -> str:
    text, ends = _latex(value_text(row, column)), interval_text(row, column)
    return rf"{text} {{\scriptsize [{ends}]}}" if ends else text


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
    Column("n", "n"),
)
_DIFFERENCES = (
    *VARIANT,
    Column("against", "minus", is_text=True),
    Column("score", "score", is_signed=True),
    Column("excess_nll", "excess NLL", is_signed=True),
    Column("agreement", "top-1 agreement", is_signed=True),
    Column("n", "n"),
)


def overall_table(summary: Sequence[SummaryRow]) -> Table:
    """The mean over tasks of every method and budget."""
    mean = mean_over_tasks(summary)
    title = f"{mean[0].task}, all lengths" if mean else "no results"
    caption = f"Score and fidelity with 95 % intervals over samples: {title}."
    return Table("overall", caption, (*VARIANT, *_SCORES), _score_rows(mean))


def task_table(summary: Sequence[SummaryRow]) -> Table:
    """Every method and budget at each task and length."""
    rows = [
        {"task": task, "length": length, **row}
        for (task, length), group in by_task_and_length(summary).items()
        for row in _score_rows(group)
    ]
    caption = "Score and fidelity by task and prompt length, with 95 % intervals over samples."
    return Table("by_task", caption, (*PLACE, *VARIANT, *_SCORES), rows)


def difference_table(summary: Sequence[SummaryRow]) -> Table:
    """Every pair of methods at equal budget, and each against the full cache, over all tasks."""
    rows: list[Cells] = [
        {
            "budget": each.row.budget,
            "method": each.row.method,
            "against": each.against.method,
            **each.estimates,
            "n": each.row.n,
        }
        for each in differences(mean_over_tasks(summary))
    ]
    caption = "Paired differences of methods over the same samples, with 95 % intervals."
    return Table("differences", caption, _DIFFERENCES, rows)


def _score_rows(rows: Sequence[SummaryRow]) -> list[Cells]:
    return [
        {
            "budget": row.budget,
            "method": row.method,
            **{name: row.estimates[name] for name in MEASURES},
            "of_full": share_of_full(row, rows),
            **{name: row.means[name] for name in MEANS},
            "n": row.n,
        }
        for row in rows
    ]


_PHASES = ("prefill", "draft", "observe", "select")
_COLUMNS = (
    Column("budget", "budget"),
    Column("method", "method", is_text=True),
    *(Column(phase, f"{phase} (s)") for phase in _PHASES),
    Column("time_to_first_token", "time to first token (s)"),
    Column("question", "question (s)"),
    Column("tokens_per_second", "tokens/s of its batch", digits=1),
    Column("rows", "batch size", digits=1),
    Column("kept", "KV entries kept", digits=1),
    Column("kv_mib", "KV cache (MiB)", digits=2),
)


def cost_table(rows: Sequence[Row]) -> Table:
    """Means over all samples of every method and budget, the full cache first."""
    order = {method: place for place, method in enumerate(in_order(row["method"] for row in rows))}
    variants: dict[tuple[float, int], list[Row]] = defaultdict(list)
    for row in rows:
        variants[row["budget"] or 0, order[row["method"]]].append(row)
    cells = [_cells(variants[key]) for key in sorted(variants)]
    return Table("costs", "Time and memory, means over samples.", _COLUMNS, cells)


def _cells(rows: list[Row]) -> Cells:
    speeds = [row["tokens_per_second"] for row in rows if row["tokens_per_second"] is not None]
    return {
        "budget": rows[0]["budget"],
        "method": rows[0]["method"],
        **{phase: statistics.fmean(row["seconds"][phase] for row in rows) for phase in (*_PHASES, "question")},
        **{name: statistics.fmean(row[name] for row in rows) for name in ("time_to_first_token", "rows", "kept")},
        "tokens_per_second": statistics.fmean(speeds) if speeds else None,
        "kv_mib": statistics.fmean(row["kv_bytes"] for row in rows) / 2**20,
    }
