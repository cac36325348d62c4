"""Shards on disk: a killed run resumes without losing or repeating a sample, and training reads what is complete.

out/manifest.json          counts, the target, its version, the chat template's digest, the mixture, the seed
out/shard-00000.jsonl      a complete shard, one row per sample
out/shard-00001.jsonl.partial   the shard being written: complete lines count, a line cut off by a kill is redone
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from keepsight.errors import UserError
from keepsight.files import append_lines, read_json, read_jsonl, text_digest, whole_lines, write_json, write_lines


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
    prompt_ids: list[int]
    answer_ids: list[int]
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
    limit: int
    shard_size: int
    max_new_tokens: int


class ShardWriter:
    """Writes samples in shards.

    Raises:
        UserError: the folder holds data made with other settings.
    """

    def __init__(self, folder: Path, settings: DataSettings) -> None:
        self.folder, self.settings = folder, settings
        if (folder / "manifest.json").exists() and any(folder.glob("shard-*")):
            _check_same(folder, read_json(folder / "manifest.json")["settings"], asdict(settings))
        self._write_manifest(complete=False)

    def shards(self) -> list[range]:
        """The samples' indices, shard by shard."""
        size, limit = self.settings.shard_size, self.settings.limit
        return [range(start, min(start + size, limit)) for start in range(0, limit, size)]

    def missing(self, shard: range) -> list[int]:
        """Indices of a shard that no earlier run has answered."""
        path = self._path(shard)
        if path.exists():
            if len(list(read_jsonl(path))) >= len(shard):
                return []
            path.rename(self._partial(shard))  # limit= was raised: what was the last shard has room for more
        done = {row["index"] for row in whole_lines(self._partial(shard))}
        return [index for index in shard if index not in done]

    def append(self, shard: range, samples: Iterable[TrainingSample]) -> None:
        """Add samples to the shard being written."""
        append_lines(self._partial(shard), map(asdict, samples))

    def finish(self, shard: range) -> None:
        """Sort a shard's samples and give it its final name."""
        partial = self._partial(shard)
        if self._path(shard).exists():
            partial.unlink(missing_ok=True)
            return
        rows = sorted(whole_lines(partial), key=lambda row: row["index"])
        if [row["index"] for row in rows] != list(shard):
            raise UserError(f"{partial}: {len(rows)} of {len(shard)} samples are there; run the same command again")
        write_lines(self._path(shard), rows)
        partial.unlink()

    def complete(self) -> dict[str, Any]:
        """Write the final manifest and return it."""
        return self._write_manifest(complete=True)

    def _write_manifest(self, complete: bool) -> dict[str, Any]:
        manifest: dict[str, Any] = {"complete": complete, "settings": asdict(self.settings)}
        if complete:
            rows = [row for shard in self.shards() for row in read_jsonl(self._path(shard)) if row["index"] in shard]
            manifest |= {
                "samples": len(rows),
                "prompt_tokens": sum(len(row["prompt_ids"]) for row in rows),
                "answer_tokens": sum(len(row["answer_ids"]) for row in rows),
                "sources": dict(Counter(row["source"] for row in rows).most_common()),
                "shards": [self._path(shard).name for shard in self.shards()],
                "digest": text_digest("".join(self._path(shard).read_text("utf-8") for shard in self.shards())),
            }
        write_json(self.folder / "manifest.json", manifest)
        return manifest

    def _path(self, shard: range) -> Path:
        return self.folder / f"shard-{shard.start // self.settings.shard_size:05d}.jsonl"

    def _partial(self, shard: range) -> Path:
        return self._path(shard).with_suffix(".jsonl.partial")


def _check_same(folder: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key, value in wanted.items():
        if key != "limit" and found.get(key) != value:
            raise UserError(
                f"{folder}: this data was made with {key}={found.get(key)!r}, now it is {value!r}; "
                "choose another out=, or delete the folder"
            )


def read_training_samples(
    folder: Path, model: str, template_digest: str
) -> tuple[list[TrainingSample], dict[str, Any]]:
    """The samples of a finished data folder, in order, and its manifest.

    Raises:
        UserError: the folder is missing, empty, unfinished, or made with another model or chat template.
    """
    if not (folder / "manifest.json").exists():
        raise UserError(f"{folder}: no manifest.json; make the data with `keepsight data out={folder}`")
    manifest = read_json(folder / "manifest.json")
    if not manifest.get("complete"):
        raise UserError(
            f"{folder}: this data is unfinished; run the same `keepsight data out={folder}` again to finish it"
        )
    made = manifest["settings"]
    if made["model"] != model:
        raise UserError(f"{folder}: this data was answered by {made['model']!r}, not by {model!r}; make it again")
    if made["template_digest"] != template_digest:
        raise UserError(f"{folder}: this data was made with another chat template of {model!r}; make it again")
    samples = [TrainingSample(**row) for name in manifest["shards"] for row in read_jsonl(folder / Path(name).name)]
    samples = [sample for sample in samples if sample.index < made["limit"]]
    if not samples:
        raise UserError(f"{folder}: this data folder holds no samples; raise limit=")
    return samples, manifest
