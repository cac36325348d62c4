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
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from typing_extensions import override

from keepsight.models.decoder import decoder_layers, full_attention_layers, head_width
from keepsight.models.distributed import whole_shape
from keepsight.models.lora import linears
from keepsight.progress import print_above, progress_bar
from keepsight.train.dataset import Batch
from keepsight.train.objective import Objective
from keepsight.train.settings import TrainSettings

_HOPPER = {"H100": 989, "H100 NVL": 835, "H100 PCIe": 756, "H200": 989, "H200 NVL": 835}
_PEAKS = {"A100": 312, **_HOPPER, "B200": 2250, "L4": 121, "L40S": 362}
"""Peaks of Nvidia's GPUs in bfloat16 without sparsity, in 1e12 operations per second (from its data sheets)."""
_EXPERTS = re.compile(r"(^|\.)experts(\.|$)")


class TrainingProgress(TrainerCallback):
    """Shows a training's step, and its losses and measurements in a line each, in place of transformers' own lines."""

    def __init__(self) -> None:
        self._bar: Any = None

    @override
    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        is_main = state.is_world_process_zero
        self._bar = progress_bar(total=state.max_steps, name="training", unit="step", shown=is_main)
        self._bar.update(state.global_step)

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._bar.update(state.global_step - self._bar.n)

    @override
    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._bar.close()

    @override
    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        measured = {name.removeprefix("eval_"): value for name, value in logs.items() if name.startswith("eval_")}
        values = []
        if "loss" in logs:
            values = [f"loss {logs['loss']:.4g}", f"learning rate {logs['learning_rate']:.2g}"]
            if "tokens_per_second" in logs:
                values.append(f"{logs['tokens_per_second']:,.0f} tokens a second")
        elif measured:
            values = [f"{name} {value:.3f}" for name, value in measured.items()]
            values[0] = f"on held-out samples {values[0]}"
        if values:
            print_above(f"step {state.global_step} of {state.max_steps}: {', '.join(values)}")


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
        self._peak = 1e12 * (settings.flops or _half_precision_peak(objective, settings))
        self._forget()
        objective.register_forward_pre_hook(self._count, with_kwargs=True)

    def _forget(self) -> None:
        self._tokens: Any = 0  # a tensor on the device where something is padded, so that the CPU need not wait for it
        self._flops = 0.0
        self._seconds = 0.0
        self._started = 0.0

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
        if logs is None or "loss" not in logs or not self._seconds:
            return
        process_row = [float(self._tokens), self._flops, self._seconds, float(peak_memory())]
        process_rows: Any = gather(torch.tensor([process_row], device=args.device))
        tokens, flops, seconds, memory = process_rows.T
        logs["tokens_per_second"] = round((tokens.sum() / seconds.max()).item(), 1)
        logs["peak_memory_gib"] = round(memory.max().item() / 2**30, 3)
        if self._peak and self._flops:
            possible_flops = len(process_rows) * seconds.max() * self._peak
            logs["mfu"] = round((flops.sum() / possible_flops).item(), 4)
        self._forget()


def _half_precision_peak(objective: Objective, settings: TrainSettings) -> float:
    """The peak of the GPUs that an objective computes on in half precision, in 1e12 operations a second; else 0."""
    weights = list(objective.parameters())
    has_half_weights = any(weight.dtype in (torch.bfloat16, torch.float16) for weight in weights)
    if settings.precision == "no" and not has_half_weights:
        return 0.0
    gpus = {weight.device for weight in weights if weight.device.type == "cuda"}
    return sum(peak_of(torch.cuda.get_device_name(gpu)) for gpu in gpus)


def peak_of(gpu: str) -> float:
    """The bfloat16 peak of a GPU by its name, in 1e12 operations a second; 0 where it is not known."""
    matching = [name for name in _PEAKS if re.search(rf"\b{name}\b", gpu)]
    if not matching:
        return 0.0
    return float(_PEAKS[max(matching, key=len)])


def peak_memory() -> int:
    """Peak bytes so far: allocated on the fullest GPU, or resident in the process where there is none."""
    if torch.cuda.is_available():
        return max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return peak * 1024  # elsewhere the unit is a KiB


def log_lists(trainer: Trainer, measured: Mapping[str, Any]) -> None:
    """Send the lists of a measurement to trackers, value by value, such as `eval_kl_by_layer/07`.

    Those of single samples are left out: they stand in fidelity.jsonl alone.
    """
    values = {}
    for name, numbers in measured.items():
        if not isinstance(numbers, list) or name.endswith(("by_sample", "samples")):
            continue
        for index, number in enumerate(numbers):
            values[f"{name}/{index:02}"] = number
    for callback in trainer.callback_handler.callbacks:
        if not isinstance(callback, TrainingProgress):
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
    routed_share = 1.0
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        experts = getattr(config, name, None)
        if experts:
            routed_share = config.num_experts_per_tok / experts
            break

    layers = decoder_layers(model)
    linear_weights = 0.0
    for name, linear in linears(layers):
        share = routed_share if _EXPERTS.search(name) else 1
        linear_weights += share * (linear.in_features * linear.out_features)
    joined_weights = 0.0  # the weights of all experts in one tensor
    for name, weight in layers.named_parameters():
        shape = whole_shape(weight)
        if len(shape) == 3:
            share = routed_share if _EXPERTS.search(name) else 1
            joined_weights += share * shape.numel()
    return linear_weights + joined_weights
