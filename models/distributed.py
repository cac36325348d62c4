"""The processes of one launch (torchrun, accelerate launch), and weights that DeepSpeed's ZeRO-3 partitions."""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import psutil
import torch
from accelerate import DeepSpeedPlugin, PartialState
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from keepsight.errors import UserError

_BUILD_STARTS = 60
"""Seconds within which a build of a torch extension has started to work in its folder after it took the lock."""
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}
Part = TypeVar("Part")
Result = TypeVar("Result")


def launched() -> PartialState:
    """The state of this process in its launch; without a time limit for waiting, as work is divided unevenly.

    Raises:
        UserError: see `check_builds`.
    """
    check_builds()
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=30))


def check_builds() -> None:
    """Under DeepSpeed, look for the lock of a killed build of a torch extension, for which torch would wait forever.

    Raises:
        UserError: there is one; no process of this machine builds in its folder.
    """
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return
    from torch.utils.cpp_extension import get_default_build_root  # takes a while

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    old_locks = [lock for lock in root.rglob("lock") if time.time() - lock.stat().st_mtime > _BUILD_STARTS]
    working_folders = set()
    for process in psutil.process_iter(["cwd"]):
        if process.info["cwd"]:
            working_folders.add(Path(process.info["cwd"]))
    for lock in old_locks:
        if lock.parent not in working_folders:
            raise UserError(
                f"{lock}: left by a build of DeepSpeed that was killed; delete this file and start again",
                field="lock",
                code="file",
            )


def map_over_processes(work: Callable[[Part], Result], parts: Iterable[Part]) -> list[Result]:
    """The results of all parts in order, on every process of the launch; each process does its share of the work.

    Every process does equally many parts, some of them twice, because a sharded model must run on all or on none.
    """
    processes = launched()
    all_parts = list(parts)
    parts_per_process = math.ceil(len(all_parts) / processes.num_processes)
    process_results = []
    for turn in range(parts_per_process):
        number = processes.process_index + turn * processes.num_processes
        process_results.append(work(all_parts[number % len(all_parts)]))
    results: list[Result] = gather_object(process_results)  # those of the first process, of the second, and so on

    ordered = []
    for number in range(len(all_parts)):
        turn, process = divmod(number, processes.num_processes)
        ordered.append(results[process * parts_per_process + turn])
    return ordered


def shards_models() -> bool:
    """Whether the launcher asks for ZeRO-3, which shards the base model of a training over the processes."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and DeepSpeedPlugin().zero_stage == 3


@contextmanager
def created_sharded(dtype: str) -> Iterator[None]:
    """Within the block, where the launcher asks for ZeRO-3, a model is sharded while it is loaded.

    Only the first process ever holds the whole model, in CPU memory, to read the files. `dtype` is the model's.
    """
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        yield
        return
    launched()
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision(_PRECISIONS.get(dtype, "no"))
    plugin.set_deepspeed_weakref()  # through which transformers finds it, as long as the plugin lives
    try:
        yield
    finally:
        unset_hf_deepspeed_config()


@contextmanager
def whole_weights(module: nn.Module) -> Iterator[None]:
    """Within the block a module's own weights are whole on every process; all processes must enter it."""
    partitioned = [weight for weight in module.parameters(recurse=False) if hasattr(weight, "ds_id")]
    if not partitioned:
        yield
        return
    from deepspeed.runtime.zero import GatheredParameters  # pyright: ignore[reportMissingImports]

    with GatheredParameters(partitioned):
        yield


def whole_shape(weight: Tensor) -> torch.Size:
    """The shape of a weight before ZeRO-3 partitioned it."""
    shape: torch.Size = getattr(weight, "ds_shape", weight.shape)
    return shape
