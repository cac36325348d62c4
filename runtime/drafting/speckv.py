"""SpecKV (arXiv 2506.08373, section 4): a draft's tokens observe; long prompts may be read in a sparse prefill.

The sparse prefill's mask: a query sees its KV head's *vertical columns*, selected by importance, and a *band* of the
most recent keys, counted from the start of its block of 64 queries.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any

import torch
from annotated_types import Ge, MultipleOf
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer
from typing_extensions import override

from keepsight.errors import Positive, UserError
from keepsight.experimental import is_on
from keepsight.models.decoder import context_of, has_latents
from keepsight.models.draft_sources import DraftHeadSource, DraftSource
from keepsight.runtime import registry
from keepsight.runtime.attention import OwnAttention, Softmax, grouped_attention, later, run
from keepsight.runtime.drafting.observer import Drafter, DraftIds, DraftObserver, FixedDraft, greedy_draft
from keepsight.runtime.drafting.speculative import head_answer
from keepsight.runtime.evict import Evict
from keepsight.runtime.images import Images
from keepsight.runtime.importance import Pool, Reduce, attention_weights, observed_attention, top_indices
from keepsight.runtime.layer import KeptLayer, Recorded
from keepsight.runtime.resources import Resources
from keepsight.runtime.rope_length import length_limit
from keepsight.runtime.state import (
    Needs,
    State,
    empty_cache,
    full_layers,
    prefill,
    record_past,
    roll_back,
    with_full_layers,
)

BLOCK = 64
_FLEX_BLOCK = 128
_FLEX_LEAST_WIDTH = 16  # FlexAttention's kernels take no smaller head dimension
_ESTIMATING_QUERIES = 64
_FIRST_COLUMNS = 30  # that the authors' code always takes
_NEAREST_SLASHES = 100  # that the authors' code always takes
_LEAST_SLASHES = 50


def sparse_attention(query: Tensor, key: Tensor, value: Tensor, columns: Tensor, band: int, softmax: Softmax) -> Tensor:
    """Attention [B, N, H, d] of N queries to N keys under the module's mask; no N x N tensor is made.

    Queries are [B, H, N, d], keys and values [B, K, N, d], `columns` [B, K, V] int64 each KV head's vertical columns,
    ascending, and `band` is a multiple of 64. On CUDA FlexAttention can compute it (experimental, off by default).
    """
    plain = softmax.softcap is None and softmax.sinks is None
    if plain and query.is_cuda and query.shape[-1] >= _FLEX_LEAST_WIDTH and is_on("flex"):
        return attend_by_flex(query, key, value, columns, band, softmax.scaling, _compiled_flex())
    return attend_by_blocks(query, key, value, columns, band, softmax)


def attend_by_blocks(query: Tensor, key: Tensor, value: Tensor, columns: Tensor, band: int, softmax: Softmax) -> Tensor:
    """`sparse_attention`, 64 queries at a time over their band and the columns before it alone."""
    length = query.shape[2]
    column_keys = at_columns(key, columns)
    column_values = at_columns(value, columns)
    blocks = []
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        band_start = max(start - band, 0)
        before_band = columns < band_start  # [B, K, V]; columns ascend, so these come first
        count = int(before_band.sum(dim=-1).max())
        keys = torch.cat([column_keys[:, :, :count], key[:, :, band_start:end]], dim=2)
        values = torch.cat([column_values[:, :, :count], value[:, :, band_start:end]], dim=2)

        # Added to the logits, not a bool mask: sdpa on a CPU takes twice as long with one.
        mask = query.new_zeros(*columns.shape[:2], end - start, keys.shape[2])
        mask[..., :count].masked_fill_(~before_band[:, :, None, :count], -torch.inf)
        own_block = count + start - band_start
        mask[..., own_block:].masked_fill_(later(end - start, query.device), -torch.inf)
        blocks.append(grouped_attention(query[:, :, start:end], keys, values, mask, softmax))
    return torch.cat(blocks, dim=1)


def attend_by_flex(
    query: Tensor, key: Tensor, value: Tensor, columns: Tensor, band: int, scaling: float, flex: Any = flex_attention
) -> Tensor:
    """`sparse_attention` as one FlexAttention over the columns' keys followed by all keys.

    Gathered and ascending, the columns that a query block sees come first, so that whole blocks of the others can be
    skipped. At their own places, nearly every block of the prompt would contain one.
    """
    mask = block_mask(columns, query.shape[1], query.shape[2], band)
    keys = torch.cat([at_columns(key, columns), key], dim=2)
    values = torch.cat([at_columns(value, columns), value], dim=2)
    output: Tensor = flex(query, keys, values, block_mask=mask, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2).contiguous()


def block_mask(columns: Tensor, heads: int, length: int, band: int) -> BlockMask:
    """The mask of `attend_by_flex` for H = `heads` and N = `length`, from the columns alone, without an N x N tensor.

    A key's index is that among the V columns, followed by all N keys.
    """
    count = columns.shape[-1]
    group = heads // columns.shape[1]
    keys = count + length

    def sees(batch: Tensor, head: Tensor, row: Tensor, index: Tensor) -> Tensor:
        band_start = row // BLOCK * BLOCK - band
        position = index - count
        column_seen = columns[batch, head // group, index.clamp(max=count - 1)] < band_start
        band_seen = (position >= band_start) & (position <= row)
        return torch.where(index < count, column_seen, band_seen)

    first_row = torch.arange(0, length, _FLEX_BLOCK, device=columns.device)[:, None]
    last_row = (first_row + _FLEX_BLOCK - 1).clamp(max=length - 1)
    first_index = torch.arange(0, keys, _FLEX_BLOCK, device=columns.device)
    last_index = (first_index + _FLEX_BLOCK - 1).clamp(max=keys - 1)

    # Which blocks of keys [row blocks, key blocks] have a key in the band, or a column before it.
    not_after_rows = first_index - count <= last_row
    in_band = last_index - count >= first_row // BLOCK * BLOCK - band
    has_band_keys = not_after_rows & in_band & (last_index >= count)
    smallest_column = columns[..., first_index.clamp(max=count - 1)][..., None, :]  # [B, K, 1, key blocks]
    has_columns = (smallest_column < last_row // BLOCK * BLOCK - band) & (first_index < count)
    needed = (has_band_keys | has_columns).repeat_interleave(group, dim=1)
    return BlockMask.from_kv_blocks(
        needed.sum(dim=-1, dtype=torch.int32),
        needed.int().argsort(dim=-1, descending=True, stable=True).int(),
        BLOCK_SIZE=_FLEX_BLOCK,
        mask_mod=sees,
        seq_lengths=(length, keys),
    )


def at_columns(tensor: Tensor, columns: Tensor) -> Tensor:
    """Keys or values [B, K, N, d] at columns [B, K, V] int64 -> [B, K, V, d]."""
    return tensor.gather(2, columns[..., None].expand(-1, -1, -1, tensor.shape[-1]))


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention)


Score = Callable[[Tensor, Tensor, Tensor, Softmax], Tensor]
"""Scores the prompt's entries, [B, K, N] float32, from a layer's queries [B, H, N + L, d], its keys and values
[B, K, N + L, d] and its softmax."""


class SparsePattern(ABC):
    """How a long prompt is read: which keys each query sees."""

    @property
    @abstractmethod
    def longest_dense(self) -> int:
        """The largest total length of a prompt and its draft that is read densely."""

    @abstractmethod
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, *, length: int, importance: Tensor
    ) -> Tensor:
        """Attention [B, N + L, H, d] in one layer, of queries [B, H, N + L, d] to keys and values [B, K, N + L, d].

        The first N = `length` tokens are the prompt's, the others the draft's; `importance` [B, K, n] float32 is that
        of the prompt's entries before the observation window.
        """

    def active(self, length: int) -> bool:
        """Whether a prompt and its draft, `length` tokens in all, are read sparsely."""
        return length > self.longest_dense

    @torch.no_grad()
    def __call__(
        self, model: PreTrainedModel, input_ids: Tensor, draft_ids: Tensor, score: Score, *, needs: Needs, window: int
    ) -> tuple[State, list[Tensor]]:
        """Read a prompt [B, N], without padding, and its draft [B, L], padded on the right.

        Returns:
            The state of the prompt alone, of which only the window of `needs` is recorded, and the importance [B, K, N]
            of each layer's entries, of which the last `window` are never columns.
        """
        if has_latents(model):
            raise UserError(
                f"SpecKV: sparse does not read the latents of {model.config.model_type}; leave out sparse",
                field="sparse",
                code="model",
            )
        batch, length = input_ids.shape
        draft_length = draft_ids.shape[1]
        lengths = torch.full((batch,), length, device=input_ids.device)
        limit = length_limit(model.config)
        if limit is not None and not limit.same(lengths, lengths + draft_length):
            raise limit.error("the draft that SpecKV reads sparsely beside the prompt goes beyond")

        cache = empty_cache(model)
        layers = [_SparseLayer(self, score, length, length - window, needs.window) for _ in full_layers(cache)]
        cache = with_full_layers(cache, layers)
        record_past(cache)
        ids = torch.cat([input_ids, draft_ids], dim=1)
        output = run(model, cache, input_ids=ids, logits_to_keep=draft_length + 1)

        roll_back(cache, draft_length)
        cache = with_full_layers(cache, [layer.first_entries(length) for layer in layers])
        logits = output.logits[:, 0].float()
        state = State(cache, logits, input_ids, lengths, Needs(window=needs.window), padded=False)
        return state, [layer.importance for layer in layers]


@registry.part("sparse", "vertical_slash")
@dataclass(frozen=True)
class SparsePrefill(SparsePattern):
    """Columns that SpecKV finds important, and a band (SpecKV, section 4.2 and table 8).

    Attributes:
        vertical: Number of columns that every query of a KV head sees, selected by importance.
        band: Number of most recent keys that a query sees; a multiple of 64.
    """

    vertical: Positive = 2048
    band: Annotated[int, Ge(BLOCK), MultipleOf(BLOCK), f"a multiple of {BLOCK}, at least {BLOCK}"] = 2048

    @property
    @override
    def longest_dense(self) -> int:
        return self.vertical + self.band

    @override
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, *, length: int, importance: Tensor
    ) -> Tensor:
        columns = top_indices(importance, min(self.vertical, importance.shape[2]))
        ascending = columns.sort(dim=-1).values
        return sparse_attention(query, key, value, ascending, self.band, softmax)


@registry.part("sparse", "minference")
@dataclass(frozen=True)
class MInference(SparsePattern):
    """MInference's vertical-slash pattern (arXiv 2407.02490, section 3), the same for all heads.

    The paper searches one for each head. A query head sees *columns*, keys that all later queries see, and *slashes*,
    diagonals of keys that are equally far behind their queries. Both are estimated from the attention of the prompt's
    last 64 queries.

    Attributes:
        vertical: Number of columns of a query head (at least 30: the first ones are always among them).
        slash: Number of diagonals of a query head (at least 50, the nearest ones), which are widened to blocks: a query
            sees what any query of its block of 64 would. Prompts of no more tokens are read densely.
    """

    vertical: Positive = 1000
    slash: Positive = 6096

    @property
    @override
    def longest_dense(self) -> int:
        return max(self.vertical, self.slash)

    @override
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, *, length: int, importance: Tensor
    ) -> Tensor:
        last_queries = query[:, :, max(length - _ESTIMATING_QUERIES, 0) : length]
        columns, slashes = self.estimate(last_queries, key[:, :, :length], softmax)
        return attend_vertical_slash(query, key, value, columns, slashes, softmax)

    def estimate(self, query: Tensor, key: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
        """From the last queries [B, H, r, d] of N keys [B, K, N, d]: columns and slashes, [B, H, N] bool both.

        A slash is marked at its distance from query to key.
        """
        weights = attention_weights(query, key, softmax)
        queries, length = weights.shape[2:]
        column_sums = weights.sum(dim=2)
        column_sums[..., :_FIRST_COLUMNS] = torch.inf

        # At each distance from a query, the weight of the key there.
        distances = torch.arange(length, device=query.device)
        positions = torch.arange(length - queries, length, device=query.device)[:, None] - distances
        by_distance = weights.gather(3, positions.clamp(min=0).expand_as(weights)).masked_fill(positions < 0, 0.0)
        slash_sums = by_distance.sum(dim=2)
        slash_sums[..., :_NEAREST_SLASHES] = torch.inf

        columns = _mark_top(column_sums, max(self.vertical, _FIRST_COLUMNS))
        slashes = _mark_top(slash_sums, max(self.slash, _LEAST_SLASHES))
        return columns, slashes


def _mark_top(sums: Tensor, count: int) -> Tensor:
    """[B, H, N] bool: True for each head's `count` largest sums [B, H, N], or for all where there are no more."""
    top = top_indices(sums, min(count, sums.shape[2]))
    return torch.zeros_like(sums, dtype=torch.bool).scatter_(2, top, True)


