"""The folder of an evaluation: `results.jsonl` with its rows (`keepsight.eval.record`), `settings.json` beside it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from typing_extensions import NotRequired, TypedDict

from keepsight.errors import UserError, require_same
from keepsight.eval.record import RESULTS, Cell, Key, ResultRow, cells_text, latest_rows
from keepsight.files import at_home, read_json, read_jsonl

SETTINGS = "settings.json"
_NO_ROW_DEPENDS_ON = ("command", "versions", "notes", "preset", "table", "planned_samples")
_IN_ROWS = ("tasks", "lengths", "methods", "budgets", "bits")
"""Settings that each row of a table shows."""
_ROWS_DECIDE = ("draws", *_IN_ROWS, "samples", "plugins", "adapter_digest", "retrieval_digest")
"""Settings that say which rows there are, or that rows have digests of: they may change while no row is left out."""
_ADDED_LATER = ("adapter", "retrieval", "jsonl", "longbench", "longbench_v2")
"""Settings of further rows: they may be given where there were none, and do not change."""
MAX_LABEL = 48
"""A longer list of differing settings is no label."""


class RunSettings(TypedDict):
    """The fields of a run's `settings.json` that are read again; it has more."""

    target: NotRequired[dict[str, Any] | None]
    versions: NotRequired[dict[str, str] | None]
    planned_samples: NotRequired[int]


def require_same_run(
    folder: Path, rows: Sequence[ResultRow], settings: Mapping[str, Any], planned: Collection[tuple[Key, Cell]]
) -> None:
    """UserError, before anything is measured, if a folder's rows do not belong to a run with these settings.

    They do not if a setting has changed that they depend on, or if one of them is about a sample or variant that is
    not `planned`: a run may be extended, and nothing that it has measured is left out.
    """
    if not rows:
        return
    settings = _settings_compared(settings)
    before = _settings_compared(read_json(folder / SETTINGS, RunSettings))
    left_out = [row for row in rows if (row.key, row.cell) not in planned]
    changed = []
    for name, value in settings.items():
        if name in _NO_ROW_DEPENDS_ON or value == before.get(name):
            continue
        if name in _ROWS_DECIDE and not left_out:
            continue
        if name in _ADDED_LATER and name in before and _was_unset(before[name]):
            continue
        changed.append(name)

    advice = "choose another out=, or delete the folder"
    earlier = dict(zip(changed, map(before.get, changed), strict=True))
    now = dict(zip(changed, map(settings.get, changed), strict=True))
    require_same(f"{folder}: these results were made", earlier, now, advice)
    if left_out:
        cells = cells_text(left_out)
        task, length, sample = left_out[0].key
        subject = f"{len(left_out)} of these results are left out: {cells}, such as {task}, {length} tokens, {sample}"
        raise UserError(f"{folder}: {subject}; name them too, or {advice}", field="methods", code="conflict")


def _was_unset(value: Any) -> bool:
    """Whether a key had no value, or a section with `dir` named no folder."""
    if isinstance(value, Mapping):
        return value.get("dir", "") is None
    return value is None


def _settings_compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without the judge's keys that no score depends on, and the chat template, which samples depend on."""
    compared = dict(settings)
    for section, names in (("judge", ("parallel", "key")), ("target", ("template",))):
        if settings.get(section):
            compared[section] = dict(settings[section])
            for name in names:
                compared[section].pop(name, None)
    return compared


@dataclass(frozen=True)
class Run:
    """Results and their settings: the rows of `results.jsonl`, at least one, and `settings.json`."""

    folder: Path
    rows: list[ResultRow]
    settings: dict[str, Any]

    @property
    def target(self) -> dict[str, Any]:
        """Name, version, dtype and quantization of the base model."""
        return self.settings.get("target") or {}

    @property
    def incomplete(self) -> str | None:
        """A sentence where the run was stopped before all of its samples were measured; else None."""
        planned: int = self.settings.get("planned_samples", 0)
        measured = len({row.key for row in self.rows})
        if measured >= planned:
            return None
        return f"Incomplete: {measured} of {planned} samples. Run the same command again to measure the others."


def read_run(folder: str | Path) -> Run:
    """Read a run's folder; UserError if it has no results."""
    folder = Path(at_home(folder))
    path = folder / RESULTS
    rows = latest_rows(read_jsonl(path, ResultRow, skip_torn=True)) if path.is_file() else []
    if not rows:
        raise UserError(
            f"{folder}: no {RESULTS} with results; name folders that keepsight eval has written",
            field="runs",
            code="missing",
        )
    return Run(folder, rows, read_json(folder / SETTINGS, RunSettings))


