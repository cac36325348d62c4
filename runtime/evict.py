"""Eviction: an observer scores the prompt's entries, its scores are reduced and pooled, and each head keeps the top.

`prefill -> observe -> allocate + select -> decode`: a method is a small frozen dataclass that names its parts, holds no
state, and serves any number of prompts and models. Every eviction method of the papers is an `Evict` with other parts.

The budget, for every method: entries per layer and KV head on average, sinks and window included; all layers and heads
together keep exactly layers x KV heads x budget. A ratio (a float between 0 and 1) stands for `round(ratio * N)`, N
being the prompt's own length, whatever the batch. A prompt no longer than the budget is left untouched. Generated
tokens are not counted and never evicted, unless `every` is set: then prompt and generated tokens together never exceed
the budget.
"""

import functools
import operator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import UserError, require_whole
from keepsight.runtime.allocate import Allocation, Held, Uniform
from keepsight.runtime.budget import Budget
from keepsight.runtime.cache import empty_cache, full_layers
from keepsight.runtime.decode import Reapply
from keepsight.runtime.gather import all_ragged, counted, keep, kept_received, select_top
from keepsight.runtime.images import Images
from keepsight.runtime.importance import Pool, Reduce, reduce_group
from keepsight.runtime.layer_eviction import LayerEviction
from keepsight.runtime.method import CacheMethod, Observe, Shared
from keepsight.runtime.observe import LayerObserver, Observer
from keepsight.runtime.prefill import prefill
from keepsight.runtime.read_layer import ReadLayer, read_layers
from keepsight.runtime.scores import protected, require_scores, value_norms
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
        during_prefill: Whether each layer is evicted from as soon as it is read, so that only one is whole at a time;
            the same entries stay. None for where the observer and the allocation allow it; an observer that looks back,
            or an allocation that compares layers, does not.
        value_norm: Whether an entry's importance is multiplied by the L2 norm of its value: what it adds to a layer's
            output grows with both (VATP, arXiv 2406.12335, which takes the L1 norm). For scores that are not negative.

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
    during_prefill: bool | None = None
    value_norm: bool = False
    reads_images = True

    def __post_init__(self) -> None:
        name, budget = type(self).__name__, self.budget
        require_whole(name, sinks=self.sinks, window=self.window, every=self.every)
        Budget(budget).check(name)
        self.bound_observer.needs()  # binding refuses what the observer cannot take from the method
        if self.during_prefill and not isinstance(self.observer, LayerObserver):
            raise UserError(
                f"{name}: during_prefill needs an observer that scores each layer as it is read; "
                f"{type(self.observer).__name__} looks back at the whole prompt: leave it out"
            )
        if self.during_prefill and self.allocate.across_layers:
            raise UserError(
                f"{name}: during_prefill evicts from each layer as it is read, and {type(self.allocate).__name__} "
                "shares the budget between all layers: leave it out, or choose another allocation"
            )
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
    def read_prompt(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        mask: Tensor | None = None,
        chunk: int | None = None,
        images: Images | None = None,
    ) -> State:
        eviction = self._layer_eviction(model, input_ids, mask)
        if eviction is None:
            return super().read_prompt(model, input_ids, mask, chunk, images)
        around, needs = functools.partial(eviction.recorder, model), self.needs()
        state = prefill(model, input_ids, mask, chunk=chunk, needs=needs, last_recorder=around, images=images)
        return replace(state, mask=None, trace=self._held_queries(state.trace))

    def _layer_eviction(self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None) -> LayerEviction | None:
        """What evicts during the prefill; None where nothing is to be evicted, or not before its end."""
        batch, width = input_ids.shape
        lengths = [width] * batch if mask is None else mask.sum(dim=1).tolist()
        budgets, cache = [*map(self.budget_for, lengths)], empty_cache(model)
        fits = not full_layers(cache) or all(map(operator.le, lengths, budgets))
        waits = self.during_prefill is False or self.allocate.across_layers
        if fits or waits or not isinstance(observer := self.bound_observer, LayerObserver):
            return None
        for budget in {*budgets}:
            self._check_room(budget)
        ragged = all_ragged(cache, min(lengths) < width)
        score = functools.partial(self._importance_of, observer)
        return LayerEviction(score, self.allocate, lengths, budgets, self.sinks + self.window, ragged)

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
        observed = observe(self.bound_observer, self.reduce)
        selected = self.select(state, self.reduced(model, state, observed))
        return self.gather(state, selected), selected

    @override
    def reapply(self, model: PreTrainedModel) -> Reapply | None:
        return Reapply(self.every, lambda state: self.compress(model, state)) if self.every else None

    def fits(self, state: State) -> bool:
        """Whether the state is within the budget, or has no layer to evict from."""
        real = self._held(state).real
        return not real.size or bool((real.mean(axis=(0, 2)) <= self.budgets(state)).all())

    def _held(self, state: State) -> Held:
        """What the state holds; the CPU waits only for padded entries to be counted."""
        shapes = [each.keys.shape[:3] for each in state.entries() if each.real is None]
        whole = len(shapes) == len(state.entries())
        real = [np.full(shape[:2], shape[2]) for shape in shapes] if whole else state.held().tolist()
        return Held.of(np.array(real), self.sinks + self.window)

    @torch.no_grad()
    def importance(self, model: PreTrainedModel, state: State) -> list[Tensor]:
        """For each layer, the importance [B, K, C] float32: +inf where protected, -inf for padding.

        One call serves every budget and allocation. Scores are reduced layer by layer where the observer allows it.
        """
        if isinstance(observer := self.bound_observer, LayerObserver):
            return [self._importance_of(observer, layer) for layer in read_layers(model, state)]
        return self.reduced(model, state, self.observe(model, state))

    def _importance_of(self, observer: LayerObserver, layer: ReadLayer) -> Tensor:
        """`importance` of one layer."""
        return self._reduced(observer.score(layer, self.reduce.queries), layer)

    @torch.no_grad()
    def observe(self, model: PreTrainedModel, state: State) -> list[Tensor]:
        """The observer's scores (see `Observer`), the same for all methods with its observer and reduction."""
        return self.bound_observer(model, state, self.reduce)

    def reduced(self, model: PreTrainedModel, state: State, observed: list[Tensor]) -> list[Tensor]:
        """Scores reduced over heads and pooled, with protected entries and padding marked.

        Raises:
            UserError: the observer did not score every entry of every layer.
        """
        layers = [*read_layers(model, state)]
        if len(observed) != len(layers):
            name = type(self.observer).__name__
            raise UserError(f"{name} returned scores for {len(observed)} layers; there are {len(layers)}")
        return [*map(self._reduced, observed, layers)]

    def _reduced(self, observed: Tensor, layer: ReadLayer) -> Tensor:
        """`reduced` of one layer."""
        require_scores(type(self.observer).__name__, observed, layer.place, layer.held)
        importance = reduce_group(observed, layer.held.keys.shape[1], self.reduce.heads)
        if self.value_norm:
            importance = importance * value_norms(layer.attended.values, importance.shape[1])
        return self.protect(importance, layer.held.real)

    def protect(self, importance: Tensor, real: Tensor | None) -> Tensor:
        """A layer's importance [B, K, C] pooled, +inf where protected, -inf where `real`, [B, K, C] bool, is False."""
        return protected(importance, real, self.pool, self.sinks, self.window)

    def keep(self, state: State, importance: list[Tensor]) -> State:
        """Select within the budget and gather the selected entries."""
        return self.gather(state, self.select(state, importance))

    def select(self, state: State, importance: list[Tensor]) -> list[Tensor]:
        """For each layer, which entries stay: [B, K, C] bool. Ties go to the lowest index."""
        budgets = self.budgets(state)
        for budget in {*budgets}:
            self._check_room(budget)
        counts = self.allocate(self._held(state), budgets, importance)
        return select_top(importance, counts)

    def gather(self, state: State, selected: list[Tensor]) -> State:
        """The state of the selected entries."""
        if self.allocate.reads_scores:
            counts = counted(selected)
        else:
            counts = self.allocate(self._held(state), self.budgets(state), [])
        kept = keep(state.cache, selected, state.tokens_mask is not None, counts)
        trace = self._held_queries(state.trace)
        received = tuple(map(kept_received, trace.received, selected, counts))
        return replace(state, cache=kept, mask=None, trace=replace(trace, received=received))

    def _held_queries(self, trace: Trace) -> Trace:
        """The trace without the queries whose own entries may have been evicted.

        It is cut also where nothing is evicted, so that the rows of a batch observe as they do alone.
        """
        queries = tuple(each[:, :, max(each.shape[2] - self.window, 0) :] for each in trace.queries)
        return replace(trace, queries=queries)
