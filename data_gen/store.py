"""The data folder: samples in Arrow shards, written by runs that may be killed at any time, and read memory-mapped.

out/manifest.json                       settings and counts; `complete` once all samples are there
out/shard-00000-0123456789abcdef.arrow  a finished shard, named by its number and the digest of its bytes
out/shard-00001.jsonl.partial           an unfinished shard: a line per sample
"""

import importlib
import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt
from typing_extensions import override

from keepsight.errors import UserError, require_same
from keepsight.files import (
    append_lines,
    atomic_file,
    cut_torn_line,
    file_digest,
    hex_digest,
    json_digest,
    read_json,
    read_jsonl,
    write_json,
    write_lines,
)
from keepsight.models.identity import Identity

TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(min_length=1)]
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

    `identity` is the model's, with its tokenizer; `mixture` has plain values; answers have at most `max_new_tokens`.
    For chat templates that contain the date, `date` is the day on which the run began. `answers` says whose they are:
    `mixture`, `model` or `source`.
    """

    model: str
    identity: Identity
    mixture: dict[str, Any] = field(hash=False)
    seed: int
    limit: NonNegativeInt
    shard_size: PositiveInt
    max_new_tokens: int
    date: str = ""
    temperature: float = 0.0
    top_p: float = 1.0
    answers: str = "mixture"

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


class LazySamples(Sequence[TrainingSample]):
    """A sequence of samples that are read when they are accessed; a slice is a list."""

    @abstractmethod
    def read(self, index: int) -> TrainingSample:
        """The sample at an index, from `-len(self)` to `len(self) - 1`."""

    @override
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.read(number) for number in range(*index.indices(len(self)))]
        return self.read(index)


class StoredSamples(LazySamples):
    """Samples of Arrow shards, memory-mapped: `rows` is a `datasets.Dataset` with the fields of `TrainingSample`."""

    def __init__(self, paths: Iterable[Path], count: int) -> None:
        from datasets import Dataset, concatenate_datasets  # takes seconds

        rows = concatenate_datasets([Dataset.from_file(str(path)) for path in paths])
        if len(rows) < count or rows.features != _features():
            raise UserError(_EXCHANGED, field="shard", code="file")
        self.rows: Any = rows.select(range(count))

    def __len__(self) -> int:
        return len(self.rows)

    @override
    def read(self, index: int) -> TrainingSample:
        return TrainingSample(**self.rows[index])

    @override
    def __iter__(self) -> Iterator[TrainingSample]:
        for row in self.rows:
            yield TrainingSample(**row)


class ShardWriter:
    """Writes samples in shards; several processes may write different shards of one folder at a time.

    UserError: the folder has data made with other settings, or shards without a manifest.
    """

    def __init__(self, folder: Path, settings: DataSettings) -> None:
        self.folder = folder
        self._is_marked = False
        path = folder / "manifest.json"
        has_shards = any(folder.glob("shard-*"))
        if has_shards and not path.exists():
            raise UserError(
                f"{folder}: manifest.json is missing; restore it, or delete the folder",
                field="manifest.json",
                code="missing",
            )

        earlier: Manifest | None = read_json(path, Manifest) if path.exists() else None
        if earlier:
            settings = replace(settings, date=earlier.settings.date or settings.date)
        if earlier and has_shards:
            subject = f"{folder}: this data was made"
            advice = "choose another out=, or delete the folder"
            earlier.settings.identity.require(settings.identity, subject, advice)
            expected = replace(earlier.settings, limit=settings.limit, date=settings.date, identity=settings.identity)
            require_same(subject, asdict(expected), asdict(settings), advice)

        self.settings = settings
        if not (earlier and earlier.complete and earlier.settings == settings):
            self._mark_unfinished()

    def missing(self, shard: range) -> list[int]:
        """Indices of a shard's samples that no earlier run has made; an incomplete shard is reopened for `append`."""
        arrow_file = self._arrow_file(shard)
        journal = self._journal(shard)
        if arrow_file is not None and not journal.exists():
            indices = set(_table(arrow_file)["index"].to_pylist())
            indices.update(row.index for row in _skipped_samples(arrow_file))
            if indices.issuperset(shard):
                return []

        rows: dict[int, TrainingSample | Skipped] = {}
        if arrow_file is not None:
            for row in _table(arrow_file).to_pylist():
                rows[row["index"]] = TrainingSample(**row)
            for skipped in _skipped_samples(arrow_file):
                rows[skipped.index] = skipped
        if journal.exists():
            cut_torn_line(journal)
            rows |= self._journal_rows(journal)

        if arrow_file is not None:
            write_lines(journal, [asdict(row) for row in rows.values()])
            arrow_file.unlink()
        return [index for index in shard if index not in rows]

    def append(self, shard: range, samples: Iterable[TrainingSample | Skipped]) -> None:
        """Add samples to an unfinished shard."""
        self._mark_unfinished()
        append_lines(self._journal(shard), map(asdict, samples))

    def finish(self, shard: range) -> None:
        """Write an unfinished shard as Arrow, sorted."""
        journal = self._journal(shard)
        if not journal.exists():
            return
        rows = self._journal_rows(journal)
        lacking = [index for index in shard if index not in rows]
        if lacking:
            count = len(shard) - len(lacking)
            raise UserError(
                f"{journal}: {count} of {len(shard)} samples are there; run the same command again",
                field="shard",
                code="missing",
            )

        start = self._number(shard) * self.settings.shard_size
        shard_rows = []
        for index in range(start, start + self.settings.shard_size):  # a smaller limit may end within the shard
            if index in rows:
                shard_rows.append(rows[index])
        _write_shard(self.folder, self._number(shard), shard_rows)
        journal.unlink()

    def complete(self) -> dict[str, Any]:
        """Write the final manifest and return it; UserError if a complete manifest names other shards."""
        shards: dict[Path, range] = {}
        for shard in self.settings.shards():
            arrow_file = self._arrow_file(shard)
            if arrow_file is None:
                raise UserError(
                    f"{self.folder}: shards are missing; run the same command again", field="shard", code="missing"
                )
            shards[arrow_file] = shard

        manifest = _manifest_of(self.settings, shards)
        path = self.folder / "manifest.json"
        earlier: Manifest = read_json(path, Manifest)
        if earlier.complete and earlier.shards != manifest.shards:  # though no process has changed a shard
            raise UserError(
                f"{self.folder}: {_EXCHANGED}; restore its files, or delete the folder", field="shard", code="file"
            )
        write_json(path, asdict(manifest))
        return asdict(manifest)

    def _mark_unfinished(self) -> None:
        """Mark the manifest as unfinished, until `complete` writes it again."""
        if not self._is_marked:
            write_json(self.folder / "manifest.json", {"complete": False, "settings": asdict(self.settings)})
            self._is_marked = True

    def _arrow_file(self, shard: range) -> Path | None:
        """The Arrow file of a finished shard, if it is there; UserError if it was changed, or there are two."""
        paths = sorted(self.folder.glob(f"{_shard_name(self._number(shard))}-*.arrow"))
        if len(paths) > 1:
            raise UserError(
                f"{paths[1]}: a second file of this shard; delete the one that is not of this run",
                field="shard",
                code="conflict",
            )
        if not paths:
            return None
        _require_unchanged(paths[0], self.folder)
        return paths[0]

    def _journal_rows(self, journal: Path) -> dict[int, TrainingSample | Skipped]:
        """The samples of an unfinished shard by index, the first of an index."""
        rows: dict[int, TrainingSample | Skipped] = {}
        try:
            for row in read_jsonl(journal, TrainingSample | Skipped):
                rows.setdefault(row.index, row)
        except UserError as error:
            raise error.reworded(f"{error}; delete this file, and {_run_again(self.folder)}") from None
        return rows

    def _number(self, shard: range) -> int:
        return shard.start // self.settings.shard_size

    def _journal(self, shard: range) -> Path:
        return self.folder / f"{_shard_name(self._number(shard))}.jsonl.partial"