def names_of(runs: Sequence[Run]) -> list[str]:
    """The folders' own names, or the whole paths where two are alike."""
    names = [run.folder.resolve().name for run in runs]
    if len(set(names)) < len(names):
        return [str(run.folder) for run in runs]
    return names


def labels_of(runs: Sequence[Run]) -> list[str]:
    """Labels of runs: the settings that differ, such as `samples=20`; `names_of` where these are many.

    If only one setting differs, its value alone is the label if it is a word.
    """
    differing = _differing_settings(runs)
    labels = []
    for position in range(len(runs)):
        labels.append(", ".join(f"{name}={values[position]}" for name, values in differing.items()))
    if len(differing) == 1:
        (values,) = differing.values()
        if all(value[:1].isalpha() for value in values):
            labels = values
    if len(set(labels)) < len(runs) or max(map(len, labels)) > MAX_LABEL:
        return names_of(runs)
    return labels


def _differing_settings(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The settings that no row shows and that differ between runs, each with its text in every run.

    Paths are cut to their last parts where these differ too.
    """
    settings = [flatten(run.settings) for run in runs]
    differing = {}
    for name in dict.fromkeys(chain.from_iterable(settings)):
        section = name.partition(".")[0]
        if section in (*_NO_ROW_DEPENDS_ON, *_IN_ROWS, "target") or name.endswith(("digest", "sha256")):
            continue
        values = [settings_of_run.get(name, "") for settings_of_run in settings]
        if len(set(values)) == 1:
            continue
        last_parts = [value.rstrip("/").rpartition("/")[2] for value in values]
        differing[name] = last_parts if len(set(last_parts)) == len(set(values)) else values
    return differing


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted names and texts, such as `{"model.id": "..."}`, in their own order."""
    flat: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        elif isinstance(value, (list, tuple)):
            flat[f"{prefix}{name}"] = ", ".join(map(str, value))
        else:
            flat[f"{prefix}{name}"] = "" if value is None else str(value)
    return flat


def parts_of_one(runs: Sequence[Run]) -> list[Run]:
    """Runs that can be shown as one, without rows that an earlier run has too, such as the full cache's.

    UserError: base models differ, or two rows of one sample, method and budget depend on different inputs.
    """
    parts: list[Run] = []
    rows_of_all: dict[tuple[Key, Cell], ResultRow] = {}
    for run in runs:
        if run.target != runs[0].target:
            models = f"its model is {run.target}, that of {runs[0].folder} is {runs[0].target}"
            raise UserError(
                f"{run.folder}: {models}; keepsight compare sets them side by side", field="runs", code="conflict"
            )
        rows = []
        for row in run.rows:
            same = rows_of_all.setdefault((row.key, row.cell), row)
            if same is row:
                rows.append(row)
            elif same.inputs_digest is None or same.inputs_digest != row.inputs_digest:
                raise UserError(
                    f"{run.folder}: {row.task}, {row.length} tokens, sample {row.sample}: {row.method} at budget "
                    f"{row.budget} is in another of the runs, measured on other inputs; keepsight compare sets them "
                    "side by side",
                    field="runs",
                    code="conflict",
                )
        parts.append(replace(run, rows=rows))
    return parts


def _sample_identity(row: ResultRow) -> tuple[Key, str]:
    """The sample of a row by its name and content."""
    return row.key, row.sample_digest or str(row.references)


def comparable(runs: Sequence[Run], allow: Collection[str] = ()) -> list[Run]:
    """Runs (at least two) with their common samples, so that rows are paired; unchanged if there are none.

    UserError: their base models or their samples differ, and `allow` does not name it (`targets`, `samples`).
    """
    first = runs[0]
    for run in runs[1:]:
        if "targets" not in allow and run.target != first.target:
            models = f"its model is {run.target}, that of {first.folder} is {first.target}"
            raise UserError(
                f"{run.folder}: {models}; allow=[targets] compares them anyway", field="runs", code="conflict"
            )

    samples_of_runs = [set(map(_sample_identity, run.rows)) for run in runs]
    common = set.intersection(*samples_of_runs)
    for run, samples in zip(runs, samples_of_runs, strict=True):
        if "samples" not in allow and samples != common:
            difference = f"{len(samples - common)} of its {len(samples)} samples are not in every other run"
            advice = "allow=[samples] compares the others, or, where there are none, the means"
            raise UserError(f"{run.folder}: {difference}; {advice}", field="runs", code="range")
    if not common:
        return list(runs)
    common_keys = {key for key, _ in common}
    paired = []
    for run in runs:
        paired.append(replace(run, rows=[row for row in run.rows if row.key in common_keys]))
    return paired
