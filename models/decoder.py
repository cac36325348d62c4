"""The decoder of a base model: kinds of layers, shapes, devices, and which models are supported."""

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate.utils import has_offloaded_params
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.pytorch_utils import Conv1D

from keepsight.errors import UserError
from keepsight.models.distributed import whole_shape
from keepsight.models.transformers_internals import replaces_attention

FULL = "full_attention"
HYBRID = "hybrid"
"""Full attention beside a recurrent state, in one layer."""
INDEXED = "indexed_attention"
"""Full attention that reads the entries which an indexer selects for each token."""
SCORED = (FULL, HYBRID, INDEXED)
"""Kinds of layers that keep an entry for every token."""
CHUNKED = "chunked_attention"
RECURRENT = ("linear_attention", "conv")
WITHOUT_CACHE = ("moe", "mlp")
BOUNDED = ("sliding_attention", CHUNKED, *RECURRENT, "hybrid_sliding", *WITHOUT_CACHE)
"""Kinds of layers whose cache does not grow with the prompt."""
_OWN_HEADS = "shares its KV heads among query heads in its own way; load a model with grouped heads"
_OWN_CACHE = "has its own kind of cache; load a model that takes transformers' DynamicCache"
_UNSUPPORTED = {
    "diffllama": _OWN_HEADS,
    "jetmoe": _OWN_HEADS,
    "doge": "computes the mask of each head from the values of all entries; load another model",
    "diffusion_gemma": "denoises many tokens at once; load a model that answers token by token",
    "kosmos-2.5": "numbers its tokens in its own way; load a model that takes position_ids",
    "minimax": _OWN_CACHE,
    "recurrent_gemma": _OWN_CACHE,
    "zaya": _OWN_CACHE,
}
"""Model types that keepsight would serve wrongly: why, and what to do instead."""
_WITH_INDEXER = ("deepseek_v32", "glm_moe_dsa")
"""Models whose indexers are known: a key of one head beside each latent entry, and the best entries in order."""
RESTARTS = ("jamba", "zamba")
"""Models whose recurrent layers forget their state where they read several tokens at once."""
_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj")
_STACKS = ("layers", "h")
"""Names of the decoder layers."""
_CROSS_ATTENTION = ("encoder_attn", "crossattention")
_MAY_BE_INFINITE = "time_step_limit"  # of state-space layers


# Structure


_SUPPORTED: WeakKeyDictionary[PreTrainedModel, torch.device] = WeakKeyDictionary()
"""Models that were found to be supported, and the device that they were on then."""


def decoder_of(model: PreTrainedModel) -> Any:
    """The stack of decoder layers, without lm_head and vision tower; see `decoder_layers`."""
    decoder: Any = model.get_decoder()
    return decoder if _stack_of(decoder) is not None else getattr(decoder, "model", decoder)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a model, in order.

    Raises:
        UserError: they have no name that is known.
    """
    stack = _stack_of(decoder_of(model))
    if stack is None:
        raise UserError(
            f"the layers of {model.config.model_type} are not known; load another model, such as Llama, Qwen, Mistral "
            "or Gemma",
            field="model",
            code="model",
        )
    return stack


def _stack_of(decoder: Any) -> nn.ModuleList | None:
    for name in _STACKS:
        stack = getattr(decoder, name, None)
        if isinstance(stack, nn.ModuleList):
            return stack
    return None


def layer_kinds(config: Any) -> list[str]:
    """The kind of each decoder layer, such as `full_attention`, from a model's configuration."""
    config = config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return list(kinds)
    kind = FULL
    if getattr(config, "sliding_window", None):
        kind = "sliding_attention"
    if getattr(config, "attention_chunk_size", None):
        kind = CHUNKED
    return [kind] * config.num_hidden_layers


def full_attention_layers(config: Any) -> list[int]:
    """Indices of the layers that keep a key and a value for every token; only these are scored and evicted from."""
    kinds = layer_kinds(config)
    owners = entry_owners(config)
    return [index for index, kind in enumerate(kinds) if kind in SCORED and owners[index] == index]


def entry_owners(config: Any) -> list[int]:
    """For each decoder layer, the one whose KV entries it reads: itself, or an earlier one that shares them.

    In Gemma 3n and small Gemma 4 models the last layers read the entries of the last layer of their kind before them.
    """
    kinds = layer_kinds(config)
    modes = getattr(config.get_text_config(decoder=True), "kv_sharing_modes", None) or [None] * len(kinds)
    last_of_kind: dict[str, int] = {}
    owners = []
    for index, (kind, mode) in enumerate(zip(kinds, modes, strict=True)):
        if mode == "reuse" and kind in last_of_kind:
            owners.append(last_of_kind[kind])
        else:
            last_of_kind[kind] = index
            owners.append(index)
    return owners


