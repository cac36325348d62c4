"""The data folder: samples in Arrow shards, written by runs that may be killed at any time, and read memory-mapped.

out/manifest.json                       settings and counts; `complete` once all samples are there
out/shard-00000-0123456789abcdef.arrow  a finished shard, named by its number and the digest of its bytes
out/shard-00001.jsonl.partial           an unfinished shard: a line per sample, each with a digest of itself
out/*.damaged-01234567                  a file that was found changed; its samples are made again

Earlier versions wrote finished shards as `shard-00000.jsonl`, and a copy of all in `.arrow/`: reading converts these.
"""

import hashlib
import importlib
import json
import logging
import shutil
import tempfile
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from filelock import FileLock
from pydantic import Field, NonNegativeInt, PositiveInt
from typing_extensions import override

from keepsight.errors import UserError, require_same
from keepsight.files import (
    append_lines,
    atomic_file,
    cut_torn_line,
    file_digest,
    read_json,
    read_jsonl,
    sound_lines,
    text_digest,
    write_json,
    write_lines,
)

logger = logging.getLogger("keepsight")

TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(min_length=1)]
_CONVERTING = "%s: converting the samples of an earlier version to Arrow"
_EXCHANGED = "its shards are not the ones that manifest.json names"


@dataclass(frozen=True)
class TrainingSample:
    """A prompt and the answer (end token included) whose attention is learned, as token ids and as text."""

    index: int
    source: str
    prompt_ids: TokenIds
    answer_ids: TokenIds
    prompt: str
    answer: str


@dataclass(frozen=True)
class Skipped:
    """A sample that could not be made, and the reason."""

    index: int
    reason: str


@dataclass(frozen=True)
class DataSettings:
    """The settings that determine every sample. A run can be resumed only with the same ones, except a larger `limit`.

    `version` is the model's revision, or the digest of its weight file; `mixture` has plain values; answers have at
    most `max_new_tokens`. For chat templates that contain the date, `date` is the day on which the run began.
    """

    model: str
    version: str
    template_digest: str
    mixture: dict[str, Any] = field(hash=False)
    seed: int
    limit: NonNegativeInt
    shard_size: PositiveInt
    max_new_tokens: int
    date: str = ""
    temperature: float = 0.0
    top_p: float = 1.0

    def shards(self) -> Iterator[range]:
        """The samples' indices, shard by shard."""
        for start in range(0, self.limit, self.shard_size):
            yield range(start, min(start + self.shard_size, self.limit))


@dataclass(frozen=True)
class Manifest:
    """Content of manifest.json; only `settings` until all samples are there, which makes it `complete`.

    `samples` and the tokens of prompts and answers are totals, `sources` numbers of samples, `shards` file names;
    `digest`, `sha256:...`, identifies the data. `skipped` are samples that could not be made.
    """

    complete: bool
    settings: DataSettings
    samples: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    shards: list[str] = field(default_factory=list)
    digest: str = ""
    skipped: list[Skipped] = field(default_factory=list)


class _Damaged(UserError):
    """A shard of an earlier version is missing, or has lines that are not samples."""


class LazySamples(Sequence[TrainingSample]):
    """A sequence of samples that are read when they are accessed; a slice is a list."""

    @abstractmethod
    def read(self, place: int) -> TrainingSample:
        """The sample at an index, from `-len(self)` to `len(self) - 1`."""

    @override
    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self.read(each) for each in range(*place.indices(len(self)))]
        return self.read(place)


class StoredSamples(LazySamples):
    """Samples of Arrow shards, memory-mapped: `rows` is a `datasets.Dataset` with the fields of `TrainingSample`."""

    def __init__(self, paths: Iterable[Path], count: int, folder: object = None) -> None:
        from datasets import Dataset, concatenate_datasets  # takes seconds

        rows = concatenate_datasets([Dataset.from_file(str(path)) for path in paths])
        if len(rows) < count or rows.features != _features():
            raise UserError(_EXCHANGED)
        self.rows: Any = rows.select(range(count))
        self._folder = folder  # temporary, and removed with the samples

    def __len__(self) -> int:
        return len(self.rows)

    @override
    def read(self, place: int) -> TrainingSample:
        return TrainingSample(**self.rows[place])

    @override
    def __iter__(self) -> Iterator[TrainingSample]:
        return (TrainingSample(**row) for row in self.rows)


