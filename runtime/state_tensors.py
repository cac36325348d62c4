"""A state as named tensors, and back: what `saved` writes to a file."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from keepsight.models.decoder import decoder_of, full_attention_layers, has_latents, head_width, running_devices
from keepsight.runtime.cache import empty_cache, filled_layer, share
from keepsight.runtime.cache_layers import KeptLayer, RaggedLayer
from keepsight.runtime.softmax import Softmax
from keepsight.runtime.state import Needs, State, Trace


def shape_of_model(model: PreTrainedModel) -> dict[str, Any]:
    """The shape that a state must have."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return {
        "layers": config.num_hidden_layers,
        "kv_heads": 1 if has_latents(model) else kv_heads,
        "head_dim": config.kv_lora_rank if has_latents(model) else head_width(config),
        "vocabulary": config.vocab_size,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def shape_of_tensors(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The shape of the state of these tensors, as `shape_of_model` gives it for a model."""
    keys = next(tensor for name, tensor in tensors.items() if name.endswith(".keys"))
    return {
        "layers": len({name.split(".")[1] for name in tensors if name.startswith("layers.")}),
        "kv_heads": keys.shape[1],
        "head_dim": keys.shape[3],
        "vocabulary": tensors["logits"].shape[1],
        "dtype": str(keys.dtype).removeprefix("torch."),
    }


def tensors_of(state: State) -> dict[str, Tensor]:
    """All tensors of a state by their names in the file."""
    found: dict[str, Tensor | None] = {
        "tokens": state.tokens,
        "lengths": state.lengths,
        "logits": state.logits,
        "mask": state.mask,
        "shift": state.shift,
        "trace.ahead": state.trace.ahead,
    }
    for index, layer in enumerate(share(state.cache).layers):
        found |= {f"layers.{index}.{name}": tensor for name, tensor in layer_tensors(layer).items()}
    found |= {f"trace.sinks.{index}": each.sinks for index, each in enumerate(state.trace.softmax)}
    found |= {f"trace.window.{index}": tensor for index, tensor in enumerate(state.trace.queries)}
    found |= {f"trace.received.{index}": tensor for index, tensor in enumerate(state.trace.received)}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in found.items() if tensor is not None}


def layer_tensors(layer: Any) -> dict[str, Tensor | None]:
    """The tensors of a layer by their names."""
    if not isinstance(layer, DynamicLayer):
        states = ("conv", layer.conv_states), ("recurrent", layer.recurrent_states)
        return {f"{kind}.{place}": tensor for kind, held in states for place, tensor in held.items()}
    of_layer: dict[str, Tensor | None] = {"keys": layer.keys, "values": layer.values}
    if isinstance(layer, KeptLayer):
        of_layer |= {"real": layer.real}
    if isinstance(layer, RaggedLayer):
        counts = torch.from_numpy(layer.counts)
        of_layer |= {"kept_keys": layer.kept_keys, "kept_values": layer.kept_values, "counts": counts}
    return of_layer


def beside_layers(tensors: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of a state on the model's devices: what is of a layer is where that layer runs."""
    scored = full_attention_layers(model.config)
    devices = [running_devices(layer)[0] for layer in decoder_of(model).layers]

    def device(name: str) -> torch.device:
        kind, *rest = name.split(".")
        if kind == "layers":
            return devices[int(rest[0])]
        return devices[scored[int(rest[1])]] if kind == "trace" and len(rest) == 2 else model.device

    return {name: tensor.to(device(name)) for name, tensor in tensors.items()}


def state_of_tensors(
    tensors: dict[str, Tensor],
    model: PreTrainedModel,
    seen: int,
    needs: Needs,
    softmax: Sequence[tuple[float, float | None]],
) -> State:
    """The state of these tensors.

    Args:
        tensors: As `tensors_of` names them.
        model: The target.
        seen: Logical length of the cache.
        needs: What the trace was recorded for.
        softmax: Scaling and softcap of each layer with full attention.
    """
    layers = [
        layer_of_tensors(empty, _named(tensors, f"layers.{index}."), seen)
        for index, empty in enumerate(empty_cache(model).layers)
    ]
    window, received = (tuple(_named(tensors, f"trace.{kind}.").values()) for kind in ("window", "received"))
    by_layer = [Softmax(*each, tensors.get(f"trace.sinks.{index}")) for index, each in enumerate(softmax)]
    return State(
        Cache(layers=layers),
        tensors.get("mask"),
        tensors["logits"],
        tensors["tokens"],
        tensors["lengths"],
        Trace(needs, window, received, tuple(by_layer), ahead=tensors.get("trace.ahead")),
        tensors.get("shift"),
    )


def layer_of_tensors(empty: Any, tensors: dict[str, Tensor], seen: int) -> Any:
    """A layer from its tensors; `empty` is one as the model begins with."""
    if not isinstance(empty, DynamicLayer):
        layer: Any = empty
        for name, tensor in tensors.items():
            kind, place = name.split(".")
            fill = layer.update_conv_state if kind == "conv" else layer.update_recurrent_state
            fill(tensor, state_idx=int(place))
        return layer
    keys, values = tensors["keys"], tensors["values"]
    if "counts" in tensors:
        counts = tensors["counts"].cpu().numpy()
        return RaggedLayer(tensors["kept_keys"], tensors["kept_values"], counts, seen, (keys, values))
    if "real" in tensors:
        return KeptLayer(keys, values, seen, tensors["real"])
    return filled_layer(empty, keys, values, seen)


def _named(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors under a prefix by the rest of their names, numbers in numerical order."""
    found = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return dict(sorted(found.items(), key=lambda item: (len(item[0]), item[0])))
