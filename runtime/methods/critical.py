"""CriticalKV (arXiv 2502.03805): which entries an eviction must keep so that a layer's output changes least."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.models.decoder import output_weight
from keepsight.runtime import registry
from keepsight.runtime.allocate import Adaptive, Allocation
from keepsight.runtime.importance import reduce_group, select_top
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.methods.window import SnapKV
from keepsight.runtime.state import State

_LEAST = 1e-4  # so that entries without attention are ranked as well


def output_norms(layer: KeptLayer, order: int, places: Tensor | None = None) -> Tensor:
    """[B, H, C] float32: the norm of what each entry's value adds to the layer's output, v W_O, by query head.

    Args:
        layer: The layer; read by a model whose output projection is a plain matrix.
        order: 1 or 2, of the norm.
        places: [B, n] int64, which entries; [B, H, n] is returned then.
    """
    values, origin = layer.attended().values, layer.origin
    assert origin is not None
    if places is not None:
        values = values.gather(2, places[:, None, :, None].expand(-1, values.shape[1], -1, values.shape[3]))
    weight = output_weight(*origin).to(values.dtype)
    by_head = weight.unflatten(1, (-1, values.shape[-1])).unbind(dim=1)  # [hidden, d] each
    group = len(by_head) // values.shape[1]
    of_heads = [values[:, head // group] @ each.t().to(values.device) for head, each in enumerate(by_head)]
    return torch.stack([torch.linalg.vector_norm(each.float(), order, dim=-1) for each in of_heads], dim=1)


@registry.method("criticalkv")
@dataclass(frozen=True)
class CriticalKV(SnapKV):
    """SnapKV, of which half is chosen by importance times the L1 norm of v W_O (arXiv 2502.03805, algorithm 1).

    The first part of a head's budget, window included, goes to the most important entries, the second to the others
    that add most to the layer's output. As in kvpress, the norm is the mean over a KV head's query heads,
    and 0.0001 is added to the importance. Any observer of attention can take the place of SnapKV's.

    Attributes:
        first: Share of the budget that importance alone decides.
    """

    first: float = 0.5
    waits = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.first) not in (int, float) or not 0 <= self.first <= 1:
            raise UserError(f"{type(self).__name__}: first {self.first!r} must be between 0 and 1")
        if self.observer.signed or self.during_prefill:
            what = "an observer of attention" if self.observer.signed else "the whole prompt: leave out during_prefill"
            raise UserError(f"{type(self).__name__}: needs {what}")

    @override
    def select(self, state: State, importance: list[Tensor]) -> list[Tensor]:
        budgets = self.budgets(state)
        self._check_room(budgets)
        counts = self.allocate(self._sizes(state), budgets, importance)
        chosen = select_top(importance, (counts * self.first).astype(counts.dtype))
        layers = zip(state.layers, importance, chosen, strict=True)
        return select_top([_by_output(*each) for each in layers], counts)


def _by_output(layer: KeptLayer, importance: Tensor, chosen: Tensor) -> Tensor:
    """Importance [B, K, C] times the norms of what entries add; +inf for entries chosen already."""
    weighted = (importance + _LEAST) * reduce_group(output_norms(layer, 1), importance.shape[1])
    weighted = torch.where(importance.isinf(), importance, weighted)  # protected entries and padding
    return weighted.masked_fill(chosen, torch.inf)


@registry.method("critical_adakv")
@dataclass(frozen=True)
class CriticalAdaKV(CriticalKV):
    """CriticalKV on AdaKV: importance alone decides how many entries each head of a layer keeps.

    kvpress guarantees each head 20 % of the average instead of AdaKV's blend: `allocate={name: adakv, blend: false}`.
    """

    allocate: Allocation = Adaptive()
