"""A method: what `generate`, `model.generate(custom_generate=...)` and the evaluation run."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.runtime.attention import Reader
from keepsight.runtime.custom_generate import CustomGenerate
from keepsight.runtime.decode import Decoded, Reapply
from keepsight.runtime.generate_request import GenerateRequest
from keepsight.runtime.images import Images
from keepsight.runtime.importance import Reduce
from keepsight.runtime.observe import Observer
from keepsight.runtime.prefill import context_of, prefill, read
from keepsight.runtime.state import Needs, State, Trace

Observe = Callable[[Observer, Reduce], list[Tensor]]
"""Scores a state with an observer, under a reduction; see `Observer`."""
Shared = tuple[State, list[Tensor] | None]


class Method(CustomGenerate):
    """From a prompt to the state that its answer is decoded from.

    Attributes:
        is_full_cache: Whether it answers from the full cache.
        selects_each_step: Whether it keeps every entry and selects at each step which of them are read.
        uses_retrieval_head: Whether a retrieval head selects what is read.
        every: Number of generated tokens between two evictions while decoding; 0 for none.
    """

    is_full_cache = selects_each_step = uses_retrieval_head = False
    every: int = 0

    @abstractmethod
    def start(
        self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None = None, *, chunk: int | None = None
    ) -> State:
        """Read a prompt and return the state to answer from.

        Args:
            model: The target.
            input_ids: [B, N] int64, padded on the left.
            mask: [B, N], 0 for padding; None when no row is padded.
            chunk: Tokens per forward pass of the prefill; None for the whole prompt in one.
        """

    def begin(self, model: PreTrainedModel, request: GenerateRequest) -> State:
        """`start` with what a request holds."""
        return self.start(model, request.input_ids, request.mask, chunk=request.chunk)

    def resume(self, model: PreTrainedModel, state: State, tokens: Tensor, *, chunk: int | None = None) -> State:
        """Read a further turn and return the state to answer from, within the budget again.

        Args:
            model: The target.
            state: State of this method, or one that `joins`; it stays unchanged.
            tokens: [B, n] int64, n >= 1, without padding.
            chunk: Tokens per forward pass; None for all in one.
        """
        reader, state = model if state.joins else self.turn_reader(model), state.copy()
        for part in tokens.split(chunk or tokens.shape[1], dim=1):
            state, _ = read(reader, state, part, logits_to_keep=1)
        return state

    @property
    def adapter_digest(self) -> str | None:
        """Digest of the lookahead adapter that it observes with; None without one."""
        return None

    def budget_for(self, length: int) -> int:
        """The budget for a prompt of `length` tokens, in entries per layer and KV head; `length` without a budget."""
        return length

    def budgets(self, state: State) -> list[int]:
        """The budget of each row, for its own number of tokens."""
        batch, width = state.tokens.shape
        lengths = [width] * batch if state.tokens_mask is None else state.lengths.tolist()
        return [*map(self.budget_for, lengths)]

    def needs(self) -> Needs:
        """What the prefill has to record."""
        return Needs()

    def compress_shared(self, model: PreTrainedModel, state: State, observe: Observe) -> Shared | None:
        """`compress` of an ordinary prefill that several methods share.

        Args:
            model: The target.
            state: One-row state; it stays unchanged.
            observe: Scores the state with an observer; equal observers and reductions share their scores.

        Returns:
            The state to decode from and, for each layer, which of the prompt's entries it holds, [1, K, N] bool (None
            where that is not known). None for a method that reads this prompt in its own way.
        """
        return None

    def tokens_to_read(self, model: PreTrainedModel, prompt: Tensor, images: Images | None = None) -> Tensor | None:
        """Indices [C] int64, ascending, of the tokens of a prompt [N] that the model reads; None to read all of it."""
        return None

    def reader(self, model: PreTrainedModel) -> Reader:
        """What reads and decodes from this method's states in the model's place."""
        return model

    def turn_reader(self, model: PreTrainedModel) -> Reader:
        """What reads a further turn after this method's states, in passes over many tokens."""
        return self.reader(model)

    def reapply(self, model: PreTrainedModel) -> Reapply | None:
        """How to evict while decoding; None not to."""
        return None

    def check(self, length: int, context: int) -> None:
        """Refuse a prompt that this method cannot work on, before any model runs.

        Args:
            length: Length of the prompt in tokens.
            context: Context length of the target.

        Raises:
            UserError: with one line that says why.
        """

    @override
    def answer(self, model: PreTrainedModel, request: GenerateRequest) -> Decoded:
        if request.past is not None:
            state = self.resume(model, request.past.state, request.unread, chunk=request.chunk)
        else:
            for length in request.lengths():
                self.check(length, context_of(model))
            state = self.begin(model, request)
        reapply = self.reapply(model)
        if reapply is None and not request.goes_on:
            state = replace(state, trace=Trace())  # recording for nobody would cost every step
        return request.decode(self.reader(model), state, reapply)


class CacheMethod(Method):
    """A method that reads the whole prompt and then compresses its cache."""

    @abstractmethod
    def compress(self, model: PreTrainedModel, state: State) -> State:
        """The state to decode from; the given one stays unchanged."""

    @override
    def begin(self, model: PreTrainedModel, request: GenerateRequest) -> State:
        if not request.images:
            return super().begin(model, request)
        return self.read_prompt(model, request.input_ids, request.mask, request.chunk, request.images)

    @override
    def resume(self, model: PreTrainedModel, state: State, tokens: Tensor, *, chunk: int | None = None) -> State:
        after = super().resume(model, state, tokens, chunk=chunk)
        return self.compress(model, after) if after.joins else after

    def shares_prefill(self, length: int) -> bool:
        """Whether it compresses an ordinary prefill of `length` tokens, which other methods can share."""
        return True

    @override
    def compress_shared(self, model: PreTrainedModel, state: State, observe: Observe) -> Shared | None:
        return self.compress(model, state), None

    @override
    def start(
        self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None = None, *, chunk: int | None = None
    ) -> State:
        return self.read_prompt(model, input_ids, mask, chunk)

    def read_prompt(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        mask: Tensor | None = None,
        chunk: int | None = None,
        images: Images | None = None,
    ) -> State:
        """`start`, with the images in the prompts."""
        return self.compress(model, prefill(model, input_ids, mask, chunk=chunk, needs=self.needs(), images=images))


@dataclass(frozen=True)
class FullCache(CacheMethod):
    """Evicts nothing: the reference that every other method is compared with."""

    is_full_cache = reads_images = True

    @override
    def compress(self, model: PreTrainedModel, state: State) -> State:
        return state.copy()
