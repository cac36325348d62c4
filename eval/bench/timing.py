"""What the benchmarks share: random prompts, greedy steps, and the seconds that an action takes."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.runtime.attention import Reader
from keepsight.runtime.state import State, read


def random_ids(model: PreTrainedModel, batch: int, length: int) -> Tensor:
    """Random token ids [batch, length] int64 on the model's device, the same ones each time."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(3, vocabulary - 1, (batch, length), generator=torch.Generator().manual_seed(0))
    return ids.to(model.device)


def read_greedily(reader: Reader, state: State, steps: int) -> State:
    """The state after `steps` of its own greedy tokens."""
    for _ in range(steps):
        state, _ = read(reader, state, state.logits.argmax(dim=-1, keepdim=True))
    return state


def seconds_of(action: Callable[[], object]) -> float:
    """Seconds that an action takes, including what it leaves to a GPU."""
    _synchronize()
    start = time.perf_counter()
    action()
    _synchronize()
    return time.perf_counter() - start


@torch.no_grad()
def median_seconds(action: Callable[[], object], repeats: int, least: float = 0.0) -> float:
    """Median seconds of an action, after one run to warm up.

    Args:
        action: What is timed.
        repeats: Minimum number of runs.
        least: Minimum seconds that all runs take together, so that short actions are run more often.
    """
    action()
    times: list[float] = []
    while len(times) < repeats or sum(times) < least:
        times.append(seconds_of(action))
    return statistics.median(times)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
