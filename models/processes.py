"""The processes of one launch (torchrun, accelerate launch)."""

import math
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

Part = TypeVar("Part")
Result = TypeVar("Result")


def launched() -> PartialState:
    """This process among those of its launch; alone when it was started by itself.

    They wait for each other as long as it takes: work is divided before it is known how long each part lasts.
    """
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=30))


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
