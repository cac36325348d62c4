"""Models whose weights DeepSpeed's ZeRO-3 divides over the processes of a launch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import DeepSpeedPlugin
from torch import Tensor, nn
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from keepsight.models.processes import launched

_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}


@contextmanager
def created_divided(dtype: str) -> Iterator[None]:
    """Where the launcher asks for ZeRO-3, a model that is loaded within the block is divided as it is created.

    No process ever holds all of it but the first, in the CPU's memory, which reads the files. Otherwise each would hold
    the whole model until DeepSpeed begins.

    Args:
        dtype: The model's, such as bfloat16.
    """
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        yield
        return
    launched()
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision(_PRECISIONS.get(dtype, "no"))
    plugin.set_deepspeed_weakref()  # by which transformers knows of it, as long as the plugin is there
    try:
        yield
    finally:
        unset_hf_deepspeed_config()


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Within the block a module's own weights are whole on every process; all of them must come here."""
    own = [weight for weight in module.parameters(recurse=False) if hasattr(weight, "ds_id")]
    if not own:
        yield
        return
    from deepspeed.runtime.zero import GatheredParameters  # pyright: ignore[reportMissingImports]

    with GatheredParameters(own):
        yield


def whole_shape(weight: Tensor) -> torch.Size:
    """The shape of a weight before it was divided."""
    shape: torch.Size = getattr(weight, "ds_shape", weight.shape)
    return shape