def attend_vertical_slash(
    query: Tensor, key: Tensor, value: Tensor, columns: Tensor, slashes: Tensor, softmax: Softmax
) -> Tensor:
    """Attention [B, n, H, d] of n queries to n keys, 64 queries at a time over no more keys than their heads see.

    `columns` and `slashes` [B, H, N] bool, N at most n, are the columns that each query head sees, and the distances
    from query to key at which it sees keys.
    """
    length = query.shape[2]
    group = query.shape[1] // key.shape[1]
    columns = functional.pad(columns, (0, length - columns.shape[2]))
    slashes = functional.pad(slashes, (0, length - slashes.shape[2]))
    nearer_slashes = functional.pad(slashes.cumsum(dim=2), (1, 0))  # number of slashes nearer than each distance
    positions = torch.arange(length, device=query.device)

    blocks = []
    for start in range(0, length, BLOCK):
        end = start + BLOCK
        rows = positions[start:end]
        keys = positions[:end]
        # A head sees a key if a slash is at one of the key's distances from the queries of the block.
        nearest = (start - keys).clamp(min=0)
        farthest = (end - keys).clamp(max=length)
        on_slash = nearer_slashes[..., farthest] > nearer_slashes[..., nearest]
        seen = columns[..., :end] | on_slash
        seen_positions = top_indices(seen.float(), int(seen.sum(dim=2).max()))

        unseen = ~seen.gather(2, seen_positions)[:, :, None] | (seen_positions[:, :, None] > rows[:, None])
        mask = query.new_zeros(unseen.shape).masked_fill_(unseen, -torch.inf)
        by_kv_head = seen_positions.unflatten(1, (-1, group)).flatten(2)
        head_keys = at_columns(key, by_kv_head).unflatten(2, (group, -1)).flatten(1, 2)
        head_values = at_columns(value, by_kv_head).unflatten(2, (group, -1)).flatten(1, 2)
        blocks.append(grouped_attention(query[:, :, start:end], head_keys, head_values, mask, softmax))
    return torch.cat(blocks, dim=1)


