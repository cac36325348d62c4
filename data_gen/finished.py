"""Reading a data folder that is finished."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from keepsight.data_gen.mapped import mapped_samples
from keepsight.data_gen.shards import EXCHANGED, Manifest, TrainingSample, read_shard, shards_digest
from keepsight.errors import UserError
from keepsight.files import read_json, text_digest

_COPY = ".arrow"
_FORMAT = 1
"""Of the copy; another number has copies of before made anew."""


def read_training_samples(
    folder: Path, model: str, template_digest: str, vocabulary: int
) -> tuple[Sequence[TrainingSample], dict[str, Any]]:
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


def finished_samples(folder: Path, manifest: Manifest) -> Sequence[TrainingSample]:
    """The samples of a finished data folder, in order; each is read when it is asked for.

    Raises:
        UserError: the folder is empty or damaged.
    """
    if not manifest.shards or not manifest.settings.limit:
        raise UserError(f"{folder}: this data folder holds no samples; raise limit=")
    names = zip(manifest.shards, manifest.settings.shards(), strict=False)
    shards = {folder / Path(name).name: shard for name, shard in names}
    exchanged = UserError(f"{folder}: {EXCHANGED}; restore its files, or make the data again")
    if not all(path.is_file() for path in shards) or shards_digest(shards) != manifest.digest:
        for _ in _read(folder, shards):
            pass  # to name the line that is at fault, if one is
        raise exchanged
    of = text_digest(f"{_FORMAT} {manifest.digest} {manifest.settings.limit}")
    samples = mapped_samples(folder / _COPY, of, lambda: _read(folder, shards))
    if len(samples) != manifest.samples:
        raise exchanged
    return samples


def _read(folder: Path, shards: Mapping[Path, range]) -> Iterator[TrainingSample]:
    for path, shard in shards.items():
        try:
            yield from read_shard(path, shard)
        except UserError as error:
            raise UserError(f"{error}; {_again(folder)}, which keeps a damaged file aside and mends it") from None


def _again(folder: Path) -> str:
    return f"run the same `keepsight data out={folder}` again"
