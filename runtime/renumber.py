"""Kept keys at consecutive positions: after an eviction the text goes on as if what was evicted had never been read.

RoPE makes attention depend on the distance of query and key alone, so that heads that keep different numbers of entries
are numbered back from one common end, after which the next token comes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.models.decoder import CHUNKED, full_attention_layers, layer_kinds
from keepsight.runtime.layer import Counts, KeptLayer
from keepsight.runtime.rotary import Rotary
from keepsight.runtime.state import State

_WINDOWS = ("sliding_attention", "hybrid_sliding", CHUNKED)

Renumber = Callable[[Tensor, Tensor], Tensor]
"""Keys [n, d] that stay, and their indices [n] among the B x K x C of their layer -> the keys at other positions."""


def require_renumberable(model: PreTrainedModel) -> list[Rotary]:
    """The RoPE of each layer whose entries are evicted.

    Raises:
        UserError: positions in the model's keys cannot be changed, or a window keeps entries at theirs.
    """
    kind = model.config.model_type
    layers = full_attention_layers(model.config)
    if not layers:
        return []  # nothing is evicted
    if set(layer_kinds(model.config)) & set(_WINDOWS):
        raise _refused(f"layers of {kind} with a window keep their keys at the old ones")
    try:
        rotaries = [Rotary(model, index) for index in layers]
    except UserError as error:
        raise _refused(str(error).partition(";")[0]) from None
    if not any(rotary.rotates for rotary in rotaries):
        raise _refused(f"{kind} has no RoPE")
    return rotaries


def _refused(reason: str) -> UserError:
    return UserError(
        f"rerotate: keys cannot get other positions: {reason}; set rerotate to false", field="model", code="model"
    )


@dataclass(frozen=True)
class Renumbering:
    """The positions of a state's entries before and after an eviction.

    Attributes:
        rotaries: RoPE of each layer with full attention.
        before: [B] int64, the next token's position before.
        after: [B] int64, its position afterwards: the number of entries of the row's longest head.
    """

    rotaries: list[Rotary]
    before: Tensor
    after: Tensor

    @classmethod
    def of(cls, model: PreTrainedModel, state: State, sizes: Counts, counts: Counts) -> "Renumbering":
        """That of a state whose heads have `sizes` [L, B, K] entries, of which they keep `counts` [L, B, K].

        Raises:
            UserError: the model's keys cannot be moved, the prompt has images, or entries were evicted before by a
                method that left the others at their positions.
        """
        rotaries = require_renumberable(model)
        if state.images:
            raise UserError(
                "rerotate: entries of images are not numbered one after the other; set it to false",
                field="rerotate",
                code="conflict",
            )
        before = state.lengths + state.rope_offset
        if before.tolist() != sizes.max(axis=(0, 2)).tolist():
            raise UserError(
                "rerotate: entries were evicted from this state by a method that left the others at their positions; "
                "apply it to the whole prompt",
                field="rerotate",
                code="state",
            )
        after = torch.from_numpy(counts.max(axis=(0, 2)).astype(np.int64)).to(before.device)
        return cls(rotaries, before, after)

    def of_layer(self, index: int, mask: Tensor) -> Renumber:
        """Moves the keys that a layer, the `index`-th with full attention, keeps: `mask` [B, K, C] bool."""
        backwards = torch.arange(mask.shape[2], 0, -1, device=mask.device)
        old_positions = (self.before.to(mask.device)[:, None, None] - backwards).expand(mask.shape)
        kept_backwards = mask.flip(-1).long().cumsum(dim=-1).flip(-1)
        new_positions = self.after.to(mask.device)[:, None, None] - kept_backwards

        def renumber(keys: Tensor, rows: Tensor) -> Tensor:
            heads = keys.float()[None, None]
            before = old_positions.flatten()[rows][None]
            after = new_positions.flatten()[rows][None]
            return self.rotaries[index].moved(heads, before, after)[0, 0].to(keys.dtype)

        return renumber

    def with_queries(self, index: int, layer: KeptLayer) -> KeptLayer:
        """The layer, just evicted from, with the recorded queries at the last positions, as its keys are."""
        recorded = layer.recorded
        layer.recent = None  # tokens that are taken back would leave a gap before the next one
        if recorded is None or recorded.queries is None:
            return layer
        queries = recorded.queries
        backwards = torch.arange(queries.shape[2], 0, -1, device=queries.device)
        before = self.before.to(queries.device)[:, None] - backwards
        after = self.after.to(queries.device)[:, None] - backwards
        moved = self.rotaries[index].moved(queries.float(), before, after).to(queries.dtype)
        layer.recorded = replace(recorded, queries=moved)
        return layer
