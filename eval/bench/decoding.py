"""The speed of decoding: from what each method keeps, and with a draft head."""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.generation import StoppingCriteriaList

from keepsight.eval.bench.measure import random_ids, read_greedily, require_room, seconds_of
from keepsight.models.decoder import context_of
from keepsight.models.draft_head import EagleHead
from keepsight.models.targets import Target
from keepsight.runtime.drafting.speculative import (
    Speculated,
    acceptance_by_position,
    acceptance_length,
    decode_speculatively,
)
from keepsight.runtime.generate import FullCache, Method, decode, end_ids, stop_after
from keepsight.runtime.state import Needs, prefill

_WARM_UP = 3
"""Steps that are not timed: the first ones make room for more entries and load kernels."""


def bench_decode(
    model: PreTrainedModel, methods: Mapping[str, Method], tokens: int, batch: int, steps: int
) -> Iterator[str]:
    """A line for each method: milliseconds a decoding step, over those of the full cache and of the first method.

    Prompts are random tokens. The methods take turns step by step, so that a machine that slows down slows all of them:
    ratios hold where times do not. For this the caches of all methods are in memory at once.
    """
    require_room(model, tokens + _WARM_UP + steps, batch)
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


class _Compared(NamedTuple):
    """One prompt's answers by both kinds of decoding, and their seconds without the prefill."""

    plain: Tensor
    plain_seconds: float
    speculated: Speculated
    seconds: float


def bench_speculate(
    target: Target, head: EagleHead, prompts: Sequence[Sequence[int]], answer_tokens: int, draft_tokens: int
) -> Iterator[str]:
    """Speculative decoding against plain decoding, both from the full cache; the first prompt also warms up.

    The head's pass over the prompt counts as decoding, the model's does not.
    """
    criteria = stop_after(answer_tokens, end_ids(target.model))
    _compare(target, head, prompts[0], criteria, draft_tokens)
    compared = [_compare(target, head, each, criteria, draft_tokens) for each in tqdm(prompts, desc="prompts")]
    longest = max(len(each) for each in prompts)
    yield (
        f"{len(prompts)} prompts of {min(len(each) for each in prompts)} to {longest} tokens, answers of at most "
        f"{answer_tokens}, drafts of {draft_tokens}, {target.model.dtype}, {torch.get_num_threads()} threads"
    )
    yield f"{'decoding':<14}{'tokens':>8}{'seconds':>9}{'tokens/s':>10}"
    plain = sum(each.plain.shape[1] for each in compared), sum(each.plain_seconds for each in compared)
    ours = sum(each.speculated.ids.shape[1] for each in compared), sum(each.seconds for each in compared)
    for name, (tokens, seconds) in {"plain": plain, "speculative": ours}.items():
        yield f"{name:<14}{tokens:>8}{seconds:>9.2f}{tokens / seconds:>10.1f}"
    yield f"{'ratio':<14}{'':>17}{ours[0] / ours[1] / (plain[0] / plain[1]):>10.2f}"
    rounds = [each for one in compared for each in one.speculated.rounds]
    yield f"acceptance length {acceptance_length(rounds):.2f} tokens a pass of the model (1 is plain decoding)"
    shares = " ".join(f"{share:.2f}" for share in acceptance_by_position(rounds))
    yield f"share of drafts accepted up to position 1, 2, ...: {shares or 'nothing was drafted'}"
    same = sum(torch.equal(each.plain, each.speculated.ids) for each in compared)
    yield f"{same} of {len(compared)} answers are the same, token for token"


@torch.no_grad()
def _compare(
    target: Target, head: EagleHead, prompt: Sequence[int], criteria: StoppingCriteriaList, draft_tokens: int
) -> _Compared:
    model = target.model
    ids = torch.tensor([prompt], device=model.device)
    state = prefill(model, ids, needs=Needs(features=head.layers_of(model)))
    bare = state.unrecorded()  # plain decoding needs no features
    state.logits.cpu()  # waits for the prefill
    start = time.perf_counter()
    plain = decode(model, bare, criteria, pad_token=0).ids
    plain_seconds = time.perf_counter() - start
    start = time.perf_counter()
    speculated = decode_speculatively(model, state.copy(), head, criteria, tokens=draft_tokens)
    return _Compared(plain, plain_seconds, speculated, time.perf_counter() - start)
