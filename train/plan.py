"""The cost of training a lookahead module: planned on fake tensors, and measured against an inference prefill.

The plan runs the objective itself on tensors that have shapes but no values, so that it follows the training code and
needs no memory. Each operation's output counts from when it is made until nothing refers to it.
"""

import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from keepsight.models.decoder import decoder_of
from keepsight.models.lookahead import Lookahead
from keepsight.runtime.attention import later
from keepsight.runtime.state import prefill
from keepsight.train.ablation import Cell, SideBySide
from keepsight.train.dataset import Batch
from keepsight.train.eviction import EvictionObjective
from keepsight.train.importance import ImportanceObjective
from keepsight.train.replay import ReplayBuffer
from keepsight.train.settings import LookaheadTrainSettings, ReplaySettings
from keepsight.train.tracking import peak_memory

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
    """

    weights: int
    module: int
    outputs: int
    first: int
    second: int
    first_flops: int
    second_flops: int

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
        layers = [_bytes_of(layer) for layer in decoder_of(model).layers]
        whole = weights - sum(layers) if layers_alone else 0
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
            first, outputs_bytes = live.most(), live.now
            objective.loss_of(outputs, batch).backward()
            second = live.most()
    return StepPlan(
        whole - (whole - weights) // shards + gathered + unpacked,
        COPIES * sum(weight.nbytes for weight in trained),
        outputs_bytes,
        first,
        second,
        round(objective.teacher_flops(batch)),
        round(objective.module_flops(batch)),
    )


def stored_bytes(model: PreTrainedModel, quantize: str | None = None) -> int:
    """Bytes of a model's weights, whose linear layers may be quantised; the lm_head never is."""
    whole = _bytes_of(model)
    if quantize is None:
        return whole
    linear = list(_linear_weights(model))
    kept = round(sum(weight.numel() for weight in linear) * _QUANTISED[quantize])
    return whole - sum(weight.nbytes for weight in linear) + kept


def _linear_weights(model: PreTrainedModel) -> Iterator[Tensor]:
    for layer in decoder_of(model).layers:
        yield from (module.weight for module in layer.modules() if isinstance(module, nn.Linear))


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
        self.now, self._most = 0, 0
        self._alive: dict[int, int] = {}

    def most(self) -> int:
        """Peak bytes since the last call."""
        most, self._most = self._most, self.now
        return most

    @override
    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        known = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        output = func(*args, **(kwargs or {}))
        for storage in (each.untyped_storage() for each in tree_leaves(output) if isinstance(each, Tensor)):
            if (key := storage._cdata) not in self._alive and key not in known:  # neither a view nor changed in place
                self._alive[key] = storage.nbytes()
                self.now += self._alive[key]
                self._most = max(self._most, self.now)
                weakref.finalize(storage, self._forget, key)
        return output

    def _forget(self, key: int) -> None:
        self.now -= self._alive.pop(key)


def bench_step(
    cells: Sequence[Lookahead], tokens: int, answer_tokens: int, repeats: int, settings: LookaheadTrainSettings
) -> Iterator[str]:
    """Time steps on one batch (forward, backward, optimiser) and its prefill in turn, as a few lines of text.

    Several `cells`, modules on one base model, are trained side by side, as in an ablation. The prefill covers prompt
    and answer; each is timed `repeats` times after one warm-up. `settings` decides the loss, the batch size, and
    the number of `replays` that are averaged.
    """
    model, replays = cells[0].model, settings.replays
    shape = settings.batch_size, tokens + answer_tokens
    ids = torch.randint(3, model.config.get_text_config().vocab_size - 1, shape, device=model.device)
    options = settings.far, settings.gradient_checkpointing, settings.cuts
    alone = [Cell(str(place), ImportanceObjective(cell, *options), settings) for place, cell in enumerate(cells)]
    objective = SideBySide(alone) if len(alone) > 1 else alone[0].objective
    objective.buffer = ReplayBuffer(ReplaySettings()) if replays > 1 else None
    learned = objective.trained_parameters()
    optimizer = torch.optim.AdamW(learned, lr=1e-4, weight_decay=0.0, fused=True)  # the trainer's

    def steps() -> None:
        for turn in range(replays):
            objective.loss(Batch(ids[:, :tokens], ids[:, tokens:], last=turn == replays - 1)).backward()
            optimizer.step()
            optimizer.zero_grad()

    times: dict[str, list[float]] = {"prefill": [], "step": []}
    peaks = {}
    for repeat in range(repeats + 1):
        for name, action in (("prefill", lambda: prefill(model, ids)), ("step", steps)):
            seconds, peaks[name] = _measure(action)
            if repeat:
                times[name].append(seconds / (replays if name == "step" else 1))
    ratio = statistics.median(times["step"]) / statistics.median(times["prefill"])
    counted = f", {len(cells)} modules" if len(cells) > 1 else ""
    cut = f" at {settings.cuts} cuts" if settings.cuts > 1 else ""
    yield (
        f"{shape[0]} x {tokens} prompt + {answer_tokens} answer tokens{counted}, "
        f"{replays} steps a pass of the model{cut}, {repeats} repeats"
    )
    for name, values in times.items():
        span = f"{statistics.median(values):7.3f} s ({min(values):.3f} to {max(values):.3f})"
        yield f"{name:<8} {span}, peak memory {peaks[name]:.0f} MiB"
    yield f"a step takes {ratio:.3f} prefills"


def _measure(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and peak memory so far in MiB: of the GPU, or of the process where there is none."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, peak_memory() / 2**20
