"""Tables: as Markdown, and as lines for a terminal that are printed one by one while rows are measured."""

import re
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_PIPE = re.compile(r"(\\*)\|")
"""The sign between cells, and the backslashes before it, which would take an escape from it."""
_GAP = "  "
"""Between two columns of a table for a terminal."""
_NARROWEST = 12
"""Characters that a column of texts keeps where a terminal is narrow."""


def markdown_table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Collection[str] | None = None,
    escape: bool = False,
) -> str:
    """A Markdown table, which ends with a line break.

    With `numbers`, the titles of columns to align to the right, all cells of a column are as wide as its widest one;
    without, cells are as wide as their texts. `escape` writes `|` within cells as text.
    """
    lines = [list(titles), *map(list, rows)]
    if escape:
        for line in lines:
            line[:] = [_PIPE.sub(r"\1\1\|", cell) for cell in line]
    rule = ["---"] * len(titles)
    if numbers is not None:
        is_number = [title in numbers for title in titles]
        widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            for index, width in enumerate(widths):
                line[index] = line[index].rjust(width) if is_number[index] else line[index].ljust(width)
        rule = []
        for width, right in zip(widths, is_number, strict=True):
            rule.append("-" * (width - 1) + ":" if right else "-" * width)
    lines.insert(1, rule)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


class TerminalColumn(NamedTuple):
    """A column of a table for a terminal.

    Attributes:
        name: Its heading, and the key of its cells.
        form: How its numbers are written, as `format` takes it, such as `.1f`; texts are shown as they are.
        width: Characters of the widest cell, if it is wider than the heading and numbers of that form.
        is_text: Whether it holds texts, which are aligned to the left.
    """

    name: str
    form: str = ""
    width: int = 6
    is_text: bool = False


@dataclass(frozen=True)
class TerminalTable:
    """A table for a terminal, whose columns have the same width from the first row on."""

    columns: Sequence[TerminalColumn]

    def lines(self, rows: Iterable[Mapping[str, Any] | str]) -> Iterator[str]:
        """The heading, then a line for each row as soon as there is one; a text among the rows is a line by itself."""
        yield self.heading()
        for row in rows:
            yield row if isinstance(row, str) else self.line(row)

    def heading(self) -> str:
        """The line with the names of the columns."""
        return self._joined([column.name for column in self.columns])

    def line(self, row: Mapping[str, Any]) -> str:
        """The line of a row; a cell that is missing or None is blank."""
        cells = []
        for column in self.columns:
            value = row.get(column.name)
            if value is None:
                cells.append("")
            elif isinstance(value, str):
                cells.append(value)
            else:
                cells.append(format(value, column.form))
        return self._joined(cells)

    def _joined(self, cells: Sequence[str]) -> str:
        aligned = []
        for column, cell, width in zip(self.columns, cells, self._widths(), strict=True):
            if column.is_text:
                is_narrower = width < max(column.width, len(column.name))
                aligned.append((shortened(cell, width) if is_narrower else cell).ljust(width))
            else:
                aligned.append(cell.rjust(width))
        return _GAP.join(aligned).rstrip()

    def _widths(self) -> list[int]:
        """Width of each column; texts give way where the terminal is too narrow for all."""
        widths = [max(column.width, len(column.name)) for column in self.columns]
        if not sys.stdout.isatty():
            return widths
        surplus = sum(widths) + len(_GAP) * (len(widths) - 1) - shutil.get_terminal_size().columns
        for index, column in enumerate(self.columns):
            if column.is_text and surplus > 0:
                narrower = min(widths[index], max(_NARROWEST, widths[index] - surplus))
                surplus -= widths[index] - narrower
                widths[index] = narrower
        return widths


def name_column(name: str, names: Iterable[str]) -> TerminalColumn:
    """A column of texts that are known before the first row is measured."""
    return TerminalColumn(name, width=max(map(len, names), default=0), is_text=True)


def shortened(text: str, width: int) -> str:
    """A text of at most `width` characters, which ends in an ellipsis where it was longer."""
    return text if len(text) <= width else text[: width - 1] + "…"
