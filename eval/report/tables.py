"""Tables as values: a page shows them sortable, and they are saved as Markdown, LaTeX and CSV."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keepsight.eval.report.intervals import Estimate
from keepsight.eval.results import FULL
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
