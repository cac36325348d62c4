"""The state of a prompt that a model has read: its cache, its tokens, and what was recorded for observers.

`prefill` makes a state, eviction a smaller one, `read` appends tokens to one, `decode` answers from one, `join` makes a
batch of several. Whole and evicted states have one type, so that a method can evict from a cache again, while an answer
is decoded or at the next turn of a conversation.

The entries of a state are those of layers with full attention. Bounded layers (a sliding window, a chunk, a recurrent
state) keep the cache that transformers gives them: they are copied with the others, and never evicted from.
"""

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from keepsight.errors import UserError, require_whole
from keepsight.files import size_text
from keepsight.models.decoder import FULL, entry_owners, has_latents, layer_kinds, require_supported
from keepsight.models.scorers import Scorer
from keepsight.models.transformers_internals import DummyLayer
from keepsight.runtime.attention import (
    OwnAttention,
    Reader,
    SharedEntries,
    Softmax,
    StateCache,
    expansions,
    is_bounded,
    recurrent_of,
    run,
)
from keepsight.runtime.distance_bias import STATISTICS, STORES_ENTRIES, has_distance_bias, left_out
from keepsight.runtime.features import RecordFeatures, WatchInputs
from keepsight.runtime.images import Images
from keepsight.runtime.importance import observed_attention, seen_ahead
from keepsight.runtime.layer import KeptLayer, LayerEntries, RaggedLayer, Recorded
from keepsight.runtime.rope_length import LengthLimit, length_limit
from keepsight.runtime.rotary import QueryStatistics, Rotary, with_queries
from keepsight.runtime.running_answers import RunningAnswers, can_read_together, read_prompt_and_answers
from keepsight.runtime.tail import Tail

AfterLayer = Callable[[Cache, int, KeptLayer], KeptLayer]
"""Takes a cache, a layer's index among its `KeptLayer`s, and that layer, just read; returns the layer to keep."""
Kind = TypeVar("Kind", bound="State")


@dataclass(frozen=True)
class Needs:
    """What a forward pass records for observers.

    Attributes:
        window: Number of last queries kept in every layer.
        accumulated: Whether to sum the attention of all queries to each entry.
        features: Layers whose outputs are kept for every token; indices from 0, ascending.
        scorers: Trained scorers that score every token in every layer, as it is read.
        statistics: Whether to sum up statistics of all queries.
    """

    window: int = 0
    accumulated: bool = False
    features: tuple[int, ...] = ()
    scorers: tuple[Scorer, ...] = ()
    statistics: bool = False

    def __or__(self, other: "Needs") -> "Needs":
        return Needs(
            max(self.window, other.window),
            self.accumulated or other.accumulated,
            tuple(sorted({*self.features, *other.features})),
            tuple(dict.fromkeys((*self.scorers, *other.scorers))),
            self.statistics or other.statistics,
        )


ALL_QUERIES = 2**31
"""A window of `Needs` that no prompt fills: the queries of all tokens, which take about as much memory as a cache."""
WINDOW = Needs(window=32)
"""The observation window that most methods need."""


