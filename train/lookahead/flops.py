"""How many floating-point operations the passes over a target are made of, from its shapes."""

import re

from transformers import PreTrainedModel

from keepsight.models.decoder import decoder_of, full_attention_layers, head_width
from keepsight.models.distributed import whole_shape
from keepsight.models.lora import linears

_EXPERTS = re.compile(r"(^|\.)experts(\.|$)")


def pass_flops(model: PreTrainedModel, weights: float, tokens: int, before: int = 0) -> float:
    """Operations of a pass: 2 for each weight and token, and 4 for each entry that a channel of a query sees.

    Windows and recurrent states, whose share is small where prompts are long, are not in it, nor are logits.

    Args:
        model: The target.
        weights: See `weights_of_a_token`.
        tokens: Tokens of the pass, causal among themselves.
        before: Entries that are there already.
    """
    config = model.config.get_text_config(decoder=True)
    channels = config.num_attention_heads * head_width(config) * len(full_attention_layers(model.config))
    return 2 * tokens * weights + 4 * tokens * (before + tokens / 2) * channels


def weights_of_a_token(model: PreTrainedModel) -> float:
    """Weights of a model's layers that a token is multiplied with: of experts only those that it is sent to."""
    config = model.config.get_text_config(decoder=True)
    counts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    experts = next(filter(None, counts), None)
    share = config.num_experts_per_tok / experts if experts else 1.0

    def counted(name: str, size: int) -> float:
        return size * share if _EXPERTS.search(name) else size

    layers = decoder_of(model).layers
    single = sum(counted(name, linear.in_features * linear.out_features) for name, linear in linears(layers))
    shapes = ((name, whole_shape(weight)) for name, weight in layers.named_parameters())
    return single + sum(counted(name, shape.numel()) for name, shape in shapes if len(shape) == 3)  # of all experts
