"""Exact speculative decoding: an EAGLE draft head drafts a chain of tokens, and the model verifies them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.generation import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from typing_extensions import override

from keepsight.errors import Positive, UserError, as_options, require_whole
from keepsight.models.decoder import context_of
from keepsight.models.draft_head import EagleHead
from keepsight.models.draft_sources import DraftHeadSource
from keepsight.runtime.attention import Reader, Softmax, grouped_attention
from keepsight.runtime.drafting.observer import DraftIds, until_end
from keepsight.runtime.generate import CacheMethod, Decoded, FullCache, GenerateRequest, end_ids
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.state import (
    Needs,
    State,
    has_recurrent,
    positions_of,
    prefill,
    read,
    record_past,
    roll_back,
    same_frequencies,
)

_ROWS_AT_ONCE = 1024  # bounds the memory of a long prompt's mask and hidden layer


class HeadCache(KeptLayer):
    """The keys and values of a draft head's rows, and `queries` [B, H, <= window, d] of the last rows, after RoPE.

    `mask` [B, m] bool is False for padding among the first m rows, None when none is; later rows are all real.
    """

    queries: Tensor | None = None

    def __init__(self, mask: Tensor | None = None, window: int = 0) -> None:
        super().__init__()
        self.mask = mask
        self.window = window

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append rows and let them attend causally; see `keepsight.models.draft_head.HeadAttend`."""
        self.update(key, value)
        if self.window:
            queries = query
            if self.queries is not None:
                queries = torch.cat([self.queries, query], dim=2)
            self.queries = queries[:, :, -self.window :].clone()
        mask = self._mask(query.shape[2], query.device)
        return grouped_attention(query, self.keys, self.values, mask, Softmax(query.shape[3] ** -0.5))

    def keep_first(self, rows: int) -> None:
        """Keep the first `rows` rows; drop the others and their queries."""
        extra = self.seen - rows
        if not extra:
            return
        self.crop(-extra)
        if self.queries is not None:
            self.queries = self.queries[:, :, : self.queries.shape[2] - extra]

    def _mask(self, new: int, device: torch.device) -> Tensor:
        """[B or 1, 1, new, rows] bool: which rows each of the last `new` rows may see; padding sees itself."""
        key_positions = torch.arange(self.seen, device=device)
        query_positions = key_positions[self.seen - new :, None]
        causal = (key_positions <= query_positions)[None, None]
        if self.mask is None:
            return causal
        real = functional.pad(self.mask, (0, self.seen - self.mask.shape[1]), value=True)
        itself = key_positions == query_positions
        return causal & real[:, None, None] | itself


