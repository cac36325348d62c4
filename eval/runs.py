"""An evaluation run as `keepsight eval` leaves it in a folder."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keepsight.errors import UserError
from keepsight.eval.results import MadeWith, Measured, Row, key_of
from keepsight.files import read_json, read_jsonl

MAY_DIFFER = ("targets", "samples")
"""What `keepsight compare` refuses to compare unless it is said."""


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
    rows = list(read_jsonl(path, Measured)) if path.is_file() else []
    if not rows:
        raise UserError(f"{folder}: no results.jsonl with results; name folders that keepsight eval has written")
    return Run(folder, rows, read_json(folder / "settings.json", MadeWith))


def names_of(runs: Sequence[Run]) -> list[str]:
    """The folders' own names, or the whole paths where two are alike."""
    names = [run.folder.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


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


def comparable(runs: Sequence[Run], allow: Collection[str] = ()) -> list[Run]:
    """Runs with the samples that all of them have, so that their rows are pairs; unchanged where there is none.

    Args:
        runs: At least two.
        allow: Which of `MAY_DIFFER` may differ.

    Raises:
        UserError: their targets or their samples differ.
    """
    first = runs[0]
    for run in runs[1:]:
        if "targets" not in allow and run.target != first.target:
            raise UserError(
                f"{run.folder}: its target is {run.target}, that of {first.folder} is {first.target}; "
                "allow=[targets] compares them all the same"
            )
    samples = [{(key_of(row), row.get("sample_digest") or str(row["references"])) for row in run.rows} for run in runs]
    common = set.intersection(*samples)
    for run, own in zip(runs, samples, strict=True):
        if "samples" not in allow and own != common:
            raise UserError(
                f"{run.folder}: {len(own - common)} of its {len(own)} samples are not in every other run; "
                "allow=[samples] compares the others, or, where there are none, the means"
            )
    if not common:
        return [*runs]
    keys = {key for key, _ in common}
    return [replace(run, rows=[row for row in run.rows if key_of(row) in keys]) for run in runs]
