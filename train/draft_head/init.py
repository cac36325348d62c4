"""A new draft head to start a training from."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from keepsight.data_gen.store import TrainingSample
from keepsight.errors import UserError
from keepsight.models.draft_head import DraftHead, default_feature_layers

_FROM_TARGET = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "initializer_range",
)
_FIRST_LOGITS = 0.5
"""Standard deviation of a new head's logits."""


def frequent_tokens(
    samples: Iterable[TrainingSample], count: int, end_tokens: Iterable[int], vocabulary: int
) -> Tensor:
    """The most frequent tokens of answers and, in any case, the end tokens.

    Ties, as of all tokens that no answer holds, go to the one that is more frequent in prompts, then to the lower id.

    Returns:
        [count] int64, ascending.

    Raises:
        UserError: the target has fewer tokens.
    """
    if not 0 < count <= vocabulary:
        raise UserError(f"draft_head.vocabulary={count} must lie between 1 and {vocabulary}, the target's vocabulary")
    answers, prompts, ends = Counter[int](), Counter[int](), set(end_tokens)
    for sample in samples:
        answers.update(sample.answer_ids)
        prompts.update(sample.prompt_ids)
    order = sorted(range(vocabulary), key=lambda token: (token not in ends, -answers[token], -prompts[token], token))
    return torch.tensor(sorted(order[:count]))


def new_draft_head(target: PreTrainedModel, vocabulary: Tensor, trained: int | None = None) -> DraftHead:
    """A random head of the target's width, in float32 on its device; its lm_head starts as the target's.

    The last norm starts small, so that the first logits are no larger than those of a random lm_head.

    Args:
        target: The model to draft for.
        vocabulary: [V] int64, the draft vocabulary in the target's ids, ascending.
        trained: Tokens of the longest training sample, the head's `max_position_embeddings`, beyond which YaRN has to
            extend it; the target's own by default.
    """
    text = target.config.get_text_config()
    values: dict[str, Any] = {name: getattr(text, name) for name in _FROM_TARGET if hasattr(text, name)}
    if trained is not None:
        values["max_position_embeddings"] = min(trained, text.max_position_embeddings)
    layers = default_feature_layers(text.num_hidden_layers)
    values |= {"draft_vocab_size": len(vocabulary), "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
    config = LlamaConfig(**values, rope_parameters=text.rope_parameters, num_hidden_layers=1, tie_word_embeddings=False)
    head = DraftHead(config)
    for module in head.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=config.initializer_range)
    head.set_vocabulary(vocabulary)
    lm_head: Any = target.get_output_embeddings()
    with torch.no_grad(), align_module_device(lm_head):
        head.lm_head.weight.copy_(lm_head.weight[vocabulary.to(lm_head.weight.device)])
        head.norm.weight.fill_(_FIRST_LOGITS / head.lm_head.weight.norm(dim=1).mean().item())
    return head.to(target.device)
