"""Eviction: an observer scores the prompt's entries, its scores are reduced and pooled, and each head keeps the top.

`prefill -> observe -> allocate + select -> decode`: a method is a small frozen dataclass that names its parts, holds no
state, and serves any number of prompts and models. Every eviction method of the papers is an `Evict` with other parts.

The budget, for every method: entries per layer and KV head on average, sinks and window included; all layers and heads
together keep exactly layers x KV heads x budget. A ratio (a float between 0 and 1) stands for `round(ratio * N)`, N
being the prompt's own length, whatever the batch. A prompt no longer than the budget is left untouched. Generated
tokens are not counted and never evicted, unless `every` is set: then prompt and generated tokens together never exceed
the budget.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import UserError, require_whole
from keepsight.runtime.allocate import Allocation, Uniform
from keepsight.runtime.budget import Budget
from keepsight.runtime.cache import LayerEntries, keep, places_of
from keepsight.runtime.decode import Reapply
from keepsight.runtime.importance import Pool, Reduce, pool, reduce_group, top_mask
from keepsight.runtime.method import CacheMethod, Method, Observe, Shared
from keepsight.runtime.observe import Observer
from keepsight.runtime.state import Needs, State, Trace


@dataclass(frozen=True)
class Evict(CacheMethod):
    """Keeps the `budget` most important entries of a prompt; see the module for what the budget counts.

    Attributes:
        budget: Entries per layer and KV head, or a ratio.
        observer: Scorer of the entries.
        reduce: Reduction over the observing queries, then over the query heads of a KV head.
        pool: Pooling over neighbouring entries, after the reduction.
        allocate: Divides the budget over layers and KV heads.
        sinks: Number of first entries that are always kept.
        window: Number of last entries that are always kept; they are not pooled with the others.
        every: Number of generated tokens after which the method is applied again, keeping `budget - every` entries, so
            that the cache never exceeds the budget; 0 to evict from the prompt alone.

    Raises:
        UserError: a value is out of range; one line names it.
    """

    budget: int | float
    observer: Observer
    reduce: Reduce = Reduce()
    pool: Pool = Pool()
    allocate: Allocation = Uniform()
    sinks: int = 0
    window: int = 0
    every: int = 0
    reads_images = True

    def __post_init__(self) -> None:
        name, budget = type(self).__name__, self.budget
        require_whole(name, sinks=self.sinks, window=self.window, every=self.every)
        Budget(budget).check(name)
        self.bound_observer.needs()  # binding refuses what the observer cannot take from the method
        if Budget(budget).is_ratio:
            if self.every:
                raise UserError(f"{name}: every {self.every} needs a budget in entries, not the ratio {budget}")
            return
        protected = self.sinks + self.window
        if budget - self.every <= protected and (protected or self.every):
            spared = f" and the {self.every} of every" if self.every else ""
            raise UserError(
                f"{name}: budget {budget} must be above the {protected} protected entries (sinks + window){spared}"
            )
        self.allocate.check(self.budget_for(0), protected)

    @property
    def bound_observer(self) -> Observer:
        """The observer, with what it leaves open taken from this method."""
        return self.observer.bound(self.budget, self.sinks, self.window)

    @property
    @override
    def adapter_digest(self) -> str | None:
        return self.observer.adapter_digest

    @override
    def budget_for(self, length: int) -> int:
        return Budget(self.budget).entries(length) - self.every

    @override
    def budgets(self, state: State) -> list[int]:
        if Budget(self.budget).is_ratio:
            return super().budgets(state)
        return [self.budget_for(0)] * len(state.lengths)

    @override
    def check(self, length: int, context: int) -> None:
        name, observer, budget = type(self).__name__, self.bound_observer, self.budget_for(length)
        if length <= budget:
            return
        self._check_room(budget)
        if (window := observer.needs().window) > length:
            raise UserError(f"{name}: a prompt of {length} tokens is shorter than the {window} that observe it")
        if (positions := observer.positions()) + length > context:
            raise UserError(
                f"{name}: {positions} observing tokens after a prompt of {length} do not fit the context of {context}; "
                "shorten the draft (lookahead) or the prompt"
            )

    def _check_room(self, budget: int) -> None:
        """A ratio becomes a number only where a prompt is known."""
        protected = self.sinks + self.window
        if protected and budget <= protected:
            raise UserError(
                f"{type(self).__name__}: budget {self.budget} leaves {budget} entries, which must be above the "
                f"{protected} protected ones (sinks + window)"
            )
        self.allocate.check(budget, protected)

    @override
    def needs(self) -> Needs:
        return self.bound_observer.needs()

    @override
    @torch.no_grad()
    def compress(self, model: PreTrainedModel, state: State) -> State:
        if self.fits(state):
            return replace(state.copy(), trace=self._held_queries(state.trace))
        return self.keep(state, self.importance(model, state))

    @override
    def compress_shared(self, model: PreTrainedModel, state: State, observe: Observe) -> Shared | None:
        if not self.shares_prefill(state.tokens.shape[1]):
            return None
        if self.fits(state):
            return self.compress(model, state), state.select_all()
        observed = observe(self.bound_observer, self.reduce.queries)
        selected = self.select(state, self.reduced(state, observed))
        return self.gather(state, selected), selected

    @override
    def reapply(self, model: PreTrainedModel) -> Reapply | None:
        return Reapply(self.every, lambda state: self.compress(model, state)) if self.every else None

    def fits(self, state: State) -> bool:
        """Whether the state is within the budget, or has no layer to evict from."""
        entries = state.entries()
        if all(each.real is None for each in entries):
            return sum(each.keys.shape[2] for each in entries) <= len(entries) * min(self.budgets(state))
        held = state.held().double().mean(dim=(0, 2)).tolist()
        return all(count <= budget for count, budget in zip(held, self.budgets(state), strict=True))

    @torch.no_grad()
    def importance(self, model: PreTrainedModel, state: State) -> list[Tensor]:
        """For each layer, the importance [B, K, C] float32: +inf where protected, -inf for padding.

        One call serves every budget and allocation.
        """
        return self.reduced(state, self.observe(model, state))

    @torch.no_grad()
    def observe(self, model: PreTrainedModel, state: State) -> list[Tensor]:
        """The observer's scores (see `Observer`), the same for all methods with its observer and reduction."""
        return self.bound_observer(model, state, self.reduce.queries)

    def reduced(self, state: State, observed: list[Tensor]) -> list[Tensor]:
        """Scores reduced over heads and pooled, with protected entries and padding marked.

        Raises:
            UserError: the observer did not score every entry of every layer.
        """
        held = state.entries()
        _require_scores(type(self.observer).__name__, observed, held)
        return [
            self._protect(reduce_group(layer, each.keys.shape[1], self.reduce.heads), each.real)
            for layer, each in zip(observed, held, strict=True)
        ]

    def keep(self, state: State, importance: list[Tensor]) -> State:
        """Select within the budget and gather the selected entries."""
        return self.gather(state, self.select(state, importance))

    def select(self, state: State, importance: list[Tensor]) -> list[Tensor]:
        """For each layer, which entries stay: [B, K, C] bool. Ties go to the lowest index."""
        budgets = self.budgets(state)
        for budget in {*budgets}:
            self._check_room(budget)
        if known := self._counts(state):
            return [top_mask(*pair) for pair in zip(importance, known, strict=True)]
        rows = [importance] if len({*budgets}) == 1 else zip(*(layer.split(1) for layer in importance), strict=True)
        divided = [self.allocate([*row], budget) for row, budget in zip(rows, budgets, strict=False)]
        counts = [torch.cat(layer) for layer in zip(*divided, strict=True)]
        return [top_mask(*pair) for pair in zip(importance, counts, strict=True)]

    def gather(self, state: State, selected: list[Tensor]) -> State:
        """The state of the selected entries."""
        trace, counts = self._held_queries(state.trace), self._counts(state)
        if trace.received:
            trace = replace(trace, received=_gather_received(trace.received, selected, counts))
        kept = keep(state.cache, selected, state.tokens_mask is not None, counts)
        return replace(state, cache=kept, mask=None, trace=trace)

    def _counts(self, state: State) -> list[int] | None:
        """For each layer, how many entries all heads keep, where that depends on no score; None where it may."""
        budgets, entries = {*self.budgets(state)}, state.entries()
        if type(self.allocate) is not Uniform or len(budgets) > 1 or any(each.real is not None for each in entries):
            return None
        return [min(*budgets, each.keys.shape[2]) for each in entries]

    def _held_queries(self, trace: Trace) -> Trace:
        """The trace without the queries whose own entries may have been evicted.

        It is cut also where nothing is evicted, so that the rows of a batch observe as they do alone.
        """
        queries = tuple(each[:, :, max(each.shape[2] - self.window, 0) :] for each in trace.queries)
        return replace(trace, queries=queries)

    def _protect(self, importance: Tensor, real: Tensor | None) -> Tensor:
        length, pooled = importance.shape[-1], importance.clone()
        free = max(length - self.window, 0)
        if real is not None:  # padding must not reach its neighbours
            importance = importance.masked_fill(~real, -torch.inf if self.pool.kind == "max" else 0.0)
        if free:
            pooled[..., :free] = pool(importance[..., :free].contiguous(), self.pool.kernel, self.pool.kind)
        pooled[..., free:] = torch.inf
        if real is None:
            pooled[..., : self.sinks] = torch.inf
            return pooled
        order = real.long().cumsum(dim=-1)
        pooled.masked_fill_(order <= self.sinks, torch.inf)
        return pooled.masked_fill_(~real, -torch.inf)