class _SparseLayer(DynamicLayer, OwnAttention):
    """A layer of the pass, which scores its entries, `importance` [B, K, N], and attends to some of them.

    Args:
        sparse: Which keys each query sees.
        score: Scores the prompt's entries.
        length: N, the prompt's length.
        candidates: Number of first entries that the pattern may select as columns.
        window: Number of the prompt's last queries that are recorded.
    """

    keys: Tensor
    values: Tensor
    importance: Tensor
    recorded: Recorded

    def __init__(self, sparse: SparsePattern, score: Score, length: int, candidates: int, window: int) -> None:
        super().__init__()
        self.sparse = sparse
        self.score = score
        self.length = length
        self.candidates = candidates
        self.window = window

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        self.importance = self.score(query, key, value, softmax)
        queries = None
        if self.window:
            queries = query[:, :, max(self.length - self.window, 0) : self.length].clone()
        self.recorded = Recorded(softmax, queries)
        importance = self.importance[..., : self.candidates]
        return self.sparse.attend(query, key, value, softmax, length=self.length, importance=importance)

    def first_entries(self, length: int) -> KeptLayer:
        """A layer of the first `length` entries alone."""
        keys = self.keys[:, :, :length].contiguous()
        values = self.values[:, :, :length].contiguous()
        layer = KeptLayer(keys, values, length)
        layer.recorded = self.recorded
        return layer


