"""Training in several processes: sharded base models, and weights gathered from DeepSpeed."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.models.decoder import decoder_layers, full_attention_layers
from keepsight.models.distributed import launched, whole_shape

SHARDED = "fsdp2"
"""The value of `model.device_map` that selects `shard_layers`."""


def gather_weights(module: nn.Module) -> None:
    """Gather the whole value of every trainable parameter in float32; all processes must call this.

    DeepSpeed computes with copies in the mixed-precision dtype, which ZeRO-3 shards over the processes. It optimises
    float32 values.
    """
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = _gathered_value(parameter)


@contextmanager
def float32_trainables(module: nn.Module) -> Iterator[None]:
    """Within the block trainable parameters are whole and float32 (`gather_weights`); then as DeepSpeed expects."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    local_values = [parameter.data for parameter in trainable]
    gather_weights(module)
    try:
        yield
    finally:
        for parameter, local_value in zip(trainable, local_values, strict=True):
            parameter.data = local_value


def _gathered_value(parameter: Tensor) -> Tensor:
    is_zero3 = hasattr(parameter, "ds_id")
    is_zero1_or_2 = hasattr(parameter, "_hp_mapping")
    if not is_zero3 and not is_zero1_or_2:
        return parameter.data
    from deepspeed.utils import safe_get_full_fp32_param  # pyright: ignore[reportMissingImports]

    value: Any = safe_get_full_fp32_param(parameter)
    return value.detach().view(whole_shape(parameter)).clone()


def shard_layers(model: PreTrainedModel) -> None:
    """Shard the layers of a frozen model over all processes with FSDP2; each layer is gathered while it runs.

    The first process has the weights on the CPU and sends them to all devices one by one; the others' models may be on
    the meta device. The trained module's parameters stay ordinary DDP parameters. A `UserError` if the model's weights
    are quantised.
    """
    processes: Any = launched()
    if getattr(model.config, "quantization_config", None) is not None:
        raise UserError(
            "model.device_map=fsdp2: quantised weights cannot be sharded; leave out model.quantize",
            field="model.quantize",
            code="conflict",
        )
    weights = model.state_dict()
    device = processes.device
    mesh = init_device_mesh(device.type, (processes.num_processes,))
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)

    def on_device(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.empty_like(tensor, device=device)
        return tensor.to(device)

    model._apply(on_device)
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    for buffer in model.buffers():  # some buffers are not in the state_dict
        dist.broadcast(buffer, src=0)
    model.tie_weights()


def gather_for_gradients(model: PreTrainedModel, predicted: list[Tensor]) -> None:
    """Where FSDP2 shards the layers, gather a layer's weights when the gradient of its prediction arrives.

    FSDP2 itself waits for the gradient of the layer's output, which arrives later, and at the last layer never.
    """

    def unshard(layer: FSDPModule, gradient: Tensor) -> None:
        layer.unshard()

    layers = decoder_layers(model)
    for index, importance in zip(full_attention_layers(model.config), predicted, strict=True):
        layer = layers[index]
        if importance.requires_grad and isinstance(layer, FSDPModule):
            importance.register_hook(partial(unshard, layer))


def leave_to_fsdp(module: nn.Module) -> None:
    """Tell DDP to ignore the parameters that `shard_layers` has sharded."""
    sharded = [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, sharded)


def launcher_of(accelerator: Accelerator, module: nn.Module) -> str:
    """The file of recipes/accelerate/ that a training was started with: `ddp`, `zero2`, `zero3` or `fsdp2`.

    With `zero3` and `fsdp2` the base model is sharded over the processes, so that it runs on all of them or on none.
    """
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:
        return "zero3" if plugin.zero_stage == 3 else "zero2"
    is_sharded = any(isinstance(parameter, DTensor) for parameter in module.parameters())
    return "fsdp2" if is_sharded else "ddp"
