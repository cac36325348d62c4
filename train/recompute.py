"""Gradient checkpointing of passes over a cache that they do not write to."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from keepsight.models.decoder import decoder_of, full_attention_layers
from keepsight.runtime.attention import recording


@contextmanager
def recomputed(
    model: PreTrainedModel, asked: bool, under: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Iterator[None]:
    """Within the block, activations of a model's layers with full attention are recomputed for their gradients.

    transformers' own gradient checkpointing goes without a cache. These layers read one and do not write to it. Hooks
    around a layer are not run again (FSDP2's gather its weights), hooks inside it are.

    Args:
        model: The base model.
        asked: Whether it is so; otherwise, and without gradients, the block changes nothing.
        under: What the pass runs under, such as an adapter that is switched on, and each layer when it is run again.
    """
    if not (asked and torch.is_grad_enabled()):
        yield
        return
    decoder = decoder_of(model)
    layers = [decoder.layers[place] for place in full_attention_layers(model.config)]

    @contextmanager
    def again() -> Iterator[None]:
        with under(), recording(decoder):
            yield

    before = [vars(layer).get("forward") for layer in layers]
    try:
        for layer in layers:
            run_again = partial(checkpoint, layer.forward, use_reentrant=False)
            layer.forward = partial(run_again, context_fn=lambda: (nullcontext(), again()))
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            if own is None:
                vars(layer).pop("forward", None)
            else:
                layer.forward = own
