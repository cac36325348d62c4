"""The folder of an evaluation: `results.jsonl`, the rows of all samples, and `settings.json`, their settings.

Each of several processes appends to a part of its own, `results-0.jsonl`, `results-1.jsonl`, ...; `merge` brings the
parts into `results.jsonl`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat
from typing_extensions import NotRequired, TypedDict

from keepsight.errors import UserError, require_same
from keepsight.files import at_home, read_json, read_jsonl, whole_lines, write_json, write_lines

FULL = "full"
"""The full cache in the `method` column."""
Row = dict[str, Any]
Key = tuple[str, int, str]
"""Task, length and id of a sample."""
EARLIER = "earlier.jsonl"
"""Rows from before a run was extended, which are used again where they depend on the same inputs."""
_MAY_CHANGE = ("command", "versions", "notes", "preset", "table")
_IN_ROWS = ("tasks", "lengths", "methods", "budgets", "bits")
"""Settings that each row of a table shows."""
MAX_LABEL = 48
"""A longer list of differing settings is no label."""

Digest = Annotated[str, Field(pattern=r"\Asha256:[0-9a-f]{64}\z")]
Count = Annotated[int, Field(ge=0, le=2**53)]


class Phases(TypedDict):
    """Seconds before the first token; see `keepsight.eval.compress.Seconds`."""

    prefill: FiniteFloat
    draft: FiniteFloat
    observe: FiniteFloat
    select: FiniteFloat
    question: FiniteFloat


class Measured(TypedDict):
    """Columns of a row that are read again; it may have others. Those not required are younger than some results.

    `length` is what was asked for, `prompt_tokens` what the prompt has. With `question=multi`, samples about one
    context have the same `context`, the digest of the first. `tokens_per_second` counts what the whole batch of `rows`
    answers decoded, each from where it leaves the full cache's; null where nothing was left to decode.
    """

    task: str
    length: Count
    sample: str
    method: str
    budget: Count | FiniteFloat | None
    score: FiniteFloat
    excess_nll: FiniteFloat
    agreement: FiniteFloat
    kept: FiniteFloat
    kv_bytes: FiniteFloat
    kv_peak_bytes: NotRequired[FiniteFloat | None]
    seconds: Phases
    time_to_first_token: FiniteFloat
    tokens_per_second: FiniteFloat | None
    rows: Count
    answer: str
    references: list[str]
    question: str
    date: str
    depth: NotRequired[FiniteFloat | None]
    recall: NotRequired[FiniteFloat | None]
    mass: NotRequired[FiniteFloat | None]
    tau: NotRequired[FiniteFloat | None]
    first_difference: NotRequired[Count | None]
    prompt_tokens: NotRequired[Count]
    answer_tokens: NotRequired[Count]
    asks: NotRequired[str]
    before: NotRequired[list[str]]
    sample_digest: NotRequired[Digest | None]
    context: NotRequired[Digest]
    inputs_digest: NotRequired[Digest | None]


class MadeWith(TypedDict):
    """The fields of `settings.json` that are read again; it has more."""

    target: NotRequired[dict[str, Any] | None]
    versions: NotRequired[dict[str, str] | None]


_GROWS: dict[str, Callable[[Any, Any], bool]] = {
    **dict.fromkeys(_IN_ROWS, lambda before, now: bool(before) and all(each in now for each in before)),
    "plugins": lambda before, now: all(each in now for each in before),
    "samples": lambda before, now: now == 0 or now >= before > 0,
    **dict.fromkeys(("adapter", "retrieval"), lambda before, now: False),
    **dict.fromkeys(("adapter_digest", "retrieval_digest"), lambda before, now: f"{now}, ".startswith(f"{before}, ")),
    **dict.fromkeys(("jsonl", "longbench", "longbench_v2"), lambda before, now: before.get("dir", "") is None),
}
"""For each setting that may be extended, whether a change only adds rows; a change from null always may."""


def part_of(out: Path, process: int, processes: int) -> Path:
    """The file that a process appends its rows to."""
    return out / (f"results-{process}.jsonl" if processes > 1 else "results.jsonl")


def finished(rows: Iterable[Row], rows_each: int) -> set[Key]:
    """`Sample.key` of the samples that have a row for the full cache and for every variant, `rows_each` in all."""
    counts = Counter(map(key_of, rows))
    return {key for key, count in counts.items() if count == rows_each}


def merge(out: Path, settings: dict[str, Any]) -> None:
    """Move the rows of all processes, of this run and earlier ones, into `results.jsonl`.

    If the settings were extended, all rows go to `EARLIER` instead. A UserError lists all settings that differ
    otherwise.
    """
    path, results, earlier = out / "settings.json", out / "results.jsonl", out / EARLIER
    parts = sorted(out.glob("results-*.jsonl"))
    written: list[Row] = [row for part in (results, *parts) for row in whole_lines(part, Measured)]
    rows = _latest(written)
    if rows and _is_extended(out, settings, read_json(path, MadeWith)):
        write_lines(earlier, _latest([*whole_lines(earlier, Measured), *rows]))
        write_lines(results, [])
        rows = written = []
    write_json(path, settings)
    if parts or len(rows) < len(written):
        write_lines(results, rows)
    for part in parts:
        part.unlink()


def _latest(rows: Iterable[Row]) -> list[Row]:
    """One row for each sample, method and budget: the last, where a sample was done again after a kill."""
    return [*{(key_of(row), row["method"], row["budget"]): row for row in rows}.values()]


def _is_extended(out: Path, settings: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether the settings were extended, as with more tasks or methods; a UserError if they differ otherwise."""
    settings, before = _without_transport(settings), _without_transport(before)
    changed = [key for key in settings if key not in _MAY_CHANGE and settings[key] != before.get(key)]
    grown = [key for key in changed if key in before and _grows(key, before[key], settings[key])]
    others = [key for key in changed if key not in grown]
    found, wanted = ({key: values.get(key) for key in others} for values in (before, settings))
    require_same(f"{out}: these results were made", found, wanted, "choose another out=, or delete the folder")
    return bool(grown)