@registry.drafter("draft_model")
@dataclass(frozen=True)
class ModelDrafter(Drafter):
    """The greedy answer of a draft model, or of a draft head, to everything the base model has read.

    A draft model reads all of it again. A draft head reads the features that the prefill recorded, in one layer, and
    continues from the base model's own first token.

    Attributes:
        draft: Source of the draft model, or a draft head.
        lookahead: Maximum length of the draft in tokens, its end token included. The paper lets the draft finish its
            answer: give the task's answer length for that.
    """

    draft: DraftSource | DraftHeadSource
    lookahead: Positive = 32

    @override
    def __call__(self, model: PreTrainedModel, state: State) -> DraftIds:
        if isinstance(self.draft, DraftHeadSource):
            if state.images:
                raise UserError(
                    "SpecKV: a draft head reads no images; give a draft model that does", field="draft", code="model"
                )
            return head_answer(model, state, self.draft, self.lookahead)[0]
        return self.write(model, state.tokens, state.tokens_mask, state.images)

    @property
    @override
    def from_tokens(self) -> bool:
        return not isinstance(self.draft, DraftHeadSource)

    @override
    def before(
        self, model: PreTrainedModel, tokens: Tensor, mask: Tensor | None, images: Images | None = None
    ) -> DraftIds:
        return self.write(model, tokens, mask, images)

    @override
    def needs(self) -> Needs:
        if isinstance(self.draft, DraftHeadSource):
            return Needs(features=self.draft.layers)
        return Needs()

    @override
    def longest(self) -> int:
        return self.lookahead

    def write(
        self, model: PreTrainedModel, tokens: Tensor, mask: Tensor | None = None, images: Images | None = None
    ) -> DraftIds:
        """The draft for tokens [B, M] that `model`, the base model, need not have read; `mask` is False for padding.

        `images` are those of the first tokens. A `UserError` if the draft model reads none.
        """
        if isinstance(self.draft, DraftHeadSource):
            raise UserError(
                "SpecKV: a draft head needs the model's features of the prompt; choose a draft model",
                field="draft",
                code="model",
            )
        draft_model = self.draft.of(model)
        require_draft_fits("SpecKV", tokens.shape[1], self.lookahead, draft_model)
        if images:
            images = images.read_by(draft_model, tokens.shape[1])
        state = prefill(draft_model, tokens, mask, needs=Needs(), images=images)
        return greedy_draft(draft_model, state, self.lookahead)


