"""One forward pass that reads a part of a prompt and the next token of every running answer.

Apart from attention, a decoder processes each token by itself. So the answers' tokens follow the prompt's in one
sequence, at their own positions; only attention separates them, and appends each to its own cache. The weights are
read once for both, so that a step of the answers adds little to the pass.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from typing_extensions import override

from keepsight.models.decoder import is_on_several_devices
from keepsight.runtime.attention import OwnAttention, RecordLayer, Softmax, grouped_attention, run, visible
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.matmul_attention import attend_by_products, is_faster
from keepsight.runtime.rope_length import length_limit


class RunningAnswers(ABC):
    """Answers that go on while a prompt is read: between its passes, or in them."""

    @abstractmethod
    def pass_tokens(self) -> int:
        """How many tokens of the prompt the next pass reads."""

    @abstractmethod
    def __call__(self) -> None:
        """Go on between two passes."""

    @abstractmethod
    def next_tokens(self, model: PreTrainedModel) -> tuple[Cache, Tensor, Tensor] | None:
        """The cache of the answers, their next tokens [B] int64 and positions [B] int64; None to go on between passes.

        The pass that reads them appends to the cache, and hands its logits to `take_logits`. Where it fails,
        that is not called.
        """

    @abstractmethod
    def take_logits(self, logits: Tensor) -> None:
        """Take the logits [B, V] float32 of the tokens."""


def can_read_together(model: PreTrainedModel, cache: Cache) -> bool:
    """Whether a cache can be read in one pass with another of its model: all of its layers hold plain keys and values.

    Windows and recurrent states would take in the tokens of others, and RoPE that depends on the length is one of all.
    """
    layers: list[Any] = cache.layers
    for layer in layers:
        if not isinstance(layer, KeptLayer) or layer.is_sliding or layer.readers > 1:
            return False
        if layer.indexed or layer.recurrent is not None or layer.expansion is not None:
            return False
    return length_limit(model.config) is None and not is_on_several_devices(model)


def read_prompt_and_answers(
    model: PreTrainedModel,
    prompt: tuple[Cache, Tensor, Tensor],
    answers: tuple[Cache, Tensor, Tensor],
    recorder: RecordLayer | None,
) -> Tensor:
    """Read a part of a prompt, and the next tokens of answers; both caches grow.

    Args:
        model: The model.
        prompt: The prompt's cache, its next tokens [1, q] and their positions [1, q].
        answers: The answers' cache, their next tokens [B] and their positions [B].
        recorder: Records the prompt's queries alone; None where nothing is recorded.

    Returns:
        [B, V] float32, the logits after the answers' tokens.
    """
    prompt_cache, ids, positions = prompt
    answers_cache, tokens, token_positions = answers
    count = ids.shape[1]
    layers: list[Any] = []
    answers_layers: list[Any] = answers_cache.layers
    prompt_layers: list[Any] = prompt_cache.layers
    entries = prompt_layers[0].seen + count
    mask = visible(count, ids.new_ones(1, 1, entries, dtype=torch.bool))
    for prompt_layer, answers_layer in zip(prompt_layers, answers_layers, strict=True):
        layers.append(_LayerOfBoth(prompt_layer, answers_layer, count, mask))

    def record(index: int, query: Tensor, key: Tensor, softmax: Softmax, *_: object) -> None:
        assert recorder is not None
        layer = layers[index]
        recorder(index, query[:, :, :count], layer.prompt_keys, softmax, None, None)

    output = run(
        model,
        Cache(layers=layers),
        recorder=None if recorder is None else record,
        input_ids=torch.cat([ids, tokens[None]], dim=1),
        attention_mask=ids.new_ones(1, 1, 1, 1, dtype=torch.bool),  # which the layers do not look at
        position_ids=torch.cat([positions, token_positions[None]], dim=1),
        logits_to_keep=len(tokens),
    )
    return output.logits[0].float()


class _LayerOfBoth(OwnAttention, DynamicLayer):
    """A prompt's layer and that of running answers, for a pass over `count` tokens of the one and then one of each.

    `mask` [1, 1, count, C] bool says what the prompt's tokens see of its C entries, these tokens among them.
    """

    prompt_keys: Tensor
    _prompt_values: Tensor
    _answers_keys: Tensor
    _answers_values: Tensor

    def __init__(self, prompt: KeptLayer, answers: KeptLayer, count: int, mask: Tensor) -> None:
        super().__init__()
        self.prompt = prompt
        self.answers = answers
        self.count = count
        self.mask = mask
        self.is_initialized = True

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        keys, answers_keys = self._parts(key_states)
        values, answers_values = self._parts(value_states)
        self.prompt_keys, self._prompt_values = self.prompt.update(keys, values)
        self._answers_keys, self._answers_values = self.answers.update(answers_keys, answers_values)
        return key_states, value_states

    def _parts(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """[1, K, q + B, d] -> those of the prompt [1, K, q, d], and of the answers [B, K, 1, d]."""
        return states[:, :, : self.count], states[:, :, self.count :].transpose(0, 2)

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        prompt_query, answers_query = self._parts(query)
        keys = self.prompt_keys
        values = self._prompt_values
        if softmax.is_plain and is_faster(prompt_query, keys, values):
            prompt_output = attend_by_products(prompt_query, keys, values, softmax.scaling)
        else:
            prompt_output = grouped_attention(prompt_query, keys, values, self.mask, softmax)
        if isinstance(self.answers, OwnAttention):
            answers_output = self.answers.attend(answers_query, self._answers_keys, self._answers_values, softmax)
        else:
            real = self.answers.real
            mask = None if real is None else visible(1, real)
            answers_output = grouped_attention(answers_query, self._answers_keys, self._answers_values, mask, softmax)
        return torch.cat([prompt_output, answers_output.transpose(0, 1)], dim=1)

    @override
    def get_seq_length(self) -> int:
        return 0  # position_ids are passed to the model

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # so is the attention mask
