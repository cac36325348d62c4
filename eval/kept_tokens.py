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

from keepsight.eval.results import Key, Row, key_of
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

    `counts` say by `count_key` of a row how many heads kept each token; see `encode_counts`.
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
        self.out, self.target = out, target
        self.samples = {sample.key: sample for sample in samples}
        self.earlier = [out, *map(Path, earlier)]
        self._counts: dict[Key, dict[tuple[str, object], str]] = defaultdict(dict)

    def note(self, samples: Sequence[RenderedSample], variant: Variant, kept: Tensor) -> None:
        """Record which entries [L, K, N] bool of a prompt a variant keeps."""
        for sample in samples:
            if sample.key in self.samples:
                self._counts[sample.key][variant.name, variant.budget] = encode_counts(kept.cpu().numpy())

    def write(self, rows: Sequence[Row]) -> None:
        """Write the file of a sample from all of its rows."""
        key = key_of(rows[0])
        sample = self.samples.get(key)
        if sample is None:
            return
        counts: dict[str, str] = {}
        for folder in self.earlier:
            path = path_of(folder, rows[0])
            counts |= read_json(path, KeptOfSample).counts if path.exists() else {}
        made = self._counts.pop(key, {})
        for row in rows:
            if (row["method"], row["budget"]) in made:
                counts[count_key(row)] = made[row["method"], row["budget"]]
        model = self.target.model
        layers, kv_heads = model.config.get_text_config().num_hidden_layers, cached_kv_heads(model)
        tokens = token_texts(self.target.tokenizer, sample.prompt_ids.tolist())
        content = KeptOfSample(tokens, layers, kv_heads, counts)
        write_json(path_of(self.out, rows[0]), asdict(content))


def path_of(folder: Path, row: Row) -> Path:
    """The file of a row's sample; it need not exist."""
    return folder / FOLDER / f"{row['sample_digest'].removeprefix('sha256:')[:16]}.json"


def count_key(row: Row) -> str:
    """The name of a row's counts in its sample's file."""
    return row.get("inputs_digest") or f"{row['method']} {row['budget']}"


def encode_counts(kept: NDArray[np.bool_]) -> str:
    """How many heads kept each token: [layers, kv_heads, N] -> base64 of zlib's uint8 [layers, N], row by row."""
    return base64.b64encode(zlib.compress(kept.sum(axis=1, dtype=np.uint8).tobytes(), 9)).decode("ascii")


def first_of_each(samples: Iterable[Sample], count: int) -> list[Key]:
    """`Sample.key` of the first `count` samples of each task and length; no later turns, as their prompts follow."""
    places: dict[tuple[str, int], list[Key]] = defaultdict(list)
    for sample in samples:
        if sample.earlier:
            continue
        places[sample.task, sample.length].append(sample.key)
    return [key for keys in places.values() for key in keys[:count]]
