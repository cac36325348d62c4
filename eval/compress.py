"""The compressed states of a sweep's methods, from one prefill; their times, and the entries that they keep.

Methods with the same observer and reduction share one observation, those with the same drafter one draft.
"""

import functools
import math
import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from scipy.stats import kendalltau
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.models.decoder import joined
from keepsight.runtime.drafting.observer import Drafter, DraftIds, DraftObserver, FixedDraft
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import CacheMethod, Method
from keepsight.runtime.images import Images
from keepsight.runtime.importance import Reduce, reduce_group
from keepsight.runtime.methods.drafts import OwnAnswer
from keepsight.runtime.observe import Observer
from keepsight.runtime.prompt_compression.method import ShortenPrompt
from keepsight.runtime.state import Needs, State, prefill

_RANKED = 512
"""Kendall's tau is computed over at most so many entries, evenly spaced over a longer prompt."""


def recall(kept: Tensor | None, ranks: Tensor) -> float | None:
    """Share of the entries that the full cache's answer attends to most, equally many per head, that are kept.

    `kept` is [L, K, N] bool, None where it is not known; `ranks` are those of `SharedPrompt.ranks`.
    """
    if kept is None:
        return None
    wanted = ranks < round(kept.sum(dim=-1).float().mean().item())
    return int((kept & wanted).sum()) / max(int(wanted.sum()), 1)


def attention_mass(kept: Tensor | None, attention: Tensor) -> float | None:
    """Share of the answer's attention to the prompt that falls on kept entries, the mean over layers and KV heads.

    `kept` is [L, K, N] bool, None where it is not known; `attention` is that of `SharedPrompt.attention`, [L, K, N]
    float32: where it is not finite or all 0, the mass is unknown.
    """
    if kept is None:
        return None
    mass = ((attention * kept).sum(-1) / attention.sum(-1)).mean().item()
    return mass if math.isfinite(mass) else None


def kendall_tau(scores: Tensor, attention: Tensor) -> float:
    """Kendall's tau-b of scores and attention, both [L, K, N] float: mean over heads; 0 for one of constant scores."""
    length = scores.shape[-1]
    places = torch.linspace(0, length - 1, min(length, _RANKED)).round().long()
    pairs = (each[..., places.to(each.device)].flatten(0, -2).cpu().numpy() for each in (scores, attention))
    found: list[Any] = [kendalltau(*pair) for pair in zip(*pairs, strict=True)]
    return float(np.mean([np.nan_to_num(each.statistic) for each in found]))


@dataclass(frozen=True)
class Seconds:
    """Seconds before a method's first token, by phase. Shared steps are timed once and shown for each method.

    Attributes:
        prefill: The model's pass over the prompt; everything, for a method that reads the prompt in its own way.
        draft: Generating a draft, or choosing the tokens of a shorter prompt.
        observe: The observer's pass, LAQ's draft included.
        select: Reduction, pooling, allocation and gathering.
        question: Prefill of a question after the compression, in one batch with other variants.
    """

    prefill: float = 0.0
    draft: float = 0.0
    observe: float = 0.0
    select: float = 0.0
    question: float = 0.0


@dataclass(frozen=True)
class Compressed:
    """The one-row state that a method answers from, and the seconds before its first token.

    `kept` is [L, K, N] bool, which of the prompt's entries it keeps; None if that is not known.
    """

    state: State
    seconds: Seconds
    kept: Tensor | None