class ShardWriter:
    """Writes samples in shards; several processes may write different shards of one folder at a time.

    UserError: the folder has data made with other settings, or shards without a manifest.
    """

    def __init__(self, folder: Path, settings: DataSettings) -> None:
        self.folder, self._is_marked = folder, False
        path, has_shards = folder / "manifest.json", any(folder.glob("shard-*"))
        if has_shards and not path.exists():
            raise UserError(f"{folder}: manifest.json is missing; restore it, or delete the folder")
        earlier: Manifest | None = read_json(path, Manifest) if path.exists() else None
        if earlier:
            settings = replace(settings, date=earlier.settings.date or settings.date)
        if earlier and has_shards:
            same = asdict(earlier.settings) | {"limit": settings.limit, "date": settings.date}
            advice = "choose another out=, or delete the folder"
            require_same(f"{folder}: this data was made", same, asdict(settings), advice)
        if earlier and earlier.complete:
            with suppress(_Damaged):  # `missing` uses the other samples of that shard
                earlier = _converted(folder, earlier, folder)
        elif any(folder.glob("shard-*.jsonl")):
            logger.warning(_CONVERTING, folder)
        self.settings = settings
        self._before = earlier if earlier and earlier.complete and earlier.settings == settings else None
        if self._before is None:
            self._mark_unfinished()

    def missing(self, shard: range) -> list[int]:
        """Indices of a shard's samples that no earlier run has made; an incomplete shard is reopened for `append`."""
        finished, journal = self._finished(shard), self._journal(shard)
        earlier = self.folder / f"{_name(self._number(shard))}.jsonl"
        if len(finished) == 1 and not (journal.exists() or earlier.exists()):
            there = {*_table(finished[0])["index"].to_pylist(), *(each.index for each in _skipped(finished[0]))}
            if {*shard} <= there:
                return []
        rows = dict[int, TrainingSample | Skipped]()
        for path in finished:
            rows |= {row["index"]: TrainingSample(**row) for row in _table(path).to_pylist()}
            rows |= {row.index: row for row in _skipped(path)}
        for path in (journal, earlier):
            cut_torn_line(path) if path.exists() else None
            rows |= {row.index: row for row in reversed(self._sound_lines(path))}
        if finished or earlier.exists():
            write_lines(journal, [asdict(row) for row in rows.values()])
            for path in (*finished, earlier):
                path.unlink(missing_ok=True)
        return [index for index in shard if index not in rows]

    def append(self, shard: range, samples: Iterable[TrainingSample | Skipped]) -> None:
        """Add samples to an unfinished shard."""
        self._mark_unfinished()
        append_lines(self._journal(shard), map(asdict, samples))

    def finish(self, shard: range) -> None:
        """Write an unfinished shard as Arrow, sorted."""
        journal, start = self._journal(shard), self._number(shard) * self.settings.shard_size
        if not journal.exists():
            return
        whole = range(start, start + self.settings.shard_size)
        rows = {row.index: row for row in reversed(self._sound_lines(journal)) if row.index in whole}
        if lacking := {*shard} - rows.keys():
            there = len(shard) - len(lacking)
            raise UserError(f"{journal}: {there} of {len(shard)} samples are there; run the same command again")
        _write_shard(self.folder, self._number(shard), [rows[index] for index in sorted(rows)])
        journal.unlink()

    def complete(self) -> dict[str, Any]:
        """Write the final manifest and return it; UserError if a complete manifest names other shards."""
        shards = {path: shard for shard in self.settings.shards() for path in self._finished(shard)}
        if len(shards) != len([*self.settings.shards()]):
            raise UserError(f"{self.folder}: shards are missing; run the same command again")
        made, path = _counted(self.settings, shards), self.folder / "manifest.json"
        if self._before and made.shards == self._before.shards:
            made = replace(made, digest=self._before.digest)
        elif read_json(path, Manifest).complete:  # no process has changed a shard
            raise UserError(f"{self.folder}: {_EXCHANGED}; restore its files, or delete the folder")
        write_json(path, asdict(made))
        shutil.rmtree(self.folder / ".arrow", ignore_errors=True)
        return asdict(made)

    def _mark_unfinished(self) -> None:
        """Mark the manifest as unfinished, until `complete` writes it again."""
        if not self._is_marked:
            write_json(self.folder / "manifest.json", {"complete": False, "settings": asdict(self.settings)})
            self._is_marked = True

    def _finished(self, shard: range) -> list[Path]:
        """The Arrow files of a shard, usually one. A damaged one is set aside."""
        paths = sorted(self.folder.glob(f"{_name(self._number(shard))}-*.arrow"))
        for path in paths:
            if not _is_sound(path):
                self._mark_unfinished()
                logger.warning("%s: changed since it was written; its samples are made again", path)
                path.rename(_aside(path))
        return [path for path in paths if path.exists()]

    def _sound_lines(self, path: Path) -> list[TrainingSample | Skipped]:
        """The samples of a file of lines. If some lines are changed, the others replace it and it is set aside."""
        if not path.exists():
            return []
        samples, faults = sound_lines(path, TrainingSample | Skipped)
        if faults:
            self._mark_unfinished()
            logger.warning("%s; it is kept as %s, and its sample is made again", faults[0], _aside(path).name)
            shutil.copyfile(path, _aside(path))
            write_lines(path, map(asdict, samples))
        return samples

    def _number(self, shard: range) -> int:
        return shard.start // self.settings.shard_size

    def _journal(self, shard: range) -> Path:
        return self.folder / f"{_name(self._number(shard))}.jsonl.partial"


