"""Methods that score by the geometry of keys and values: KeyDiff and CurDKV alone, CriticalKV beside attention.

CriticalKV (arXiv 2502.03805) asks which entries an eviction must keep so that a layer's output changes least.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from keepsight.errors import Share, UserError, Whole
from keepsight.models.decoder import output_weight
from keepsight.runtime import registry
from keepsight.runtime.allocate import Adaptive, Allocation
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import NO_POOL, Pool, reduce_group, select_top
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.methods.window import SnapKV
from keepsight.runtime.observe import LayerObserver, Observer
from keepsight.runtime.state import State

_LEAST = 1e-4
"""Added to CriticalKV's importance, so that entries without attention are ranked as well."""


@registry.observer("distinct_keys")
@dataclass(frozen=True)
class DistinctKeys(LayerObserver):
    """Minus the cosine of each key, after RoPE, with the mean of the normalised keys (KeyDiff, arXiv 2504.15364)."""

    signed = True

    @override
    def score(self, layer: KeptLayer, reduction: str) -> Tensor:
        keys, _, real = layer.contents()
        directions = functional.normalize(keys.float(), dim=-1)
        counted = directions if real is None else directions * real[..., None]
        anchor = functional.normalize(counted.sum(dim=2, keepdim=True), dim=-1)
        return -(directions * anchor).sum(dim=-1)


@registry.method("keydiff")
@dataclass(frozen=True)
class KeyDiff(Evict):
    """Keeps the keys that are least like the others, without sinks or window (KeyDiff, arXiv 2504.15364, section 4).

    The paper evicts after each block of a prompt that is read under the budget. Here the whole prompt is read with full
    attention first, as in kvpress, and `every` evicts while decoding.
    """

    observer: Observer = DistinctKeys()
    pool: Pool = NO_POOL


@registry.observer("leverage")
@dataclass(frozen=True)
class Leverage(LayerObserver):
    """Squared norm of each key times that of its value, each as a share of its block (CurDKV, arXiv 2509.15038).

    Squared norms stand in for leverage scores: on average they are the paper's, after a random projection to 20
    dimensions.

    Attributes:
        block: Number of consecutive entries whose norms are compared; 0 for all.
    """

    block: Whole = 16
    signed = False

    @override
    def score(self, layer: KeptLayer, reduction: str) -> Tensor:
        entries = layer.contents()
        real = entries.marks
        key_norms = entries.keys.float().square().sum(dim=-1) * real
        value_norms = entries.values.float().square().sum(dim=-1) * real
        return self._share(key_norms, real) * self._share(value_norms, real)

    def _share(self, squares: Tensor, real: Tensor) -> Tensor:
        """Squared norms [B, K, C], each divided by the sum of its block; blocks begin at the first real entry."""
        if self.block:
            blocks = (real.long().cumsum(dim=-1) - 1).clamp(min=0) // self.block
            sums = torch.zeros_like(squares).scatter_add_(-1, blocks, squares).gather(-1, blocks)
        else:
            sums = squares.sum(dim=-1, keepdim=True)
        return squares / sums.clamp(min=torch.finfo(torch.float32).tiny)


@registry.method("curdkv")
@dataclass(frozen=True)
class CurDKV(Evict):
    """Keeps 4 sinks and the entries of most leverage in keys and values (CurDKV, arXiv 2509.15038, algorithm 1).

    As kvpress has it: without the paper's random projection, and relative to the 16 entries of a block.
    """

    observer: Observer = Leverage()
    pool: Pool = NO_POOL
    sinks: int = 4


def output_norms(layer: KeptLayer, order: int, positions: Tensor | None = None) -> Tensor:
    """[B, H, C] float32: the norm of each entry's term of the layer's output, v W_O, by query head.

    The layer was read by a model whose output projection is a plain matrix; `order` of the norm is 1 or 2. For the
    entries at `positions` [B, n] int64 alone it is [B, H, n].
    """
    values = layer.attended().values
    if positions is not None:
        values = values.gather(2, positions[:, None, :, None].expand(-1, values.shape[1], -1, values.shape[3]))
    assert layer.origin is not None
    weight = output_weight(*layer.origin).to(values.dtype)
    head_weights = weight.unflatten(1, (-1, values.shape[-1])).unbind(dim=1)  # [hidden, d] each
    group = len(head_weights) // values.shape[1]

    norms = []
    for head, head_weight in enumerate(head_weights):
        outputs = values[:, head // group] @ head_weight.t().to(values.device)
        norms.append(torch.linalg.vector_norm(outputs.float(), order, dim=-1))
    return torch.stack(norms, dim=1)


@registry.method("criticalkv")
@dataclass(frozen=True)
class CriticalKV(SnapKV):
    """SnapKV that chooses half of its entries by importance times the L1 norm of v W_O (arXiv 2502.03805, algorithm 1).

    The first part of a head's budget, window included, goes to the most important entries, the second to the others
    that add most to the layer's output. As in kvpress, the norm is the mean over a KV head's query heads,
    and 0.0001 is added to the importance. Any observer of attention can take the place of SnapKV's.

    Attributes:
        first: Share of the budget that importance alone decides.
    """

    first: Share = 0.5
    evicts_after_prefill = True
    needs_model = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.observer.signed:
            raise UserError(f"{type(self).__name__}: needs an observer of attention", field="observer", code="conflict")

    @override
    def select(self, state: State, importance: list[Tensor]) -> list[Tensor]:
        counts = self.counts(state, importance)
        most_important = select_top(importance, (counts * self.first).astype(counts.dtype))
        weighted = []
        for layer, layer_importance, selected in zip(state.layers, importance, most_important, strict=True):
            norms = reduce_group(output_norms(layer, 1), layer_importance.shape[1])
            layer_weighted = (layer_importance + _LEAST) * norms
            is_fixed = layer_importance.isinf()  # protected entries and padding
            layer_weighted = torch.where(is_fixed, layer_importance, layer_weighted)
            weighted.append(layer_weighted.masked_fill(selected, torch.inf))
        return select_top(weighted, counts)


@registry.method("critical_adakv")
@dataclass(frozen=True)
class CriticalAdaKV(CriticalKV):
    """CriticalKV on AdaKV: importance alone decides how many entries each head of a layer keeps.

    kvpress guarantees each head 20 % of the average instead of AdaKV's blend: `allocate={name: adakv, blend: false}`.
    """

    allocate: Allocation = Adaptive()
