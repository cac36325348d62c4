"""SpecKV (arXiv 2506.08373): a small draft model's answer and the prompt's last tokens score the prompt's entries.

Long prompts can be read sparsely (section 4.2): prompt and draft are read in one pass, in which the window's and the
draft's queries score the prompt's entries in each layer. The top entries per KV head are columns that all queries see
beside their local band, and the same scores decide what is kept afterwards.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer
from typing_extensions import override

from keepsight.errors import UserError, require_whole
from keepsight.models.decoder import has_latents
from keepsight.models.draft_sources import DraftHeadSource, DraftSource
from keepsight.runtime.images import Images
from keepsight.runtime.attention import OwnAttention, run
from keepsight.runtime.state import empty_cache, full_layers, record_past, roll_back, with_full_layers
from keepsight.runtime.layer import KeptLayer, Recorded
from keepsight.runtime.drafting.observer import Drafter, DraftIds, DraftObserver, GivenDraft, greedy_draft
from keepsight.runtime.drafting.speculative import head_answer
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import Pool, Reduce, observed_attention, protected, reduce_group, top_entries
from keepsight.runtime.state import context_of, prefill
from keepsight.runtime.attention import Softmax, grouped_attention
from keepsight.runtime.state import Needs, State

BLOCK = 64
"""Queries that share a local band; as in the paper's kernel."""


@dataclass(frozen=True)
class ModelDrafter(Drafter):
    """Writes a greedy answer with a draft model, which reads the prompt again, or with a draft head.

    A draft head reads the features that the prefill recorded, in one layer, and continues from the model's own first
    token.

    Attributes:
        draft: Source of the draft model, or a draft head.
        lookahead: Maximum length of the draft in tokens, its end token included. The paper lets the draft finish its
            answer: give the task's answer length for that.
    """

    draft: DraftSource | DraftHeadSource
    lookahead: int = 32

    def __post_init__(self) -> None:
        require_whole("SpecKV", 1, lookahead=self.lookahead)

    @override
    def __call__(self, model: PreTrainedModel, state: State) -> DraftIds:
        if isinstance(self.draft, DraftHeadSource):
            return head_answer(model, state, self.draft, self.lookahead)[0]
        return self.write(model, state.tokens, state.tokens_mask)

    @override
    def needs(self) -> Needs:
        return Needs(features=self.draft.layers) if isinstance(self.draft, DraftHeadSource) else Needs()

    @override
    def longest(self) -> int:
        return self.lookahead

    def write(self, model: PreTrainedModel, tokens: Tensor, mask: Tensor | None = None) -> DraftIds:
        """The draft for tokens [B, M] that `model` need not have read; `mask` is False for padding.

        Raises:
            UserError: prompt and draft do not fit the draft model's context, or the draft is a head.
        """
        if isinstance(self.draft, DraftHeadSource):
            raise UserError("SpecKV: a draft head reads what the model has read; give a draft model to write before")
        drafting = self.draft.of(model)
        require_draft_fits("SpecKV", tokens.shape[1], self.lookahead, drafting)
        return greedy_draft(drafting, prefill(drafting, tokens, mask, needs=Needs()), self.lookahead)


def require_draft_fits(name: str, length: int, lookahead: int, drafting: PreTrainedModel) -> None:
    """Raise a UserError where a prompt and its draft do not fit the draft model's context."""
    if length + lookahead > (context := context_of(drafting)):
        raise UserError(
            f"{name}: a prompt of {length} tokens and a draft of {lookahead} do not fit the draft model's context of "
            f"{context}; shorten the draft (lookahead) or the prompt, or take another draft model"
        )


Score = Callable[[Tensor, Tensor, Softmax], Tensor]
"""Scores the prompt's entries, [B, K, N] float32, from a layer's queries [B, H, N + L, d], its keys [B, K, N + L, d]
and its softmax."""


