"""A method: what `generate`, `model.generate(custom_generate=...)` and the evaluation run."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from typing_extensions import override

from keepsight.runtime.decode import Reapply, decode
from keepsight.runtime.prefill import context_of, prefill
from keepsight.runtime.state import Needs, State, Trace


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

    def needs(self) -> Needs:
        """What the prefill must record."""
        return Needs()

    @override
    def start(
        self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None = None, *, chunk: int | None = None
    ) -> State:
        return self.compress(model, prefill(model, input_ids, mask, chunk=chunk, needs=self.needs()))


@dataclass(frozen=True)
class FullCache(CacheMethod):
    """Evicts nothing: the reference that every other method is compared with."""

    @override
    def compress(self, model: PreTrainedModel, state: State) -> State:
        return state.copy()
