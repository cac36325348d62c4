"""Teacher outputs for a draft head: from the running model, or from files that are written once."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from keepsight.errors import UserError, require_same
from keepsight.files import atomic_file, file_digest, one_writer, read_json, write_json
from keepsight.models.decoder import decoder_of, logits_of, on_each
from keepsight.models.distributed import launched
from keepsight.runtime.features import RecordFeatures


@dataclass(frozen=True)
class HiddenStates:
    """The base model's hidden states of a text of n tokens.

    Attributes:
        features: [n, 3 * hidden], the outputs of three layers side by side.
        hidden: [n, hidden], the input of its lm_head.
    """

    features: Tensor
    hidden: Tensor


Teacher = Callable[[Tensor], HiddenStates]
"""The token ids of a text, [n] int64 -> the base model's hidden states."""


class RunModel:
    """A teacher that runs the base model, without gradients.

    Args:
        model: In evaluation mode.
        layers: Indices of the layers whose outputs are the features.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        self._model, self._layers = model, tuple(layers)

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> HiddenStates:
        """See `Teacher`."""
        with RecordFeatures(self._model, self._layers) as features:
            output = decoder_of(self._model)(input_ids=ids[None].to(self._model.device), use_cache=False)
        joined = torch.cat(features.outputs(), dim=-1)[0]
        return HiddenStates(joined, output.last_hidden_state[0].to(joined.device))


@dataclass(frozen=True)
class NextTokens:
    """The base model's next-token distributions after n tokens, over a draft vocabulary of V tokens.

    Attributes:
        probabilities: [n, V], each row sums to 1.
        known: [n] bool, whether the base model's top-1 token lies in the draft vocabulary.
    """

    probabilities: Tensor
    known: Tensor


_ROWS = 256


@torch.no_grad()
def next_tokens(hidden: Tensor, model: PreTrainedModel, vocabulary: Tensor, dtype: torch.dtype) -> NextTokens:
    """The next-token distributions, computed a few rows at a time.

    Args:
        hidden: [n, hidden], the input of the lm_head.
        model: The base model.
        vocabulary: [V] int64, the draft vocabulary in the base model's ids.
        dtype: Dtype of the probabilities.
    """
    probabilities = hidden.new_empty(len(hidden), len(vocabulary), dtype=dtype)
    known, vocabulary_on = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device), on_each(vocabulary)
    for start in range(0, len(hidden), _ROWS):
        chunk = slice(start, start + _ROWS)
        logits = logits_of(model, hidden[chunk])
        drafted = logits.index_select(1, vocabulary_on(logits.device))
        probabilities[chunk] = drafted.softmax(-1, dtype=torch.float32)
        known[chunk] = drafted.amax(-1) == logits.amax(-1)  # an argmax takes a CPU ten times as long
    return NextTokens(probabilities, known)


_MANIFEST, _SHARD = "manifest.json", 32
"""The second: texts per file, about 150 MB for a small model and texts of 1K tokens."""


@dataclass(frozen=True)
class _Manifest:
    """The content of manifest.json.

    Attributes:
        made_of: The settings on which the hidden states depend, by name.
        digests: `sha256:...` of the complete files, by name.
    """

    made_of: dict[str, Any]
    digests: dict[str, str] = field(default_factory=dict)


class StoredStates:
    """A teacher that reads a folder that `write_states` has filled; texts are found by their token ids."""

    def __init__(self, folder: Path) -> None:
        self._shards: dict[str, Path] = {}
        made: _Manifest = read_json(folder / _MANIFEST, _Manifest)
        for name, digest in made.digests.items():
            path = folder / Path(name).name
            if file_digest(path) != digest:
                raise UserError(f"{path}: changed since it was written; delete it to have it computed again")
            with safe_open(path, framework="pt") as tensors:
                self._shards |= {key.partition(".")[0]: path for key in tensors.keys()}  # noqa: SIM118

    def __call__(self, ids: Tensor) -> HiddenStates:
        """[n] int64 -> the hidden states, on the device of `ids`.

        Raises:
            UserError: the folder lacks this text or a part of its hidden states.
        """
        key = _key(ids.tolist())
        if key not in self._shards:
            raise UserError(f"a sample of {len(ids)} tokens is not in features=; delete that folder to make it again")
        path, names = self._shards[key], (f"{key}.features", f"{key}.hidden")
        with safe_open(path, framework="pt", device=str(ids.device)) as tensors:
            found = [tensors.get_tensor(name) for name in names if name in tensors.keys()]  # noqa: SIM118
        if [len(each) for each in found] != [len(ids)] * 2:
            raise UserError(f"{path}: a sample of {len(ids)} tokens is incomplete; delete that file")
        return HiddenStates(*found)


def write_states(folder: Path, teacher: Teacher, texts: Sequence[list[int]], made_of: Mapping[str, Any]) -> None:
    """Write the hidden states of all texts that the folder lacks, so that a run that was killed resumes.

    Several processes of one launch divide the files among themselves.

    Args:
        folder: Folder for the files; created if absent.
        teacher: Runs the base model.
        texts: Token ids of each text.
        made_of: The settings on which the hidden states depend, by name: data, model, layers.

    Raises:
        UserError: the folder was written with other settings.
    """
    made = _Manifest(dict(made_of))
    if (folder / _MANIFEST).exists():
        made = read_json(folder / _MANIFEST, _Manifest)
        advice = "choose another features=, or delete the folder"
        require_same(f"{folder}: these features were made", made.made_of, made_of, advice)

    def write(start: int) -> dict[str, str]:
        path = folder / _name(start)
        with atomic_file(path) as unfinished:
            save_file(_tensors(teacher, texts[start : start + _SHARD]), unfinished)
        return {path.name: file_digest(path)}

    processes = launched()
    with one_writer(folder) if processes.is_main_process else nullcontext():
        starts = range(0, len(texts), _SHARD)
        lacking = [each for each in starts if _name(each) not in made.digests or not (folder / _name(each)).is_file()]
        processes.wait_for_everyone()
        for first in tqdm(range(0, len(lacking), processes.num_processes), desc="features", unit="round", disable=None):
            own = lacking[first : first + processes.num_processes][processes.process_index :][:1]
            for written in gather_object([write(start) for start in own]):
                made.digests.update(written)
            if processes.is_main_process:
                write_json(folder / _MANIFEST, asdict(made))
        processes.wait_for_everyone()


def _name(start: int) -> str:
    return f"readings-{start // _SHARD:05d}.safetensors"


def _tensors(teacher: Teacher, texts: Sequence[list[int]]) -> dict[str, Tensor]:
    tensors = {}
    for ids in texts:
        states = teacher(torch.tensor(ids))
        tensors |= {f"{_key(ids)}.{name}": each.cpu().contiguous() for name, each in vars(states).items()}
    return tensors


def _key(ids: list[int]) -> str:
    return hashlib.sha256(str(ids).encode()).hexdigest()[:32]