def _without_transport(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings without the judge's keys that no score depends on."""
    judge = settings.get("judge") or {}
    return settings | {"judge": {key: judge[key] for key in judge if key not in ("parallel", "key")}}


def _grows(key: str, before: Any, now: Any) -> bool:
    if key not in _GROWS:
        return False
    return before is None or (type(before) is type(now) and _GROWS[key](before, now))


def key_of(row: Row) -> Key:
    """The sample that a row is about."""
    return row["task"], row["length"], row["sample"]


@dataclass(frozen=True)
class Run:
    """Results and their settings: the rows of `results.jsonl`, at least one, and `settings.json`."""

    folder: Path
    rows: list[Row]
    settings: dict[str, Any]

    @property
    def target(self) -> dict[str, Any]:
        """Name, version, dtype and quantization of the base model."""
        return self.settings.get("target") or {}


def read_run(folder: str | Path) -> Run:
    """Read a run's folder; UserError if it has no results."""
    folder = Path(at_home(folder))
    path = folder / "results.jsonl"
    rows = _latest(read_jsonl(path, Measured)) if path.is_file() else []
    if not rows:
        raise UserError(f"{folder}: no results.jsonl with results; name folders that keepsight eval has written")
    return Run(folder, rows, read_json(folder / "settings.json", MadeWith))


def names_of(runs: Sequence[Run]) -> list[str]:
    """The folders' own names, or the whole paths where two are alike."""
    names = [run.folder.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def labels_of(runs: Sequence[Run]) -> list[str]:
    """Labels of runs: the settings that differ, such as `samples=20`; `names_of` where these are many.

    If only one setting differs, its value alone is the label if it is a word.
    """
    left_out = (*_MAY_CHANGE, *_IN_ROWS)
    settings = [flatten({key: run.settings[key] for key in run.settings if key not in left_out}) for run in runs]
    keys = dict.fromkeys(key for each in settings for key in each if not key.endswith(("digest", "sha256")))
    found = {key: [each.get(key, "") for each in settings] for key in keys}
    differing = {key: values for key, values in found.items() if len(set(values)) > 1 and key.split(".")[0] != "target"}
    for key, values in differing.items():
        ends = [value.rstrip("/").rpartition("/")[2] for value in values]
        differing[key] = ends if len(set(ends)) == len(set(values)) else values
    labels = [", ".join(f"{key}={values[at]}" for key, values in differing.items()) for at in range(len(runs))]
    if len(differing) == 1:
        (values,) = differing.values()
        labels = values if all(value[:1].isalpha() for value in values) else labels
    told = len(set(labels)) == len(runs) and max(map(len, labels)) <= MAX_LABEL
    return labels if told else names_of(runs)


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted names and texts, such as `{"model.id": "..."}`, in their own order."""
    flat: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
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
    seen: dict[tuple[Any, ...], Any] = {}
    for run in runs:
        if run.target != runs[0].target:
            models = f"its model is {run.target}, that of {runs[0].folder} is {runs[0].target}"
            raise UserError(f"{run.folder}: {models}; keepsight compare sets them side by side")
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
    """Runs (at least two) with their common samples, so that rows are paired; unchanged if there are none.

    UserError: their base models or their samples differ, and `allow` does not name it (`targets`, `samples`).
    """
    first = runs[0]
    for run in runs[1:]:
        if "targets" not in allow and run.target != first.target:
            models = f"its model is {run.target}, that of {first.folder} is {first.target}"
            raise UserError(f"{run.folder}: {models}; allow=[targets] compares them anyway")
    samples = [{(key_of(row), row.get("sample_digest") or str(row["references"])) for row in run.rows} for run in runs]
    common = set.intersection(*samples)
    for run, own in zip(runs, samples, strict=True):
        if "samples" not in allow and own != common:
            few = f"{len(own - common)} of its {len(own)} samples are not in every other run"
            advice = "allow=[samples] compares the others, or, where there are none, the means"
            raise UserError(f"{run.folder}: {few}; {advice}")
    if not common:
        return [*runs]
    keys = {key for key, _ in common}
    return [replace(run, rows=[row for row in run.rows if key_of(row) in keys]) for run in runs]
