"""What the target says about a text, for a draft head to learn from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.models.decoder import decoder_of, logits_of, on_each
from keepsight.runtime.features import RecordFeatures


@dataclass(frozen=True)
class TargetReading:
    """The target's states while it reads a text of n tokens.

    Attributes:
        features: [n, 3 * hidden], the outputs of three layers side by side.
        hidden: [n, hidden], what its lm_head reads.
    """

    features: Tensor
    hidden: Tensor


class TargetReader(Protocol):
    """Reads texts with the target."""

    def __call__(self, ids: Tensor) -> TargetReading:
        """[n] int64 -> its reading."""
        ...


class RunTarget:
    """Reads by running the target, without gradients.

    Args:
        target: In evaluation mode.
        layers: Indices of the layers whose outputs are the features.
    """

    def __init__(self, target: PreTrainedModel, layers: Sequence[int]) -> None:
        self._target, self._layers = target, tuple(layers)

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> TargetReading:
        """[n] int64 -> its reading."""
        with RecordFeatures(self._target, self._layers) as features:
            output = decoder_of(self._target)(input_ids=ids[None].to(self._target.device), use_cache=False)
        read = torch.cat(features.outputs(), dim=-1)[0]
        return TargetReading(read, output.last_hidden_state[0].to(read.device))


@dataclass(frozen=True)
class Teacher:
    """The target's next-token distributions after n tokens, confined to a draft vocabulary of V tokens.

    Attributes:
        probabilities: [n, V], each row sums to 1.
        known: [n] bool, whether the target's top-1 token lies in the draft vocabulary.
    """

    probabilities: Tensor
    known: Tensor


_ROWS = 256


@torch.no_grad()
def teacher_of(hidden: Tensor, target: PreTrainedModel, vocabulary: Tensor, dtype: torch.dtype) -> Teacher:
    """The target's logits, a few rows at a time.

    Args:
        hidden: [n, hidden], what the lm_head reads.
        target: The target.
        vocabulary: [V] int64, the draft vocabulary in the target's ids.
        dtype: Dtype of the probabilities.
    """
    probabilities = hidden.new_empty(len(hidden), len(vocabulary), dtype=dtype)
    known, vocabulary_on = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device), on_each(vocabulary)
    for start in range(0, len(hidden), _ROWS):
        chunk = slice(start, start + _ROWS)
        logits = logits_of(target, hidden[chunk])
        drafted = logits.index_select(1, vocabulary_on(logits.device))
        probabilities[chunk] = drafted.softmax(-1, dtype=torch.float32)
        known[chunk] = drafted.amax(-1) == logits.amax(-1)  # an argmax takes a CPU ten times as long
    return Teacher(probabilities, known)
