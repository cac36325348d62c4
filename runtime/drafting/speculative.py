"""Draft heads at work: an EAGLE chain drafts tokens, and the model verifies them (exact speculative decoding)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.generation import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from typing_extensions import override

from keepsight.errors import UserError, require_whole
from keepsight.models.draft_sources import DraftHeadSource
from keepsight.runtime.attention import Reader, Softmax, grouped_attention
from keepsight.runtime.drafting.observer import DraftIds, until_end
from keepsight.runtime.generate import CacheMethod, Decoded, FullCache, GenerateRequest, Reapply, end_ids
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.state import Needs, State, context_of, positions_of, prefill, read

_ROWS_AT_ONCE = 1024  # bounds the memory of a long prompt's mask and hidden layer


class DraftingHead(Protocol):
    """What drafting needs of a head; for shapes see `keepsight.models.draft_head.DraftHead`."""

    def layers_of(self, model: PreTrainedModel) -> tuple[int, ...]:
        """The target's layers whose outputs are the features."""
        ...

    def embedding(self, model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
        """What embeds token ids for the head."""
        ...

    def combine(self, features: Tensor) -> Tensor:
        """The target's features of those layers, concatenated -> what `__call__` takes."""
        ...

    def __call__(
        self,
        embeddings: Tensor,
        features: Tensor,
        positions: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Run the head's layer over new rows."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the head's vocabulary, from the output of a pass."""
        ...

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """The target's ids of the head's."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Its parameters, all of one dtype."""
        ...


class HeadCache:
    """The keys and values of a head's rows; `attend` is the head's attention.

    Args:
        mask: [B, m] bool, False for padding among the first m rows; None when none is. Later rows are all real.
        window: Number of last rows whose queries are kept.

    Attributes:
        queries: [B, H, <= window, d] of the last rows, after RoPE; None before the first row.
    """

    def __init__(self, mask: Tensor | None = None, window: int = 0) -> None:
        self.mask, self.window = mask, window
        self.queries: Tensor | None = None
        self._layer: KeptLayer | None = None

    @property
    def keys(self) -> Tensor:
        """[B, K, rows, d], after RoPE."""
        assert self._layer is not None
        return self._layer.keys

    @property
    def rows(self) -> int:
        """Number of rows."""
        return 0 if self._layer is None else self._layer.keys.shape[2]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append rows and let them attend causally; see `keepsight.models.draft_head.HeadAttend`."""
        if self._layer is None:
            self._layer = KeptLayer(key, value, key.shape[2])
        else:
            self._layer.update(key, value)
        if self.window:
            earlier = query[:, :, :0] if self.queries is None else self.queries
            self.queries = torch.cat([earlier, query], dim=2)[:, :, -self.window :].clone()
        mask = self._mask(query.shape[2], query.device)
        return grouped_attention(query, self._layer.keys, self._layer.values, mask, Softmax(query.shape[3] ** -0.5))

    def crop(self, rows: int) -> None:
        """Keep the first `rows` rows; drop the others and their queries."""
        forgotten = self.rows - rows
        if self._layer is None or not forgotten:
            return
        self._layer.crop(-forgotten)
        if self.queries is not None:
            self.queries = self.queries[:, :, : self.queries.shape[2] - forgotten]

    def _mask(self, new: int, device: torch.device) -> Tensor:
        """[B or 1, 1, new, rows] bool: what each of the last `new` rows may see; padding sees itself."""
        place = torch.arange(self.rows, device=device)
        own = place[self.rows - new :, None]
        seen = (place <= own)[None, None]
        if self.mask is None:
            return seen
        real = functional.pad(self.mask, (0, self.rows - self.mask.shape[1]), value=True)
        return seen & real[:, None, None] | (place == own)


class ChainDrafter:
    """Drafts greedily after what a target has read; keeps the head's cache between drafts.

    Args:
        head: The draft head, on the target's device.
        target: The model whose tokens it guesses.
        mask: [B, N] bool, False for padding among the N tokens read at first, on the left; None when none is.
        window: Number of last rows whose queries the cache keeps.
    """

    def __init__(
        self, head: DraftingHead, target: PreTrainedModel, mask: Tensor | None = None, window: int = 0
    ) -> None:
        self.head, self.cache = head, HeadCache(mask, window)
        self._embed = head.embedding(target)
        self._dtype = next(head.parameters()).dtype
        self._verified = 0

    @torch.no_grad()
    def read(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Read verified rows; they replace what was drafted since the last ones.

        Args:
            features: [B, q, layers * hidden], the target's features of the next q >= 1 tokens.
            tokens: [B, q] int64, the token after each.

        Returns:
            The head's output for the last of them, [B, 1, hidden].
        """
        self.cache.crop(self._verified)
        parts = zip(features.split(_ROWS_AT_ONCE, dim=1), tokens.split(_ROWS_AT_ONCE, dim=1), strict=True)
        hidden = [self._pass(self.head.combine(each.to(self._dtype)), after)[:, -1:] for each, after in parts]
        self._verified = self.cache.rows
        return hidden[-1]

    @torch.no_grad()
    def draft(self, features: Tensor, tokens: Tensor, count: int) -> Tensor:
        """Read verified rows and guess the `count` >= 1 tokens after them, [B, count] int64; arguments as `read`."""
        hidden = self.read(features, tokens)
        drafted = [self._guess(hidden)]
        while len(drafted) < count:
            hidden = self._pass(hidden, drafted[-1])
            drafted.append(self._guess(hidden))
        return torch.cat(drafted, dim=1)

    def _pass(self, features: Tensor, tokens: Tensor) -> Tensor:
        end = self.cache.rows + tokens.shape[1]
        mask = self.cache.mask
        if mask is not None:
            mask = functional.pad(mask, (0, end - mask.shape[1]), value=True)
        positions = positions_of(mask, end, tokens.device)[:, self.cache.rows :]
        return self.head(self._embed(tokens).to(self._dtype), features, positions, self.cache.attend)

    def _guess(self, hidden: Tensor) -> Tensor:
        return self.head.target_ids(self.head.logits(hidden).argmax(dim=-1))


def unread_rows(state: State, layers: tuple[int, ...], newest: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that a head can read of a state, as `ChainDrafter.read` takes them.

    Args:
        state: State of M tokens, the last m of which have recorded features.
        layers: The head's feature layers.
        newest: [B, 1] int64: the token after all that the state has read.

    Returns:
        Features [B, m, layers * hidden] and the token after each, [B, m].

    Raises:
        UserError: the features were not recorded.
    """
    if not state.features or not set(layers) <= set(state.needs.features):
        raise UserError(
            f"the features of layers {list(layers)} that the draft head reads were not recorded: prefill with "
            f"needs=Needs(features={layers})"
        )
    features = state.features_of(layers)
    return features, torch.cat([state.tokens, newest], dim=1)[:, -features.shape[1] :]


@dataclass(frozen=True)
class Round:
    """One pass of the target over drafted tokens.

    Attributes:
        judged: Drafted tokens that the target accepted or rejected; where the answer ended within the draft, only
            those up to its end.
        accepted: Number of judged tokens that it accepted.
        emitted: Tokens of the answer that the pass gave.
    """

    judged: int
    accepted: int
    emitted: int


@dataclass(frozen=True)
class Speculated(Decoded):
    """An answer, the state it leaves behind (without a trace), and the outcome of each pass."""

    rounds: tuple[Round, ...]


def acceptance_length(rounds: Sequence[Round]) -> float:
    """Mean tokens per pass of the target after the prefill; 1 is plain decoding."""
    return sum(each.emitted for each in rounds) / max(len(rounds), 1)


def acceptance_by_position(rounds: Sequence[Round]) -> list[float]:
    """The share of drafts whose first i tokens were all accepted, for i = 1, 2, ..."""
    longest = max((each.judged for each in rounds), default=0)
    shares = []
    for place in range(longest):
        judged = [each for each in rounds if each.judged > place]
        shares.append(sum(each.accepted > place for each in judged) / len(judged))
    return shares


@torch.no_grad()
def decode_speculatively(
    model: PreTrainedModel,
    state: State,
    head: DraftingHead,
    stopping_criteria: StoppingCriteriaList,
    *,
    tokens: int = 5,
    prompt_ids: Tensor | None = None,
    logits_processor: LogitsProcessorList | None = None,
    streamer: BaseStreamer | None = None,
) -> Speculated:
    """The greedy answer that `decode` gives, in fewer passes of the target.

    Args:
        model: The target, without adapters.
        state: State of one prompt, evicted or not, with the head's features in its trace: prefill with
            `needs=Needs(features=head.layers_of(model))`. Its cache grows.
        head: Drafts for the target.
        stopping_criteria: See `decode`.
        tokens: Tokens per draft; fewer near the answer's maximum length and the end of the target's context.
        prompt_ids: See `decode`.
        logits_processor: See `decode`.
        streamer: See `decode`.

    Raises:
        UserError: a batch, packed entries, features that were not recorded, or `tokens` below 1.
    """
    require_single(state.tokens)
    require_whole("speculative decoding", 1, tokens=tokens)
    if not state.cache.is_croppable:
        raise UserError("speculative decoding: entries that are packed (kivi, specache) cannot forget a rejected draft")
    layers = head.layers_of(model)
    drafter = ChainDrafter(head, model, state.tokens_mask)
    answer = _Answer(state, prompt_ids, stopping_criteria, logits_processor, streamer)
    answer.add(state.logits)
    place, rounds = int(state.lengths), []
    while not answer.ended:
        newest = answer.ids[:, -1:]
        count = max(min(tokens, answer.room - 1, context_of(model) - place - 1), 0)
        drafted = newest[:, :0]
        if count:
            drafted = drafter.draft(*unread_rows(state, layers, newest), count)
        # Only the new tokens' features are recorded: the head has read the others.
        state = replace(state, needs=Needs(features=layers), features=())
        state, logits = read(model, state, torch.cat([newest, drafted], dim=1))
        each = _judge(answer, drafted, logits)
        state = state.crop(count + 1 - each.emitted, logits[:, each.emitted - 1])
        rounds.append(each)
        place += each.emitted
    answer.end()
    return Speculated(answer.ids, replace(state, needs=Needs(), features=()), tuple(rounds))


class _Answer:
    """An answer that grows token by token, as in `decode`."""

    def __init__(
        self,
        state: State,
        prompt_ids: Tensor | None,
        stopping_criteria: StoppingCriteriaList,
        logits_processor: LogitsProcessorList | None,
        streamer: BaseStreamer | None,
    ) -> None:
        self.ids = prompt_ids if prompt_ids is not None else state.tokens[:, :0]
        self.ended = False
        self._criteria, self._processor, self._streamer = stopping_criteria, logits_processor, streamer

    @property
    def room(self) -> int:
        """Maximum number of further tokens that the criteria allow."""
        longest = self._criteria.max_length
        return torch.iinfo(torch.long).max if longest is None else longest - self.ids.shape[1]

    def add(self, logits: Tensor) -> int:
        """Append the target's token, from its logits [1, V]."""
        scores = self._processor(self.ids, logits) if self._processor else logits  # type: ignore[arg-type]
        token = scores.argmax(dim=-1)
        self.ids = torch.cat([self.ids, token[:, None]], dim=1)
        if self._streamer is not None:
            self._streamer.put(token.cpu())
        self.ended = bool(self._criteria(self.ids, scores))  # pyright: ignore[reportArgumentType]
        return int(token)

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()


def _judge(answer: _Answer, drafted: Tensor, logits: Tensor) -> Round:
    """Extend the answer by the accepted tokens of a draft [1, n] and one more, from logits [1, n + 1, V]."""
    guesses = drafted[0].tolist()
    for place, guess in enumerate(guesses):
        if answer.add(logits[:, place]) != guess:
            return Round(len(guesses), place, place + 1)
        if answer.ended:
            return Round(place + 1, place + 1, place + 1)
    answer.add(logits[:, -1])
    return Round(len(guesses), len(guesses), len(guesses) + 1)


def require_single(ids: Tensor) -> None:
    """Refuse a batch.

    Raises:
        UserError: there are several prompts.
    """
    if len(ids) != 1:
        raise UserError(f"speculative decoding answers one prompt at a time, not {len(ids)}; give them one by one")


@dataclass(frozen=True)
class HeadAnswer:
    """A head's draft, and the head's cache after it.

    Attributes:
        draft: The draft; its first token is the target's own.
        cache: The head's cache: M - 1 rows for a prompt of M tokens (row t is that of token t + 1), and one for each
            token of the draft but the last.
    """

    draft: DraftIds
    cache: HeadCache


@torch.no_grad()
def head_answer(
    model: PreTrainedModel, state: State, drafting: DraftHeadSource, lookahead: int, window: int = 0
) -> HeadAnswer:
    """Let a head answer greedily.

    Args:
        model: The target.
        state: State of M >= 2 tokens, with the head's features in its trace.
        drafting: The head.
        lookahead: Length of the draft in tokens; those after an end token are padding.
        window: Number of last prompt tokens whose queries the cache keeps, beside those of the draft.

    Raises:
        UserError: the features were not recorded.
    """
    first = state.logits.argmax(dim=-1, keepdim=True)
    chain = ChainDrafter(drafting.head, model, state.tokens_mask, window + lookahead - 1)
    features, tokens = unread_rows(state, drafting.layers, first)
    if lookahead == 1:
        chain.read(features[:, :-1], tokens[:, :-1])
        ids = first
    else:
        ids = torch.cat([first, chain.draft(features, tokens, lookahead - 1)], dim=1)
    end = end_ids(model)
    return HeadAnswer(DraftIds(ids, None if end is None else until_end(ids, end)), chain.cache)


@dataclass(frozen=True)
class Speculative(CacheMethod):
    """Answers from another method's cache faster, with a draft head: the same greedy answer.

    `generate(model, ids, Speculative(head, SnapKV(128)))`. Only `generate` speculates; a `Conversation` and the
    evaluation decode plainly from the method's states.

    Attributes:
        head: Drafts for the target.
        inner: Method that decides what stays in the cache.
        tokens: Tokens per draft.

    Raises:
        UserError: `tokens` is below 1, or `inner` evicts while decoding or does not read the whole prompt.
    """

    head: DraftingHead = field(compare=False, repr=False)
    inner: CacheMethod = FullCache()
    tokens: int = 5

    def __post_init__(self) -> None:
        require_whole("speculative decoding", 1, tokens=self.tokens)
        name = type(self.inner).__name__
        if not isinstance(self.inner, CacheMethod):
            raise UserError(f"speculative decoding: {name} shortens prompts; give a method that evicts from the cache")
        if self.inner.selects_each_step:
            raise UserError(
                f"speculative decoding: {name} chooses anew for each token what it reads; give the full cache, or a "
                "method that evicts"
            )
        if self.inner.every:
            raise UserError(f"speculative decoding: {name} evicts while decoding; make it with every=0")

    @override
    def check(self, length: int, context: int) -> None:
        self.inner.check(length, context)
        if not self.inner.shares_prefill(length):
            raise UserError(
                f"speculative decoding: {type(self.inner).__name__} reads this prompt of {length} tokens sparsely, "
                "which leaves the draft head without features; leave out sparse"
            )

    @override
    def needs(self) -> Needs:
        return self.inner.needs()

    @override
    def compress(self, model: PreTrainedModel, state: State) -> State:
        return self.inner.compress(model, state)

    @override
    def reader(self, model: PreTrainedModel) -> Reader:
        return self.inner.reader(model)

    @override
    def reapply(self, model: PreTrainedModel) -> Reapply | None:
        return self.inner.reapply(model)

    @override
    def answer(self, model: PreTrainedModel, request: GenerateRequest) -> Decoded:
        require_single(request.input_ids)
        if request.do_sample:
            raise UserError("speculative decoding is greedy: give do_sample=False")
        if request.past is not None:
            raise UserError("speculative decoding: leave out past_key_values, or go on with the inner method")
        self.check(request.input_ids.shape[1], context_of(model))
        needs = self.inner.needs() | Needs(features=self.head.layers_of(model))
        return decode_speculatively(
            model,
            self.inner.compress(
                model, prefill(model, request.input_ids, request.mask, chunk=request.chunk, needs=needs)
            ),
            self.head,
            request.stopping_criteria,
            tokens=self.tokens,
            prompt_ids=request.input_ids,
            logits_processor=request.logits_processor,
            streamer=request.streamer,
        )