def read_training_samples(
    folder: Path, model: str, template_digest: str, vocabulary: int
) -> tuple[Sequence[TrainingSample], dict[str, Any]]:
    """The samples of a finished data folder, in order, and its manifest.

    UserError: the folder is missing, empty, unfinished, damaged, or was made with another model or chat template, or
    has token ids beyond the model's `vocabulary`.
    """
    pc: Any = importlib.import_module("pyarrow.compute")  # its functions are made when it is imported

    manifest = finished_manifest(folder)
    made = manifest.settings
    if made.model != model:
        raise UserError(f"{folder}: this data was answered by {made.model!r}, not by {model!r}; make it again")
    if made.template_digest != template_digest:
        raise UserError(f"{folder}: this data was made with another chat template of {model!r}; make it again")
    samples = finished_samples(folder, manifest)
    for name in ("prompt_ids", "answer_ids"):
        column = samples.rows.data.column(name)
        lowest, largest = pc.min_max(pc.list_flatten(column)).as_py().values()
        if lowest < 0 or largest >= vocabulary or pc.min(pc.list_value_length(column)).as_py() == 0:
            beyond = f"token {largest}, but the vocabulary of {model!r} ends at {vocabulary - 1}"
            raise UserError(f"{folder}: {name} has {beyond}; make the data again")
    return samples, asdict(manifest)


def earlier_settings(folder: Path) -> DataSettings | None:
    """The settings of the data that is in a folder or was begun there; UserError if its manifest is damaged."""
    path = folder / "manifest.json"
    return read_json(path, Manifest).settings if path.exists() else None


def finished_manifest(folder: Path) -> Manifest:
    """The manifest of a finished data folder; UserError if it is missing or unfinished."""
    if not (folder / "manifest.json").exists():
        raise UserError(f"{folder}: no manifest.json; make the data with `keepsight data out={folder}`")
    manifest: Manifest = read_json(folder / "manifest.json", Manifest)
    if not manifest.complete:
        raise UserError(f"{folder}: this data is unfinished; {_again(folder)} to finish it")
    return manifest


def finished_samples(folder: Path, manifest: Manifest) -> StoredSamples:
    """Samples of a finished data folder, in order, converted from earlier versions; UserError if empty or damaged."""
    if not manifest.shards or not manifest.samples:
        cause = f"all were skipped, such as {manifest.skipped[0]}" if manifest.skipped else "raise limit="
        raise UserError(f"{folder}: this data folder has no samples; {cause}")
    shards, temporary = folder, None
    if any(name.endswith(".jsonl") for name in manifest.shards):
        try:
            with FileLock(folder / ".lock"):
                manifest = _converted(folder, finished_manifest(folder), folder)
        except OSError:  # nothing can be written there
            temporary = tempfile.TemporaryDirectory(prefix="keepsight-")
            shards = Path(temporary.name)
            manifest = _converted(folder, manifest, shards)
    paths = [shards / Path(name).name for name in manifest.shards]
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: no such file; {_again(folder)}")
        if not _is_sound(path):
            raise UserError(f"{path}: changed since it was written; {_again(folder)} to repair it")
    try:
        return StoredSamples(paths, manifest.samples, temporary)
    except UserError as error:
        raise UserError(f"{folder}: {error}; restore its files, or make the data again") from None


