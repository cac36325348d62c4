"""The speed of plain decoding from what each method keeps, against the full cache."""

import statistics
from collections.abc import Iterator, Mapping
from itertools import islice

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from keepsight.eval.bench.timing import random_ids, read_greedily, seconds_of
from keepsight.runtime.generate import FullCache, Method
from keepsight.runtime.state import context_of

_WARM_UP = 3
"""Steps that are not timed: the first ones make room for more entries and load kernels."""


def bench_decode(
    model: PreTrainedModel, methods: Mapping[str, Method], tokens: int, batch: int, steps: int
) -> Iterator[str]:
    """A line for each method: milliseconds a decoding step, over those of the full cache and of the first method.

    The last column is the KV entries held.

    The methods take turns step by step, so that a machine that slows down slows all of them: ratios hold where times
    do not. For this the caches of all methods are held at once.

    Args:
        model: The target.
        methods: Methods by the name to print.
        tokens: Prompt length; prompts are random tokens.
        batch: Number of prompts.
        steps: Timed steps, each of one token a prompt.
    """
    ids = random_ids(model, batch, tokens)
    for method in methods.values():
        method.check(tokens, context_of(model))
    compared = {"full cache": FullCache(), **methods}
    decoding = {name: _Decoding(model, each, ids) for name, each in tqdm(compared.items(), desc="prompts")}
    for _ in tqdm(range(steps), desc="steps"):
        for each in decoding.values():
            each.step()
    width = max(18, *(len(name) + 2 for name in methods))
    yield f"{batch} rows of {tokens} tokens, median of {steps} steps, {torch.get_num_threads()} threads, {model.dtype}"
    yield f"{'method':<{width}}{'ms a step':>11}{'tokens/s':>10}{'of full':>9}{'of first':>10}{'KV MiB':>9}"
    full, first = (each.seconds for each in islice(decoding.values(), 2))
    for name, each in decoding.items():
        ratios = f"{each.seconds / full:>9.2f}{each.seconds / first:>10.2f}"
        yield f"{name:<{width}}{each.seconds * 1000:>11.1f}{batch / each.seconds:>10.1f}{ratios}{each.kv_mib:>9.1f}"


class _Decoding:
    """Greedy decoding after prompts [B, N], with the seconds that each step took."""

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, method: Method, ids: Tensor) -> None:
        self.reader = method.reader(model)
        self.state = read_greedily(self.reader, method.start(model, ids), _WARM_UP)
        self.taken: list[float] = []

    @torch.no_grad()
    def step(self) -> None:
        def read() -> None:
            self.state = read_greedily(self.reader, self.state, 1)

        self.taken.append(seconds_of(read))

    @property
    def seconds(self) -> float:
        return statistics.median(self.taken)

    @property
    def kv_mib(self) -> float:
        return self.state.kv_bytes / 2**20
