"""Shards on disk: a killed run resumes without losing or repeating a sample, and training reads what is complete.

out/manifest.json          counts, the target, its version, the chat template's digest, the mixture, the seed
out/shard-00000.jsonl      a complete shard, one row per sample, each with a digest of itself
out/shard-00001.jsonl.partial   the shard being written: complete lines count, a line cut off by a kill is redone
out/shard-00001.jsonl.damaged-*  what a shard was when some of its lines were found changed; the others are still used
"""

import hashlib
import logging
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt

from keepsight.errors import UserError, require_same
from keepsight.files import (
    append_lines,
    cut_torn_line,
    file_digest,
    read_json,
    read_jsonl,
    sound_lines,
    write_json,
    write_lines,
)

logger = logging.getLogger("keepsight")

TokenIds = Annotated[list[NonNegativeInt], Field(min_length=1)]


@dataclass(frozen=True)
class TrainingSample:
    """A prompt and the answer whose attention is learned.

    Attributes:
        index: Position in the data set.
        source: Kind of prompt, such as `needles/single`.
        prompt_ids: Token ids of the rendered prompt.
        answer_ids: Token ids of the answer, end token included.
        prompt: The rendered prompt as text.
        answer: The answer as text.
    """

    index: int
    source: str
    prompt_ids: TokenIds
    answer_ids: TokenIds
    prompt: str
    answer: str


@dataclass(frozen=True)
class DataSettings:
    """What decides every sample: a run can be resumed only with the same settings (but for `limit`).

    Attributes:
        model: Hub id or folder of the target.
        version: Revision of the target, or the digest of its weight file.
        template_digest: Digest of the target's chat template.
        mixture: The mixture as plain values.
        seed: Random seed of the mixture's draws.
        limit: Number of samples; a later run may raise it to add more.
        shard_size: Samples per shard.
        max_new_tokens: Longest answer in tokens.
    """

    model: str
    version: str
    template_digest: str
    mixture: dict[str, Any] = field(hash=False)
    seed: int
    limit: NonNegativeInt
    shard_size: Annotated[int, Field(ge=1)]
    max_new_tokens: int

    def shards(self) -> Iterator[range]:
        """The samples' indices, shard by shard."""
        for start in range(0, self.limit, self.shard_size):
            yield range(start, min(start + self.shard_size, self.limit))


@dataclass(frozen=True)
class Manifest:
    """What manifest.json says; only `settings` until all samples are there.

    Attributes:
        complete: Whether they are.
        settings: What decides the samples.
        samples: Number of samples.
        prompt_tokens: Their prompts' tokens together.
        answer_tokens: Their answers' tokens together.
        sources: Number of samples by source.
        shards: File names.
        digest: `sha256:...` of all these files, one after another.
    """

    complete: bool
    settings: DataSettings
    samples: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    shards: list[str] = field(default_factory=list)
    digest: str = ""


class ShardWriter:
    """Writes samples in shards. Several may write different shards of one folder at a time.

    Raises:
        UserError: the folder holds data made with other settings, or shards without a manifest.
    """

    def __init__(self, folder: Path, settings: DataSettings) -> None:
        self.folder, self.settings, self._has_written = folder, settings, False
        self._before = self._earlier()
        if self._before is None:
            write_json(folder / "manifest.json", {"complete": False, "settings": asdict(settings)})

    def missing(self, shard: range) -> list[int]:
        """Indices of a shard that no earlier run has answered."""
        path, partial = self._path(shard), self._partial(shard)
        if path.exists():
            if [sample.index for sample in self._sound(path) if sample.index in shard] == list(shard):
                return []
            path.rename(partial)  # limit= was raised, and the last shard has room for more; or lines were damaged
        if not partial.exists():
            return list(shard)
        cut_torn_line(partial)
        done = self._by_index(partial)
        return [index for index in shard if index not in done]

    def append(self, shard: range, samples: Iterable[TrainingSample]) -> None:
        """Add samples to the shard being written."""
        self._has_written = True
        append_lines(self._partial(shard), map(asdict, samples))

    def finish(self, shard: range) -> None:
        """Sort a shard's samples and give it its final name."""
        path, partial = self._path(shard), self._partial(shard)
        if not path.exists():
            held = self._by_index(partial)
            if lacking := set(shard) - held.keys():
                there = len(shard) - len(lacking)
                raise UserError(f"{partial}: {there} of {len(shard)} samples are there; run the same command again")
            write_lines(path, [asdict(held[index]) for index in sorted(held)])
        partial.unlink(missing_ok=True)

    def complete(self) -> dict[str, Any]:
        """Write the final manifest and return it.

        Raises:
            UserError: nothing was missing, but the shards are not those that the manifest was written for.
        """
        digest, sources, prompts, answers, names = hashlib.sha256(), Counter[str](), 0, 0, list[str]()
        for shard in self.settings.shards():
            path = self._path(shard)
            digest.update(path.read_bytes())
            names.append(path.name)
            for sample in _samples(path, shard):
                sources[sample.source] += 1
                prompts, answers = prompts + len(sample.prompt_ids), answers + len(sample.answer_ids)
        made = Manifest(
            True, self.settings, sources.total(), prompts, answers, dict(sources.most_common()), names, _named(digest)
        )
        if self._before is not None and not self._has_written and made.digest != self._before.digest:
            raise UserError(f"{self.folder}: {_EXCHANGED}; restore its files, or delete the folder")
        write_json(self.folder / "manifest.json", asdict(made))
        return asdict(made)

    def _earlier(self) -> Manifest | None:
        """The manifest of an earlier run that made all of these samples."""
        path, has_shards = self.folder / "manifest.json", any(self.folder.glob("shard-*"))
        if not path.exists():
            if has_shards:
                raise UserError(f"{self.folder}: manifest.json is missing; restore it, or delete the folder")
            return None
        before: Manifest = read_json(path, Manifest)
        if has_shards:
            same_limit = replace(before.settings, limit=self.settings.limit)
            advice = "choose another out=, or delete the folder"
            require_same(f"{self.folder}: this data was made", asdict(same_limit), asdict(self.settings), advice)
        return before if before.complete and before.settings == self.settings else None

    def _by_index(self, partial: Path) -> dict[int, TrainingSample]:
        """The samples of a shard that is being written, each once."""
        start = int(partial.name.removeprefix("shard-").partition(".")[0]) * self.settings.shard_size
        room = range(start, start + self.settings.shard_size)
        return {sample.index: sample for sample in reversed(self._sound(partial)) if sample.index in room}

    def _sound(self, path: Path) -> list[TrainingSample]:
        """A file's samples. One with changed lines is kept aside, and a file without these takes its place."""
        samples, faults = sound_lines(path, TrainingSample)
        if faults:
            aside = path.with_name(f"{path.name}.damaged-{file_digest(path)[7:15]}")
            logger.warning("%s; it is kept as %s, and what its place lacks is made again", faults[0], aside.name)
            shutil.copyfile(path, aside)
            write_lines(path, map(asdict, samples))
            self._has_written = True
        return samples

    def _path(self, shard: range) -> Path:
        return self.folder / f"shard-{shard.start // self.settings.shard_size:05d}.jsonl"

    def _partial(self, shard: range) -> Path:
        return self._path(shard).with_suffix(".jsonl.partial")