def _converted(folder: Path, manifest: Manifest, out: Path) -> Manifest:
    """Write the JSON Lines of an earlier version to `out` as Arrow shards; returns their manifest."""
    earlier = [folder / Path(name).name for name in manifest.shards]
    if not any(path.suffix == ".jsonl" for path in earlier):
        return manifest  # another process was faster
    logger.warning(_CONVERTING, folder)
    digest = hashlib.sha256()
    shards: dict[Path, range] = {}
    for path, shard in zip(earlier, manifest.settings.shards(), strict=False):
        try:
            if not path.is_file():
                raise UserError(f"{path}: no such file")
            rows = [row for row in read_jsonl(path, TrainingSample) if row.index in shard]
            if [row.index for row in rows] != [*shard]:
                raise UserError(f"{path}: lacks one of the samples {shard.start} to {shard.stop - 1} in order")
        except UserError as error:
            raise _Damaged(f"{error}; {_again(folder)}, which sets a damaged file aside and repairs it") from None
        digest.update(path.read_bytes())
        shards[_write_shard(out, shard.start // manifest.settings.shard_size, rows)] = shard
    if f"sha256:{digest.hexdigest()}" != manifest.digest:
        raise UserError(f"{folder}: {_EXCHANGED}; restore its files, or make the data again")
    made = replace(_counted(manifest.settings, shards), digest=manifest.digest)
    if out == folder:
        write_json(folder / "manifest.json", asdict(made))
        for path in earlier:
            path.unlink()
        shutil.rmtree(folder / ".arrow", ignore_errors=True)
    return made


def _counted(settings: DataSettings, shards: dict[Path, range]) -> Manifest:
    """The manifest of finished shards, of which the last may have samples beyond the limit."""
    pc: Any = importlib.import_module("pyarrow.compute")  # its functions are made when it is imported

    sources, prompts, answers, skipped = Counter[str](), 0, 0, list[Skipped]()
    for path, shard in shards.items():
        table = _table(path)
        table = table.filter(pc.less(table["index"], shard.stop))
        sources.update(table["source"].to_pylist())
        prompts += pc.sum(pc.list_value_length(table["prompt_ids"])).as_py() or 0
        answers += pc.sum(pc.list_value_length(table["answer_ids"])).as_py() or 0
        skipped += [each for each in _skipped(path) if each.index < shard.stop]
    names = [path.name for path in shards]
    counts = (sources.total(), prompts, answers, dict(sources.most_common()))
    return Manifest(True, settings, *counts, names, text_digest("\n".join(names)), skipped)


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.damaged-{file_digest(path)[7:15]}")


def _name(number: int) -> str:
    return f"shard-{number:05d}"


def _is_sound(path: Path) -> bool:
    return file_digest(path)[7:23] == path.stem.rpartition("-")[2]


@lru_cache(maxsize=1)
def _features() -> Any:
    from datasets import Features, List, Value

    ids, text = List(Value("int32")), Value("string")
    columns = {"index": Value("int64"), "source": text, "prompt_ids": ids, "answer_ids": ids}
    return Features({**columns, "prompt": text, "answer": text})


def _write_shard(folder: Path, number: int, rows: Sequence[TrainingSample | Skipped]) -> Path:
    """Write samples as an Arrow stream that `datasets` reads; its metadata has the skipped ones."""
    import pyarrow as pa

    samples = [asdict(row) for row in rows if isinstance(row, TrainingSample)]
    skipped = json.dumps([asdict(row) for row in rows if isinstance(row, Skipped)])
    schema = _features().arrow_schema
    schema = schema.with_metadata({**schema.metadata, b"skipped": skipped.encode()})
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, schema) as writer:
        writer.write_table(pa.Table.from_pylist(samples, schema=schema))
    content = stream.getvalue()
    path = folder / f"{_name(number)}-{hashlib.sha256(content).hexdigest()[:16]}.arrow"
    with atomic_file(path) as unfinished:
        unfinished.write_bytes(content)
    return path


def _table(path: Path) -> Any:
    import pyarrow as pa

    return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()


def _skipped(path: Path) -> list[Skipped]:
    return [Skipped(**each) for each in json.loads(_table(path).schema.metadata[b"skipped"])]


def _again(folder: Path) -> str:
    return f"run the same `keepsight data out={folder}` again"
