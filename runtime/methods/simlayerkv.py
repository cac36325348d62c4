"""SimLayerKV: layers whose last token looks at the first and the most recent entries alone keep no others."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from keepsight.errors import Positive, Share, as_options
from keepsight.runtime import registry
from keepsight.runtime.allocate import Allocation, HeadSizes, shortened
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import NO_POOL, Pool, Reduce, select_top
from keepsight.runtime.layer import Counts
from keepsight.runtime.observe import Observer, PromptWindow
from keepsight.runtime.state import State


@as_options
@dataclass(frozen=True)
class LazyLayers(Allocation):
    """Lazy layers keep few entries, the others all.

    The layers that attend least to the entries in between become lazy first.

    A layer's laziness is 1 minus the attention to all entries but the protected and the `recent` ones. Lazy layers keep
    these, at most half of the budget while there are others, and share what the others leave of it.

    Attributes:
        recent: Number of most recent entries of a lazy layer.
        threshold: Laziness above which a layer is lazy, as published; the budget is then the most that stays, and
            further layers become lazy where it requires that. None for as many as the budget requires.
    """

    across_layers = True
    recent: Positive = 1024
    threshold: Share | None = None

    @property
    @override
    def meets_budget_exactly(self) -> bool:
        return self.threshold is None

    @override
    def __call__(self, sizes: HeadSizes, budgets: list[int], importance: list[Tensor]) -> Counts:
        rows = []
        for row, budget in enumerate(budgets):
            real = sizes.real[:, row]
            protected = sizes.protected[:, row]
            row_importance = [layer[row] for layer in importance]
            short = np.minimum(real, protected + self.recent)
            if self.threshold is not None:
                is_lazy = self._laziness(row_importance, self.recent) > self.threshold
                counts = np.where(is_lazy[:, None], short, real)
                if counts.sum() <= real.size * budget:
                    rows.append(counts)
                    continue
            short = short.clip(max=np.maximum(protected + 1, budget // 2))
            recent = int((short - protected).max())
            order = np.argsort(-self._laziness(row_importance, recent), kind="stable")
            rows.append(shortened(real, short, order, budget))
        return np.stack(rows, axis=1)

    def _laziness(self, importance: list[Tensor], recent: int) -> np.ndarray:
        """[L] float32: how lazy each layer of a row is, from its importance [K, C]; the CPU waits for it."""
        shares = []
        for layer_importance in importance:
            between = layer_importance[:, : max(layer_importance.shape[1] - recent, 0)]
            attention = between.masked_fill(~between.isfinite(), 0.0).sum(dim=-1)
            shares.append(1 - attention.mean().cpu())
        return torch.stack(shares).numpy()


@registry.method("simlayerkv", label="SimLayerKV")
@dataclass(frozen=True)
class SimLayerKV(Evict):
    """Layers whose last token looks at little else keep 4 sinks and recent entries, the others all (arXiv 2410.13846).

    Section 3 decides by a threshold, which depends on the model (`allocate={threshold: 0.9}` for Llama 3, 0.8 for
    Mistral, 0.85 for Qwen, as kvpress has them): lazy layers then keep the last 1,024 entries, kvpress as many less the
    last token. Without it as many layers are lazy as the budget requires, the laziest first. The last prompt token
    decides, as in kvpress; the paper averages over the last ones, `observer=PromptWindow(32)`.
    """

    observer: Observer = PromptWindow(1)
    reduce: Reduce = Reduce(heads="mean of layer")
    pool: Pool = NO_POOL
    allocate: Allocation = LazyLayers()
    sinks: int = 4
    evicts_after_prefill = True

    @override
    def select(self, state: State, importance: list[Tensor]) -> list[Tensor]:
        by_age = []
        for layer_importance in importance:
            positions = torch.arange(layer_importance.shape[-1], dtype=torch.float32, device=layer_importance.device)
            by_age.append(torch.where(layer_importance.isfinite(), positions, layer_importance))
        return select_top(by_age, self.counts(state, importance))