_EXCHANGED = "each line of its shards is whole, but together they are not what manifest.json has the digest of"


def read_training_samples(
    folder: Path, model: str, template_digest: str, vocabulary: int
) -> tuple[list[TrainingSample], dict[str, Any]]:
    """The samples of a finished data folder that a target answered, in order, and its manifest.

    Args:
        folder: Made by `keepsight data`.
        model: Name of the target, which must have answered.
        template_digest: Digest of the target's chat template.
        vocabulary: Size of the target's vocabulary, above all token ids.

    Raises:
        UserError: the folder is missing, empty, unfinished, damaged, or made with another model or chat template.
    """
    manifest = finished_manifest(folder)
    made = manifest.settings
    if made.model != model:
        raise UserError(f"{folder}: this data was answered by {made.model!r}, not by {model!r}; make it again")
    if made.template_digest != template_digest:
        raise UserError(f"{folder}: this data was made with another chat template of {model!r}; make it again")
    samples = finished_samples(folder, manifest)
    for sample in samples:
        if (largest := max(*sample.prompt_ids, *sample.answer_ids)) >= vocabulary:
            raise UserError(
                f"{folder}: sample {sample.index} has token {largest}, but the vocabulary of {model!r} ends at "
                f"{vocabulary - 1}; make the data again"
            )
    return samples, asdict(manifest)


def finished_manifest(folder: Path) -> Manifest:
    """The manifest of a finished data folder.

    Raises:
        UserError: the folder is missing or unfinished.
    """
    if not (folder / "manifest.json").exists():
        raise UserError(f"{folder}: no manifest.json; make the data with `keepsight data out={folder}`")
    manifest: Manifest = read_json(folder / "manifest.json", Manifest)
    if not manifest.complete:
        raise UserError(f"{folder}: this data is unfinished; {_again(folder)} to finish it")
    return manifest


def finished_samples(folder: Path, manifest: Manifest) -> list[TrainingSample]:
    """The samples of a finished data folder, in order.

    Raises:
        UserError: the folder is empty or damaged.
    """
    if not manifest.shards or not manifest.settings.limit:
        raise UserError(f"{folder}: this data folder holds no samples; raise limit=")
    samples, digest = list[TrainingSample](), hashlib.sha256()
    for name, shard in zip(manifest.shards, manifest.settings.shards(), strict=False):
        path = folder / Path(name).name
        try:
            samples += _samples(path, shard)
        except UserError as error:
            raise UserError(f"{error}; {_again(folder)}, which keeps a damaged file aside and mends it") from None
        digest.update(path.read_bytes())
    if len(samples) != manifest.samples or _named(digest) != manifest.digest:
        raise UserError(f"{folder}: {_EXCHANGED}; restore its files, or make the data again")
    return samples


def _again(folder: Path) -> str:
    return f"run the same `keepsight data out={folder}` again"


def _samples(path: Path, shard: range) -> list[TrainingSample]:
    """The samples of a shard; its file may hold later ones, from a run with a higher limit."""
    if not path.exists():
        raise UserError(f"{path}: no such file")
    samples = [sample for sample in read_jsonl(path, TrainingSample) if sample.index in shard]
    if [sample.index for sample in samples] != list(shard):
        raise UserError(f"{path}: does not hold the samples {shard.start} to {shard.stop - 1}, each once and in order")
    return samples


def _named(digest: "hashlib._Hash") -> str:
    return f"sha256:{digest.hexdigest()}"
