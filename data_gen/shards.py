"""Shards on disk: what they hold. `shard_writer` writes them, `finished` reads those of a folder that is complete.

out/manifest.json          counts, the target, its version, the chat template's digest, the mixture, the seed
out/shard-00000.jsonl      a complete shard, one row per sample, each with a digest of itself
out/shard-00001.jsonl.partial   the shard being written: complete lines count, a line cut off by a kill is redone
out/.arrow/                a copy of all shards that training reads from, see `mapped`
out/shard-00001.jsonl.damaged-*  what a shard was when some of its lines were found changed; the others are still used
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt

from keepsight.errors import UserError
from keepsight.files import read_jsonl

TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(min_length=1)]


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
    """What decides every sample: a run can be resumed only with the same settings (except `limit`).

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


EXCHANGED = "each line of its shards is whole, but together they are not what manifest.json has the digest of"


def read_shard(path: Path, shard: range) -> list[TrainingSample]:
    """The samples of a shard; its file may hold later ones, from a run with a higher limit."""
    if not path.exists():
        raise UserError(f"{path}: no such file")
    samples = [sample for sample in read_jsonl(path, TrainingSample) if sample.index in shard]
    if [sample.index for sample in samples] != list(shard):
        raise UserError(f"{path}: does not hold the samples {shard.start} to {shard.stop - 1}, each once and in order")
    return samples


def shards_digest(paths: Iterable[Path]) -> str:
    """`sha256:` and the digest of the files' bytes, one file after another."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return f"sha256:{digest.hexdigest()}"
