"""Metrics for experiment trackers beside the loss: tokens per second, model FLOPs utilisation, memory, values by layer.

transformers' own counters look at a single input, and include the time of measuring and saving.
"""

import re
import resource
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import gather
from torch import nn
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from typing_extensions import override

from keepsight.models.decoder import decoder_of, full_attention_layers, head_width
from keepsight.models.distributed import whole_shape
from keepsight.models.lora import linears
from keepsight.train.dataset import Batch
from keepsight.train.objective import Objective
from keepsight.train.settings import TrainSettings

_HOPPER = {"H100": 989, "H100 NVL": 835, "H100 PCIe": 756, "H200": 989, "H200 NVL": 835}
_PEAKS = {"A100": 312, **_HOPPER, "B200": 2250, "L4": 121, "L40S": 362}
"""Peaks of Nvidia's GPUs in bfloat16 without sparsity, in 1e12 operations per second (from its data sheets)."""
_EXPERTS = re.compile(r"(^|\.)experts(\.|$)")


class Throughput(TrainerCallback):
    """Adds to each logged loss the speed and memory of the steps since the previous one, over all processes.

    - `tokens_per_second`: tokens of prompts and answers without padding, counted in each replay, over the time of the
      steps alone.
    - `mfu`, model FLOPs utilisation: the operations of the steps, without recomputation, as a share of all devices'
      peak. Missing if the peak or `Objective.flops` is not known.
    - `peak_memory_gib`: the peak of a process's GPU memory so far, or of its CPU memory where it has no GPU.

    Trackers and the console get them; the training's own log stays the same from run to run.
    """

    def __init__(self, objective: Objective, settings: TrainSettings) -> None:
        self._objective = objective
        self._peak = 1e12 * (settings.flops or _known_peak(objective, settings))
        self._forget()
        objective.register_forward_pre_hook(self._count, with_kwargs=True)

    def _forget(self) -> None:
        self._tokens: Any = 0  # a tensor on the device where something is padded, so that the CPU need not wait for it
        self._flops, self._seconds, self._started = 0.0, 0.0, 0.0

    def _count(self, module: nn.Module, args: object, values: dict[str, Any]) -> None:
        batch = Batch(**values)
        ids, mask = batch.joined()
        self._tokens += ids.numel() if mask is None else mask.sum()
        self._flops += self._objective.flops(batch) or 0.0

    @override
    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._started = time.perf_counter()

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._seconds += time.perf_counter() - self._started

    @override
    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        if logs is not None and "loss" in logs and self._seconds:
            own = [float(self._tokens), self._flops, self._seconds, float(peak_memory())]
            everyone: Any = gather(torch.tensor([own], device=args.device))
            tokens, flops, seconds, memory = everyone.T
            logs["tokens_per_second"] = round((tokens.sum() / seconds.max()).item(), 1)
            logs["peak_memory_gib"] = round(memory.max().item() / 2**30, 3)
            if self._peak and self._flops:
                logs["mfu"] = round((flops.sum() / (len(everyone) * seconds.max() * self._peak)).item(), 4)
            self._forget()


def _known_peak(objective: Objective, settings: TrainSettings) -> float:
    """The peak of the GPUs that an objective computes on in half precision, in 1e12 operations a second; else 0."""
    halves = (torch.bfloat16, torch.float16)
    weights = list(objective.parameters())
    is_half = settings.precision != "no" or any(weight.dtype in halves for weight in weights)
    devices = {weight.device for weight in weights if weight.device.type == "cuda"}
    return sum(peak_of(torch.cuda.get_device_name(device)) for device in devices) if is_half else 0.0


def peak_of(gpu: str) -> float:
    """The bfloat16 peak of a GPU by its name, in 1e12 operations a second; 0 where it is not known."""
    known = [name for name in _PEAKS if re.search(rf"\b{name}\b", gpu)]
    return float(_PEAKS[max(known, key=len)]) if known else 0.0


def peak_memory() -> int:
    """Peak bytes so far: allocated on the fullest GPU, or resident in the process where there is none."""
    if torch.cuda.is_available():
        return max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def log_lists(trainer: Trainer, measured: Mapping[str, Any]) -> None:
    """Send the lists of a measurement to trackers, value by value, such as `eval_kl_by_layer/07`.

    Those of single samples are left out: they stand in fidelity.jsonl alone.
    """
    of_samples = "by_sample", "samples"
    lists = {
        name: value for name, value in measured.items() if isinstance(value, list) and not name.endswith(of_samples)
    }
    values = {f"{name}/{place:02}": each for name, value in lists.items() for place, each in enumerate(value)}
    for callback in trainer.callback_handler.callbacks:
        if not isinstance(callback, PrinterCallback | ProgressCallback):
            callback.on_log(trainer.args, trainer.state, trainer.control, logs=dict(values), model=trainer.model)


def pass_flops(model: PreTrainedModel, weights: float, tokens: int, before: int = 0) -> float:
    """Operations of a pass of `tokens` after `before` cached ones; `weights` as of `weights_per_token`.

    2 for each weight and token, and 4 for each entry that a channel of a query sees. Sliding windows and recurrent
    states, whose share is small where prompts are long, are not counted, nor are logits.
    """
    config = model.config.get_text_config(decoder=True)
    channels = config.num_attention_heads * head_width(config) * len(full_attention_layers(model.config))
    return 2 * tokens * weights + 4 * tokens * (before + tokens / 2) * channels


def weights_per_token(model: PreTrainedModel) -> float:
    """Weights of a model's layers that a token is multiplied with: of experts only those that it is routed to."""
    config = model.config.get_text_config(decoder=True)
    counts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    experts = next(filter(None, counts), None)
    share = config.num_experts_per_tok / experts if experts else 1.0

    def counted(name: str, size: int) -> float:
        return size * share if _EXPERTS.search(name) else size

    layers = decoder_of(model).layers
    single = sum(counted(name, linear.in_features * linear.out_features) for name, linear in linears(layers))
    shapes = ((name, whole_shape(weight)) for name, weight in layers.named_parameters())
    return single + sum(counted(name, shape.numel()) for name, shape in shapes if len(shape) == 3)  # of all experts
