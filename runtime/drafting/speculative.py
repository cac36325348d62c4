"""Speculative decoding: a draft head guesses the next tokens, and the target reads all of them in one pass.

Leviathan et al. 2023 (arXiv 2211.17192), with chain drafts of an EAGLE-3 head (arXiv 2503.01840) and greedy decoding: a
guess is accepted where the target would have said the same, so that every token is the target's own choice, from a full
cache or an evicted one. A pass over several tokens sums in another order than one over a single token, so that logits
which are equal up to rounding may change places: hardly ever in float32, now and then in bfloat16.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from typing_extensions import override

from keepsight.errors import UserError, require_whole
from keepsight.runtime.attention import Reader
from keepsight.runtime.custom_generate import GenerateRequest
from keepsight.runtime.decode import Decoded, Reapply
from keepsight.runtime.drafting.eagle import ChainDrafter, DraftingHead, unread_rows
from keepsight.runtime.method import CacheMethod, FullCache
from keepsight.runtime.prefill import context_of, prefill, read
from keepsight.runtime.state import Needs, State, Trace


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
    _require_single(state.tokens)
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
        state = replace(state, trace=Trace(Needs(features=layers)))
        state, logits = read(model, state, torch.cat([newest, drafted], dim=1))
        each = _judge(answer, drafted, logits)
        state = _forget_last(state, count + 1 - each.emitted, logits[:, each.emitted - 1])
        rounds.append(each)
        place += each.emitted
    answer.end()
    return Speculated(answer.ids, replace(state, trace=Trace()), tuple(rounds))


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


def _forget_last(state: State, count: int, logits: Tensor) -> State:
    """Roll the state back by `count` tokens; `logits` [1, V] are those of its last token then."""
    state.cache.crop(-count)
    features = tuple(each[:, : each.shape[1] - count] for each in state.trace.features)
    return replace(
        state,
        mask=None if state.mask is None else state.mask[:, : state.mask.shape[1] - count],
        logits=logits,
        tokens=state.tokens[:, : state.tokens.shape[1] - count],
        lengths=state.lengths - count,
        trace=replace(state.trace, features=features),
    )


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
        _require_single(request.input_ids)
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


def _require_single(ids: Tensor) -> None:
    if len(ids) != 1:
        raise UserError(f"speculative decoding answers one prompt at a time, not {len(ids)}; give them one by one")
