"""LAQ and LAQ++ (arXiv 2505.20334): the base model drafts the answer from a small cache; the draft's queries score."""

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
                "draft is written from; raise it, or lower the observer's first_window",
                field="budget",
                code="range",
            )

    @override
    def __call__(self, model: PreTrainedModel, state: State, reduce: Reduce) -> list[Tensor]:
        queries, is_real = self._draft(model, state)
        window = 0
        if self.window and state.layers:
            window = recorded_queries(state.layers[0], self.window).queries.shape[2]
        if self.mask == "published":
            queries, is_real = self._with_window(state, queries, is_real)

        scores = []
        for layer, layer_queries in zip(state.layers, queries, strict=True):
            if self.mask == "published":
                attention = _causal_attention(layer_queries, layer, is_real, reduce.queries)
            else:
                attention = _draft_attention(layer_queries, layer, is_real, reduce.queries)
                if window:
                    window_attention = PromptWindow(window).score(layer, reduce.queries)
                    attention = combine(window_attention, attention, window, is_real, reduce.queries)
            kv_heads = layer.entries().keys.shape[1]
            scores.append(reduce_group(attention, kv_heads, reduce.heads))
        return scores

    def _with_window(self, state: State, queries: list[Tensor], is_real: Tensor) -> tuple[list[Tensor], Tensor]:
        """The window's queries and then a draft's [B, H, T, d], in each layer, and which of them are real, [B, q].

        Padding comes first in every row, so that each ends with a real query.
        """
        if self.window and state.layers:
            windows = [recorded_queries(layer, self.window) for layer in state.layers]
            window_mask = windows[0].query_mask
            if window_mask is None:
                window_mask = is_real.new_ones(len(is_real), windows[0].queries.shape[2])
            is_real = torch.cat([window_mask, is_real], dim=1)
            pairs = zip(windows, queries, strict=True)
            queries = [torch.cat([window.queries, drafted], dim=2) for window, drafted in pairs]
        order = is_real.long().argsort(dim=1, stable=True)
        order_on = on_each(order[:, None, :, None])
        ordered = []
        for layer_queries in queries:
            layer_order = order_on(layer_queries.device).expand_as(layer_queries)
            ordered.append(layer_queries.gather(2, layer_order))
        return ordered, is_real.gather(1, order)

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
                "QueryCache(budget=64), or observe with a method, whose budget it takes",
                field="budget",
                code="missing",
            )
        small = SnapKV(self.budget, window=self.first_window, pool=self.first_pool).compress_state(model, state)
        small = small.unrecorded(Needs(window=self.lookahead))  # from here on the draft's queries alone
        end = end_ids(model)
        draft = decode(model, small, stop_after(self.lookahead, end), pad_token=0)
        # The last token of the draft has not been read, and it observes too.
        after, _ = read(model, draft.state, draft.ids[:, -1:])
        queries = [recorded_queries(layer, self.lookahead).queries for layer in after.layers]
        is_real = until_end(draft.ids, end)
        if is_real is None:
            is_real = torch.ones_like(draft.ids, dtype=torch.bool)
        return queries, is_real


def _causal_attention(queries: Tensor, layer: KeptLayer, is_real: Tensor, reduction: str) -> Tensor:
    """Attention [B, H, C] of queries [B, H, q, d], as if they were those of the last q entries."""
    entries = layer.attended()
    return observed_attention(
        queries,
        entries.keys,
        layer.softmax,
        entries.keys.shape[2],
        key_mask=entries.real,
        query_mask=is_real,
        reduction=reduction,
    )


def _draft_attention(queries: Tensor, layer: KeptLayer, is_real: Tensor, reduction: str) -> Tensor:
    """Attention [B, H, C] of queries [B, H, T, d] that see every entry and not each other."""
    heads, count = queries.shape[1:3]
    # Each query becomes a head of its own, so that there is no causal mask between them.
    query_heads = queries.flatten(1, 2)[:, :, None]
    softmax = layer.softmax
    if softmax.sinks is not None:
        softmax = softmax._replace(sinks=softmax.sinks.repeat_interleave(count))
    entries = layer.attended()
    weights = observed_attention(query_heads, entries.keys, softmax, entries.keys.shape[2], key_mask=entries.real)
    is_real = is_real.to(weights.device)
    weights = weights.unflatten(1, (heads, count)) * is_real[:, None, :, None]
    if reduction == "max":
        return weights.amax(dim=2)
    return weights.sum(dim=2) / is_real.sum(dim=1)[:, None, None]


@registry.method("laq", colour="#CC79A7", marker="^")
@dataclass(frozen=True)
class LAQ(Evict):
    """The base model's draft of 8 tokens observes (Lookahead Q-Cache, arXiv 2505.20334); no window is kept.

    An observer without a budget takes the method's, so that the draft depends on the budget, as published. With a
    budget of its own, one observation serves all budgets.
    """

    section = "answer"
    cost = "a draft of 8 tokens by the model itself"
    observer: Observer = QueryCache()


@registry.method("laq++")
@dataclass(frozen=True)
class LAQPlus(LAQ):
    """LAQ++ (arXiv 2505.20334): the last 8 prompt tokens observe beside the draft, and are kept."""

    observer: Observer = QueryCache(window=8)
    window: int = 8
