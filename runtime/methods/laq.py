"""LAQ and LAQ++ (arXiv 2505.20334): the base model drafts the answer from a small cache; the draft's queries score."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import Budget, Positive, UserError, Whole
from keepsight.models.decoder import on_each
from keepsight.runtime import registry
from keepsight.runtime.drafting.observer import until_end
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import decode, end_ids, stop_after
from keepsight.runtime.importance import Pool, Reduce, combine, observed_attention, recorded_queries, reduce_group
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.methods.window import SnapKV
from keepsight.runtime.observe import Observer, PromptWindow
from keepsight.runtime.state import Needs, State, read


@registry.observer("query_cache")
@dataclass(frozen=True)
class QueryCache(Observer):
    """The queries of a draft that the base model writes from a SnapKV cache score the whole cache (LAQ).

    They are used as computed over the small cache: the model is not run over the whole cache, and the softmax is over
    its entries alone.

    Attributes:
        lookahead: Maximum length of the draft in tokens, its end token included.
        window: Number of last prompt tokens that observe beside the draft.
        budget: Budget of the SnapKV cache, entries or a ratio; None for the method's own.
        first_window: Observation window of the SnapKV cache.
        first_pool: Pooling of the SnapKV cache.
        mask: `corrected`: prompt queries see the entries before them, drafted ones every entry. `published`: as in the
            paper's code, all of them under one causal triangle over the last window + lookahead entries.
    """

    lookahead: Positive = 8
    window: Whole = 0
    budget: Budget | None = None
    first_window: Positive = 32
    first_pool: Pool = Pool()
    mask: Annotated[str, Literal["corrected", "published"]] = "corrected"
    signed = False

    def __post_init__(self) -> None:
        if type(self.budget) is int and self.budget <= self.first_window:
            raise UserError(
                f"LAQ: budget {self.budget} must be above the first_window {self.first_window} of the cache that the "
                "draft is written from; raise it, or lower the observer's first_window"
            )

    @override
    def __call__(self, model: PreTrainedModel, state: State, reduce: Reduce) -> list[Tensor]:
        by_layer = zip(self._by_layer(model, state, reduce.queries), state.entries(), strict=True)
        return [reduce_group(each, entries.keys.shape[1], reduce.heads) for each, entries in by_layer]

    def _by_layer(self, model: PreTrainedModel, state: State, reduction: str) -> Iterator[Tensor]:
        """Attention [B, H, C] of one layer after the other."""
        drafted, real = self._draft(model, state)
        layers, rows = state.layers, 0
        windows = [recorded_queries(layer, self.window) for layer in layers] if self.window else []
        if windows:
            rows = windows[0].queries.shape[2]
        if self.mask == "published":
            before = [each.queries for each in windows] or [each[:, :, :0] for each in drafted]
            both = [torch.cat(pair, dim=2) for pair in zip(before, drafted, strict=True)]
            mask = windows[0].query_mask if windows else None
            seen = real.new_ones(len(real), rows) if mask is None else mask
            yield from _under_triangle(layers, both, torch.cat([seen, real], dim=1), reduction)
            return
        for queries, layer in zip(drafted, layers, strict=True):
            of_draft = _from_beyond(queries, layer, real, reduction)
            of_window = PromptWindow(rows).score(layer, reduction) if rows else None
            yield of_draft if of_window is None else combine(of_window, of_draft, rows, real, reduction)

    @override
    def needs(self) -> Needs:
        return Needs(window=max(self.window, self.first_window))

    @override
    def positions(self) -> int:
        return self.lookahead

    def _draft(self, model: PreTrainedModel, state: State) -> tuple[list[Tensor], Tensor]:
        """The draft's queries [B, H, T, d] of each layer, and which of them are real, [B, T] bool."""
        if self.budget is None:
            raise UserError(
                "LAQ: the observer has no budget for the cache that the draft is written from; give it one, as in "
                "QueryCache(budget=64), or observe with a method, whose budget it takes"
            )
        small = SnapKV(self.budget, window=self.first_window, pool=self.first_pool).compress_state(model, state)
        small = small.unrecorded(Needs(window=self.lookahead))  # from here on the draft's queries alone
        end = end_ids(model)
        draft = decode(model, small, stop_after(self.lookahead, end), pad_token=0)
        after, _ = read(model, draft.state, draft.ids[:, -1:])
        real = None if end is None else until_end(draft.ids, end)
        queries = [recorded_queries(layer, self.lookahead).queries for layer in after.layers]
        return queries, torch.ones_like(draft.ids, dtype=torch.bool) if real is None else real


def _from_beyond(queries: Tensor, layer: KeptLayer, real: Tensor, reduction: str) -> Tensor:
    """Attention [B, H, C] of queries [B, H, T, d] that see every entry and not each other."""
    heads, rows = queries.shape[1:3]
    # Each query becomes a head of its own, so that there is no causal mask between them.
    apart = queries.flatten(1, 2)[:, :, None]
    softmax, seen = layer.softmax, layer.attended()
    sinks = None if softmax.sinks is None else softmax.sinks.repeat_interleave(rows)
    softmax = softmax._replace(sinks=sinks)
    weights = observed_attention(apart, seen.keys, softmax, seen.keys.shape[2], key_mask=seen.real)
    real = real.to(weights.device)
    weights = weights.unflatten(1, (heads, rows)) * real[:, None, :, None]
    if reduction == "max":
        return weights.amax(dim=2)
    return weights.sum(dim=2) / real.sum(dim=1)[:, None, None]


def _under_triangle(layers: list[KeptLayer], queries: list[Tensor], real: Tensor, reduction: str) -> Iterator[Tensor]:
    """Attention [B, H, C] of each layer, as if the queries [B, H, q, d] were those of the last q entries."""
    order = real.long().argsort(dim=1, stable=True)  # padding first, so that every row ends at its last entry
    place_on = on_each(order[:, None, :, None])
    for each, layer in zip(queries, layers, strict=True):
        seen = layer.attended()
        yield observed_attention(
            each.gather(2, place_on(each.device).expand_as(each)),
            seen.keys,
            layer.softmax,
            seen.keys.shape[2],
            key_mask=seen.real,
            query_mask=real.gather(1, order),
            reduction=reduction,
        )


@registry.method("laq", colour="#CC79A7", marker="^")
@dataclass(frozen=True)
class LAQ(Evict):
    """The base model's draft of 8 tokens observes (Lookahead Q-Cache, arXiv 2505.20334); no window is kept.

    An observer without a budget takes the method's, so that the draft depends on the budget, as published. With a
    budget of its own, one observation serves all budgets.
    """

    observer: Observer = QueryCache()


@registry.method("laq++")
@dataclass(frozen=True)
class LAQPlus(LAQ):
    """LAQ++ (arXiv 2505.20334): the last 8 prompt tokens observe beside the draft, and are kept."""

    observer: Observer = QueryCache(window=8)
    window: int = 8
