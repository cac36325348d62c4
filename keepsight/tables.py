"""Tables, by pandas: as Markdown and for a terminal; and one that is printed while its rows are measured.

pandas is imported where a table is made, and not above: a GPU's machine of `make bench-gpu` has none.
"""

import re
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import dedent, indent
from typing import Any, NamedTuple

_PIPE = re.compile(r"(\\*)\|")
"""The sign between cells, and the backslashes before it, which would take an escape from it."""
_GAP = "  "
"""Between two columns of a table for a terminal."""
_NARROWEST = 12
"""Characters that a column of texts keeps where a terminal is narrow."""


def markdown_table(rows: Any, columns: list[str] | None = None, *, numbers: Collection[str] | None = None) -> str:
    """A Markdown table of a frame of texts, which ends with a line break.

    `rows` and `columns` are what `pandas.DataFrame` takes. Without `numbers`, cells are as wide as their texts, and may
    hold Markdown. With `numbers`, the columns to align to the right, a column is as wide as its widest cell, and `|`
    within cells stays text.
    """
    import pandas as pd
    from tabulate import DataRow, TableFormat

    frame = pd.DataFrame(rows, columns=columns)
    if numbers is not None:
        alignments = ["right" if title in numbers else "left" for title in frame]
        escaped = frame.map(escape_pipes).rename(columns=escape_pipes)
        return f"{escaped.to_markdown(index=False, disable_numparse=True, colalign=alignments)}\n"

    def rule(widths: Sequence[int], _: Any) -> str:
        return f"| {' | '.join(['---'] * len(widths))} |"

    line = DataRow("| ", " | ", " |")
    compact = TableFormat(None, rule, None, None, headerrow=line, datarow=line, padding=0, with_header_hide=None)
    unaligned: dict[str, Any] = {"stralign": None, "numalign": None, "disable_numparse": True}
    return f"{frame.to_markdown(index=False, tablefmt=compact, **unaligned)}\n"


def escape_pipes(text: str) -> str:
    """A text for a cell of a Markdown table, in which `|` stays text."""
    return _PIPE.sub(r"\1\1\|", text)


class TerminalColumn(NamedTuple):
    """A column of a table for a terminal.

    Attributes:
        name: Its heading, and the key of its cells.
        form: How its numbers are written, as `format` takes it, such as `.1f`; texts are shown as they are.
        width: Characters of the widest cell, if it is wider than the heading and numbers of that form. Only a table
            whose rows are still to be measured needs it.
        is_text: Whether it holds texts, which are aligned to the left.
    """

    name: str
    form: str = ""
    width: int = 6
    is_text: bool = False

    def text_of(self, row: Mapping[str, Any]) -> str:
        """The row's cell; one that is missing or None is blank."""
        value = row.get(self.name)
        if value is None:
            return ""
        return value if isinstance(value, str) else format(value, self.form)


def terminal_table(rows: Iterable[Mapping[str, Any]], columns: Sequence[TerminalColumn]) -> str:
    """A table for a terminal, whose rows are all there; texts give way where the terminal is narrow."""
    import pandas as pd

    rows = list(rows)
    texts = {}
    longest = []
    for column in columns:
        texts[column.name] = list(map(column.text_of, rows))
        longest.append(max(map(len, [column.name, *texts[column.name]])))

    widths = _widths_in_terminal(columns, longest)
    left_headings = {}
    spaces = []
    for column, width in zip(columns, widths, strict=True):
        if column.is_text:
            texts[column.name] = [shortened(text, width).ljust(width) for text in texts[column.name]]
            left_headings[column.name] = column.name.ljust(width)
        spaces.append(width + len(_GAP) - 1)  # pandas leaves one between two columns
    text = pd.DataFrame(texts).rename(columns=left_headings).to_string(index=False, col_space=spaces)
    return "\n".join(map(str.rstrip, dedent(text).splitlines()))


def terminal_list(values: Mapping[str, str]) -> str:
    """Names and what each amounts to, a line each, by two spaces to the right."""
    import pandas as pd

    return indent(pd.Series(values).to_string(), "  ")


@dataclass(frozen=True)
class LiveTable:
    """A table for a terminal that is printed while its rows are measured.

    pandas writes whole tables: it has to know all cells of a column before it writes the first line, and hours may lie
    between two rows of a benchmark. So widths follow from the columns here, and a line is written for each row.
    """

    columns: Sequence[TerminalColumn]

    def lines(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
        """The heading, then a line for each row as soon as there is one."""
        yield self.heading()
        for row in rows:
            yield self.line(row)

    def heading(self) -> str:
        """The line with the names of the columns."""
        return self._joined([column.name for column in self.columns])

    def line(self, row: Mapping[str, Any]) -> str:
        """The line of a row; a cell that is missing or None is blank."""
        return self._joined([column.text_of(row) for column in self.columns])

    def _joined(self, cells: Sequence[str]) -> str:
        least = [max(column.width, len(column.name)) for column in self.columns]
        aligned = []
        for index, width in enumerate(_widths_in_terminal(self.columns, least)):
            cell = cells[index]
            if width < least[index]:
                cell = shortened(cell, width)
            if self.columns[index].is_text:
                aligned.append(cell.ljust(width))
            else:
                aligned.append(cell.rjust(width))
        return _GAP.join(aligned).rstrip()


def _widths_in_terminal(columns: Sequence[TerminalColumn], widths: Sequence[int]) -> list[int]:
    """Widths of columns; those of texts are smaller where the terminal is too narrow for all."""
    fitting = list(widths)
    if not sys.stdout.isatty():
        return fitting
    surplus = sum(widths) + len(_GAP) * (len(widths) - 1) - shutil.get_terminal_size().columns
    for index, column in enumerate(columns):
        if column.is_text and surplus > 0:
            narrower = min(widths[index], max(_NARROWEST, widths[index] - surplus))
            surplus -= widths[index] - narrower
            fitting[index] = narrower
    return fitting


def name_column(name: str, names: Iterable[str]) -> TerminalColumn:
    """A column of texts that are known before the first row is measured."""
    return TerminalColumn(name, width=max(map(len, names), default=0), is_text=True)


def shortened(text: str, width: int) -> str:
    """A text of at most `width` characters, which ends in an ellipsis where it was longer."""
    return text if len(text) <= width else text[: width - 1] + "…"
