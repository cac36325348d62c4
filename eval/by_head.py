"""Numbers of every layer and head: as a row of a benchmark keeps them, and as a table with a line for each."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pandas as pd
from torch import Tensor

ByHead = list[list[float]]
"""A number for each layer and head; one for the whole model where tokens are scored for all of it."""


def rounded(values: Tensor) -> ByHead:
    """Values [L, H] as lists, with the five decimals that a row needs."""
    rows = []
    for numbers in values.double().tolist():
        rows.append([round(number, 5) for number in numbers])
    return rows


def lines_by_head(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], measures: Sequence[str]
) -> pd.DataFrame:
    """A line for every row, layer and head.

    Args:
        rows: Rows whose `measures` are numbers by layer and head.
        columns: Columns of a row that stay, by their names in the rows, with those in the table.
        measures: Columns with a number for every layer and head.
    """
    lines = []
    for row in rows:
        of_row = {title: row[name] for name, title in columns.items()}
        first = row[measures[0]]
        for layer, head in product(range(len(first)), range(len(first[0]))):
            of_head = {measure: row[measure][layer][head] for measure in measures}
            lines.append({**of_row, "layer": layer, "head": head, **of_head})
    return pd.DataFrame(lines)