@dataclass(frozen=True)
class SparsePrefill:
    """How a long prompt is read (SpecKV, section 4.2 and table 8).

    Attributes:
        vertical: Number of columns that every query of a KV head sees, selected by importance.
        band: Number of most recent keys that a query sees; a multiple of 64.

    Raises:
        UserError: a value is out of range.
    """

    vertical: int = 2048
    band: int = 2048

    def __post_init__(self) -> None:
        require_whole("sparse prefill", 1, vertical=self.vertical)
        if type(self.band) is not int or self.band < BLOCK or self.band % BLOCK:
            raise UserError(f"sparse prefill: band {self.band!r} must be a multiple of {BLOCK}, at least {BLOCK}")

    def active(self, length: int) -> bool:
        """Whether `length` tokens of prompt and draft are read sparsely."""
        return length > self.vertical + self.band

    @torch.no_grad()
    def __call__(
        self, model: PreTrainedModel, input_ids: Tensor, draft_ids: Tensor, score: Score, *, needs: Needs, window: int
    ) -> tuple[State, list[Tensor]]:
        """Read a prompt and its draft.

        Args:
            model: The base model.
            input_ids: [B, N] int64, without padding.
            draft_ids: [B, L] int64, padded on the right.
            score: Scores the prompt's entries.
            needs: What to record of the prompt; only the window is.
            window: Number of last prompt entries that are never columns.

        Returns:
            The state of the prompt alone, and the importance [B, K, N] of each layer's entries.

        Raises:
            UserError: the model's attention is latent.
        """
        if has_latents(model):
            raise UserError(f"SpecKV: sparse does not read the latents of {model.config.model_type}; leave out sparse")
        length, ids = input_ids.shape[1], torch.cat([input_ids, draft_ids], dim=1)
        cache = empty_cache(model)
        layers = [_SparseLayer(self, score, length, length - window, needs.window) for _ in full_layers(cache)]
        cache = with_full_layers(cache, layers)
        record_past(cache)
        output = run(model, cache, input_ids=ids, logits_to_keep=draft_ids.shape[1] + 1)
        lengths = torch.full((len(input_ids),), length, device=input_ids.device)
        roll_back(cache, draft_ids.shape[1])
        cache = with_full_layers(cache, [layer.first_entries(length) for layer in layers])
        logits, recorded = output.logits[:, 0].float(), Needs(window=needs.window)
        state = State(cache, logits, input_ids, lengths, recorded, padded=False)
        return state, [layer.importance for layer in layers]


class _SparseLayer(DynamicLayer, OwnAttention):
    """A layer of the sparse pass.

    Attributes:
        importance: [B, K, N] float32.
        queries: [B, H, w, d] of the prompt's last tokens.
        softmax: The layer's.
    """

    keys: Tensor
    values: Tensor
    importance: Tensor
    queries: Tensor
    softmax: Softmax

    def __init__(self, sparse: SparsePrefill, score: Score, length: int, candidates: int, window: int) -> None:
        super().__init__()
        self.sparse, self.score = sparse, score
        self.length, self.candidates, self.window = length, candidates, window

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        self.importance, self.softmax = self.score(query, key, softmax), softmax
        self.queries = query[:, :, max(self.length - self.window, 0) : self.length].clone()
        columns = top_entries(self.importance[..., : self.candidates], min(self.sparse.vertical, self.candidates))
        return sparse_attention(query, key, value, columns, self.sparse.band, softmax)

    def first_entries(self, length: int) -> KeptLayer:
        """A layer of the first `length` entries alone."""
        keys, values = (each[:, :, :length].contiguous() for each in (self.keys, self.values))
        layer = KeptLayer(keys, values, length)
        layer.recorded = Recorded(self.softmax, self.queries if self.window else None)
        return layer


def sparse_attention(query: Tensor, key: Tensor, value: Tensor, columns: Tensor, band: int, softmax: Softmax) -> Tensor:
    """Attention of N queries to N keys under SpecKV's sparse mask, 64 queries at a time; no N x N tensor is made.

    Query i sees key t <= i when t is in the band, t >= 64 * floor(i / 64) - band, or one of the columns of its KV head
    (section 4.2; the mask of the 64 x 64 kernel in its code).

    Args:
        query: [B, H, N, d].
        key: [B, K, N, d].
        value: [B, K, N, d].
        columns: [B, K, V] int64, ascending: each KV head's vertical columns.
        band: Multiple of 64.
        softmax: The layer's.

    Returns:
        [B, N, H, d], contiguous.
    """
    length = query.shape[2]
    at_columns = columns[..., None].expand(-1, -1, -1, key.shape[-1])
    first_keys, first_values = key.gather(2, at_columns), value.gather(2, at_columns)
    starts = torch.arange(0, length, BLOCK, device=query.device)
    lefts = (starts - band).clamp(min=0).expand(*columns.shape[:2], -1).contiguous()
    counts = torch.searchsorted(columns, lefts).amax(dim=(0, 1)).tolist()  # of columns before each block's band
    later = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=query.device).triu(1)
    blocks = []
    for start, count in zip(range(0, length, BLOCK), counts, strict=True):
        end, left = min(start + BLOCK, length), max(start - band, 0)
        keys = torch.cat([first_keys[:, :, :count], key[:, :, left:end]], dim=2)
        values = torch.cat([first_values[:, :, :count], value[:, :, left:end]], dim=2)
        # Added to the logits, not a bool mask: sdpa on a CPU takes twice as long with one.
        hidden = query.new_zeros(*columns.shape[:2], end - start, keys.shape[2])
        hidden[..., :count].masked_fill_(columns[:, :, None, :count] >= left, -torch.inf)
        hidden[..., count + start - left :].masked_fill_(later[: end - start, : end - start], -torch.inf)
        blocks.append(grouped_attention(query[:, :, start:end], keys, values, hidden, softmax))
    return torch.cat(blocks, dim=1)


