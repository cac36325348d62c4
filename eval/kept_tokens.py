"""Which tokens of a prompt each variant kept: a file a sample in the folder `kept` of a run, for pages that show them.

Counts are stored under the digest of what they depend on, so that a later run that uses rows again finds them.
"""

import base64
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from keepsight.eval.record import Cell, Key, ResultRow
from keepsight.eval.sweep import Variant
from keepsight.eval.tasks.samples import RenderedSample, Sample
from keepsight.files import read_json, write_json
from keepsight.models.decoder import cached_kv_heads
from keepsight.models.targets import Target
from keepsight.runtime.prompt_compression.text import token_texts

FOLDER = "kept"


@dataclass(frozen=True)
class KeptOfSample:
    """The content of a sample's file: the texts of its prompt's N tokens, and numbers of layers and KV heads.

    `counts` say by `name_of_counts` of a row how many heads kept each token; see `encode_counts`.
    """

    tokens: list[str]
    layers: int
    heads: int
    counts: dict[str, str]


class KeptTokens:
    """Collects what variants keep of some samples, and writes it to the run's folder `out` once a sample is done.

    `earlier` are folders of runs whose rows are used again.
    """

    def __init__(self, out: Path, target: Target, samples: Iterable[RenderedSample], earlier: Sequence[str]) -> None:
        self.out = out
        self.target = target
        self.samples = {sample.key: sample for sample in samples}
        self.earlier = [out, *map(Path, earlier)]
        self._counts: dict[Key, dict[Cell, str]] = defaultdict(dict)

    def note(self, samples: Sequence[RenderedSample], variant: Variant, kept: Tensor) -> None:
        """Record which entries [L, K, N] bool of a prompt a variant keeps."""
        for sample in samples:
            if sample.key in self.samples:
                self._counts[sample.key][variant.cell] = encode_counts(kept.cpu().numpy())

    def write(self, rows: Sequence[ResultRow]) -> None:
        """Write the file of a sample from all of its rows."""
        first_row = rows[0]
        sample = self.samples.get(first_row.key)
        if sample is None:
            return
        counts: dict[str, str] = {}
        for folder in self.earlier:
            path = path_of(folder, first_row)
            if path.exists():
                counts.update(read_json(path, KeptOfSample).counts)
        new_counts = self._counts.pop(first_row.key, {})
        for row in rows:
            if row.cell in new_counts:
                counts[name_of_counts(row)] = new_counts[row.cell]

        model = self.target.model
        content = KeptOfSample(
            tokens=token_texts(self.target.tokenizer, sample.prompt_ids.tolist()),
            layers=model.config.get_text_config().num_hidden_layers,
            heads=cached_kv_heads(model),
            counts=counts,
        )
        write_json(path_of(self.out, first_row), asdict(content))


def path_of(folder: Path, row: ResultRow) -> Path:
    """The file of a row's sample, whose digest the row has; it need not exist."""
    assert row.sample_digest is not None
    return folder / FOLDER / f"{row.sample_digest.removeprefix('sha256:')[:16]}.json"


def name_of_counts(row: ResultRow) -> str:
    """The name of a row's counts in its sample's file."""
    return row.inputs_digest or f"{row.method} {row.budget}"


def encode_counts(kept: NDArray[np.bool_]) -> str:
    """How many heads kept each token: [layers, kv_heads, N] -> base64 of zlib's uint8 [layers, N], row by row."""
    return base64.b64encode(zlib.compress(kept.sum(axis=1, dtype=np.uint8).tobytes(), 9)).decode("ascii")


def first_of_each(samples: Iterable[Sample], count: int) -> list[Key]:
    """`Sample.key` of the first `count` samples of each task and length; no later turns, as their prompts follow."""
    keys: dict[tuple[str, int], list[Key]] = defaultdict(list)
    for sample in samples:
        if not sample.earlier:
            keys[sample.task, sample.length].append(sample.key)
    first: list[Key] = []
    for keys_of_task in keys.values():
        first += keys_of_task[:count]
    return first
