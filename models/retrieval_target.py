"""Whether a retrieval head is one for a target."""

from typing import Any

from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.models.decoder import cached_kv_heads, full_attention_layers
from keepsight.models.retrieval_head import RetrievalHead


def check_target(head: RetrievalHead, target: PreTrainedModel) -> None:
    """Check that a head is one for a target.

    Raises:
        UserError: hidden size, vocabulary or KV heads differ; or the target is too shallow for the features or groups.
    """
    config, text = head.config, target.config.get_text_config()
    embedding: Any = target.get_input_embeddings()
    pairs = {
        "hidden size": (config.hidden_size, embedding.weight.shape[1]),
        "feature width": (config.target_hidden_size, text.hidden_size),
        "vocabulary": (config.vocab_size, text.vocab_size),
        "KV heads": (config.num_key_value_heads, cached_kv_heads(target)),
    }
    differing = [f"{name} {own} against {its}" for name, (own, its) in pairs.items() if own != its]
    if differing:
        name = target.config.name_or_path or type(target).__name__
        raise UserError(
            f"this retrieval head is for another target than {name}: {', '.join(differing)}; choose its own"
        )
    head.layers_of(target)
    # Without any such layer the method itself refuses the target, and says why.
    if 0 < (layers := len(full_attention_layers(target.config))) < config.groups:
        raise UserError(
            f"this retrieval head has {config.groups} groups of layers, and the target {layers} layers with full "
            "attention; choose its own"
        )
