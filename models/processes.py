"""The processes of one launch (torchrun, accelerate launch)."""

import math
import os
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import psutil
import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from keepsight.errors import UserError

_BUILD_STARTS = 60
"""Seconds within which a build has begun to work in its folder, after it took the lock."""
Part = TypeVar("Part")
Result = TypeVar("Result")


def launched() -> PartialState:
    """This process among those of its launch; alone when it was started by itself.

    They wait for each other as long as it takes: work is divided before it is known how long each part lasts.

    Raises:
        UserError: see `check_builds`.
    """
    check_builds()
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=30))


def check_builds() -> None:
    """With DeepSpeed, look for a lock that a killed build of an extension left: torch would wait for it forever.

    Raises:
        UserError: there is one; no process of this machine builds in its folder.
    """
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return
    from torch.utils.cpp_extension import get_default_build_root  # takes a while

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    old = [lock for lock in root.rglob("lock") if time.time() - lock.stat().st_mtime > _BUILD_STARTS]
    if stale := [lock for lock in old if lock.parent not in _working_folders()]:
        raise UserError(f"{stale[0]}: left by a build of DeepSpeed that was killed; delete this file and start again")


def _working_folders() -> set[Path]:
    """Where the processes of this machine work, as far as they may be asked."""
    return {Path(each.info["cwd"]) for each in psutil.process_iter(["cwd"]) if each.info["cwd"]}


def divided(work: Callable[[Part], Result], parts: Iterable[Part]) -> list[Result]:
    """The results of all parts in order, on every process of the launch; each process does its share of the work.

    All do equally many parts, for a model that is sharded over processes runs on all of them or on none: at the end
    some parts are done twice.
    """
    processes, all_parts = launched(), list(parts)
    count, step = math.ceil(len(all_parts) / processes.num_processes), processes.num_processes
    own = [all_parts[(processes.process_index + step * turn) % len(all_parts)] for turn in range(count)]
    results: list[Result] = gather_object([work(part) for part in own])
    return [results[number % step * count + number // step] for number in range(len(all_parts))]