def read_training_samples(
    folder: Path, model: str, identity: Identity, vocabulary: int
) -> tuple[Sequence[TrainingSample], dict[str, Any]]:
    """The samples of a finished data folder, in order, and its manifest.

    UserError: the folder is missing, empty, unfinished, damaged, or was made with another model or tokenizer, or has
    token ids beyond the model's `vocabulary`.
    """
    pc: Any = importlib.import_module("pyarrow.compute")  # its functions are made when it is imported

    manifest = finished_manifest(folder)
    settings = manifest.settings
    if settings.model != model:
        raise UserError(
            f"{folder}: this data was answered by {settings.model!r}, not by {model!r}; make it again",
            field="model",
            code="conflict",
        )
    tokenizer = Identity(template=identity.template)  # any version of the model may be trained on its answers
    settings.identity.require(tokenizer, f"{folder}: this data was made", "make it again")
    samples = finished_samples(folder, manifest)
    for name in ("prompt_ids", "answer_ids"):
        column = samples.rows.data.column(name)
        lowest_id, highest_id = pc.min_max(pc.list_flatten(column)).as_py().values()
        shortest = pc.min(pc.list_value_length(column)).as_py()
        if lowest_id < 0 or highest_id >= vocabulary or shortest == 0:
            raise UserError(
                f"{folder}: {name} has token {highest_id}, but the vocabulary of {model!r} ends at {vocabulary - 1}; "
                "make the data again",
                field=name,
                code="model",
            )
    return samples, asdict(manifest)