def cached_layers(config: Any) -> int:
    """Number of decoder layers that keep something of what they have read."""
    owners = entry_owners(config)
    kinds = layer_kinds(config)
    return sum(owners[index] == index and kind not in WITHOUT_CACHE for index, kind in enumerate(kinds))


def last_scored_layer(config: Any) -> int:
    """Index of the last layer that reads entries which are scored; -1 for none."""
    scored = set(full_attention_layers(config))
    return max((index for index, owner in enumerate(entry_owners(config)) if owner in scored), default=-1)


def context_of(model: PreTrainedModel) -> int:
    """Context length of a model in tokens, as extended by its RoPE; huge where its configuration names none."""
    config = model.config.get_text_config(decoder=True)
    config_length = int(getattr(config, "max_position_embeddings", None) or sys.maxsize)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    by_kind = FULL in rope  # models with several kinds of layers name the extended length where it is scaled linearly
    rope = rope.get(FULL) or rope
    scaling = rope.get("rope_type")
    original = rope.get("original_max_position_embeddings")
    if scaling in ("linear", "dynamic") and not by_kind:
        original = original or config_length
    elif scaling not in ("yarn", "longrope"):
        return config_length  # others, such as llama3, name the extended length
    stretched = (rope.get("factor") or 1) * (original or 0)
    return max(config_length, int(stretched))


def scored_config(config: Any) -> Any:
    """The configuration of a text model's layers with full attention.

    In Gemma 4 they have wider heads than the others, and in its 12B fewer KV heads. Where layers differ, the model's
    configuration refuses to name one number for all.
    """
    config = config.get_text_config(decoder=True)
    scored = full_attention_layers(config)
    if not getattr(config, "is_heterogeneous", False) or not scored:  # transformers before 5.20 has one configuration
        return config
    return config.per_layer_config[scored[0]]


def norm_epsilon(config: Any) -> float:
    """The epsilon of a text model's norms, from its configuration; 1e-6 where it names none."""
    for name in ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps"):
        epsilon = getattr(config, name, None)
        if epsilon is not None:
            return float(epsilon)
    return 1e-6


def head_width(config: Any) -> int:
    """Dimensions of one attention head of the layers with full attention, from the configuration of a text model."""
    config = scored_config(config)
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def cached_kv_heads(model: PreTrainedModel) -> int:
    """KV heads of the layers with full attention; with latent attention (MLA), the query heads."""
    config = scored_config(model.config)
    kv_heads = None if has_latents(model) else getattr(config, "num_key_value_heads", None)
    return int(kv_heads or config.num_attention_heads)


def has_latents(model: PreTrainedModel) -> bool:
    """Whether attention is latent (MLA of DeepSeek-V2 and V3): one latent per token, from which heads are expanded."""
    return bool(getattr(model.config.get_text_config(decoder=True), "kv_lora_rank", None))


def input_embedding(model: PreTrainedModel) -> Tensor:
    """The input embedding [vocabulary, hidden], detached, without the updates of LoRA and of trainable tokens.

    PEFT's modules in its place have the attribute `weight` too, and few of the others of `nn.Embedding`.
    """
    weight: Any = model.get_input_embeddings().weight
    embedding: Tensor = weight.detach()
    return embedding


def input_shape(model: PreTrainedModel) -> tuple[int, int]:
    """Size of the vocabulary and width of the input embedding, also where ZeRO-3 has partitioned it."""
    weight: Any = model.get_input_embeddings().weight
    vocabulary, width = whole_shape(weight)
    return vocabulary, width


def embedding_scale(model: PreTrainedModel) -> float:
    """The factor by which the model multiplies its input embeddings, as Gemma does."""
    module: Any = model.get_input_embeddings()
    while isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):  # PEFT's, which hide the embedding
        module = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module.original_module
    return float(getattr(module, "embed_scale", 1.0))


def embedding_std(model: PreTrainedModel) -> Tensor:
    """[] float32: the standard deviation of the input embeddings as the first layer reads them."""
    norm: Any = getattr(model.get_input_embeddings(), "embed_norm", None)
    if norm is not None:  # Inkling's embedding normalises each
        gain: Tensor = norm.weight
        return gain.detach().float().square().mean().sqrt()
    return input_embedding(model).float().std() * embedding_scale(model)


def embedded_inputs(model: PreTrainedModel, embeddings: Tensor) -> dict[str, Any]:
    """What the decoder takes for input embeddings [B, n, hidden], of tokens or of soft tokens.

    Gemma 3n and small Gemma 4 models have a second embedding of each token, for all layers. Soft tokens get that of
    padding, as the tokens of an image do in these models.
    """
    decoder = decoder_of(model)
    if decoder.config.model_type == "ctrl":
        embeddings = embeddings.clone()  # it scales them in place
    inputs = {"inputs_embeds": embeddings}
    if getattr(decoder.config, "hidden_size_per_layer_input", 0):
        with torch.no_grad():
            inputs["per_layer_inputs"] = decoder.get_per_layer_inputs(_tokens_of(model, embeddings))
    return inputs


