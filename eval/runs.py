"""An evaluation run as `keepsight eval` leaves it in a folder."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keepsight.errors import UserError
from keepsight.eval.results import Row, key_of
from keepsight.files import read_json, read_jsonl


@dataclass(frozen=True)
class Run:
    """Results and what they were made with.

    Attributes:
        folder: Where they are.
        rows: Rows of `results.jsonl`, at least one.
        settings: `settings.json`.
    """

    folder: Path
    rows: list[Row]
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name

    @property
    def target(self) -> dict[str, Any]:
        """Name, version, dtype and quantization of the target."""
        return self.settings.get("target") or {}


def read_run(folder: str | Path) -> Run:
    """Read a run's folder.

    Raises:
        UserError: it holds no results.
    """
    folder = Path(folder)
    path = folder / "results.jsonl"
    rows = list(read_jsonl(path)) if path.is_file() else []
    if not rows:
        raise UserError(f"{folder}: no results.jsonl with results; name folders that keepsight eval has written")
    return Run(folder, rows, read_json(folder / "settings.json"))


def parts_of_one(runs: Sequence[Run]) -> list[Run]:
    """Runs that can be shown as one: a row that a run before has too, such as the full cache's, is left out.

    Raises:
        UserError: targets differ, or two rows of one sample, method and budget depend on different inputs.
    """
    parts: list[Run] = []
    seen: dict[tuple[Any, ...], Any] = {}
    for run in runs:
        if run.target != runs[0].target:
            raise UserError(
                f"{run.folder}: its target is {run.target}, that of {runs[0].folder} is {runs[0].target}; "
                "keepsight compare sets them side by side"
            )
        fresh = []
        for row in run.rows:
            place = (*key_of(row), row["method"], row["budget"])
            if place not in seen:
                fresh.append(row)
            elif seen[place] is None or seen[place] != row.get("inputs_digest"):
                raise UserError(
                    f"{run.folder}: {place[0]}, {place[1]} tokens, sample {place[2]}: {place[3]} at budget {place[4]} "
                    "is in another of the runs, measured on other inputs; keepsight compare sets them side by side"
                )
            seen.setdefault(place, row.get("inputs_digest"))
        parts.append(replace(run, rows=fresh))
    return parts
