"""`generate`: an answer from what a method keeps."""

from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from keepsight.runtime.method import CustomGenerate, FullCache


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    method: CustomGenerate | None = None,
    *,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Answer prompts from a cache that `method` has compressed.

    Args:
        model: Any causal language model of transformers with full attention.
        input_ids: [B, N] int64, padded on the left.
        method: The method, such as `SnapKV(budget=128)`; the full cache by default.
        attention_mask: [B, N], 0 for padding; needed when a row is padded.
        options: Options of `model.generate`: `max_new_tokens`, `do_sample`, `temperature`, `streamer`, ...

    Returns:
        [B, T] int64: the answers alone, without the prompts, padded on the right.
    """
    mask = attention_mask if attention_mask is not None else input_ids.new_ones(input_ids.shape)
    # transformers gives a streamer the prompt but no callable of ours; the method streams the answer itself.
    custom = partial(method or FullCache(), streamer=options.get("streamer"))
    ids = model.generate(input_ids, attention_mask=mask, custom_generate=custom, **options)  # type: ignore[operator]
    return ids[:, input_ids.shape[1] :]
