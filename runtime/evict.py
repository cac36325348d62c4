"""Eviction: an observer scores the prompt's entries, its scores are reduced and pooled, and each head keeps the top.

`prefill -> score -> allocate -> keep -> decode`: a method is a small frozen dataclass that names its parts, holds no
state, and serves any number of prompts and models. Every eviction method of the papers is an `Evict` with other parts.

The budget, for every method: entries per layer and KV head on average, sinks and window included; all layers and heads
keep exactly layers x KV heads x budget entries. A ratio (a float between 0 and 1) stands for `round(ratio * N)`, N
being the prompt's own length, whatever the batch. A prompt no longer than the budget is left untouched. While an answer
is decoded, its tokens are neither counted nor evicted, unless `every` is set: then they count, and the sum never
exceeds the budget.
"""

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from typing_extensions import final, override

from keepsight.errors import Budget, UserError, Whole
from keepsight.runtime import registry
from keepsight.runtime.allocate import Allocation, HeadSizes, Uniform
from keepsight.runtime.attention import is_bounded
from keepsight.runtime.generate import CacheMethod, PeriodicEviction
from keepsight.runtime.images import Images
from keepsight.runtime.importance import Pool, Reduce, reduce_group, select_top, top_mask, value_norms
from keepsight.runtime.layer import Counts, KeptLayer
from keepsight.runtime.observe import LayerObserver, Observer
from keepsight.runtime.renumber import Renumbering, require_renumberable
from keepsight.runtime.state import ALL_QUERIES, Needs, State, can_read_tail, full_layers, prefill, with_full_layers
from keepsight.runtime.tail import Tail


