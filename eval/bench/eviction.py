"""Time and memory of eviction, against the prefill."""

import functools
import operator
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from keepsight.eval.bench.memory import peak_bytes, peak_kv_bytes
from keepsight.eval.bench.timing import median_seconds, random_ids, seconds_of
from keepsight.models.targets import Target
from keepsight.runtime.evict import Evict, call
from keepsight.runtime.state import State, context_of, prefill

_LEAST_SECONDS = 0.4
"""A turn of observing or selecting, which are short, takes at least these."""


def bench_evict(target: Target, methods: Mapping[str, Evict], lengths: Sequence[int], repeats: int) -> Iterator[str]:
    """A line for each length and method: time and memory of observe and of select, against the prefill.

    The prefill and the methods take turns, and a share is the median of the shares of single turns, so that a machine
    that slows down slows both: shares hold where times do not.

    Args:
        target: The model; prompts are random tokens.
        methods: Methods by the name to print.
        lengths: Prompt lengths in tokens.
        repeats: Turns, after one to warm up; medians are printed. In each, observing and selecting are repeated for
            0.4 seconds.
    """
    yield (
        f"{torch.get_num_threads()} threads, median of {repeats} turns; peak: beyond what the prefill holds; "
        "KV: the most bytes of keys and values while the prompt is read and compressed"
    )
    heads = f"{'observe ms':>11}{'select ms':>11}{'of prefill':>12}{'peak MiB':>10}{'KV MiB':>9}"
    yield f"{'tokens':>7}  {'method':<14}{heads}"
    for length in tqdm(lengths, desc="lengths"):
        for method in methods.values():
            method.check(length, context_of(target.model))
        for line in _Length(target.model, methods, length).lines(repeats):
            yield f"{length:>7}  {line}"


class _Seconds(NamedTuple):
    """What one turn took.

    Attributes:
        prefill: Reading the prompt.
        summing: Reading it with the sums of attention that H2O needs; as `prefill` where no method does.
        steps: By method, observing and selecting.
    """

    prefill: float
    summing: float
    steps: dict[str, tuple[float, float]]


class _Length:
    """The benchmark of prompts of one length."""

    def __init__(self, model: PreTrainedModel, methods: Mapping[str, Evict], length: int) -> None:
        self.model, self.methods, self.ids = model, methods, random_ids(model, 1, length)
        self.needs = functools.reduce(operator.or_, (method.needs() for method in methods.values()))

    def lines(self, repeats: int) -> Iterator[str]:
        """A line for the prefill, one for H2O's sums where they are needed, and one for each method."""
        turns = [self._turn() for _ in tqdm(range(repeats + 1), desc="turns", leave=False)][1:]
        state, peak = self._read(), peak_bytes(self._plain) / 2**20
        held, taken = peak_kv_bytes(self.model, self._plain) / 2**20, statistics.median(each.prefill for each in turns)
        yield f"{'prefill':<14}{taken * 1000:>11.0f}{'':>11}{'':>12}{peak:>10.1f}{held:>9.1f}"
        if self.needs.accumulated:  # summed up during the prefill, not after it
            extra = statistics.median(each.summing - each.prefill for each in turns) * 1000
            share = statistics.median(each.summing / each.prefill for each in turns) - 1
            yield f"{'sums for h2o':<14}{extra:>11.0f}{'':>11}{share:>12.2%}"
        for name, method in self.methods.items():
            times = [statistics.median(each) * 1000 for each in zip(*(turn.steps[name] for turn in turns), strict=True)]
            share = statistics.median(sum(turn.steps[name]) / turn.prefill for turn in turns)
            peak = max(map(peak_bytes, _steps(self.model, method, state))) / 2**20
            held = peak_kv_bytes(self.model, functools.partial(method.start, self.model, self.ids)) / 2**20
            yield f"{name:<14}{times[0]:>11.1f}{times[1]:>11.1f}{share:>12.2%}{peak:>10.1f}{held:>9.1f}"

    def _turn(self) -> _Seconds:
        taken, state = self._timed(self._plain)
        summing = taken
        if self.needs.accumulated:
            del state  # two caches would not fit where one just does
            summing, state = self._timed(self._read)
        steps = dict[str, tuple[float, float]]()
        for name, method in self.methods.items():
            observe, select = (median_seconds(step, 1, _LEAST_SECONDS) for step in _steps(self.model, method, state))
            steps[name] = observe, select
        return _Seconds(taken, summing, steps)

    def _timed(self, read: Callable[[], State]) -> tuple[float, State]:
        states = list[State]()
        return seconds_of(lambda: states.append(read())), states[0]

    def _read(self) -> State:
        return prefill(self.model, self.ids, needs=self.needs)

    def _plain(self) -> State:
        return prefill(self.model, self.ids, needs=replace(self.needs, accumulated=False))


def _steps(model: PreTrainedModel, method: Evict, state: State) -> tuple[Callable[[], object], Callable[[], object]]:
    """Observing and selecting, each by itself."""
    observe = functools.partial(call, method.bound_observer, model, state, method.reduce)
    scores = observe()
    return (
        observe,
        lambda: method.compress(model, state, lambda *_: scores),
    )