@dataclass(frozen=True)
class State:
    """The tokens that a model has read, and their cache. Prefill and decoding append to it; methods leave it unchanged.

    Attributes:
        cache: C entries per layer and KV head (C may differ), of M >= C tokens.
        logits: [B, V] float32, of the last token.
        tokens: [B, M] int64: everything read, evicted tokens included, padded on the left.
        lengths: [B] int64: number of each row's tokens without padding.
        needs: What is recorded of the tokens read: in the cache's layers, and in `features`.
        features: For each of the layers in `needs.features`, its output [B, m, hidden] for the last m tokens.
        rope_offset: [B] int64, or 0 for all rows: the next RoPE position minus the row's number of tokens, where
            positions are not consecutive (an image's tokens under M-RoPE).
        batch_offset: [B] int64, or 0 for all rows: number of tokens of the longest text of the batch that a row was
            read in, minus the row's own. Where RoPE depends on the length, it is that of the longest.
        padded: Whether a row has padding; None where the CPU has to wait for `lengths` to know.
        seconds: Time spent summing accumulated attention; on a GPU, only the time that the CPU was blocked.
        images: The prompts' images, which a draft model reads again; None for none.
    """

    cache: Cache
    logits: Tensor
    tokens: Tensor
    lengths: Tensor
    needs: Needs = Needs()
    features: tuple[Tensor, ...] = ()
    rope_offset: Tensor | Literal[0] = 0
    batch_offset: Tensor | Literal[0] = 0
    padded: bool | None = None
    seconds: float = 0.0
    images: Images | None = None

    def __repr__(self) -> str:
        """One line; `entries` are those of the longest KV head, `kv` the size of all of them."""
        rows, tokens = self.tokens.shape
        return (
            f"{type(self).__name__}(rows={rows}, tokens={tokens}, entries={self.length}, kv={size_text(self.kv_bytes)})"
        )

    @property
    def layers(self) -> list[KeptLayer]:
        """The layers with full attention."""
        return full_layers(self.cache)

    @property
    def length(self) -> int:
        """Number of entries of the longest KV head, padding included; 0 where every layer is bounded."""
        return max((layer.longest for layer in self.layers), default=0)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values."""
        return cache_bytes(self.cache)

    def kv_peak_bytes(self, appended: Sequence[int]) -> int | None:
        """Peak bytes of the cache of an answer, which is reached at its last token.

        Unlike `kv_bytes` it counts room for tokens to come, and the marks of padded rows. `appended` are the tokens of
        each forward pass, such as a question of 20 and an answer token by token: [20, 1, 1]. Growing a layer briefly
        takes its old tensors beside the new ones, which is not counted. None for states of subclasses, which store
        entries in their own form.
        """
        if not self.has_plain_entries:
            return None
        peak_bytes = 0
        for layer in self.cache.layers:
            if isinstance(layer, KeptLayer):
                peak_bytes += layer.memory_bytes(appended) + _recurrent_bytes(layer)
            else:
                peak_bytes += _bounded_bytes(layer, sum(appended))
        return peak_bytes

    @property
    def has_plain_entries(self) -> bool:
        """Whether the entries are plain keys and values; subclasses store them in a form of their own."""
        return type(self) is State

    @property
    def tokens_mask(self) -> Tensor | None:
        """[B, M] bool, False where `tokens` is padding; None when nothing is."""
        width = self.tokens.shape[1]
        if self.padded is False or (self.padded is None and bool((self.lengths == width).all())):
            return None
        return torch.arange(width, device=self.lengths.device) >= width - self.lengths[:, None]

    @property
    def rope_lengths(self) -> Tensor:
        """[B] int64: the length of the text that a row's RoPE counts, where it depends on one."""
        return self.lengths + self.rope_offset + self.batch_offset

    @property
    def is_whole(self) -> bool:
        """Whether it is of text alone, nothing was evicted, and entries are stored as they are."""
        return self.has_plain_entries and not self.images and bool((self.counts() == self.lengths[:, None]).all())

    def entries(self) -> list[LayerEntries]:
        """Keys, values [B, K, C, d] of each layer, and which of them are real, [B, 1 or K, C] or None for all."""
        return [layer.entries() for layer in self.layers]

    def counts(self) -> Tensor:
        """[L, B, K] int64: number of real entries per layer, row and KV head; [0, B, 0] without full attention."""
        if not self.layers:
            return self.lengths.new_zeros(0, len(self.lengths), 0)
        return torch.stack([torch.as_tensor(layer.head_sizes()).to(self.lengths.device) for layer in self.layers])

    def mean_entries(self) -> float:
        """Number of real entries of a KV head, the mean over layers, rows and heads; 0 where every layer is bounded."""
        return self.counts().float().mean().item() if self.layers else 0.0

    def select_all(self) -> list[Tensor]:
        """For each layer, a selection [B, K, C] bool of all real entries."""
        return [entries.marks for entries in self.entries()]

    def copy(self) -> "State":
        """The same state with an independent cache to append to.

        Raises:
            UserError: the cache has grown or shrunk since, see `require_unchanged`.
        """
        self.require_unchanged()
        return replace(self, cache=share(self.cache))

    def require_unchanged(self) -> None:
        """Refuse a state whose cache has read other tokens than `tokens`: something else appended to it or cut it.

        Raises:
            UserError: a layer has seen more or fewer tokens.
        """
        width = self.tokens.shape[1]
        for layer in self.layers:
            if layer.seen != width:
                raise UserError(
                    f"the cache of this state has {layer.seen} tokens, and the state itself {width}: another call has "
                    "changed it; continue from the state that this call returned, or work on a state.copy()",
                    field="state",
                    code="state",
                )

    def unrecorded(self, needs: Needs = Needs()) -> "State":
        """A copy without recorded queries, scores and features; `needs` is recorded from the next token on."""
        unrecorded = replace(self.copy(), needs=needs, features=(), seconds=0.0)
        for layer in unrecorded.layers:
            layer.recorded = None
            layer.recent = None
        return unrecorded

    def as_kind(self, kind: type[Kind], cache: Cache) -> Kind:
        """This state as one of a subclass, with its own form of cache; recordings are dropped."""
        return kind(
            cache,
            self.logits,
            self.tokens,
            self.lengths,
            rope_offset=self.rope_offset,
            batch_offset=self.batch_offset,
            padded=self.padded,
            images=self.images,
        )

    def without_last(self, count: int) -> "State":
        """The state before its last `count` tokens, exactly, as a copy to read more into; its `logits` are not known.

        Raises:
            UserError: they cannot be taken off: entries before them were evicted, or a layer is bounded.
        """
        if not self.has_plain_entries:
            raise UserError(
                "crop: entries in a form of their own cannot be cropped; keep a copy of the state instead",
                field="crop",
                code="state",
            )
        if has_bounded(self.cache):
            raise UserError(
                "crop: layers with a window or a recurrent state cannot be cropped; keep a copy instead",
                field="crop",
                code="state",
            )
        self.require_unchanged()
        layers = [layer.without_last(count) for layer in self.layers]
        return self._shortened(count, self.logits, with_full_layers(self.cache, layers))

    def crop(self, count: int, logits: Tensor) -> "State":
        """The state before its last `count` tokens, which the cache drops; `logits` [B, V] are the new last ones."""
        self.cache.crop(-count)
        return self._shortened(count, logits, self.cache)

    def _shortened(self, count: int, logits: Tensor, cache: Cache) -> "State":
        return replace(
            self,
            cache=cache,
            logits=logits,
            tokens=self.tokens[:, : self.tokens.shape[1] - count],
            lengths=self.lengths - count,
            features=tuple(outputs[:, : outputs.shape[1] - count] for outputs in self.features),
        )

    def features_of(self, layers: Sequence[int], tokens: slice = slice(None)) -> Tensor:
        """Concatenated outputs of some of the recorded layers, [B, m, len(layers) * hidden], of all or some tokens."""
        outputs = []
        for layer in layers:
            index = self.needs.features.index(layer)
            outputs.append(self.features[index][:, tokens])
        return torch.cat(outputs, dim=-1)

    def attention_mask(self) -> Tensor | None:
        """[B, M] bool as transformers expects it; None where no layer needs one.

        Once entries were evicted, full-attention layers know their padding, and the mask is for the bounded layers.
        """
        layers: list[Any] = self.cache.layers
        needed = any(is_bounded(layer) or layer.token_mask is not None for layer in layers)
        return self.tokens_mask if needed else None