def _tokens_of(model: PreTrainedModel, embeddings: Tensor) -> Tensor:
    """The ids [B, n] of the tokens that have these input embeddings [B, n, hidden]; that of padding for others."""
    padding = model.config.get_text_config(decoder=True).pad_token_id or 0
    compared = 8  # numbers of a row; all of them would take the memory of [B, n, vocabulary, hidden]
    table = input_embedding(model)[:, :compared]
    table = table * table.new_tensor(embedding_scale(model))
    matches = (embeddings[..., None, :compared] == table).all(dim=-1)
    return matches.int().argmax(dim=-1).where(matches.any(dim=-1), padding)


def logits_of(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """The logits [..., V] of a decoder's outputs [..., hidden], with the model's scaling and soft-capping."""
    config: Any = model.config.get_text_config(decoder=True)
    lm_head: Any = model.get_output_embeddings()
    scaling = getattr(config, "logits_scaling", None) or 1.0
    scale = scaling if config.model_type.startswith("hyperclovax") else 1 / scaling  # others divide by it
    logits: Tensor = lm_head(hidden) * scale * (getattr(config, "logit_scale", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def attention_of(model: PreTrainedModel, index: int) -> nn.Module:
    """The attention of a decoder layer, which ends with an output projection.

    Raises:
        UserError: none is known in that layer.
    """
    for module in decoder_layers(model)[index].modules():
        is_recurrent = hasattr(module, "conv1d")  # Mamba's has an output projection too
        if hasattr(module, "layer_idx") and not is_recurrent and any(hasattr(module, name) for name in _OUTPUTS):
            return module
    raise UserError(
        f"{model.config.model_type}: the attention of layer {index} has no known output projection",
        field="model",
        code="model",
    )


def output_projection(model: PreTrainedModel, index: int) -> nn.Module:
    """The module that a decoder layer's attention ends with: it multiplies all heads' outputs by W_O.

    Raises:
        UserError: the attention of that layer has none that is known.
    """
    attention = attention_of(model, index)
    return next(getattr(attention, name) for name in _OUTPUTS if hasattr(attention, name))


def output_weight(model: PreTrainedModel, index: int) -> Tensor:
    """W_O [hidden, H x d] of a decoder layer's attention; d is the width of a value.

    Raises:
        UserError: it is quantized, offloaded, or not known.
    """
    projection = output_projection(model, index)
    weight = getattr(projection, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.dtype.itemsize < 2 or weight.is_meta:
        raise UserError(
            f"the output projection of layer {index} is not a plain matrix; load the model unquantized",
            field="model",
            code="model",
        )
    if isinstance(projection, Conv1D):  # GPT-2's, which is stored the other way round
        weight = weight.T
    return weight.detach()


# What is supported


def _attends_to_encoder(layer: nn.Module) -> bool:
    return any(hasattr(layer, name) for name in _CROSS_ATTENTION)


def require_supported(model: PreTrainedModel) -> None:
    """Refuse models for which keepsight would give wrong answers."""
    caller = getattr(getattr(model, "prepare_inputs_for_generation", None), "__self__", None)
    for adapted in (model, caller):  # PEFT's models lend it to the model whose `generate` they call
        if not isinstance(adapted, PeftModel) or adapted._adapters_disabled:
            continue
        adapter = adapted.active_adapter
        config: Any = adapted.peft_config[adapter] if isinstance(adapter, str) else None
        if config is not None and config.is_prompt_learning:
            raise UserError(
                f"the virtual tokens of {config.peft_type.value.lower()} are not supported; disable that adapter, "
                "or call generate without a method",
                field="peft_type",
                code="model",
            )
    if model in _SUPPORTED and _SUPPORTED[model] == model.device:
        return
    require_supported_config(model.config)
    kind = model.config.model_type
    decoder = decoder_of(model)
    stack = _stack_of(decoder)
    if stack is None or not replaces_attention(decoder):
        raise UserError(
            f"{kind} does not compute attention by transformers' AttentionInterface, so that no query can be read; "
            "load a model that does, such as Llama, Qwen, Mistral or Gemma",
            field="model",
            code="model",
        )
    if any(_attends_to_encoder(layer) for layer in stack):
        raise UserError(
            f"the layers of {kind} attend to an encoder too, which this model lacks; load a decoder-only model",
            field="model",
            code="model",
        )
    selects = any(hasattr(module, "indexer") for module in decoder.modules())
    if has_latents(model) and selects and kind not in _WITH_INDEXER:
        raise UserError(
            f"{kind} selects the entries that its latent attention reads; load a model with full attention, such as "
            "DeepSeek-V3",
            field="model",
            code="model",
        )
    if not hasattr(model, "hf_device_map"):  # no hook moves activations between devices
        require_one_device(model)
    _SUPPORTED[model] = model.device


def require_supported_config(config: Any) -> None:
    """The part of `require_supported` that a configuration decides, before any weights are read.

    Raises:
        UserError: see `require_supported`; or a value is NaN or infinite.
    """
    kind = config.model_type
    if config.is_encoder_decoder or type(config).is_encoder_decoder:  # a decoder's own configuration says no
        raise UserError(f"{kind} is an encoder-decoder model; load a decoder-only model", field="model", code="model")
    if not hasattr(config.get_text_config(decoder=True), "num_hidden_layers"):
        raise UserError(
            f"{kind} is made of several stacks of layers; load a model with one decoder", field="model", code="model"
        )
    if kind in _UNSUPPORTED:
        raise UserError(f"{kind} {_UNSUPPORTED[kind]}", field="model", code="model")
    supported_kinds = [*SCORED, *BOUNDED]
    if kind not in _WITH_INDEXER:
        supported_kinds.remove(INDEXED)
    unsupported = sorted(set(layer_kinds(config)) - set(supported_kinds))
    if unsupported:
        supported = ", ".join(supported_kinds)
        raise UserError(
            f"{kind} has layers of {', '.join(unsupported)}; supported are {supported}", field="model", code="model"
        )
    if "shared" in (getattr(config.get_text_config(decoder=True), "indexer_types", None) or ()):
        raise UserError(
            f"{kind}: some layers read what the indexer of an earlier layer selects (indexer_types), and layers keep "
            "different entries after an eviction; load a model with an indexer in each layer, such as DeepSeek-V3.2",
            field="model",
            code="model",
        )
    if not any(isinstance(layer, DynamicLayer) for layer in DynamicCache(config=config).layers):
        raise UserError(
            f"{kind} has no attention, and so no KV entries; use it without keepsight", field="model", code="model"
        )
    for name, value in floats_of(config.to_dict()):
        if not math.isfinite(value) and _MAY_BE_INFINITE not in name:
            raise UserError(
                f"{kind}: {name}={value} in its configuration is not finite; copy the model again",
                field=name,
                code="data",
            )


def floats_of(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The floats in a configuration, by dotted names."""
    if isinstance(value, float):
        yield name, value
    if not isinstance(value, dict | list | tuple):
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        item_name = f"{name}.{key}" if name else str(key)
        yield from floats_of(item, item_name)


def require_one_device(model: PreTrainedModel) -> None:
    """Refuse models whose layers run on several devices."""
    devices = sorted(map(str, running_devices(decoder_of(model))))
    if len(devices) > 1:
        kind = model.config.model_type
        raise UserError(
            f"the layers of {kind} lie on {', '.join(devices)}; load the model on one device",
            field="model.device_map",
            code="model",
        )


def require_full_attention(model: PreTrainedModel) -> None:
    """Refuse to train a lookahead module or head for a model without full attention.

    Raises:
        UserError: no layer keeps an entry for every token.
    """
    if not full_attention_layers(model.config):
        raise UserError(
            f"{model.config.model_type} has no layer with full attention, so that there is nothing to choose from; "
            "use it without a trained module",
            field="model",
            code="model",
        )


# Devices


def values_of(model: nn.Module, name: str, weight: Tensor) -> Tensor:
    """A weight by its name, read from where accelerate offloads it; on the meta device where it has no values."""
    module_name, _, weight_name = name.rpartition(".")
    module: Any = model.get_submodule(module_name)
    if weight.is_meta and has_offloaded_params(module):
        offloaded: Tensor = module._hf_hook.weights_map[weight_name]
        return offloaded
    return weight


def running_devices(model: nn.Module) -> list[torch.device]:
    """The devices on which a model's modules run, each once, also where accelerate offloads their weights."""
    devices: dict[torch.device, None] = {}
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            device = weight.device
            if weight.is_meta and has_offloaded_params(module):
                hook: Any = module._hf_hook
                device = torch.device(hook.execution_device)
            devices[device] = None
    return list(devices)


def is_on_several_devices(model: nn.Module) -> bool:
    """Whether accelerate placed the modules of a model, or of one within it, on several devices."""
    return any(len(getattr(module, "hf_device_map", ())) > 1 for module in model.modules())


def on_each(tensor: Tensor | None) -> Callable[[torch.device], Any]:
    """A function that returns a tensor, or None, on a device; it is copied once to each device."""
    return functools.cache(lambda device: None if tensor is None else tensor.to(device))


def joined(layers: Sequence[Tensor]) -> Tensor:
    """Tensors of layers on several devices, concatenated on the device of the first."""
    return torch.cat([layer.to(layers[0].device) for layer in layers])