class ChainDrafter:
    """Drafts greedily after what a model has read; the head's cache stays between drafts.

    The head is on the model's device. `mask` [B, N] bool is False for padding on the left of the N tokens read at
    first, None when none is. The cache keeps the queries of the last `window` rows.
    """

    def __init__(self, head: EagleHead, model: PreTrainedModel, mask: Tensor | None = None, window: int = 0) -> None:
        self.head = head
        self.cache = HeadCache(mask, window)
        self._embed = head.embedding(model)
        self._dtype = next(head.parameters()).dtype
        self._verified = 0

    @torch.no_grad()
    def read(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Read verified rows, which replace the rows drafted since the last ones.

        `features` [B, q, layers * hidden] are the model's of the next q >= 1 tokens, `tokens` [B, q] int64 those after
        each. Returns the head's output for the last of them, [B, 1, hidden].
        """
        self.cache.keep_first(self._verified)
        hidden = None
        for start in range(0, features.shape[1], _ROWS_AT_ONCE):
            block = slice(start, start + _ROWS_AT_ONCE)
            combined = self.head.combine(features[:, block].to(self._dtype))
            hidden = self._forward(combined, tokens[:, block])[:, -1:]
        assert hidden is not None
        self._verified = self.cache.seen
        return hidden

    @torch.no_grad()
    def draft(self, features: Tensor, tokens: Tensor, count: int) -> Tensor:
        """Read verified rows and draft the `count` >= 1 tokens after them, [B, count] int64; arguments as `read`."""
        hidden = self.read(features, tokens)
        drafted = [self._next(hidden)]
        while len(drafted) < count:
            hidden = self._forward(hidden, drafted[-1])
            drafted.append(self._next(hidden))
        return torch.cat(drafted, dim=1)

    def _forward(self, features: Tensor, tokens: Tensor) -> Tensor:
        """The head's outputs [B, q, hidden] for its next rows."""
        end = self.cache.seen + tokens.shape[1]
        mask = self.cache.mask
        if mask is not None:
            mask = functional.pad(mask, (0, end - mask.shape[1]), value=True)
        positions = positions_of(mask, end, tokens.device)[:, self.cache.seen :]
        return self.head(self._embed(tokens).to(self._dtype), features, positions, self.cache.attend)

    def _next(self, hidden: Tensor) -> Tensor:
        """The most likely token [B, 1] after the head's output [B, 1, hidden]."""
        return self.head.target_ids(self.head.logits(hidden).argmax(dim=-1))


def _recorded_rows(state: State, layers: tuple[int, ...], newest: Tensor) -> tuple[Tensor, Tensor]:
    """Features [B, m, layers * hidden] of a state's last m tokens, and the token after each, [B, m].

    `newest` [B, 1] int64 is the token after all that the state has read.
    """
    if not state.features or not set(layers) <= set(state.needs.features):
        raise UserError(
            f"the features of layers {list(layers)} that the draft head reads were not recorded: prefill with "
            f"needs=Needs(features={layers})",
            field="features",
            code="missing",
        )
    features = state.features_of(layers)
    next_tokens = torch.cat([state.tokens, newest], dim=1)[:, -features.shape[1] :]
    return features, next_tokens


@dataclass(frozen=True)
class Round:
    """One pass of the model over drafted tokens, and how many tokens of the answer it emitted.

    `judged` counts the drafted tokens that were verified, up to the answer's end if the draft goes beyond it, and
    `accepted` the first of them that the model agreed with.
    """

    judged: int
    accepted: int
    emitted: int


@dataclass(frozen=True)
class Speculated(Decoded):
    """An answer, the state after it, without recordings, and the outcome of each pass."""

    rounds: tuple[Round, ...]


def acceptance_length(rounds: Sequence[Round]) -> float:
    """Mean tokens per pass of the model after the prefill; 1 is plain decoding."""
    return sum(model_pass.emitted for model_pass in rounds) / max(len(rounds), 1)


def acceptance_by_position(rounds: Sequence[Round]) -> list[float]:
    """The share of drafts whose first i tokens were all accepted, for i = 1, 2, ..."""
    longest = max((model_pass.judged for model_pass in rounds), default=0)
    shares = []
    for index in range(longest):
        judged = 0
        accepted = 0
        for model_pass in rounds:
            judged += model_pass.judged > index
            accepted += model_pass.accepted > index
        shares.append(accepted / judged)
    return shares


@torch.no_grad()
def decode_speculatively(
    model: PreTrainedModel,
    state: State,
    head: EagleHead,
    stopping_criteria: StoppingCriteriaList,
    *,
    tokens: int = 5,
    prompt_ids: Tensor | None = None,
    logits_processor: LogitsProcessorList | None = None,
    streamer: BaseStreamer | None = None,
) -> Speculated:
    """The greedy answer that `decode` gives, in fewer passes of the model; other arguments are those of `decode`.

    The state is of one prompt, evicted or not, with the head's features: prefill with
    `needs=Needs(features=head.layers_of(model))`. Its cache grows. Drafts have `tokens` tokens; fewer near the answer's
    maximum length and the end of the model's context. A `UserError` if it is a batch, entries are packed, a layer has a
    recurrent state, features were not recorded, or `tokens` is below 1.
    """
    _require_single(state.tokens)
    require_whole("speculative decoding", 1, tokens=tokens)
    cache = state.cache
    if has_recurrent(cache):
        raise UserError(
            "speculative decoding: a recurrent state cannot forget a rejected draft; decode without a head",
            field="state",
            code="state",
        )
    if not cache.is_croppable:
        raise UserError(
            "speculative decoding: entries that are packed (kivi, specache) cannot forget a rejected draft",
            field="state",
            code="state",
        )
    layers = head.layers_of(model)
    drafter = ChainDrafter(head, model, state.tokens_mask)
    if prompt_ids is None:
        prompt_ids = state.tokens[:, :0]
    answer = _Answer(prompt_ids, stopping_criteria, logits_processor, streamer)
    answer.add(state.logits)

    tokens_read = int(state.lengths)
    rounds = []
    record_past(cache)  # a window that has slid could not forget a rejected draft
    try:
        while not answer.ended:
            newest = answer.ids[:, -1:]
            room = min(answer.room, context_of(model) - tokens_read) - 1
            draft_length = max(min(tokens, room), 0)
            draft_length = same_frequencies(model, state, draft_length + 1) - 1
            drafted = newest[:, :0]
            if draft_length:
                features, next_tokens = _recorded_rows(state, layers, newest)
                drafted = drafter.draft(features, next_tokens, draft_length)

            # Only the new tokens' features are recorded: the head has read the others.
            state = replace(state, needs=Needs(features=layers), features=())
            state, logits = read(model, state, torch.cat([newest, drafted], dim=1))
            verified = _judge(answer, drafted, logits)
            rejected = draft_length + 1 - verified.emitted
            state = state.crop(rejected, logits[:, verified.emitted - 1])
            rounds.append(verified)
            tokens_read += verified.emitted
    finally:
        roll_back(cache, 0)
    if streamer is not None:
        streamer.end()
    after = replace(state, needs=Needs(), features=())
    return Speculated(answer.ids, after, tuple(rounds))


@dataclass
class _Answer:
    """An answer that grows token by token, as in `decode`."""

    ids: Tensor
    criteria: StoppingCriteriaList
    processor: LogitsProcessorList | None
    streamer: BaseStreamer | None
    ended: bool = False

    @property
    def room(self) -> int:
        """Maximum number of further tokens that the criteria allow."""
        longest = self.criteria.max_length
        if longest is None:
            return torch.iinfo(torch.long).max
        return longest - self.ids.shape[1]

    def add(self, logits: Tensor) -> int:
        """Append the model's token, from its logits [1, V]."""
        scores = logits
        if self.processor:
            scores = self.processor(self.ids, logits)  # type: ignore[arg-type]
        token = scores.argmax(dim=-1)
        self.ids = torch.cat([self.ids, token[:, None]], dim=1)
        if self.streamer is not None:
            self.streamer.put(token.cpu())
        self.ended = bool(self.criteria(self.ids, scores))  # pyright: ignore[reportArgumentType]
        return int(token)


def _judge(answer: _Answer, drafted: Tensor, logits: Tensor) -> Round:
    """Extend the answer by the accepted tokens of a draft [1, n] and one more, from logits [1, n + 1, V]."""
    draft = drafted[0].tolist()
    for index, token in enumerate(draft):
        if answer.add(logits[:, index]) != token:
            return Round(len(draft), accepted=index, emitted=index + 1)
        if answer.ended:
            return Round(judged=index + 1, accepted=index + 1, emitted=index + 1)
    answer.add(logits[:, -1])
    return Round(len(draft), len(draft), len(draft) + 1)


def _require_single(ids: Tensor) -> None:
    if len(ids) != 1:
        raise UserError(
            f"speculative decoding answers one prompt at a time, not {len(ids)}; give them one by one",
            field="input_ids",
            code="range",
        )


@torch.no_grad()
def head_answer(
    model: PreTrainedModel, state: State, drafting: DraftHeadSource, lookahead: int, window: int = 0
) -> tuple[DraftIds, HeadCache]:
    """Let a head answer greedily.

    The state has M >= 2 tokens, with the head's features. The draft has `lookahead` tokens, those after an end token
    being padding. The head's cache keeps the queries of the draft and of the last `window` prompt tokens.

    Returns:
        The draft, whose first token is the model's own, and the head's cache after it: M - 1 rows for the prompt (row t
        is that of token t + 1), and one for each token of the draft but the last.
    """
    first = state.logits.argmax(dim=-1, keepdim=True)
    chain = ChainDrafter(drafting.of(model), model, state.tokens_mask, window + lookahead - 1)
    features, tokens = _recorded_rows(state, drafting.layers, first)
    if lookahead == 1:
        chain.read(features[:, :-1], tokens[:, :-1])
        ids = first
    else:
        ids = torch.cat([first, chain.draft(features, tokens, lookahead - 1)], dim=1)
    draft = DraftIds(ids, until_end(ids, end_ids(model)))
    return draft, chain.cache


@as_options
@dataclass(frozen=True)
class Speculative(CacheMethod):
    """Answers from another method's cache faster, with a draft head: the same greedy answer.

    `generate(model, ids, Speculative(head, SnapKV(128)))`. Only `generate` speculates; a `Conversation` and the
    evaluation decode plainly from the method's states.

    Attributes:
        head: The draft head.
        inner: Method that decides what stays in the cache.
        tokens: Tokens per draft.
    """

    head: EagleHead = field(compare=False, repr=False)
    inner: CacheMethod = FullCache()
    tokens: Positive = 5

    def __post_init__(self) -> None:
        name = type(self.inner).__name__
        if not isinstance(self.inner, CacheMethod):
            raise UserError(
                f"speculative decoding: {name} shortens prompts; give a method that evicts from the cache",
                field="method",
                code="model",
            )
        if self.inner.selects_each_step:
            raise UserError(
                f"speculative decoding: {name} selects what it reads at each step; give the full cache, or a "
                "method that evicts",
                field="method",
                code="model",
            )
        if self.inner.every:
            raise UserError(
                f"speculative decoding: {name} evicts while decoding; make it with every=0",
                field="every",
                code="conflict",
            )

    @override
    def check(self, length: int, context: int) -> None:
        self.inner.check(length, context)
        if not self.inner.shares_prefill(length):
            raise UserError(
                f"speculative decoding: {type(self.inner).__name__} reads this prompt of {length} tokens sparsely, "
                "which leaves the draft head without features; leave out sparse",
                field="sparse",
                code="conflict",
            )

    @override
    def needs(self) -> Needs:
        return self.inner.needs()

    @override
    def compress_state(self, model: PreTrainedModel, state: State) -> State:
        return self.inner.compress_state(model, state)

    @override
    def reader(self, model: PreTrainedModel) -> Reader:
        return self.inner.reader(model)

    @override
    def answer(self, model: PreTrainedModel, request: GenerateRequest) -> Decoded:
        _require_single(request.input_ids)
        decoding = request.decoding
        if decoding["do_sample"]:
            raise UserError("speculative decoding is greedy: give do_sample=False", field="do_sample", code="conflict")
        if request.past is not None:
            raise UserError(
                "speculative decoding: leave out past_key_values, or continue with the inner method",
                field="past_key_values",
                code="conflict",
            )
        self.check(request.input_ids.shape[1], context_of(model))
        needs = self.inner.needs() | Needs(features=self.head.layers_of(model))
        state = prefill(model, request.input_ids, request.mask, chunk=request.chunk, needs=needs)
        return decode_speculatively(
            model,
            self.inner.compress_state(model, state),
            self.head,
            decoding["stopping_criteria"],
            tokens=self.tokens,
            prompt_ids=decoding["prompt_ids"],
            logits_processor=decoding["logits_processor"],
            streamer=decoding["streamer"],
        )
