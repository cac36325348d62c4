"""The cost of training a lookahead module, planned on fake tensors.

The plan runs the objective itself on tensors that have shapes but no values, so that it follows the training code and
needs no memory. Each operation's output counts from when it is made until nothing refers to it.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedModel
from typing_extensions import override

from keepsight.models.decoder import decoder_layers
from keepsight.runtime.attention import later
from keepsight.train.dataset import Batch
from keepsight.train.eviction import EvictionObjective
from keepsight.train.importance import ImportanceObjective

COPIES = 4
"""Values stored for each trained weight: itself, its gradient, and Adam's two moments."""
_QUANTISED = {"nf4": 0.5 + 1 / 64 + 4 / (64 * 256), "int8": 1.0}
"""Bytes of a quantised weight: nf4 has an 8-bit scale for 64 weights, and a float32 one for 256 of these."""


@dataclass(frozen=True)
class StepPlan:
    """The cost of one sample in a training step on one device, in bytes and floating-point operations.

    Attributes:
        weights: Weights of the base model that the device holds.
        module: The module's weights, their gradients and Adam's moments.
        outputs: Teacher outputs, stored after the first pass: the KV entries and the target importance.
        first: Peak of the first pass above weights and module, teacher outputs included.
        second: The same of the second pass and its gradients.
        first_flops: Operations of the first pass.
        second_flops: Operations of the second pass and its gradients.
        trained: Number of trainable parameters.
        parameters: Number of parameters of the whole base model, shared ones counted once.
    """

    weights: int
    module: int
    outputs: int
    first: int
    second: int
    first_flops: int
    second_flops: int
    trained: int
    parameters: int

    @property
    def peak(self) -> int:
        """Peak memory."""
        return self.weights + self.module + max(self.first, self.second)


def plan_step(
    config: Any,
    dtype: torch.dtype,
    make: Callable[[PreTrainedModel], ImportanceObjective | EvictionObjective],
    tokens: int,
    answer: int,
    *,
    quantize: str | None = None,
    shards: int = 1,
    layers_alone: bool = False,
) -> StepPlan:
    """Plan a step on one sample of prompt `tokens` and `answer` tokens.

    `make` builds the objective on a model without values, of this configuration and dtype. Linear layers are stored
    as `nf4` or `int8` if `quantize` says so. The model is sharded over `shards` devices, each gathering one layer after
    another; its layers alone if `layers_alone`, as by `model.device_map=fsdp2`.
    """
    with _fake_tensors():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
        weights = stored_bytes(model, quantize)
        parameters = sum(weight.numel() for weight in model.parameters())
        layers = [_bytes_of(layer) for layer in decoder_layers(model)]
        unsharded = weights - sum(layers) if layers_alone else 0
        gathered = 0 if shards == 1 else 2 * max(layers)
        unpacked = 0 if quantize is None else max(weight.nbytes for weight in _linear_weights(model))
        objective = make(model)
        trained = objective.trained_parameters()
        for weight in trained:
            weight.grad = torch.zeros_like(weight)
        ids = torch.zeros(1, tokens + answer, dtype=torch.long)
        batch = Batch(ids[:, :tokens], ids[:, tokens:])
        with _LiveBytes() as live:
            outputs = objective.run_teacher(batch)
            first_peak = live.peak()
            outputs_bytes = live.now
            objective.loss_of(outputs, batch).backward()
            second_peak = live.peak()
    sharded = -((unsharded - weights) // shards)  # rounded up
    return StepPlan(
        weights=unsharded + sharded + gathered + unpacked,
        module=COPIES * sum(weight.nbytes for weight in trained),
        outputs=outputs_bytes,
        first=first_peak,
        second=second_peak,
        first_flops=round(objective.teacher_flops(batch)),
        second_flops=round(objective.module_flops(batch)),
        trained=sum(weight.numel() for weight in trained),
        parameters=parameters,
    )


def stored_bytes(model: PreTrainedModel, quantize: str | None = None) -> int:
    """Bytes of a model's weights, whose linear layers may be quantised; the lm_head never is."""
    model_bytes = _bytes_of(model)
    if quantize is None:
        return model_bytes
    linear_bytes = 0
    linear_count = 0
    for weight in _linear_weights(model):
        linear_bytes += weight.nbytes
        linear_count += weight.numel()
    return model_bytes - linear_bytes + round(linear_count * _QUANTISED[quantize])


def _linear_weights(model: PreTrainedModel) -> Iterator[Tensor]:
    for layer in decoder_layers(model):
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                yield module.weight


def _bytes_of(module: nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


@contextmanager
def _fake_tensors() -> Iterator[None]:
    """Tensors made within the block have no values; caches of them are cleared afterwards."""
    later.cache_clear()
    try:
        with FakeTensorMode():
            yield
    finally:
        later.cache_clear()


class _LiveBytes(TorchDispatchMode):
    """Counts in `now` the bytes of storages made within the block that are still referenced."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self._peak = 0
        self._alive: dict[int, int] = {}

    def peak(self) -> int:
        """Peak bytes since the last call."""
        peak = self._peak
        self._peak = self.now
        return peak

    @override
    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        input_storages = {storage._cdata for storage in _storages((args, kwargs))}
        output = func(*args, **(kwargs or {}))
        for storage in _storages(output):
            key = storage._cdata
            is_new = key not in self._alive and key not in input_storages  # neither a view nor changed in place
            if is_new:
                self._alive[key] = storage.nbytes()
                self.now += self._alive[key]
                self._peak = max(self._peak, self.now)
                weakref.finalize(storage, self._forget, key)
        return output

    def _forget(self, key: int) -> None:
        self.now -= self._alive.pop(key)


def _storages(tree: Any) -> list[Any]:
    """The storages of the tensors in a tree of values."""
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