def _require_scores(name: str, scores: list[Tensor], held: list[LayerEntries]) -> None:
    """Refuse scores that are not one for each entry of each layer.

    Raises:
        UserError: with one line that names the observer, the shape that it returned and the expected one.
    """
    if len(scores) != len(held):
        raise UserError(f"{name} returned scores for {len(scores)} layers; there are {len(held)}")
    for index, (layer, entries) in enumerate(zip(scores, held, strict=True)):
        batch, kv_heads, length, _ = entries.keys.shape
        shape = [*layer.shape]
        if len(shape) != 3 or shape[::2] != [batch, length] or not shape[1] or shape[1] % kv_heads:
            raise UserError(
                f"{name} returned scores of shape {shape} for layer {index}; expected [{batch}, {kv_heads}, {length}] "
                f"by KV head, or a multiple of {kv_heads} by query head"
            )


def _gather_received(
    received: tuple[Tensor, ...], selected: list[Tensor], counts: list[int] | None
) -> tuple[Tensor, ...]:
    """[B, H, C] of each layer at the selected entries of its KV head, padded on the left where heads differ.

    `counts` are the numbers of selected entries, where every head of a layer has the same.
    """
    if counts is not None:
        return tuple(map(_received_at, received, map(places_of, selected, counts)))
    gathered = []
    for layer, mask in zip(received, selected, strict=True):
        held = mask.sum(dim=-1)
        longest = int(held.max())
        group = layer.shape[1] // mask.shape[1]
        real = torch.arange(longest, device=mask.device) >= longest - held[..., None]
        by_head = layer.new_zeros(*layer.shape[:2], longest)
        by_head[real.repeat_interleave(group, dim=1)] = layer[mask.repeat_interleave(group, dim=1)]
        gathered.append(by_head)
    return tuple(gathered)


def _received_at(layer: Tensor, places: Tensor) -> Tensor:
    """[B, H, C] at places [B, K, n] -> [B, H, n]."""
    group = layer.shape[1] // places.shape[1]
    return layer.gather(2, places.repeat_interleave(group, dim=1))


def require_evict(method: Method, refusal: str) -> Evict:
    """The method, if it evicts entries from the cache.

    Raises:
        UserError: it does not; `refusal` is the message.
    """
    if not isinstance(method, Evict):
        raise UserError(refusal)
    return method
