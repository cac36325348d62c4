"""The runner of benchmarks: rows are printed and saved as they are measured, and a stopped run resumes.

A benchmark names its cases, such as a method at a prompt length, and measures one case. The runner asks only for those
that the folder lacks, appends their rows to `NAME.jsonl`, prints the table as they come, and writes it to `NAME.csv`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from keepsight.files import append_lines, one_writer, read_json, whole_lines, write_csv, write_json, write_lines
from keepsight.models.identity import MadeWith
from keepsight.progress import progress_bar
from keepsight.tables import LiveTable, TerminalColumn

SETTINGS_FILE = "settings.json"
_ROWS_IN_CASE = "rows_in_case"
"""A column of the file alone: the number of rows of a case, which tells whether a kill cut the case off."""
Kind = TypeVar("Kind")
TableRow = dict[str, Any]
"""A row of a table by the names of its columns."""


class Runner:
    """Measures the cases of benchmarks, and keeps their rows in a folder if it has one."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def rows(
        self,
        name: str,
        cases: Sequence[tuple[TableRow, Kind]],
        measure: Callable[[Kind], Iterable[Mapping[str, Any]]],
        *,
        unit: str = "",
        kind: Any = TableRow,
    ) -> Iterator[TableRow]:
        """The rows of all cases, in their order, each as soon as its case is measured or from the folder.

        Args:
            name: Name of the rows' file in the folder.
            cases: For each case, the columns that identify it, with which its rows begin, and the argument of
                `measure`. All cases have the same columns.
            measure: The rows of a case, without these columns. A case without rows is measured again each time.
            unit: What a case is; a progress bar counts them, if it is given.
            kind: Type of the rows in the file, as for `files.from_json`.

        Raises:
            UserError: a line of the file is malformed.
        """
        columns = list(cases[0][0]) if cases else []
        rows_of_case = self._whole_cases(name, columns, kind)
        missing = sum(tuple(columns_of_case.values()) not in rows_of_case for columns_of_case, _ in cases)

        with progress_bar(total=missing, name=f"{unit}s", unit=unit, shown=bool(unit)) as progress:
            for columns_of_case, case in cases:
                rows = rows_of_case.get(tuple(columns_of_case.values()), [])
                if not rows:
                    rows = [{**columns_of_case, **figures} for figures in measure(case)]
                    if self.folder is not None:
                        append_lines(self.folder / f"{name}.jsonl", [{**row, _ROWS_IN_CASE: len(rows)} for row in rows])
                    progress.update()
                yield from rows

    def _whole_cases(self, name: str, columns: Sequence[str], kind: Any) -> dict[tuple[Any, ...], list[TableRow]]:
        """The folder's rows by the case's values in `columns`; incomplete cases are removed from the file."""
        if self.folder is None:
            return {}
        path = self.folder / f"{name}.jsonl"
        lines_of_case: dict[tuple[Any, ...], list[TableRow]] = {}
        for line in _lines(path, kind):
            lines_of_case.setdefault(tuple(map(line.get, columns)), []).append(line)
        whole_cases = {}
        whole_lines_of_cases = []
        for case, lines in lines_of_case.items():
            if len(lines) == lines[0].get(_ROWS_IN_CASE):
                whole_cases[case] = list(map(_without_count, lines))
                whole_lines_of_cases += lines
        if len(whole_cases) < len(lines_of_case):
            write_lines(path, whole_lines_of_cases)
        return whole_cases

    def rows_so_far(self, name: str, kind: Any = TableRow) -> Iterator[TableRow]:
        """All rows of the folder's `NAME.jsonl`, those of other cases too; UserError for a malformed line."""
        if self.folder is not None:
            yield from map(_without_count, _lines(self.folder / f"{name}.jsonl", kind))

    def compare(
        self,
        name: str,
        methods: Mapping[str, Kind],
        measure: Callable[[Kind, int], Mapping[str, Any]],
        *,
        lengths: Sequence[int] = (0,),
        ratios: Mapping[str, str] | None = None,
    ) -> Iterator[TableRow]:
        """A row for each length and method, with what `measure` finds, as soon as it is measured.

        Rows begin with `tokens`, the length, and `method`, the name. `ratios` adds columns, see `with_ratios`.
        """
        cases = []
        for length, (method_name, method) in product(lengths, methods.items()):
            cases.append(({"tokens": length, "method": method_name}, (method, length)))
        rows = self.rows(name, cases, lambda case: [measure(*case)])
        return with_ratios(rows, ratios or {})

    def table(self, name: str, columns: Sequence[TerminalColumn], rows: Iterable[TableRow]) -> Iterator[str]:
        """The lines of a table, each as soon as its row is there; the whole is then in `NAME.csv` of the folder."""
        table = LiveTable(columns)
        shown = []
        yield table.heading()
        for row in rows:
            shown.append(row)
            yield table.line(row)
        self.save_csv(name, [column.name for column in columns], shown)

    def save_csv(self, name: str, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
        """Write a table to `NAME.csv` in the folder, if there is one: numbers with six digits, nothing for None."""
        if self.folder is None:
            return
        lines = []
        for row in rows:
            lines.append({column: _csv_cell(row.get(column)) for column in columns})
        write_csv(self.folder / f"{name}.csv", columns, lines)


def _lines(path: Path, kind: Any) -> Iterator[TableRow]:
    for line in whole_lines(path, kind):
        yield line if isinstance(line, dict) else asdict(line)


def _without_count(line: TableRow) -> TableRow:
    row = dict(line)
    row.pop(_ROWS_IN_CASE, None)
    return row


def with_ratios(rows: Iterable[TableRow], ratios: Mapping[str, str]) -> Iterator[TableRow]:
    """The rows with further columns: by its name, the column that is divided by that of the length's first row.

    Rows without `tokens` are of one length.
    """
    first: TableRow = {}
    for row in rows:
        if not first or row.get("tokens") != first.get("tokens"):
            first = row
        yield {**row, **{name: row[column] / first[column] for name, column in ratios.items()}}


def _csv_cell(value: object) -> object:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value


@contextmanager
def runner_in(folder: Path | None, made_with: MadeWith) -> Iterator[Runner]:
    """A runner with a folder that no other process writes to within the block; with None it keeps nothing.

    A block that fails before it has written anything leaves the folder as it was, or none where there was none, so that
    the corrected command can have the same one.

    Raises:
        UserError: the folder has rows that were measured with something else.
    """
    if folder is None:
        yield Runner()
        return
    path = folder / SETTINGS_FILE
    existed_before = folder.exists()
    files_before = set(folder.iterdir()) if existed_before else set()
    try:
        with one_writer(folder):
            if path.exists():
                before: MadeWith = read_json(path, MadeWith)
                before.require(made_with, f"{path}: this was measured", "choose another out=, or delete the folder")
            write_json(path, asdict(made_with))
            yield Runner(folder)
    except BaseException:
        if folder.is_dir() and set(folder.iterdir()) - files_before == {path}:
            path.unlink()
            if not existed_before:
                folder.rmdir()
        raise