@registry.method("speckv", colour="#56B4E9", marker="P")
@dataclass(frozen=True)
class SpecKV(Evict):
    """Keeps what the draft or the last 33 prompt tokens attend to most (arXiv 2506.08373, section 4 and table 8).

    The published budget C and window W leave out the last prompt token, which is read again before the answer: they
    are budget C + 1 and window W + 1 here. That token's entry and the first answer token come from the prefill.

    Ada-SpecKV is `allocate=Adaptive()`: the paper names it, its code does not have it, and this is a reconstruction
    (the importance of SpecKV, the allocation of AdaKV).

    Attributes:
        sparse: Sparse prefill of long prompts: `SparsePrefill`, or `MInference`; None to read all prompts densely. It
            applies to `start` alone: the prompt of `compress_state` has been read already.
    """

    section = "answer"
    cost = "a draft model that reads the prompt and answers first"
    takes_draft = True
    reduce: Reduce = Reduce("max", "max")
    pool: Pool = Pool("max", 7)
    window: int = 33
    sparse: SparsePattern | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sparse is None:
            return
        if self._model_drafter() is None:
            raise UserError(
                "SpecKV: sparse needs observer=DraftObserver(ModelDrafter(draft)) whose draft is a model; a draft "
                "head reads the features of a dense prefill",
                field="sparse",
                code="model",
            )
        longest_dense = self.sparse.longest_dense
        if isinstance(self.budget, float) or self.budget > longest_dense:
            raise UserError(
                f"SpecKV: sparse needs a budget of at most {longest_dense} entries (prompts up to that length are read "
                f"densely), not {self.budget}",
                field="budget",
                code="range",
            )

    @classmethod
    def with_draft(
        cls, draft: DraftSource | DraftHeadSource, budget: int | float, lookahead: int = 32, **parts: Any
    ) -> "SpecKV":
        """The method with a draft; `parts` are other fields."""
        return cls(budget, DraftObserver(ModelDrafter(draft, lookahead), window=None), **parts)

    @classmethod
    @override
    def fields_from(cls, resources: Resources, options: dict[str, Any]) -> dict[str, Any]:
        return {"observer": DraftObserver(ModelDrafter(resources.find("draft")), window=None)}

    @override
    def shares_prefill(self, length: int) -> bool:
        drafter = self._model_drafter()
        if self.sparse is None or drafter is None or length <= self.budget_for(length):
            return True
        return not self.sparse.active(length + drafter.lookahead)

    @override
    def reads_chunks(self) -> bool:
        return self.sparse is None

    @override
    def start(self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None = None, **options: Any) -> State:
        length = input_ids.shape[1]
        drafter = self._model_drafter()
        if drafter is None or self.sparse is None or self.shares_prefill(length):
            return super().start(model, input_ids, mask, **options)
        _require_whole_prompts(length, mask, options)
        draft = drafter.write(model, input_ids)
        if not self.sparse.active(length + draft.ids.shape[1]):
            observer = replace(self.observer, drafter=FixedDraft(draft))  # type: ignore[type-var]
            return replace(self, sparse=None, observer=observer).start(model, input_ids)
        score = self._draft_score(draft, length)
        state, importance = self.sparse(model, input_ids, draft.ids, score, needs=self.needs(), window=self.window)
        return self.keep(model, state, self.select(state, importance))

    def _model_drafter(self) -> ModelDrafter | None:
        """The observer's drafter if it is a draft model."""
        if not isinstance(self.observer, DraftObserver):
            return None
        drafter = self.observer.drafter
        if isinstance(drafter, ModelDrafter) and not isinstance(drafter.draft, DraftHeadSource):
            return drafter
        return None

    def _draft_score(self, draft: DraftIds, length: int) -> Score:
        """Scores a prompt of `length` tokens in one layer of a pass over prompt and draft, as `importance` does."""
        window = min(getattr(self.bound_observer, "window", 0), length)
        observers = window + draft.ids.shape[1]
        observer_mask = draft.mask
        if observer_mask is not None:
            observer_mask = functional.pad(observer_mask, (window, 0), value=True)

        def score(query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
            attention = observed_attention(
                query[:, :, -observers:],
                key,
                softmax,
                length,
                query_mask=observer_mask,
                reduction=self.reduce.queries,
            )
            return self.layer_importance(attention, KeptLayer(key[:, :, :length], value[:, :, :length]))

        return score


def require_draft_fits(name: str, length: int, lookahead: int, draft_model: PreTrainedModel) -> None:
    """Refuse prompts that a draft model cannot read and answer."""
    context = context_of(draft_model)
    if length + lookahead > context:
        raise UserError(
            f"{name}: a prompt of {length} tokens and a draft of {lookahead} do not fit the draft model's context of "
            f"{context}; shorten the draft (lookahead) or the prompt, or take another draft model",
            field="lookahead",
            code="range",
        )


def _require_whole_prompts(length: int, mask: Tensor | None, options: Mapping[str, Any]) -> None:
    if options.get("images"):
        raise UserError("SpecKV: sparse reads no images; leave out sparse", field="sparse", code="conflict")
    chunk = options.get("chunk")
    if chunk is not None and chunk < length:
        raise UserError(
            f"SpecKV: sparse reads the prompt of {length} tokens in one pass, not in chunks of {chunk}; "
            "leave out chunk or sparse",
            field="sparse",
            code="conflict",
        )
    if mask is not None and not bool(mask.bool().all()):
        raise UserError(
            "SpecKV: sparse reads prompts without padding; give prompts one by one, or leave out sparse",
            field="sparse",
            code="conflict",
        )