class Checkpoint:
    """A state before an answer, to which the state after it can be taken back.

    It holds what cropping cannot restore: recordings, bounded layers, and with `copies` (entries are evicted or read
    again while the answer is decoded) the entries. Otherwise these are taken from the state after the answer, so that
    none is held twice.
    """

    def __init__(self, state: State, copies: bool) -> None:
        self.length = state.tokens.shape[1]
        self.logits = state.logits
        self.recorded = [layer.recorded for layer in state.layers]
        self.copy = state.copy() if copies else None
        empty = [KeptLayer() for _ in state.layers]
        self.bounded = with_full_layers(state.cache, empty) if state.has_plain_entries and not copies else None

    def restored(self, after: State) -> State:
        """A copy of the state as it was, from the state `after` the answer.

        Raises:
            UserError: the state's method stores entries in its own form.
        """
        if self.copy is not None:
            return self.copy.copy()
        if self.bounded is None:
            raise UserError("crop: entries in a form of their own cannot be cropped", field="crop", code="state")
        after.require_unchanged()
        count = after.tokens.shape[1] - self.length
        layers = [layer.share() for layer in after.layers]
        for layer, recorded in zip(layers, self.recorded, strict=True):
            layer.crop(-count)
            layer.recorded = recorded
        return after._shortened(count, self.logits, with_full_layers(self.bounded, layers))


