"""The compressed states of a sweep's methods, from one prefill; their times, and the entries that they keep.

Methods with the same observer and reduction share one observation, those with the same drafter one draft.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import kendalltau
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.eval.record import NO_TIME, Phases
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


def kendall_taus(scores: Tensor, attention: Tensor) -> NDArray[np.float64]:
    """Kendall's tau-b [L, K] of scores and attention, both [L, K, N] float, by head; 0 where one is constant."""
    length = scores.shape[-1]
    positions = torch.linspace(0, length - 1, min(length, _RANKED)).round().long()
    scores_of_heads = scores[..., positions.to(scores.device)].cpu().numpy()
    attention_of_heads = attention[..., positions.to(attention.device)].cpu().numpy()
    taus = np.zeros(scores.shape[:2])
    for layer, head in np.ndindex(*taus.shape):
        result: Any = kendalltau(scores_of_heads[layer, head], attention_of_heads[layer, head])
        taus[layer, head] = np.nan_to_num(result.statistic)
    return taus


@dataclass(frozen=True)
class Compressed:
    """The one-row state that a method answers from, and the seconds before its first token.

    `kept` is [L, K, N] bool, which of the prompt's entries it keeps; None if that is not known.
    """

    state: State
    seconds: Phases
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
    _observed: dict[tuple[Observer, Reduce], tuple[list[Tensor], Phases]] = field(default_factory=dict, init=False)
    _taus: dict[tuple[Observer, Reduce], float] = field(default_factory=dict, init=False)

    @torch.no_grad()
    def compress(self, method: Method) -> Compressed:
        """The state that a method answers from."""
        length = self.state.tokens.shape[1]
        if isinstance(method, CacheMethod) and method.shares_prefill(length):
            return self._compress_prefill(method)
        start = time.perf_counter()
        if isinstance(method, ShortenPrompt) and method.budget_for(length) == length:
            kept = joined(self.state.select_all())
            return Compressed(self.state, replace(NO_TIME, prefill=self.seconds, select=since(start)), kept)
        positions = method.tokens_to_read(self.model, self.state.tokens[0], self.images)
        if positions is not None:
            return self._read_shortened(positions, drafting=since(start))
        state = method.start(self.model, self.state.tokens, images=self.images)
        return Compressed(state, replace(NO_TIME, prefill=since(start)), None)

    def _compress_prefill(self, method: CacheMethod) -> Compressed:
        """The compressed prefill; which entries it keeps is known only for methods that evict."""
        scores = None
        seconds = replace(NO_TIME, prefill=self.seconds)
        if isinstance(method, Evict) and not method.fits(self.state):
            scores, seconds = self._observe(method.bound_observer, method.reduce)

        start = time.perf_counter()
        if isinstance(method, Evict):
            state, selected = method.evict(self.model, self.state, scores)
            kept = joined(selected)
        else:
            state = method.compress_state(self.model, self.state)
            kept = None
        return Compressed(state, replace(seconds, select=since(start)), kept)

    def _read_shortened(self, positions: Tensor, drafting: float) -> Compressed:
        """The prefill of the prompt's tokens at `positions` [P] int64, which were chosen in `drafting` seconds."""
        start = time.perf_counter()
        images = self.images
        if images is not None:
            images = images.shortened(self.model, self.state.tokens, positions)
        state = prefill(self.model, self.state.tokens[:, positions], needs=Needs(), images=images)
        seconds = replace(NO_TIME, prefill=since(start), draft=drafting)
        kept = torch.zeros_like(joined(self.state.select_all()))
        kept[..., positions] = True
        return Compressed(state, seconds, kept)

    @torch.no_grad()
    def attention(self) -> Tensor:
        """[L, K, N] float32: attention of the continuation to each entry, mean over tokens and a group's heads."""
        return self._by_kv_head(DraftObserver(OwnAnswer()), Reduce())

    def ranks(self) -> Tensor:
        """[L, K, N] int64: the rank of each entry within its head by `attention`, 0 for the largest."""
        return self.attention().argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)

    def tau(self, method: Method) -> float | None:
        """Kendall's tau of a method's scores before pooling and `attention`, the mean over heads.

        None where the method has scored nothing.
        """
        if not isinstance(method, Evict):
            return None
        key = (method.bound_observer, method.reduce)
        if key not in self._observed:
            return None
        if key not in self._taus:
            self._taus[key] = float(kendall_taus(self._by_kv_head(*key), self.attention()).mean())
        return self._taus[key]

    def scores(self, method: Evict) -> Tensor:
        """[L, K, N] float32: what a method's observer scores, before pooling and without protected entries."""
        return self._by_kv_head(method.bound_observer, method.reduce)

    def importance(self, method: Evict) -> Tensor:
        """[L, K, N] float32: the importance by which a method selects, +inf for protected entries."""
        scores, _ = self._observe(method.bound_observer, method.reduce)
        return joined(method.importance(self.model, self.state, scores))

    def _by_kv_head(self, observer: Observer, reduce: Reduce) -> Tensor:
        """[L, K, N] float32: an observer's scores, reduced over the query heads of each KV head."""
        scores_of_layers, _ = self._observe(observer, reduce)
        reduced = []
        for scores, entries in zip(scores_of_layers, self.state.entries(), strict=True):
            reduced.append(reduce_group(scores, entries.keys.shape[1], reduce.heads))
        return joined(reduced)

    def _observe(self, observer: Observer, reduce: Reduce) -> tuple[list[Tensor], Phases]:
        """An observer's scores by layer, and the seconds up to them."""
        key = (observer, reduce)
        if key in self._observed:
            return self._observed[key]
        drafting = 0.0
        if isinstance(observer, DraftObserver):
            draft, drafting = self._draft(observer.drafter)
            observer = replace(observer, drafter=FixedDraft(draft))

        start = time.perf_counter()
        scores_of_layers = []
        for scores in observer(self.model, self.state, reduce):
            if not scores.is_floating_point():
                scores = scores.float()
            if scores.isnan().any():
                raise UserError(f"{type(observer).__name__} returned scores that are NaN", field="scores", code="data")
            scores_of_layers.append(scores)
        observing = since(start)
        if observer.needs().accumulated:
            observing += self.state.seconds
        seconds = replace(NO_TIME, prefill=self.seconds, draft=drafting, observe=observing)
        self._observed[key] = (scores_of_layers, seconds)
        return self._observed[key]

    def _draft(self, drafter: Drafter) -> tuple[DraftIds, float]:
        """A drafter's tokens, and the seconds that they took."""
        if drafter == OwnAnswer():
            return self.continuation, self.continuation_seconds
        if drafter not in self._drafts:
            start = time.perf_counter()
            draft = drafter(self.model, self.state)
            self._drafts[drafter] = (draft, since(start))
        return self._drafts[drafter]


def needs_of_all(methods: Iterable[Method]) -> Needs:
    """What a prefill must record so that all of the methods can share it."""
    needs = Needs()
    for method in methods:
        needs |= method.needs()
    return needs


def since(start: float) -> float:
    """Seconds since `start`, with the GPU's queue finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
