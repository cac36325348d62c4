"""The runner of benchmarks: methods are measured at each prompt length, and every row goes into one table."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

Kind = TypeVar("Kind")
Row = dict[str, Any]
"""A row of a table by the names of its columns."""


def compare(
    methods: Mapping[str, Kind],
    measure: Callable[[Kind, int], Mapping[str, Any]],
    *,
    lengths: Sequence[int] = (0,),
    ratios: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """A row for each length and method, with what `measure` finds, as soon as it is measured.

    Rows have `tokens`, the length, and `method`, the name. `ratios` adds columns: by their names, the column whose
    value is divided by that of the first method at the same length.
    """
    for length in lengths:
        first: Row = {}
        for name, method in methods.items():
            row = {"tokens": length, "method": name, **measure(method, length)}
            first = first or row
            for ratio, column in (ratios or {}).items():
                row[ratio] = row[column] / first[column]
            yield row
