"""`generate`: an answer from what a method keeps."""

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from keepsight.runtime.custom_generate import CustomGenerate
from keepsight.runtime.method import FullCache


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    method: CustomGenerate | None = None,
    *,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Any:
    """Answer prompts from a cache that `method` has compressed.

    Args:
        model: Any causal language model of transformers with full attention.
        input_ids: [B, N] int64, padded on the left.
        method: The method, such as `SnapKV(budget=128)`; the full cache by default. Or what `load_state` returns,
            whose prompt the ids follow.
        attention_mask: [B, N], 0 for padding; needed when a row is padded.
        options: Options of `model.generate`: `max_new_tokens`, `do_sample`, `temperature`, `streamer`, ...

    Returns:
        [B, T] int64: the answers alone, without the prompts, padded on the right. With `return_dict_in_generate=True`,
        the output of `model.generate` as it is, whose `sequences` begin with the prompts.
    """
    mask = attention_mask if attention_mask is not None else input_ids.new_ones(input_ids.shape)
    output = model.generate(input_ids, attention_mask=mask, custom_generate=method or FullCache(), **options)  # type: ignore[operator]
    return output if isinstance(output, GenerateDecoderOnlyOutput) else output[:, input_ids.shape[1] :]