def earlier_settings(folder: Path) -> DataSettings | None:
    """The settings of the data that is in a folder or was begun there; UserError if its manifest is damaged."""
    path = folder / "manifest.json"
    return read_json(path, Manifest).settings if path.exists() else None


def finished_manifest(folder: Path) -> Manifest:
    """The manifest of a finished data folder; UserError if it is missing or unfinished."""
    if not (folder / "manifest.json").exists():
        raise UserError(
            f"{folder}: no manifest.json; make the data with `keepsight data out={folder}`",
            field="manifest.json",
            code="missing",
        )
    manifest: Manifest = read_json(folder / "manifest.json", Manifest)
    if not manifest.complete:
        raise UserError(
            f"{folder}: this data is unfinished; {_run_again(folder)} to finish it", field="data", code="missing"
        )
    return manifest


def finished_samples(folder: Path, manifest: Manifest) -> StoredSamples:
    """Samples of a finished data folder, in order; UserError if there are none, or a file is missing or changed."""
    if not manifest.shards or not manifest.samples:
        cause = f"all were skipped, such as {manifest.skipped[0]}" if manifest.skipped else "raise limit="
        raise UserError(f"{folder}: this data folder has no samples; {cause}", field="data", code="range")
    paths = [folder / Path(name).name for name in manifest.shards]
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: no such file; {_run_again(folder)}", field="shard", code="missing")
        _require_unchanged(path, folder)
    try:
        return StoredSamples(paths, manifest.samples)
    except UserError as error:
        raise error.reworded(f"{folder}: {error}; restore its files, or make the data again") from None


def _manifest_of(settings: DataSettings, shards: dict[Path, range]) -> Manifest:
    """The manifest of finished shards, of which the last may have samples beyond the limit."""
    pc: Any = importlib.import_module("pyarrow.compute")  # its functions are made when it is imported

    sources: Counter[str] = Counter()
    prompt_tokens = 0
    answer_tokens = 0
    skipped: list[Skipped] = []
    for path, shard in shards.items():
        table = _table(path)
        table = table.filter(pc.less(table["index"], shard.stop))
        sources.update(table["source"].to_pylist())
        prompt_tokens += pc.sum(pc.list_value_length(table["prompt_ids"])).as_py() or 0
        answer_tokens += pc.sum(pc.list_value_length(table["answer_ids"])).as_py() or 0
        skipped += [sample for sample in _skipped_samples(path) if sample.index < shard.stop]
    names = [path.name for path in shards]
    return Manifest(
        complete=True,
        settings=settings,
        samples=sources.total(),
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        sources=dict(sources.most_common()),
        shards=names,
        digest=json_digest(names),
        skipped=skipped,
    )


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}"


def _require_unchanged(path: Path, folder: Path) -> None:
    """Refuse (`UserError`) a shard whose contents no longer match the digest in its name."""
    if file_digest(path)[7:23] != path.stem.rpartition("-")[2]:
        raise UserError(
            f"{path}: changed since it was written; restore the file, or delete it and {_run_again(folder)}",
            field="shard",
            code="file",
        )


@lru_cache(maxsize=1)
def _features() -> Any:
    from datasets import Features, List, Value

    token_ids = List(Value("int32"))
    text = Value("string")
    return Features(
        {
            "index": Value("int64"),
            "source": text,
            "prompt_ids": token_ids,
            "answer_ids": token_ids,
            "prompt": text,
            "answer": text,
        }
    )


def _write_shard(folder: Path, number: int, rows: Sequence[TrainingSample | Skipped]) -> Path:
    """Write samples as an Arrow stream that `datasets` reads; its metadata has the skipped ones."""
    import pyarrow as pa

    samples = []
    skipped = []
    for row in rows:
        if isinstance(row, TrainingSample):
            samples.append(asdict(row))
        else:
            skipped.append(asdict(row))
    schema = _features().arrow_schema
    schema = schema.with_metadata({**schema.metadata, b"skipped": json.dumps(skipped).encode()})
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, schema) as writer:
        writer.write_table(pa.Table.from_pylist(samples, schema=schema))
    content = stream.getvalue()
    path = folder / f"{_shard_name(number)}-{hex_digest([content])[:16]}.arrow"
    with atomic_file(path) as unfinished:
        unfinished.write_bytes(content)
    return path


def _table(path: Path) -> Any:
    import pyarrow as pa

    return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()


def _skipped_samples(path: Path) -> list[Skipped]:
    rows = json.loads(_table(path).schema.metadata[b"skipped"])
    return [Skipped(**row) for row in rows]


def _run_again(folder: Path) -> str:
    return f"run the same `keepsight data out={folder}` again"
