"""The configuration of a draft head: read as strictly as its tensors, and written under the names of public heads."""

from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig

from keepsight.errors import UserError
from keepsight.files import read_json
from keepsight.models.decoder import head_width
from keepsight.models.draft_head import DraftHead
from keepsight.models.weight_files import LARGEST_SIZE, one_line

_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_UNKNOWN_NORMS = ("norm_before_fc", "norm_before_residual")  # other layers than ours, by the same keys
_SAVED = (
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "vocab_size",
)
_SAVED_IF_SET = ("eagle_config", "fc_norm", "norm_output", "qkv_bias")


def read_head_config(path: Path) -> LlamaConfig:
    """Read a head's config.json.

    Raises:
        UserError: it is no EAGLE head's, or one of an unknown kind.
    """
    values: dict[str, Any] = read_json(path, dict[str, Any])
    for name in _SIZES:
        if type(size := values.get(name)) is not int or not 0 < size <= LARGEST_SIZE:
            raise UserError(f"{path}: {name} is missing or no possible size; this is no EAGLE head's configuration")
    if (layers := values.get("num_hidden_layers", 1)) != 1:
        raise UserError(f"{path}: num_hidden_layers is {layers}; an EAGLE head has 1, this is another model")
    if unknown := [name for name in _UNKNOWN_NORMS if values.get(name)]:
        raise UserError(f"{path}: {unknown[0]}={values[unknown[0]]} is not supported; choose another head")
    if not _names_three_layers(values.get("eagle_config")):
        raise UserError(
            f"{path}: eagle_config={values['eagle_config']!r}: expected three whole numbers in "
            "eagle_aux_hidden_state_layer_ids, the target's layers that the head reads"
        )
    try:
        return LlamaConfig.from_dict(values)
    except (StrictDataclassError, ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not a Llama layer's configuration ({one_line(error)})") from None


def _names_three_layers(eagle_config: Any) -> bool:
    if eagle_config is None:
        return True
    layers = eagle_config.get("eagle_aux_hidden_state_layer_ids") if isinstance(eagle_config, dict) else ()
    return layers is None or (isinstance(layers, list) and [type(layer) for layer in layers] == [int, int, int])


def public_config(head: DraftHead) -> dict[str, Any]:
    """The configuration under the names of public heads, which serving engines read.

    `target_hidden_size` is left out when it is `hidden_size`: EAGLE's own code takes its presence for a head with an
    embedding of its own.
    """
    config = head.config
    rope: dict[str, Any] = dict(config.rope_parameters or {})
    theta = rope.pop("rope_theta", 10000.0)
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: getattr(config, name) for name in _SAVED},
        "head_dim": head_width(config),
        "num_hidden_layers": 1,
        "draft_vocab_size": len(head.d2t),
        "rope_theta": theta,
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "tie_word_embeddings": False,
        "torch_dtype": str(head.fc.weight.dtype).removeprefix("torch."),
    }
    if (width := head.fc.in_features // 3) != config.hidden_size or head.own_embedding is not None:
        values["target_hidden_size"] = width
    return values | {name: getattr(config, name) for name in _SAVED_IF_SET if getattr(config, name, None)}
