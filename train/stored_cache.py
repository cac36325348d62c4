"""A cache among the tensors of a reading, by name: `keys.LAYER`, `values.LAYER` and so on."""

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from keepsight.runtime.saved import layer_of_tensors, layer_tensors
from keepsight.runtime.state import empty_cache
from keepsight.train.replay import Reading


def stored(cache: Cache) -> Reading:
    """What every layer holds, by name."""
    held = [(index, *each) for index, layer in enumerate(cache.layers) for each in layer_tensors(layer).items()]
    return {f"{name}.{index}": tensor for index, name, tensor in held if tensor is not None}


def restored(reading: Reading, model: PreTrainedModel, length: int) -> Cache:
    """A cache of what `stored` named, after `length` tokens."""
    layers = []
    for index, empty in enumerate(empty_cache(model).layers):
        end = f".{index}"
        own = [name for name in reading if name.endswith(end) and not name.startswith("importance.")]
        held = {name.removesuffix(end): reading[name] for name in own}
        # A recurrent state is in float32 in models of any dtype.
        cast = {name: each if name.startswith("recurrent") else each.to(model.dtype) for name, each in held.items()}
        layers.append(layer_of_tensors(empty, cast, length))
    return Cache(layers=layers)
