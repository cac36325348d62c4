"""`results.jsonl`: the rows of all samples, written by one process or by several, over any number of runs.

Each of several processes appends to a part of its own, `results-0.jsonl`, `results-1.jsonl`, ...; `merge` brings the
parts into `results.jsonl`. Beside it stands `settings.json`, what the rows were made with.
"""

from collections import Counter
from pathlib import Path
from typing import Any

from keepsight.errors import UserError
from keepsight.files import read_json, whole_lines, write_json, write_lines

FULL = "full"
"""What the `method` column says of the full cache."""
Row = dict[str, Any]
Key = tuple[str, int, str]
"""Task, length and id of a sample."""
_MAY_CHANGE = ("command", "versions")


def part_of(out: Path, process: int, processes: int) -> Path:
    """The file that a process appends its rows to."""
    return out / (f"results-{process}.jsonl" if processes > 1 else "results.jsonl")


def finished(out: Path) -> set[Key]:
    """`Sample.key` of all samples in `results.jsonl`."""
    return {key_of(row) for row in whole_lines(out / "results.jsonl")}


def merge(out: Path, settings: dict[str, Any], rows_each: int) -> None:
    """Bring what all processes of this and earlier runs have written into `results.jsonl`.

    A sample of fewer rows than `rows_each`, cut short by a kill or a full disk, is done again: its rows are dropped.

    Raises:
        UserError: `out` holds results of other settings.
    """
    path, results = out / "settings.json", out / "results.jsonl"
    parts = sorted(out.glob("results-*.jsonl"))
    written = [row for part in (results, *parts) for row in whole_lines(part)]
    if written:
        _check(out, settings, read_json(path))
    write_json(path, settings)
    rows = list({(key_of(row), row["method"], row["budget"]): row for row in written}.values())
    counts = Counter(key_of(row) for row in rows)
    whole = [row for row in rows if counts[key_of(row)] == rows_each]
    if parts or len(whole) < len(written):
        write_lines(results, whole)
    for part in parts:
        part.unlink()


def _check(out: Path, settings: dict[str, Any], before: dict[str, Any]) -> None:
    for key, value in settings.items():
        if key not in _MAY_CHANGE and before.get(key) != value:
            raise UserError(
                f"{out}: these results were made with {key}={before.get(key)!r}, now it is {value!r}; "
                "choose another out=, or delete the folder"
            )


def key_of(row: Row) -> Key:
    """The sample that a row is about."""
    return row["task"], row["length"], row["sample"]