@dataclass(frozen=True, eq=False)
class SharedPrompt:
    """A prompt that was prefilled once for many methods, with the drafts and observations that they share.

    Attributes:
        model: The base model.
        state: One-row state of the prompt, with everything recorded that the methods' observers need.
        continuation: The tokens after the prompt under the full cache: the oracle's draft.
        seconds: Seconds of the prefill, without the time spent summing accumulated attention.
        continuation_seconds: Seconds that decoding `continuation` took.
        images: Images in the prompt.
    """

    model: PreTrainedModel
    state: State
    continuation: DraftIds
    seconds: float
    continuation_seconds: float = 0.0
    images: Images | None = None
    _drafts: dict[Drafter, tuple[DraftIds, float]] = field(default_factory=dict, init=False)
    _observed: dict[tuple[Observer, Reduce], tuple[list[Tensor], Seconds]] = field(default_factory=dict, init=False)
    _taus: dict[tuple[Observer, Reduce], float] = field(default_factory=dict, init=False)

    @torch.no_grad()
    def compress(self, method: Method) -> Compressed:
        """The state that a method answers from."""
        length, images, start = self.state.tokens.shape[1], self.images, time.perf_counter()
        if isinstance(method, CacheMethod) and method.shares_prefill(length):
            return self._of_prefill(method)
        if isinstance(method, ShortenPrompt) and method.budget_for(length) == length:
            kept = joined(self.state.select_all())
            return Compressed(self.state, Seconds(prefill=self.seconds, select=since(start)), kept)
        chosen = method.tokens_to_read(self.model, self.state.tokens[0], images)
        if chosen is None:
            state = method.start(self.model, self.state.tokens, images=images)
            return Compressed(state, Seconds(prefill=since(start)), None)
        drafting, start = since(start), time.perf_counter()
        images = images and images.shortened(self.model, self.state.tokens, chosen)
        state = prefill(self.model, self.state.tokens[:, chosen], needs=Needs(), images=images)
        seconds = Seconds(prefill=since(start), draft=drafting)
        of_chosen = torch.zeros_like(joined(self.state.select_all()))
        of_chosen[..., chosen] = True
        return Compressed(state, seconds, of_chosen)

    def _of_prefill(self, method: CacheMethod) -> Compressed:
        """The compressed prefill; which entries it keeps is known only for methods that evict."""
        scores, kept, seconds = None, None, Seconds(prefill=self.seconds)
        if isinstance(method, Evict) and not method.fits(self.state):
            scores, seconds = self._observe(method.bound_observer, method.reduce)
        start = time.perf_counter()
        if isinstance(method, Evict):
            state, selected = method.evict(self.model, self.state, scores)
            kept = joined(selected)
        else:
            state = method.compress_state(self.model, self.state)
        return Compressed(state, replace(seconds, select=since(start)), kept)

    @torch.no_grad()
    def attention(self) -> Tensor:
        """[L, K, N] float32: attention of the continuation to each entry, mean over tokens and a group's heads."""
        return self._by_kv_head(DraftObserver(OwnAnswer()), Reduce())

    def ranks(self) -> Tensor:
        """[L, K, N] int64: the rank of each entry within its head by `attention`, 0 for the largest."""
        return self.attention().argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)

    def tau(self, method: Method) -> float | None:
        """Kendall's tau of a method's scores before pooling and `attention`; None where it has scored nothing."""
        if not isinstance(method, Evict) or (key := (method.bound_observer, method.reduce)) not in self._observed:
            return None
        if key not in self._taus:
            self._taus[key] = kendall_tau(self._by_kv_head(*key), self.attention())
        return self._taus[key]

    def _by_kv_head(self, observer: Observer, reduce: Reduce) -> Tensor:
        layers = zip(self._observe(observer, reduce)[0], self.state.entries(), strict=True)
        return joined([reduce_group(layer, each.keys.shape[1], reduce.heads) for layer, each in layers])

    def _observe(self, observer: Observer, reduce: Reduce) -> tuple[list[Tensor], Seconds]:
        key = observer, reduce
        if key not in self._observed:
            drafting = 0.0
            if isinstance(observer, DraftObserver):
                draft, drafting = self._draft(observer.drafter)
                observer = replace(observer, drafter=FixedDraft(draft))
            start = time.perf_counter()
            scored = observer(self.model, self.state, reduce)
            observed = [scores if scores.is_floating_point() else scores.float() for scores in scored]
            if any(scores.isnan().any() for scores in observed):
                raise UserError(f"{type(observer).__name__} returned scores that are NaN")
            took = since(start) + (self.state.seconds if observer.needs().accumulated else 0.0)
            self._observed[key] = observed, Seconds(self.seconds, draft=drafting, observe=took)
        return self._observed[key]

    def _draft(self, drafter: Drafter) -> tuple[DraftIds, float]:
        if drafter == OwnAnswer():
            return self.continuation, self.continuation_seconds
        if drafter not in self._drafts:
            start = time.perf_counter()
            draft = drafter(self.model, self.state)
            self._drafts[drafter] = draft, since(start)
        return self._drafts[drafter]


def needs_of_all(methods: Sequence[Method]) -> Needs:
    """What a prefill must record so that all of the methods can share it."""
    return functools.reduce(operator.or_, (method.needs() for method in methods), Needs())


def since(start: float) -> float:
    """Seconds since `start`, with the GPU's queue finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
