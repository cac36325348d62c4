"""Files of a draft head: configuration and weights under the names of public EAGLE heads, and `keepsight.json` of ours.

Heads that are published as a pickle are read by torch's `weights_only`, which makes tensors and runs nothing.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from keepsight.errors import UserError, one_line
from keepsight.files import read_json
from keepsight.models.artifacts import LARGEST_SIZE, as_weights, check_digest, read_tensors, unpickled
from keepsight.models.card import Provenance
from keepsight.models.decoder import input_embedding, input_width
from keepsight.models.model_files import logger

CONFIG, WEIGHTS, ORIGIN = "config.json", "model.safetensors", "keepsight.json"
PICKLE = "pytorch_model.bin"
EMBEDDING = "embed_tokens.weight"
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_RELATIVE, _ABSOLUTE = 2**-6, 1e-4
"""Tolerances within which two embeddings are the same, rounded to different dtypes."""
_ROWS_AT_ONCE = 4096
_UNKNOWN_NORMS = ("norm_before_fc", "norm_before_residual")  # layers of another form, under the same keys


@dataclass(frozen=True)
class Origin:
    """Content of keepsight.json: digests are `sha256:...` by file name."""

    provenance: Provenance
    digests: dict[str, str]


def read_config(path: Path) -> LlamaConfig:
    """A head's config.json, checked as strictly as its tensors."""
    values: dict[str, Any] = read_json(path, dict[str, Any])
    if type(eps := values.get("rms_norm_eps", 1e-6)) is not float or not 0 < eps < 1:
        raise UserError(f"{path}: rms_norm_eps={eps} must be above 0 and below 1; fetch it again")
    for name in SIZES:
        if type(size := values.get(name)) is not int or not 0 < size <= LARGEST_SIZE:
            raise UserError(f"{path}: {name} is missing or not a size; this configures no EAGLE head")
    if (layers := values.get("num_hidden_layers", 1)) != 1:
        raise UserError(f"{path}: num_hidden_layers is {layers}; an EAGLE head has 1, this is another model")
    if unknown := [name for name in _UNKNOWN_NORMS if values.get(name)]:
        raise UserError(f"{path}: {unknown[0]}={values[unknown[0]]} is not supported; choose another head")
    if not _names_three_layers(values.get("eagle_config")):
        raise UserError(
            f"{path}: eagle_config={values['eagle_config']!r}: expected three whole numbers in "
            "eagle_aux_hidden_state_layer_ids, the model's layers that the head reads"
        )
    try:
        return LlamaConfig.from_dict(values)
    except (StrictDataclassError, ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not a Llama layer's configuration ({one_line(error, 200)})") from None


def _names_three_layers(eagle_config: Any) -> bool:
    if eagle_config is None:
        return True
    layers = eagle_config.get("eagle_aux_hidden_state_layer_ids") if isinstance(eagle_config, dict) else ()
    return layers is None or (isinstance(layers, list) and [type(layer) for layer in layers] == [int, int, int])


def check_model(folder: Path, config: LlamaConfig, model: PreTrainedModel) -> None:
    """Refuse a head for a model of other sizes."""
    text = model.config.get_text_config()
    sizes = {
        "hidden size": (config.hidden_size, input_width(model)),
        "feature width": (getattr(config, "target_hidden_size", None) or config.hidden_size, text.hidden_size),
        "vocabulary": (config.vocab_size, text.vocab_size),
    }
    for name, (own, its) in sizes.items():
        if own != its:
            raise UserError(
                f"{folder}: this draft head is for a model with {name} {own}, but that of "
                f"{model.config.name_or_path or type(model).__name__} is {its}; choose the model's own head"
            )


def read_weights(folder: Path, origin: Origin | None) -> tuple[Path, dict[str, Tensor]]:
    """The file of a head's weights and its tensors, an EAGLE-3 layer's under `midlayer.*`."""
    if not (path := folder / WEIGHTS).is_file():
        tensors = unpickled(path := folder / PICKLE)
        logger.warning("%s: a pickle; its %d tensors were read as safetensors would be", path, len(tensors))
    else:
        if origin is not None:
            check_digest(path, origin.digests.get(WEIGHTS, "missing"), ORIGIN)
        tensors = read_tensors(path)
    if "layers.0.hidden_norm.weight" in tensors:
        tensors = {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in tensors.items()}
    return path, tensors


def own_embedding(path: Path, embedding: Tensor, model: PreTrainedModel) -> Tensor | None:
    """A head's embedding on the model's device and in its dtype, if it differs from the model's."""
    base = input_embedding(model)
    if embedding.shape != base.shape:
        raise UserError(
            f"{path}: tensor {EMBEDDING!r} has shape {list(embedding.shape)}, the model's is {list(base.shape)}"
        )
    own = as_weights(path, {EMBEDDING: embedding}, model.dtype)[EMBEDDING]
    pairs = zip(own.split(_ROWS_AT_ONCE), base.split(_ROWS_AT_ONCE), strict=True)
    is_same = all(torch.allclose(row.float(), its.float().cpu(), _RELATIVE, _ABSOLUTE) for row, its in pairs)
    return None if is_same else own.to(base.device)
