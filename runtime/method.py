"""A method: what `generate`, `model.generate(custom_generate=...)` and the evaluation run."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from typing_extensions import override

from keepsight.runtime.decode import Reapply, decode
from keepsight.runtime.observe import Observer
from keepsight.runtime.prefill import context_of, prefill
from keepsight.runtime.state import Needs, State, Trace

Observe = Callable[[Observer, str], list[Tensor]]
"""Asks an observer about a state, under a reduction over queries; see `Observer`."""
Shared = tuple[State, list[Tensor] | None]


class Method(ABC):
    """From a prompt to the state that its answer is decoded from."""

    @abstractmethod
    def start(
        self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None = None, *, chunk: int | None = None
    ) -> State:
        """Read a prompt and return the state to answer from.

        Args:
            model: The target.
            input_ids: [B, N] int64, padded on the left.
            mask: [B, N], 0 for padding; None when no row is padded.
            chunk: Tokens a forward pass of the prefill.
        """

    @property
    def is_full_cache(self) -> bool:
        """Whether it answers from the full cache, as the reference does."""
        return False

    @property
    def selects_each_step(self) -> bool:
        """Whether it keeps every entry and selects anew at each step which of them are read."""
        return False

    @property
    def adapter_digest(self) -> str | None:
        """Digest of the lookahead adapter that it observes with; None without one."""
        return None

    @property
    def uses_retrieval_head(self) -> bool:
        """Whether a retrieval head selects what is read."""
        return False

    def budget_for(self, length: int) -> int:
        """The budget for a prompt of `length` tokens, in entries per layer and KV head; `length` without a budget."""
        return length

    def needs(self) -> Needs:
        """What the prefill must record."""
        return Needs()

    def compress_shared(self, model: PreTrainedModel, state: State, observe: Observe) -> Shared | None:
        """What the method makes of the state of an ordinary prefill, which other methods share.

        Args:
            model: The target.
            state: Of one row; it stays as it is.
            observe: Asks an observer about the state; equal observers and reductions need to be asked only once.

        Returns:
            The state to decode from and, for each layer, which of the prompt's entries it holds, [1, K, N] bool (None
            where that has no meaning). None for a method that reads this prompt in its own way.
        """
        return None

    def tokens_to_read(self, model: PreTrainedModel, prompt: Tensor) -> Tensor | None:
        """Indices [C] int64, ascending, of the tokens of a prompt [N] that the model reads; None to read all of it."""
        return None

    def reader(self, model: PreTrainedModel) -> PreTrainedModel:
        """What `read`, `decode` and `score_answer` are called with in the model's place, for this method's states."""
        return model

    def reapply(self, model: PreTrainedModel) -> Reapply | None:
        """What decoding does every few tokens to hold the budget; None for nothing."""
        return None

    def check(self, length: int, context: int) -> None:
        """Refuse a prompt that this method cannot work on, before any model runs.

        Args:
            length: Tokens of the prompt.
            context: The most positions that the target can take.

        Raises:
            UserError: with one line that says why.
        """

    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """The hook that transformers calls: `model.generate(**inputs, custom_generate=method)`.

        Returns:
            [B, N + T] int64: prompt and answer, as `model.generate` returns them.
        """
        pad = generation_config.pad_token_id
        mask = model_kwargs.get("attention_mask")
        self.check(input_ids.shape[1], context_of(model))
        state = self.start(model, input_ids, mask, chunk=generation_config.prefill_chunk_size)
        reapply = self.reapply(model)
        return decode(
            self.reader(model),
            state if reapply else replace(state, trace=Trace()),  # recording for nobody would cost every step
            stopping_criteria,
            pad_token=0 if pad is None else int(pad),
            prompt_ids=input_ids,
            logits_processor=logits_processor,
            do_sample=bool(generation_config.do_sample),
            streamer=streamer,
            reapply=reapply,
        ).ids


class CacheMethod(Method):
    """A method that reads the whole prompt and then decides what stays in the cache."""

    @abstractmethod
    def compress(self, model: PreTrainedModel, state: State) -> State:
        """The state to decode from; the given one stays as it is."""

    @override
    def compress_shared(self, model: PreTrainedModel, state: State, observe: Observe) -> Shared | None:
        return self.compress(model, state), None

    @override
    def start(
        self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None = None, *, chunk: int | None = None
    ) -> State:
        return self.compress(model, prefill(model, input_ids, mask, chunk=chunk, needs=self.needs()))


@dataclass(frozen=True)
class FullCache(CacheMethod):
    """Evicts nothing: the reference that every other method is compared with."""

    @property
    @override
    def is_full_cache(self) -> bool:
        return True

    @override
    def compress(self, model: PreTrainedModel, state: State) -> State:
        return state.copy()