@dataclass(frozen=True)
class SpecKV(Evict):
    """Keeps what the draft or the last 33 prompt tokens attend to most (arXiv 2506.08373, section 4 and table 8).

    The published budget C and window W leave out the last prompt token, which is read again before the answer: they are
    budget C + 1 and window W + 1 here. That token's entry and the first answer token come from the prefill.

    Ada-SpecKV is `allocate=Adaptive()`: the paper names it, its code does not have it, and this is a reconstruction
    (the importance of SpecKV, the allocation of AdaKV).

    Attributes:
        sparse: Sparse prefill of prompts longer than its `vertical + band` tokens; None to read all prompts densely.
            It applies to `start` alone: a prompt that `compress` is given has been read already.
    """

    reduce: Reduce = Reduce("max", "max")
    pool: Pool = Pool("max", 7)
    window: int = 33
    sparse: SparsePrefill | None = None
    reads_images = False  # the draft would not see them

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sparse is None:
            return
        if self._drafter() is None:
            raise UserError(
                "SpecKV: sparse needs an observer that is DraftObserver of a ModelDrafter, and a draft that is a "
                "model: a draft head reads what the model has read"
            )
        most = self.sparse.vertical + self.sparse.band
        if not isinstance(self.budget, int) or self.budget > most:
            raise UserError(
                f"SpecKV: sparse needs a budget of at most {most} entries (vertical + band), not {self.budget}"
            )

    @classmethod
    def with_draft(
        cls, draft: DraftSource | DraftHeadSource, budget: int | float, lookahead: int = 32, **parts: Any
    ) -> "SpecKV":
        """The method with a draft; `parts` are other fields.

        Raises:
            UserError: a value is out of range.
        """
        return cls(budget, DraftObserver(ModelDrafter(draft, lookahead), window=None), **parts)

    @override
    def shares_prefill(self, length: int) -> bool:
        drafter = self._drafter()
        if self.sparse is None or drafter is None or length <= self.budget_for(length):
            return True
        return not self.sparse.active(length + drafter.lookahead)

    @override
    def start(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        mask: Tensor | None = None,
        *,
        chunk: int | None = None,
        images: Images | None = None,
    ) -> State:
        drafter, length = self._drafter(), input_ids.shape[1]
        if drafter is None or self.sparse is None or self.shares_prefill(length):
            return super().start(model, input_ids, mask, chunk=chunk, images=images)
        if chunk is not None and chunk < length:
            raise UserError(
                f"SpecKV: sparse reads the prompt of {length} tokens in one pass, not in chunks of {chunk}; "
                "leave out chunk or sparse"
            )
        if mask is not None and not bool(mask.bool().all()):
            raise UserError("SpecKV: sparse reads prompts without padding; give prompts one by one, or no sparse")
        draft = drafter.write(model, input_ids)
        if not self.sparse.active(length + draft.ids.shape[1]):
            dense = replace(self, sparse=None, observer=replace(self.observer, drafter=GivenDraft(draft)))  # type: ignore[type-var]
            return dense.start(model, input_ids)
        score = self._score(draft, length)
        state, importance = self.sparse(
            model, input_ids, draft.ids, score, needs=self.needs(), window=self.window
        )
        return self.keep(state, self.select(state, importance))

    def _drafter(self) -> ModelDrafter | None:
        drafter = self.observer.drafter if isinstance(self.observer, DraftObserver) else None
        return drafter if isinstance(drafter, ModelDrafter) and not isinstance(drafter.draft, DraftHeadSource) else None

    def _score(self, draft: DraftIds, length: int) -> Score:
        """The method's scores of a prompt of `length` tokens, for one layer of a pass over prompt and draft."""
        window = min(getattr(self.bound_observer, "window", 0), length)
        rows, real = window + draft.ids.shape[1], draft.mask
        if real is not None:
            real = functional.pad(real, (window, 0), value=True)

        def score(query: Tensor, key: Tensor, softmax: Softmax) -> Tensor:
            observed = observed_attention(
                query[:, :, -rows:], key, softmax, length, query_mask=real, reduction=self.reduce.queries
            )
            scores = reduce_group(observed, key.shape[1], self.reduce.heads)
            return protected(scores, None, self.pool, self.sinks, self.window)

        return score
