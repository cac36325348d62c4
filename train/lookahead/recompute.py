"""Gradient checkpointing of a pass over a cache.

transformers' own goes without a cache, into which a layer that runs again would write again. The layers that observers
look back at write nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


@contextmanager
def recomputed(layers: Iterable[nn.Module], again: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Layers that run within the block keep their inputs alone, and run again when their gradients are made.

    Hooks around a layer stay outside (FSDP2's gather its weights), hooks inside it run again.

    Args:
        layers: Layers that change nothing when they run.
        again: What must be in force while they run again, as it is within the block.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), again()

    changed = [*layers]
    before = [vars(layer).get("forward") for layer in changed]
    try:
        for layer in changed:
            twice: Any = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)
            layer.forward = twice
        yield
    finally:
        for layer, own in zip(changed, before, strict=True):
            if own is None:
                vars(layer).pop("forward", None)
            else:
                layer.forward = own
