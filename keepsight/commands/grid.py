"""Several values for a key: every combination of them is a cell."""

import re
from collections.abc import Collection, Iterator
from itertools import product

from keepsight.errors import UserError


def cells(overrides: list[str], varied: Collection[str]) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Every combination of the values of keys that are given several, `key=[a,b]` or `key=a,b`; lists as `[a,[b,c]]`.

    Args:
        overrides: `key=value` arguments.
        varied: Keys that may have several values.

    Yields:
        A combination: the values of the keys that have several, and the overrides with one value for each key.

    Raises:
        UserError: a key names a value twice.
    """
    given = {key: values for key, values in map(_values, overrides) if key in varied}
    for key, values in given.items():
        if len({*values}) < len(values):
            raise UserError(f"{key}=[{','.join(values)}] names a value twice")
    rest = [override for override in overrides if override.partition("=")[0] not in given]
    for combination in product(*given.values()):
        cell = dict(zip(given, combination, strict=True))
        several = {key: value for key, value in cell.items() if len(given[key]) > 1}
        yield several, [*rest, *(f"{key}={value}" for key, value in cell.items())]


def _values(override: str) -> tuple[str, list[str]]:
    key, _, value = override.partition("=")
    return key, [each.strip() for each in re.split(r",(?![^\[]*\])", value.removeprefix("[").removesuffix("]"))]
