"""A small cover of a grid of cases: every kind of row meets every kind of column in some case."""

import itertools
from collections import Counter
from collections.abc import Mapping, Set

Kinds = Mapping[str, Set[str]]
"""The names of rows or columns, and what each of them is."""


def cover(rows: Kinds, columns: Kinds) -> list[tuple[str, str]]:
    """Choose cases greedily, the same ones every time.

    Each kind of row meets each kind of column, and each row and each column occurs. Of the cases that add as many such
    pairs, the one whose row and column were chosen least often comes first.

    Returns:
        Names of rows and columns, in the order of the grid.
    """
    pairs = {
        (row, column): {*itertools.product(rows[row], columns[column]), (row, None), (None, column)}
        for row in rows
        for column in columns
    }
    missing = set[tuple[str | None, str | None]]().union(*pairs.values())
    chosen, used = set[tuple[str, str]](), Counter[str]()
    while missing:
        best = max(pairs, key=lambda case: (len(pairs[case] & missing), -used[case[0]] - used[case[1]]))
        chosen.add(best)
        used.update(best)
        missing -= pairs[best]
    return [case for case in pairs if case in chosen]
