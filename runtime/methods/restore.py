"""RestoreKV: KVzip, and within its budget the entries of a few learned tokens, which read the whole cache before."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.models.restore import RestoreWeights
from keepsight.runtime import registry
from keepsight.runtime.methods.reconstruction import KVzip, Replayed
from keepsight.runtime.observe import read_with
from keepsight.runtime.state import State


class _RestoringLayer(Replayed):
    """A layer that keeps the entries [B, K, n, d] which the tokens that observe it would add."""

    made: tuple[Tensor, Tensor]

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        self.made = key_states, value_states
        return super().update(key_states, value_states, *args, **kwargs)


@registry.method("restorekv", label="RestoreKV", colour="#66A61E", marker="P")
@dataclass(frozen=True)
class RestoreKV(KVzip):
    """KVzip's selection with learned entries in its budget (RestoreKV, arXiv 2608.01247).

    n learned tokens (8 as published) are read after the prompt, through a LoRA that nothing else is read with, while
    the cache is whole. Their entries stay in every layer and head, with KVzip's choice of budget - n; what follows
    stands n positions later. A prompt that fits the budget stays as it is.

    Attributes:
        weights: What was trained; by name, what `scorer` names: a file, a folder or a Hub id.
    """

    weights: RestoreWeights | None = None

    @override
    def __post_init__(self) -> None:
        if not isinstance(self.weights, RestoreWeights):
            raise UserError("RestoreKV: weights must be RestoreWeights.from_pretrained(FILE_FOLDER_OR_HUB_ID)")
        if self.every:
            raise UserError("RestoreKV: learned entries stand for a prompt that is evicted from once; leave out every")
        if isinstance(self.budget, int) and self.budget <= (least := self.added + self.sinks + self.window):
            raise UserError(
                f"RestoreKV: budget {self.budget} must be above {least}, the {self.added} learned entries and the "
                "protected ones (sinks + window)"
            )
        super().__post_init__()

    @property
    def added(self) -> int:
        """Number of learned entries."""
        return 0 if self.weights is None else len(self.weights.tokens)

    @override
    def budget_for(self, length: int) -> int:
        return super().budget_for(length) - self.added

    @override
    @torch.no_grad()
    def keep(self, model: PreTrainedModel, state: State, selected: list[Tensor]) -> State:
        made, after = self._restored(model, state), super().keep(model, state, selected)
        for layer, (keys, values) in zip(after.layers, made, strict=True):
            layer.update(keys, values)
            layer.seen -= self.added  # they are no tokens of the prompt
        before = torch.zeros_like(state.lengths) if state.rope_offset is None else state.rope_offset
        return replace(after, rope_offset=before + self.added)

    def _restored(self, model: PreTrainedModel, state: State) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [B, K, n, d] of the learned tokens in each layer."""
        assert self.weights is not None
        tokens, lora = self.weights.bound(model)
        layers = [_RestoringLayer(layer, state.tokens_mask) for layer in state.layers]
        embeddings = tokens.expand(len(state.lengths), -1, -1)
        with nullcontext() if lora is None else lora.attached():
            read_with(model, state.cache, layers, state.tokens_mask, embeddings, state.next_position)
        return [layer.made for layer in layers]