@dataclass
class PassRecorder:
    """Records the `needs` of one forward pass in the layers of the cache that it appends to.

    Attributes:
        cache: The cache.
        needs: What to record.
        mask: [B, C + q] bool over the entries after the pass, False for padding; None when none is.
        after_layer: Returns the layer to keep for each that was read; attention still uses the whole layer, which is
            freed after it.
        tail: Observers that are read after the pass's own tokens; the cache forgets them.
        layers_read: Number of layers with full attention that were read so far.
        seconds: Time spent summing accumulated attention.
    """

    cache: Cache
    needs: Needs
    mask: Tensor | None
    after_layer: AfterLayer | None = None
    tail: Tail | None = None
    layers_read: int = 0
    seconds: float = 0.0
    _ahead: Tensor | None = None  # of the pass's own tokens
    _scores: dict[Scorer, Tensor] = field(default_factory=dict)  # of the layer that is being read

    def score(self, index: int, attention: nn.Module, hidden: Tensor) -> None:
        """Score a pass's tokens in a layer, from the input of its attention [B, q, hidden]."""
        layer: Any = self.cache.layers[index]
        before = layer.recorded.scores if layer.recorded else {}
        self._scores = {}
        for scorer in self.needs.scorers:
            scores = scorer(index, self.layers_read, attention, hidden, layer.seen)
            self._scores[scorer] = scorer.joined(before.get(scorer), scores)

    def __call__(
        self, index: int, query: Tensor, key: Tensor, softmax: Softmax, real: Tensor | None, mask: Any
    ) -> None:
        """See `keepsight.runtime.attention.RecordLayer`."""
        layer = self.cache.layers[index]
        if not isinstance(layer, KeptLayer):
            return  # bounded: nothing is scored there

        observer_queries = None
        if self.tail is not None:
            observers = self.tail.count
            observer_queries = query[:, :, -observers:]
            query = query[:, :, :-observers]
            layer.crop(-observers)  # attention still gets the entries of the observers
            if mask is not None and len(mask.shape) == 4:
                mask = mask[..., :-observers, :-observers]

        before = layer.recorded or Recorded(softmax)
        if not self.layers_read and mask is not None:  # layers with full attention have one mask
            rows = query.shape[2]
            if not self.needs.accumulated:
                rows = min(rows, self.needs.window)
            self._ahead = seen_ahead(mask, rows)
        if isinstance(layer, RaggedLayer) and self.needs.accumulated:
            key, _, real = layer.attended()  # `key` is of the new tokens

        queries = query_mask = ahead = accumulated = statistics = None
        if self.needs.window:
            queries, query_mask, ahead = self._window(before, query)
        if self.needs.accumulated:
            start = time.perf_counter()
            accumulated = self._accumulated(before.accumulated, query, key, softmax, real)
            self.seconds += time.perf_counter() - start
        if self.needs.statistics:
            if softmax.bias is not None:
                raise left_out(STATISTICS)
            statistics = self._statistics(layer, before.statistics, query)
        layer.recorded = Recorded(
            softmax, queries, query_mask, ahead, accumulated, self._scores, statistics, scored=before.scored
        )

        if self.tail is not None and observer_queries is not None:
            observed = self.tail.score(observer_queries, key, softmax, self.mask, layer.recorded, layer.kv_heads)
            layer.recorded = replace(layer.recorded, observed=observed)
        if self.after_layer is not None:
            self.cache.layers[index] = self.after_layer(self.cache, self.layers_read, layer)
        self.layers_read += 1

    def _window(self, before: Recorded, query: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`queries`, `query_mask` and `ahead` of `Recorded` after a pass with queries [B, H, q, d]."""
        window = self.needs.window
        recent = query[:, :, -window:]
        if before.queries is not None and recent.shape[2] < window:
            recent = torch.cat([before.queries, recent], dim=2)[:, :, -window:]
        queries = recent.clone()  # a slice would keep the whole prompt's queries alive

        width = queries.shape[2]
        query_mask = None if self.mask is None else self.mask[:, -width:].to(query.device)
        if before.ahead is None and self._ahead is None:
            return queries, query_mask, None

        if self._ahead is None:
            ahead = queries.new_zeros(len(queries), min(query.shape[2], width), dtype=torch.long)
        else:
            ahead = self._ahead[:, -width:]
        if before.ahead is None:
            earlier = ahead.new_zeros(len(queries), width - ahead.shape[1])
        else:
            earlier = before.ahead.to(ahead.device)
        return queries, query_mask, torch.cat([earlier, ahead], dim=1)[:, -width:]

    def _statistics(self, layer: KeptLayer, before: QueryStatistics | None, query: Tensor) -> QueryStatistics:
        assert layer.origin is not None
        first = layer.seen - query.shape[2]
        return with_queries(before, Rotary(*layer.origin, latent=True), query, first, self.mask)

    def _accumulated(
        self, before: Tensor | None, query: Tensor, key: Tensor, softmax: Softmax, real: Tensor | None
    ) -> Tensor:
        queries = query.shape[2]
        key_mask = self.mask if real is None else real
        query_mask = None if self.mask is None else self.mask[:, -queries:]
        total = observed_attention(
            query,
            key,
            softmax,
            key.shape[2],
            key_mask=key_mask,
            query_mask=query_mask,
            ahead=self._ahead,
            reduction="sum",
        )
        if before is not None:
            total[..., :-queries] += before
        return total


@contextmanager
def _recorded_in_hooks(model: Reader, needs: Needs, recorder: PassRecorder | None) -> Iterator[RecordFeatures | None]:
    """Within the block, hooks record what `needs` asks for beside the attention; yields the recorded features."""
    with ExitStack() as hooks:
        record_features = None
        if needs.features:
            record_features = hooks.enter_context(RecordFeatures(model, needs.features))
        if needs.scorers and recorder is not None:
            hooks.enter_context(WatchInputs(model, recorder.score))
        yield record_features


def prefill(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    chunk: int | None = None,
    between: Callable[[], None] | None = None,
    needs: Needs = WINDOW,
    after_layer: AfterLayer | None = None,
    images: Images | None = None,
    rope_lengths: Tensor | None = None,
    tail: Tail | None = None,
) -> State:
    """Run prompts through a model.

    Args:
        model: A causal language model.
        input_ids: [B, N] int64, padded on the left.
        attention_mask: [B, N], 0 for padding; None when no row is padded.
        chunk: Tokens per forward pass; None for the whole prompt in one. The result is the same: eviction waits for
            the whole prompt, so that every token attends to all before it.
        between: Called between two passes, such as to decode other answers meanwhile. `RunningAnswers` say how many
            tokens each pass reads, in place of `chunk`; their own tokens are read in the passes themselves, but for the
            last, where model and `needs` allow it.
        needs: What to record of the prompt for observers.
        after_layer: Returns the layer to keep for each that the last pass has read, such as an evicted one.
        images: Images in the prompts, which are then read in one pass.
        rope_lengths: [B] int64, the lengths of the texts that the prompts begin, where RoPE depends on it; by default
            that of the longest prompt of the batch, for all rows.
        tail: Observers that the last pass reads after the prompt, for a model and needs that `can_read_tail` allows;
            with images it has the prompt's embeddings too, in place of which nothing of them is read. The observers'
            scores are in what the layers recorded, before `after_layer` is called.

    Raises:
        UserError: the model is not supported or reads no images, or images are to be read in chunks.
    """
    return _prefill(
        model,
        input_ids,
        attention_mask,
        chunk=chunk,
        between=between,
        needs=needs,
        after_layer=after_layer,
        images=images,
        rope_lengths=rope_lengths,
        tail=tail,
    )[0]


def pass_tokens(chunk: int | None, between: Callable[[], None] | None, most: int) -> int:
    """How many tokens the next pass of a prefill reads; `most` in one pass. See `prefill`."""
    if isinstance(between, RunningAnswers):
        return between.pass_tokens()
    return chunk or most


@torch.no_grad()
def _prefill(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    *,
    chunk: int | None = None,
    between: Callable[[], None] | None = None,
    needs: Needs = WINDOW,
    after_layer: AfterLayer | None = None,
    images: Images | None = None,
    rope_lengths: Tensor | None = None,
    tail: Tail | None = None,
    logits_to_keep: int = 1,
) -> tuple[State, Tensor]:
    """`prefill`, and the logits [B, q, V] float32 of the last `logits_to_keep` tokens of its last pass."""
    if chunk is not None:
        require_whole("prefill", 1, prefill_chunk_size=chunk)
        if images is not None:
            raise UserError(
                "a prompt with images is read in one pass; leave out prefill_chunk_size",
                field="prefill_chunk_size",
                code="conflict",
            )
    batch, length = input_ids.shape
    mask = None
    lengths = torch.full((batch,), length, device=input_ids.device)
    if attention_mask is not None and not attention_mask.bool().all():
        mask = attention_mask.bool()
        lengths = mask.sum(dim=1)

    positions, rope_offset = _rope_positions(model, input_ids, mask, lengths, images)
    batch_offset: Tensor | Literal[0] = 0
    if length_limit(model.config) is not None:
        row_lengths = lengths + rope_offset
        if rope_lengths is None:
            rope_lengths = row_lengths.amax().expand(batch)
        batch_offset = rope_lengths - row_lengths

    cache = empty_cache(model, mask)
    prompts = _Prompts(model, cache, input_ids, mask, positions, rope_lengths, images, needs)
    answers = None
    if isinstance(between, RunningAnswers) and mask is None and not (needs.features or needs.scorers):
        answers = between if can_read_together(model, cache) else None
    answers_were_read = False  # in the pass before
    start = 0
    end = 0
    while end < length:
        start = end
        end = min(start + pass_tokens(chunk, between, length), length)
        is_last = end == length
        if answers is not None and not is_last and prompts.read_with_answers(start, end, answers):
            answers_were_read = True
            continue
        # The last pass cannot carry the answers' tokens, so they get a step before it; otherwise they would wait two
        # passes.
        if start and between is not None and (is_last or not answers_were_read):
            between()
        answers_were_read = False
        if is_last:
            logits = prompts.read(start, end, logits_to_keep, after_layer, tail)
        else:
            prompts.read(start, end, logits_to_keep)

    logits = logits.float()
    state = State(
        cache,
        logits[:, -1],
        input_ids,
        lengths,
        needs,
        prompts.features,
        rope_offset,
        batch_offset,
        padded=mask is not None,
        seconds=prompts.seconds,
        images=images,
    )
    return state, logits


@dataclass
class _Prompts:
    """Prompts that a model reads pass by pass.

    Attributes:
        model: The model.
        cache: Holds the entries of the tokens read so far.
        ids: [B, N] int64, padded on the left.
        mask: [B, N] bool, False for padding; None when no row is padded.
        positions: RoPE positions, [B or 1, N] int64; [3, B, N] under M-RoPE.
        rope_lengths: As for `run`.
        images: Images in the prompts, which are then read in one pass; None for none.
        needs: What is recorded of the tokens.
        features: As in `State`, of the tokens read so far.
        seconds: As in `State`, so far.
    """

    model: PreTrainedModel
    cache: Cache
    ids: Tensor
    mask: Tensor | None
    positions: Tensor
    rope_lengths: Tensor | None
    images: Images | None
    needs: Needs
    features: tuple[Tensor, ...] = ()
    seconds: float = 0.0

    def read(
        self, start: int, end: int, logits_to_keep: int, after_layer: AfterLayer | None = None, tail: Tail | None = None
    ) -> Tensor:
        """Read the tokens from `start` up to `end`; returns the logits [B, q, V] of the last `logits_to_keep`.

        `after_layer` and `tail` are as for `prefill`.

        Raises:
            UserError: not everything was recorded.
        """
        mask = None if self.mask is None else self.mask[:, :end]
        recorder = PassRecorder(self.cache, self.needs, mask, after_layer, tail)
        inputs: dict[str, Any] = {"input_ids": self.ids[:, start:end]}
        if self.images is not None:
            inputs = {**self.images.with_tokens(self.ids)}
        inputs["attention_mask"] = mask
        inputs["position_ids"] = self.positions[..., start:end]
        inputs["logits_to_keep"] = logits_to_keep
        adapter: AbstractContextManager[object] = nullcontext()
        if tail is not None:
            adapter = tail.adapter()
            inputs = _with_tail(self.model, tail, inputs)

        with _recorded_in_hooks(self.model, self.needs, recorder) as record_features, adapter:
            output = run(self.model, self.cache, recorder=recorder, rope_lengths=self.rope_lengths, **inputs)
        if record_features is not None:
            self.features = record_features.after(self.features)
        self.seconds += recorder.seconds
        self._require_recorded(recorder, end)
        logits: Tensor = output.logits
        return logits

    def read_with_answers(self, start: int, end: int, answers: RunningAnswers) -> bool:
        """Read tokens together with the next one of each answer; False where the answers are to go on by themselves.

        Prompt and answers are such that `can_read_together` holds, and no row is padded.
        """
        next_tokens = answers.next_tokens(self.model)
        if next_tokens is None:
            return False
        recorder = PassRecorder(self.cache, self.needs, None)
        prompt = (self.cache, self.ids[:, start:end], self.positions[:, start:end])
        recorder_of_prompt = None if self.needs == Needs() else recorder
        answers.take_logits(read_prompt_and_answers(self.model, prompt, next_tokens, recorder_of_prompt))
        self.seconds += recorder.seconds
        return True

    def _require_recorded(self, recorder: PassRecorder, end: int) -> None:
        """Refuse (`UserError`) a model whose pass up to `end` has not recorded or appended to every `KeptLayer`."""
        layers = [layer for layer in self.cache.layers if isinstance(layer, KeptLayer)]
        if recorder.layers_read != len(layers) or any(layer.seen != end for layer in layers):
            raise UserError(
                f"{self.model.config.model_type} has its own kind of attention or cache, so that queries or entries "
                "cannot be recorded; load another model, such as Llama, Qwen, Mistral or Gemma",
                field="model",
                code="model",
            )


def _rope_positions(
    model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None, lengths: Tensor, images: Images | None
) -> tuple[Tensor, Tensor | Literal[0]]:
    """Position ids of prompts of `lengths` [B] tokens, [B or 1, N] or [3, B, N] (M-RoPE), and `State.rope_offset`."""
    if images is not None:
        images.require_read_by(model)
        image_positions = images.positions_in(model, input_ids, mask)
        if image_positions is not None:
            return image_positions, image_positions.amax(dim=(0, 2)) + 1 - lengths
    return positions_of(mask, input_ids.shape[1], input_ids.device), 0


def can_read_tail(model: PreTrainedModel, needs: Needs) -> bool:
    """Whether observers can be read with a prompt, and `needs` be recorded in the same pass.

    A sliding window or a recurrent state would take in the observers too, and cannot forget them. RoPE that depends on
    the length would turn the prompt's keys as those of a longer text. Where a prompt's tokens see those after them
    (PaliGemma), they would see the observers.
    """
    if getattr(model.config.get_text_config(decoder=True), "use_bidirectional_attention", None):
        return False
    if needs.accumulated or needs.statistics or needs.features or needs.scorers:
        return False
    return set(layer_kinds(model.config)) == {FULL} and length_limit(model.config) is None


def _with_tail(model: PreTrainedModel, tail: Tail, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a pass that reads observers after its tokens; the logits stay those of its last token."""
    mask = inputs["attention_mask"]
    positions = inputs["position_ids"]
    if mask is not None:
        mask = functional.pad(mask, (0, tail.count), value=True)
    token_embeddings = tail.prompt
    if token_embeddings is None:
        token_embeddings = model.get_input_embeddings()(inputs["input_ids"])
    length = token_embeddings.shape[1]
    last = positions.amax(dim=-1, keepdim=True)
    if positions.dim() == 3:
        last = last.amax(dim=0, keepdim=True)  # what follows an image is at one position in all dimensions of M-RoPE
    observer_positions = last + 1 + torch.arange(tail.count, device=positions.device)
    observer_positions = observer_positions.expand(*positions.shape[:-1], -1)
    return {
        "inputs_embeds": torch.cat([token_embeddings, tail.embeddings.to(token_embeddings)], dim=1),
        "attention_mask": mask,
        "position_ids": torch.cat([positions, observer_positions], dim=-1),
        "logits_to_keep": slice(length - 1, length),  # no tensor, which would have to be on the last layer's device
    }


@torch.no_grad()
def read(
    model: Reader, state: State, tokens: Tensor, *, logits_to_keep: int = 0, more: int = 0
) -> tuple[State, Tensor]:
    """Read more tokens after a state, before or after eviction; the state's cache grows.

    Where the model drops its cache as the text grows beyond a limit, everything is read again (see `rope_length`).

    Args:
        model: The model, without adapters.
        state: State to read after.
        tokens: [B, q] int64, none of them padding.
        logits_to_keep: Number of last tokens whose logits are computed; 0 for all.
        more: Number of tokens that belong to the same text and are read next, where RoPE depends on the length.

    Returns:
        The state after them, and the logits [B, q, V] float32 of all q tokens, or of the last ones.

    Raises:
        UserError: everything is to be read again, and entries were evicted; or the state's cache has grown since the
            state was returned.
    """
    state.require_unchanged()
    count = tokens.shape[1]
    limit = length_limit(model.config)
    if limit is not None:
        remaining = remaining_tokens(model, state, count)
        if remaining:
            return _read_beyond(model, state, tokens, limit, remaining, logits_to_keep)

    mask = None if state.padded is False else state.attention_mask()
    if mask is not None:
        mask = functional.pad(mask, (0, count), value=True)
    recorder = None
    if state.needs != Needs():
        recorder = PassRecorder(state.cache, state.needs, mask)
    first_positions = state.lengths + state.rope_offset
    rope_lengths = None if limit is None else state.rope_lengths + count + more
    with _recorded_in_hooks(model, state.needs, recorder) as record_features:
        output = run(
            model,
            state.cache,
            recorder=recorder,
            input_ids=tokens,
            attention_mask=mask,
            position_ids=first_positions[:, None] + torch.arange(count, device=tokens.device),
            rope_lengths=rope_lengths,
            logits_to_keep=logits_to_keep,
        )

    logits = output.logits.float()
    features = state.features
    if record_features is not None:
        features = record_features.after(features)
    seconds = state.seconds
    if recorder is not None:
        seconds += recorder.seconds
    after = replace(
        state,
        logits=logits[:, -1],
        tokens=torch.cat([state.tokens, tokens], dim=1),
        lengths=state.lengths + count,
        features=features,
        seconds=seconds,
    )
    return after, logits


def remaining_tokens(model: Reader, state: State, count: int) -> list[int]:
    """Of the rows that drop their cache within `count` tokens: how many tokens they read before. See `rope_length`."""
    limit = length_limit(model.config)
    if limit is None or not limit.rereads:
        return []
    return limit.remaining(state.rope_lengths, count)


def must_restart(model: Reader, state: State, count: int) -> bool:
    """Whether `read` cannot read `count` tokens: the model drops its cache there, and entries were evicted."""
    return bool(remaining_tokens(model, state, count)) and not state.is_whole


def _read_beyond(
    model: Reader, state: State, tokens: Tensor, limit: LengthLimit, remaining: list[int], logits_to_keep: int
) -> tuple[State, Tensor]:
    """`read`, where rows grow beyond the limit at which everything is read again, after `remaining` tokens."""
    count = tokens.shape[1]
    until_limit = min(remaining)
    if until_limit:
        first_count = until_limit
        after, logits = read(model, state, tokens[:, :first_count])
    else:
        # Rows at the limit read everything again, with the tokens up to where the next row reaches it.
        first_count = min([*filter(None, remaining), count])
        after, logits = _read_again(model, state, tokens[:, :first_count], limit)

    if first_count < count:
        after, later_logits = read(model, after, tokens[:, first_count:])
        logits = torch.cat([logits, later_logits], dim=1)
    return after, logits[:, -logits_to_keep:]


def _read_again(model: Any, state: State, tokens: Tensor, limit: LengthLimit) -> tuple[State, Tensor]:
    """The state after more tokens [B, q], all of whose tokens are read again, and the logits [B, q, V] of the q."""
    if not state.is_whole:
        raise limit.error("reads everything again there, which an evicted cache cannot")
    count = tokens.shape[1]
    mask = state.tokens_mask
    if mask is not None:
        mask = functional.pad(mask, (0, count), value=True)
    after, logits = _prefill(
        model,
        torch.cat([state.tokens, tokens], dim=1),
        mask,
        needs=state.needs,
        rope_lengths=state.rope_lengths + count,
        logits_to_keep=count,
    )
    recorded_tokens = count
    if state.features:
        recorded_tokens += state.features[0].shape[1]
    features = tuple(outputs[:, -recorded_tokens:] for outputs in after.features)
    return replace(after, features=features, seconds=state.seconds + after.seconds), logits


def same_frequencies(model: Reader, state: State, count: int) -> int:
    """How many of `count` >= 1 further tokens, at least 1, have the same RoPE in one pass as one by one."""
    limit = length_limit(model.config)
    before = state.rope_lengths
    while count > 1 and limit is not None and not limit.same(before + 1, before + count):
        count -= 1
    return count


@torch.no_grad()
def read_one_by_one(model: Reader, state: State, tokens: Tensor) -> tuple[State, Tensor]:
    """`read` tokens that were generated: where RoPE depends on the length, each at the length of the text up to it."""
    limit = length_limit(model.config)
    before = state.rope_lengths
    if limit is None or limit.rereads or limit.same(before + 1, before + tokens.shape[1]):
        return read(model, state, tokens)
    logits = list[Tensor]()
    for token in tokens.split(1, dim=1):
        state, token_logits = read(model, state, token)
        logits.append(token_logits)
    return state, torch.cat(logits, dim=1)


def with_observers(model: PreTrainedModel, state: State, count: int) -> State:
    """The state whose keys `count` observing tokens after it look at, as if all were read in one pass.

    That is the state itself, unless the model's RoPE depends on the length and the observing tokens change it: the
    prompt is then read again, for them alone.

    Raises:
        UserError: it is to be read again, and entries were evicted.
    """
    limit = length_limit(model.config)
    before = state.rope_lengths
    if limit is None or limit.same(before, before + count):
        return state
    if not state.is_whole:
        raise limit.error(f"the {count} observing tokens go beyond, where an evicted cache cannot be read again")
    return prefill(model, state.tokens, state.tokens_mask, needs=state.needs, rope_lengths=before + count)


def require_same_frequencies(model: PreTrainedModel, state: State, count: int) -> None:
    """Refuse (`UserError`) `count` more entries of a state that have other RoPE frequencies than its own."""
    limit = length_limit(model.config)
    before = state.rope_lengths
    if limit is not None and not limit.same(before, before + count):
        raise limit.error(f"the {count} entries that the method adds would have other ones than the prompt's")


def positions_of(mask: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Position ids [B, N] (or [1, N] without a mask): real tokens count from 0, padding gets 0."""
    if mask is None:
        return torch.arange(length, device=device)[None]
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


def empty_cache(model: PreTrainedModel, mask: Tensor | None = None) -> Cache:
    """An empty cache, with a layer of its kind for each layer of the model.

    `mask` [B, N] bool is False for padding of the prompts that will be read; None when no row is padded. A `UserError`
    if the model is not supported.
    """
    require_supported(model)
    layers = list[Any]()
    layers_of_model: list[Any] = DynamicCache(config=model.config).layers
    for index, layer in enumerate(layers_of_model):
        recurrent = None
        if isinstance(layer, LinearAttentionCacheLayerMixin) and isinstance(layer, DynamicLayer):
            recurrent = LinearAttentionLayer(number_of_states=layer.number_of_states)
        if isinstance(layer, LinearAttentionAndSlidingWindowAttentionLayer):
            layer = DynamicSlidingWindowLayer(sliding_window=layer.sliding_window)
        elif (
            type(layer) is DynamicLayer
            or isinstance(layer, LinearAttentionAndFullAttentionLayer)
            or hasattr(layer, "update_indexer")
        ):
            has_indexer = hasattr(layer, "update_indexer")
            layer = KeptLayer()
            if has_indexer:
                layer.indexed = int(model.config.get_text_config(decoder=True).index_head_dim)
            layer.has_positions = has_distance_bias(model.config)
            layer.token_mask = mask
            layer.origin = (model, index)
        if recurrent is not None:
            _attach_recurrent(layer, recurrent)
        layers.append(layer)
    _share_entries(model, layers)
    if has_latents(model):
        for layer, expansion in zip(full_layers(Cache(layers=layers)), expansions(model), strict=True):
            layer.expansion = expansion
    return StateCache(layers=layers)


def _share_entries(model: PreTrainedModel, layers: list[Any]) -> None:
    """Let the layers that read the entries of others name them, and these know how many read them."""
    owners = entry_owners(model.config)
    for index, owner in enumerate(owners):
        if owner != index:
            layers[index] = SharedEntries(owner)
    for owner, readers in Counter(owners).items():
        if isinstance(layers[owner], KeptLayer):
            layers[owner].readers = readers


def full_layers(cache: Cache) -> list[Any]:
    """The layers with full attention."""
    return [layer for layer in cache.layers if not is_bounded(layer)]


def with_full_layers(cache: Cache, layers: Iterable[Any]) -> Cache:
    """A cache with other layers in place of those with full attention, and copies of the bounded ones."""
    replacements = iter(layers)
    new_layers = list[Any]()
    cache_layers: list[Any] = cache.layers
    for layer in cache_layers:
        recurrent = recurrent_of(layer)
        if not is_bounded(layer):
            new_layer = next(replacements)
            if new_layer is layer and recurrent is not None:
                new_layer = copy.copy(layer)
            readers = getattr(layer, "readers", 1)
            if readers > 1:
                _require_shareable(new_layer, readers)
                new_layer.readers = readers
            if isinstance(new_layer, OwnAttention) and not new_layer.can_be_shared:
                require_plain_entries(layer)
        elif isinstance(layer, DynamicLayer):
            new_layer = copy.copy(layer)  # a window's tensors are replaced when it slides
        else:
            new_layer = _with_own_state(layer)  # a recurrent state is written in place
        if recurrent is not None:
            _attach_recurrent(new_layer, _with_own_state(recurrent))
        new_layers.append(new_layer)
    return StateCache(layers=new_layers)


def _with_own_state(layer: Any) -> Any:
    """A copy of a layer with copies of its tensors, by number or by name.

    `copy.deepcopy` would give tensors without values, of which trainings are planned, another mode than all others.
    """
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, Tensor):
            setattr(twin, name, value.clone())
        elif isinstance(value, dict):
            copies = {key: item.clone() if isinstance(item, Tensor) else item for key, item in value.items()}
            setattr(twin, name, copies)
        elif isinstance(value, list):
            setattr(twin, name, [item.clone() if isinstance(item, Tensor) else item for item in value])
    return twin


def _attach_recurrent(layer: Any, recurrent: LinearAttentionLayer) -> None:
    """Let a layer, also a bounded one of transformers' own, keep a recurrent state beside its entries."""
    layer.recurrent = recurrent


def _require_shareable(layer: Any, readers: int) -> None:
    """Refuse (`UserError`) a layer that one decoder layer alone can attend to in place of one that several read."""
    if isinstance(layer, OwnAttention) and not layer.can_be_shared:
        raise UserError(
            f"{readers} layers of this model read the same entries, which this method stores or reads in its own way; "
            "take one that evicts, such as snapkv",
            field="model",
            code="model",
        )


def require_plain_entries(layer: Any) -> None:
    """Refuse (`UserError`) a layer whose entries hold more than keys and values, for a method that would lose it."""
    if getattr(layer, "has_positions", False):
        raise left_out(STORES_ENTRIES)
    if getattr(layer, "indexed", 0):
        raise UserError(
            "an indexer of this model selects what is read, and this method stores or reads entries in its own way; "
            "take one that evicts, such as snapkv, or own_indexer",
            field="model",
            code="model",
        )


def share(cache: Cache) -> Cache:
    """An independent cache of the same entries, without copies: appending to one leaves the other unchanged."""
    return with_full_layers(cache, [layer.share() for layer in full_layers(cache)])


def has_recurrent(cache: Cache) -> bool:
    """Whether a layer has a recurrent state, which cannot be rolled back."""
    return any(
        isinstance(layer, LinearAttentionCacheLayerMixin) or recurrent_of(layer) is not None for layer in cache.layers
    )


def has_bounded(cache: Cache) -> bool:
    """Whether a layer keeps more than the entries of tokens, or fewer: a window, or a recurrent state."""
    return has_recurrent(cache) or any(isinstance(layer, DynamicSlidingWindowLayer) for layer in cache.layers)


def record_past(cache: Cache) -> None:
    """Let bounded layers keep what `roll_back` will need.

    Raises:
        UserError: one of them has a recurrent state, which cannot be rolled back.
    """
    if has_recurrent(cache):
        raise UserError(
            "a recurrent state cannot forget tokens; use a method that reads no token twice",
            field="state",
            code="state",
        )
    cache.activate_past_recording()


def roll_back(cache: Cache, count: int) -> None:
    """Roll bounded layers that have recorded the past back by `count` tokens, and stop recording."""
    layers: list[Any] = cache.layers
    for layer in layers:
        if is_bounded(layer):
            layer.crop(-count)
            layer.record_past = False


def cache_bytes(cache: Cache) -> int:
    """Bytes of all keys and values: entries of all layers, rows and KV heads x head dimension x 2 x item size.

    The windows and states of bounded layers are in it; room for tokens to come is not.
    """
    return sum(_bytes(layer) for layer in cache.layers)


def _bounded_bytes(layer: Any, appended: int) -> int:
    """Bytes of a bounded layer after `appended` more tokens: a window grows until it is full."""
    size = _bytes(layer)
    if not isinstance(layer, DynamicSlidingWindowLayer) or layer.keys is None or not size:
        return size
    recurrent_bytes = _recurrent_bytes(layer)
    present = layer.keys.shape[2]
    grown = max(present, min(present + appended, layer.sliding_window - 1))
    return recurrent_bytes + (size - recurrent_bytes) // present * grown


def _recurrent_bytes(layer: Any) -> int:
    """Bytes of the recurrent state that a layer keeps beside its entries; 0 without one."""
    recurrent = recurrent_of(layer)
    return 0 if recurrent is None else _bytes(recurrent)


def _bytes(layer: Any) -> int:
    """Bytes of a layer's entries and recurrent states."""
    recurrent_bytes = _recurrent_bytes(layer)
    if isinstance(layer, DummyLayer):
        return 0
    if isinstance(layer, KeptLayer):
        return layer.nbytes + recurrent_bytes
    if isinstance(layer, DynamicLayer):
        tensors = [layer.keys, layer.values]
    else:
        tensors = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return recurrent_bytes + sum(tensor.nbytes for tensor in tensors if tensor is not None)
