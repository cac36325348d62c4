"""The tables of an evaluation, which a page shows sortable, and which are saved as Markdown, LaTeX and CSV."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from keepsight.errors import printable
from keepsight.eval.record import FULL, ResultRow
from keepsight.eval.report.intervals import Estimate
from keepsight.eval.report.summary import (
    Frame,
    by_task_and_length,
    differences,
    mean_over_tasks,
    notes_on,
    number_text,
    records,
)
from keepsight.files import write_csv, write_text
from keepsight.tables import markdown_table

_LATEX = str.maketrans(
    {
        **{character: rf"\{character}" for character in "&%#_{}$"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "–": "--",
        "τ": r"$\tau$",
    }
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

    @classmethod
    def of(cls, name: str, caption: str, columns: Sequence[Column], frame: Frame) -> "Table":
        """A table of the columns of a frame."""
        return cls(name, caption.strip(), columns, records(frame[[column.name for column in columns]]))

    def save(self, folder: Path) -> None:
        """Write it as Markdown, LaTeX (for the package booktabs) and CSV."""
        write_text(folder / f"{self.name}.md", self.markdown())
        write_text(folder / f"{self.name}.tex", self.latex())
        columns, rows = self.csv_rows()
        write_csv(folder / f"{self.name}.csv", columns, rows)

    def markdown(self) -> str:
        """Numbers to the right, intervals in brackets."""
        frame = self._texts(_markdown_cell)
        frame.columns = [column.title for column in self.columns]
        numbers = []
        for column in self.columns:
            if not column.is_text:
                numbers.append(column.title)
        return f"{printable(self.caption)}\n\n{markdown_table(frame, numbers=numbers)}"

    def latex(self) -> str:
        """A `table` with intervals in small type."""
        frame = self._texts(_latex_cell)
        frame.columns = [_latex(column.title) for column in self.columns]
        alignments = ""
        for column in self.columns:
            alignments += "l" if column.is_text else "r"
        return frame.style.hide(axis="index").to_latex(
            caption=_latex(self.caption),
            label=f"tab:{self.name}",
            column_format=alignments,
            position_float="centering",
            hrules=True,
        )

    def _texts(self, cell_text: Callable[[Cells, Column], str]) -> Frame:
        """The cells as texts; the columns are numbered."""
        texts = []
        for row in self.rows:
            texts.append([cell_text(row, column) for column in self.columns])
        return pd.DataFrame(texts, columns=range(len(self.columns)))

    def csv_rows(self) -> tuple[list[str], list[dict[str, object]]]:
        """Columns and cells of the CSV: whole numbers as they are, others with 6 digits; two columns an interval."""
        names = []
        with_interval = set()
        for column in self.columns:
            names.append(column.name)
            if any(isinstance(row[column.name], Estimate) for row in self.rows):
                with_interval.add(column.name)
                names += [f"{column.name}_low", f"{column.name}_high"]

        lines = []
        for row in self.rows:
            cells: dict[str, object] = {}
            for column in self.columns:
                value = row[column.name]
                low = high = None
                if isinstance(value, Estimate):
                    if value.interval is not None:
                        low, high = value.interval
                    value = value.value
                cells[column.name] = _plain(value)
                if column.name in with_interval:
                    cells[f"{column.name}_low"] = _plain(low)
                    cells[f"{column.name}_high"] = _plain(high)
            lines.append(cells)
        return names, lines


def value_text(row: Cells, column: Column) -> str:
    """A cell without its interval; a missing budget is that of the full cache."""
    value = row[column.name]
    if isinstance(value, Estimate):
        value = value.value
    if value is None:
        is_full_cache = column.name == "budget" and row.get("method") == FULL
        return "all" if is_full_cache else "–"
    if isinstance(value, float):
        return number_text(value, column.digits, column.is_signed)
    return printable(str(value))


def interval_text(row: Cells, column: Column) -> str:
    """`0.12, 0.34`, or nothing where a cell has no interval."""
    value = row[column.name]
    if not isinstance(value, Estimate) or value.interval is None:
        return ""
    low, high = (number_text(end, column.digits, column.is_signed) for end in value.interval)
    if low == high:  # the full cache against itself has no width
        return ""
    return f"{low}, {high}"


def text_of(row: Cells, column: Column) -> str:
    """A cell with its interval in brackets."""
    text = value_text(row, column)
    interval = interval_text(row, column)
    return f"{text} [{interval}]" if interval else text


def sort_key(row: Cells, column: Column) -> str:
    """The value that a page sorts a cell by."""
    value = row[column.name]
    if isinstance(value, Estimate):
        return repr(value.value)
    return "" if value is None else str(value)


def _plain(value: object) -> object:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value


def _latex(text: str) -> str:
    return printable(text).translate(_LATEX)


def _markdown_cell(row: Cells, column: Column) -> str:
    return printable(text_of(row, column))


def _latex_cell(row: Cells, column: Column) -> str:
    text = _latex(value_text(row, column))
    interval = interval_text(row, column)
    return rf"{text} {{\scriptsize [{interval}]}}" if interval else text


# The tables of a report

TASK_COLUMNS = (Column("task", "task", is_text=True), Column("length", "length"))
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
    Column("prefill", "prefill (s)"),
    Column("draft", "draft (s)"),
    Column("observe", "observe (s)"),
    Column("select", "select (s)"),
    Column("time_to_first_token", "time to first token (s)"),
    Column("question", "question (s)"),
    Column("tokens_per_second", "tokens/s of its batch", digits=1),
    Column("rows", "batch size", digits=1),
    Column("kept", "KV entries kept", digits=1),
    Column("kv_mib", "KV cache (MiB)", digits=2),
    Column("kv_peak_mib", "peak while answering (MiB)", digits=2),
)


def overall_table(summary: Frame) -> Table:
    """The mean over tasks of every method and budget."""
    mean = mean_over_tasks(summary)
    title = f"{mean['task'].iloc[0]}, all lengths"
    caption = f"Score and fidelity with 95 % intervals over samples: {title}. {notes_on(mean)}"
    return Table.of("overall", caption, (*VARIANT, *_SCORES), mean)


def task_table(summary: Frame) -> Table:
    """Every method and budget at each task and length."""
    rows = pd.concat(by_task_and_length(summary).values())
    caption = f"Score and fidelity by task and prompt length, with 95 % intervals over samples. {notes_on(rows)}"
    return Table.of("by_task", caption, (*TASK_COLUMNS, *VARIANT, *_SCORES), rows)


def difference_table(summary: Frame) -> Table:
    """Every pair of methods at equal budget, and each against the full cache, over all tasks."""
    rows = differences(mean_over_tasks(summary)).assign(not_evicted=0)
    caption = f"Paired differences of methods over the same samples, with 95 % intervals. {notes_on(rows)}"
    return Table.of("differences", caption, _DIFFERENCES, rows)


def cost_table(rows: Sequence[ResultRow]) -> Table:
    """Seconds by phase, decoding speed, KV entries and memory: means over all samples, the full cache first."""
    frame = pd.DataFrame([{**vars(row), **vars(row.seconds)} for row in rows], dtype=object)
    frame["order"] = frame["budget"].astype(float).fillna(0)
    frame["kv_mib"] = frame["kv_bytes"].astype(float) / 2**20
    frame["kv_peak_mib"] = frame["kv_peak_bytes"].astype(float) / 2**20
    means = {column.name: (column.name, "mean") for column in _MEANS}
    groups = frame.astype(dict.fromkeys(means, float)).groupby(["order", "method"])
    costs = groups.agg(budget=("budget", "first"), **means).reset_index()
    caption = (
        "Time and memory, means over samples. tokens/s counts what the whole batch of an answer decoded, each answer "
        "from where it leaves the full cache's; the batch size is the number of its answers."
    )
    return Table.of("costs", caption, (*VARIANT, *_MEANS), costs)