@registry.method("evict")
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
        every: Eviction interval: number of generated tokens after which the method is applied again, keeping `budget -
            every` entries, so that the cache never exceeds the budget; 0 to evict from the prompt alone.
        during_prefill: Whether each layer is evicted from as soon as it is read, so that only one is whole at a time;
            the same entries stay. None: where observer, model and allocation allow it. An observer that needs the
            whole prompt before it looks back does not, nor does an allocation that compares layers.
        value_norm: Whether an entry's importance is multiplied by the L2 norm of its value: what it adds to a layer's
            output grows with both (VATP, arXiv 2406.12335, which takes the L1 norm). For scores that are not negative.
        rerotate: Whether kept keys get consecutive positions, by RoPE, and the text goes on right after them, as if
            evicted tokens had not been read (kvpress's KeyRerotationPress). By default all stay where they were.

    Raises:
        UserError: a value is out of range; one line names it.
    """

    budget: Budget
    observer: Observer
    reduce: Reduce = Reduce()
    pool: Pool = Pool()
    allocate: Allocation = Uniform()
    sinks: Whole = 0
    window: Whole = 0
    every: Whole = 0
    during_prefill: bool | None = None
    value_norm: bool = False
    rerotate: bool = False
    reads_images = True
    evicts_after_prefill = False  # True where a method evicts only once all layers have read the whole prompt
    needs_model = False  # True where scores or selection need weights or RoPE of the model

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.during_prefill and self.evicts_after_prefill:
            raise UserError(
                f"{name}: it evicts once the whole prompt is read: leave out during_prefill",
                field="during_prefill",
                code="conflict",
            )
        needs = self.bound_observer.needs()  # binding refuses what the observer cannot take from the method
        if self.rerotate:
            self._check_rerotation(needs)
        if self.during_prefill and not (isinstance(self.observer, LayerObserver) or self.observer.joins_prefill):
            raise UserError(
                f"{name}: during_prefill needs an observer that scores each layer as it is read; "
                f"{type(self.observer).__name__} looks back at the whole prompt: leave it out",
                field="during_prefill",
                code="conflict",
            )
        if self.observer.signed:
            self._require_unweighted()
        if self.during_prefill and self.allocate.across_layers:
            raise UserError(
                f"{name}: during_prefill evicts from each layer as it is read, and {type(self.allocate).__name__} "
                "shares the budget between all layers: leave it out, or choose another allocation",
                field="during_prefill",
                code="conflict",
            )
        if isinstance(self.budget, float):
            if self.every:
                raise UserError(
                    f"{name}: every {self.every} needs a budget in entries, not the ratio {self.budget}",
                    field="every",
                    code="conflict",
                )
            return

        protected = self.sinks + self.window
        if self.budget - self.every <= protected and (protected or self.every):
            interval = f" plus every={self.every}" if self.every else ""
            raise UserError(
                f"{name}: budget {self.budget} must be above the {protected} protected entries "
                f"(sinks + window){interval}",
                field="budget",
                code="range",
            )
        if not protected:
            self.allocate.check(self.budget - self.every)

    def _check_rerotation(self, needs: Needs) -> None:
        """Refuse options that cannot be combined with `rerotate`."""
        name = type(self).__name__
        if self.during_prefill:
            raise UserError(
                f"{name}: rerotate needs to know how many entries all layers keep, and during_prefill evicts from each "
                "as it is read: leave one of them out",
                field="during_prefill",
                code="conflict",
            )
        if needs.statistics:
            raise UserError(
                f"{name}: rerotate would change positions that {type(self.observer).__name__} takes statistics of: "
                "leave it out",
                field="rerotate",
                code="conflict",
            )

    def _require_unweighted(self) -> None:
        """Refuse to multiply scores that can be negative: the larger factor would make them the less important."""
        weighted = "value_norm" if self.value_norm else "allocate.weights"
        if self.value_norm or getattr(self.allocate, "weights", None) is not None:
            raise UserError(
                f"{type(self).__name__}: {weighted} multiplies scores, and those of {type(self.observer).__name__} "
                "can be negative; leave it out, or take an observer that scores by attention",
                field=weighted,
                code="conflict",
            )

    @functools.cached_property
    def bound_observer(self) -> Observer:
        """The observer, with `budget`, `sinks` and `window` of this method where its own are None."""
        observer: Any = self.observer
        from_method = {}
        for name in ("budget", "sinks", "window"):
            if getattr(observer, name, 0) is None:
                from_method[name] = getattr(self, name)
        return replace(observer, **from_method) if from_method else observer

    @property
    @override
    def adapter_digest(self) -> str | None:
        return self.observer.adapter_digest

    @override
    def check_model(self, model: PreTrainedModel) -> None:
        self.observer.check_model(model)
        if self.rerotate:
            require_renumberable(model)

    @final
    @override
    def needs(self) -> Needs:
        return self.bound_observer.needs()

    @override
    def least_budget(self) -> int:
        protected = self.sinks + self.window
        return protected + 1 if protected else 1

    @override
    def check(self, length: int, context: int) -> None:
        budget = self.budget_for(length)
        if length <= budget:
            return
        if isinstance(self.budget, float):
            self._check_allocation([budget])

        name = type(self).__name__
        observer = self.bound_observer
        window = observer.needs().window
        if length < window < ALL_QUERIES:
            raise UserError(
                f"{name}: a prompt of {length} tokens is shorter than the {window} that observe it",
                field="prompt",
                code="range",
            )
        positions = 0 if isinstance(observer, LayerObserver) else observer.positions()
        if length > context:
            raise UserError(
                f"{name}: the prompt has {length} tokens, more than the context of {context}; shorten it",
                field="prompt",
                code="range",
            )
        if positions + length > context:
            raise UserError(
                f"{name}: {positions} observing tokens after a prompt of {length} do not fit the context of {context}; "
                "shorten the draft (lookahead) or the prompt",
                field="prompt",
                code="range",
            )

    def _check_allocation(self, budgets: list[int]) -> None:
        """Refuse budgets that the allocation cannot share: a ratio becomes a number only where a prompt is known."""
        if not self.sinks + self.window:
            self.allocate.check(min(budgets))

    @override
    @torch.no_grad()
    def start(self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None = None, **options: Any) -> State:
        observer = self.bound_observer
        batch, width = input_ids.shape
        lengths = [width] * batch if mask is None else mask.sum(dim=1).tolist()
        budgets = [self.budget_for(length) for length in lengths]
        evicts = any(length > budget for length, budget in zip(lengths, budgets, strict=True))
        if evicts and isinstance(self.budget, float):
            self._check_allocation(budgets)

        tail = None
        if evicts:
            tail = self._tail(model, input_ids, mask, options.get("images"))
        after_layer = None
        evicts_later = (
            self.evicts_after_prefill or self.rerotate or self.during_prefill is False or self.allocate.across_layers
        )
        if evicts and not evicts_later and (tail is not None or isinstance(observer, LayerObserver)):
            after_layer = _LayerEviction(self, observer, lengths, budgets, padded=min(lengths) < width)

        state = prefill(model, input_ids, mask, needs=observer.needs(), after_layer=after_layer, tail=tail, **options)
        if after_layer is not None:
            return state
        if tail is None:
            return self.compress_state(model, state)
        tail_scores = []
        for layer in state.layers:
            assert layer.recorded is not None and layer.recorded.observed is not None
            tail_scores.append(layer.recorded.observed)
        return self.evict(model, state, tail_scores)[0]

    def _tail(
        self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None, images: Images | None
    ) -> Tail | None:
        """The observers to be read in one pass with prompts [B, N]; None where they have to be read after it."""
        observer = self.bound_observer
        if not observer.joins_prefill or not can_read_tail(model, observer.needs()):
            return None
        if images is None:
            return observer.tail(model, input_ids, mask, self.reduce)
        embeddings = images.embeddings_alone(model, input_ids, mask)
        if embeddings is None:
            return None
        tail = observer.tail(model, input_ids, mask, self.reduce, images)
        if tail is None:
            return None
        return replace(tail, prompt=embeddings)

    @override
    def compress_state(self, model: PreTrainedModel, state: State) -> State:
        return self.evict(model, state)[0]

    @torch.no_grad()
    def evict(
        self, model: PreTrainedModel, state: State, scores: list[Tensor] | None = None
    ) -> tuple[State, list[Tensor]]:
        """Evict from a state, which may have been evicted from before; it stays unchanged.

        Args:
            model: The base model.
            state: What it has read.
            scores: What the bound observer returned for the state; by default it is called.

        Returns:
            The state to decode from, and for each layer which entries it keeps, [B, K, C] bool.
        """
        if self.fits(state):
            return self._unevicted(state), state.select_all()
        selected = self.select(state, self.importance(model, state, scores))
        return self.keep(model, state, selected), selected

    @override
    def periodic_eviction(self, model: PreTrainedModel) -> PeriodicEviction | None:
        if not self.every:
            return None
        return PeriodicEviction(self.every, lambda state: self.compress_state(model, state))

    def fits(self, state: State) -> bool:
        """Whether the state is within the budget, or has no layer to evict from."""
        real = self._sizes(state).real
        if not real.size:
            return True
        return self.allocate.meets_budget_exactly and bool((real.mean(axis=(0, 2)) <= self.budgets(state)).all())

    @torch.no_grad()
    def importance(self, model: PreTrainedModel, state: State, scores: list[Tensor] | None = None) -> list[Tensor]:
        """For each layer, the importance [B, K, C] float32: +inf where protected, -inf for padding.

        One call serves every budget and allocation. Scores are reduced layer by layer where the observer allows it. A
        `UserError` if the observer did not score every entry of every layer. `scores` are as for `evict`.
        """
        observer = self.bound_observer
        layers = state.layers
        importance = []
        if scores is None and isinstance(observer, LayerObserver):
            for layer in layers:
                layer_scores = observer.score(layer, self.reduce.queries)
                importance.append(self.layer_importance(layer_scores, layer))
            return importance

        if scores is None:
            scores = observer(model, state, self.reduce)
        if len(scores) != len(layers):
            name = type(self.observer).__name__
            raise UserError(
                f"{name} returned scores for {len(scores)} layers; there are {len(layers)}", field="scores", code="data"
            )
        for layer_scores, layer in zip(scores, layers, strict=True):
            importance.append(self.layer_importance(layer_scores, layer))
        return importance

    def layer_importance(self, scores: Tensor, layer: KeptLayer) -> Tensor:
        """Importance [B, K, C] float32 of a layer's entries, from scores [B, H or K, C]; as `importance`.

        Raises:
            UserError: the scores are not one for each entry.
        """
        entries = layer.entries()
        batch, kv_heads, length, _ = entries.keys.shape
        shape = [*scores.shape]
        if len(shape) != 3 or shape[::2] != [batch, length] or not shape[1] or shape[1] % kv_heads:
            raise UserError(
                f"{type(self.observer).__name__} returned scores of shape {shape} for a layer; expected "
                f"[{batch}, {kv_heads}, {length}] by KV head, or a multiple of {kv_heads} by query head",
                field="scores",
                code="data",
            )
        scores = scores if scores.is_floating_point() else scores.float()

        importance = reduce_group(scores, kv_heads, self.reduce.heads)
        if self.value_norm:
            if self.observer.signed is None and bool((importance < 0).any()):
                self._require_unweighted()
            importance = importance * value_norms(layer.attended().values, kv_heads)

        real = entries.real
        before_window = max(length - self.window, 0)
        importance = self._pooled(importance, real, before_window)
        importance[..., before_window:] = torch.inf
        if real is None:
            importance[..., : self.sinks] = torch.inf
            return importance
        importance.masked_fill_(real.long().cumsum(dim=-1) <= self.sinks, torch.inf)
        return importance.masked_fill_(~real, -torch.inf)

    def _pooled(self, importance: Tensor, real: Tensor | None, end: int) -> Tensor:
        """A copy of importance [B, K, C] whose entries before `end` are pooled."""
        pooled = importance.clone()
        if not end or self.pool.kernel == 1:
            return pooled
        is_max = self.pool.kind == "max"
        if real is not None:  # padding must not reach its neighbours
            padding = -torch.inf if is_max else 0.0
            importance = importance.masked_fill(~real, padding)
        pool = functional.max_pool1d if is_max else functional.avg_pool1d
        kernel = self.pool.kernel
        pooled[..., :end] = pool(importance[..., :end].contiguous(), kernel, stride=1, padding=kernel // 2)
        return pooled

    def select(self, state: State, importance: list[Tensor]) -> list[Tensor]:
        """For each layer, which entries stay: [B, K, C] bool. Ties go to the lowest index."""
        return select_top(importance, self.counts(state, importance))

    def counts(self, state: State, importance: list[Tensor]) -> Counts:
        """[L, B, K]: how many entries each head keeps."""
        budgets = self.budgets(state)
        if isinstance(self.budget, float):
            self._check_allocation(budgets)
        return self.allocate(self._sizes(state), budgets, importance)

    def keep(self, model: PreTrainedModel, state: State, selected: list[Tensor]) -> State:
        """The state of the selected entries, [B, K, C] bool for each layer."""
        if self.allocate.reads_scores:  # counted: the CPU waits for it
            device = selected[0].device
            layer_counts = [mask.sum(dim=-1).to(device) for mask in selected]
            counts = np.array(torch.stack(layer_counts).tolist())
        else:
            counts = self.allocate(self._sizes(state), self.budgets(state), [])
        ragged, marked = _forms(state.cache, state.tokens_mask is not None, counts)
        renumbering = None
        if self.rerotate:
            renumbering = Renumbering.of(model, state, self._sizes(state).real, counts)
        layers = []
        for index, (layer, mask) in enumerate(zip(state.layers, selected, strict=True)):
            renumber = None if renumbering is None else renumbering.of_layer(index, mask)
            kept = layer.keep(mask, counts[index], window=self.window, ragged=ragged, marked=marked, renumber=renumber)
            layers.append(kept if renumbering is None else renumbering.with_queries(index, kept))
        after = replace(state, cache=with_full_layers(state.cache, layers))
        if renumbering is None:
            return after
        return replace(after, rope_offset=renumbering.after - state.lengths)

    def _unevicted(self, state: State) -> State:
        """A copy whose recorded queries are cut as eviction cuts them: rows of a batch observe as they do alone."""
        copied_state = state.copy()
        for layer in copied_state.layers:
            if layer.recorded is not None:
                layer.recorded = layer.recorded.last(self.window)
        return copied_state

    def _sizes(self, state: State) -> HeadSizes:
        """How many entries each head has; the CPU waits only for padded entries to be counted."""
        layer_sizes: Any = [layer.head_sizes() for layer in state.layers]
        if any(isinstance(sizes, Tensor) for sizes in layer_sizes):
            layer_sizes = state.counts().tolist()
        real = np.array(layer_sizes)
        return HeadSizes(real, real.clip(max=self.sinks + self.window))


def _forms(cache: Cache, padded: bool, counts: Counts | None) -> tuple[bool, bool]:
    """`ragged` and `marked` of `KeptLayer.keep`, for all layers of a cache.

    Args:
        cache: The cache before eviction.
        padded: Whether a row has padding.
        counts: [L, B, K] int64: how many entries the heads keep; None where those of other layers are not known yet.
    """
    # After an eviction the model's padding mask no longer fits a dense layer. Bounded layers still need that mask, so
    # the evicted layers must do without it: they become ragged.
    ragged = padded and any(map(is_bounded, cache.layers))
    # The model makes one causal mask for all layers, which fits none of another length.
    marked = counts is None or bool(counts.min() != counts.max())
    return ragged, marked


@dataclass
class _LayerEviction:
    """Evicts from each layer of a batch of prompts as soon as it is read.

    What a layer computes does not depend on the entries of others, so the same entries stay as by eviction after the
    prefill, and only one layer is whole at a time. A prompt that is read in chunks is evicted from in the last pass.
    """

    method: Evict
    observer: Observer
    lengths: list[int]
    budgets: list[int]
    padded: bool
    _counts: Counts | None = field(default=None, init=False)

    def __call__(self, cache: Cache, index: int, layer: KeptLayer) -> KeptLayer:
        """Evict from the layer of this index among those with full attention."""
        method = self.method
        importance = method.layer_importance(self._scores(layer), layer)
        if method.allocate.reads_scores:
            counts = self._allocate(importance, 1, [importance])[0]
            ragged, marked = _forms(cache, self.padded, None)
        else:
            if self._counts is None:
                self._counts = self._allocate(importance, len(full_layers(cache)), [])
            counts = self._counts[index]
            ragged, marked = _forms(cache, self.padded, self._counts)
        mask = top_mask(importance, counts)
        return layer.keep(mask, counts, window=method.window, ragged=ragged, marked=marked)

    def _allocate(self, importance: Tensor, layers: int, compared: list[Tensor]) -> Counts:
        """[L, B, K]: how many entries the heads keep of layers that are as long as one of this importance [B, K, C]."""
        method = self.method
        batch, kv_heads = importance.shape[:2]
        real = np.broadcast_to(np.array(self.lengths)[:, None], (layers, batch, kv_heads))
        sizes = HeadSizes(real, real.clip(max=method.sinks + method.window))
        return method.allocate(sizes, self.budgets, compared)

    def _scores(self, layer: KeptLayer) -> Tensor:
        """The scores of observers that were read with the prompt, or of one that needs the layer alone."""
        if layer.recorded is not None and layer.recorded.observed is not None:
            return layer.recorded.observed
        assert isinstance(self.observer, LayerObserver)
        return self.observer.score(layer, self.method.reduce.queries)
