"""The speed of decoding: from each method's cache, with a draft head, and in an evaluation's sweep."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import StoppingCriteriaList

from keepsight.eval.answers import default_batch_tokens, entry_bytes, free_tokens
from keepsight.eval.bench.measure import random_ids, read_greedily, require_room, seconds_of
from keepsight.eval.bench.offload import random_state
from keepsight.eval.bench.runner import Row, compare
from keepsight.eval.record import RowStore
from keepsight.eval.sweep import Variant, plan, run_samples, sweep
from keepsight.eval.tasks.niah import make_samples
from keepsight.models.draft_head import EagleHead
from keepsight.models.targets import Target
from keepsight.progress import progress_bar
from keepsight.runtime.attention import Reader
from keepsight.runtime.drafting.speculative import (
    Round,
    Speculated,
    acceptance_by_position,
    acceptance_length,
    decode_speculatively,
)
from keepsight.runtime.generate import CacheMethod, FullCache, Method, decode, end_ids, generate, stop_after
from keepsight.runtime.join import can_join, join
from keepsight.runtime.layer import GROWTH
from keepsight.runtime.state import Needs, State, prefill
from keepsight.tables import LiveTable, TerminalColumn, name_column

_WARM_UP = 3
"""Steps that are not timed: the first ones make room for more entries and load kernels."""
_MOST_ROWS = 1024


def bench_decode(
    model: PreTrainedModel, methods: Mapping[str, Method], tokens: int, batch: int, steps: int
) -> Iterator[str]:
    """A line for each method: milliseconds a decoding step, over those of the full cache and of the first method.

    Prompts are random tokens. The methods take turns step by step, so that a machine that slows down slows all of them:
    ratios hold where times do not. For this the caches of all methods are in memory at once.
    """
    require_room(model, tokens + _WARM_UP + steps, batch)
    ids = random_ids(model, batch, tokens)
    decodings: dict[str, _Decoding] = {}
    for name, method in progress_bar({"full cache": FullCache(), **methods}.items(), name="prompts", unit="method"):
        decodings[name] = _Decoding(method.reader(model), method.start(model, ids))
    for _ in progress_bar(range(steps), name="steps", unit="step"):
        for decoding in decodings.values():
            decoding.step()

    yield f"{batch} rows of {tokens} tokens, median of {steps} steps, {torch.get_num_threads()} threads, {model.dtype}"
    _, first_method, *_ = decodings.values()

    def figures(decoding: _Decoding, _: int) -> Row:
        return {**decoding.figures(batch), "of first": decoding.seconds / first_method.seconds}

    rows = compare(decodings, figures, ratios={"of full": "ms a step"})
    yield from _table(decodings, "ms a step", "tokens/s", "of full", "of first", "KV MiB").lines(rows)


def bench_largest(model: PreTrainedModel, methods: Mapping[str, Method], tokens: int, steps: int) -> Iterator[str]:
    """A line for each method, in the largest batch that fits the free memory with it, and no more than `_MOST_ROWS`."""
    require_room(model, tokens + _WARM_UP + steps)
    ids = random_ids(model, 1, tokens)
    compared: dict[str, Method] = {"full cache": FullCache(), **methods}

    def measure(method: Method, _: int) -> Row:
        count, decoding = _in_largest_batch(model, method, ids)
        for _ in range(steps):
            decoding.step()
        return {"rows": count, **decoding.figures(count)}

    yield f"rows of {tokens} tokens, median of {steps} steps, {torch.get_num_threads()} threads, {model.dtype}"
    rows = compare(compared, measure, ratios={"of full": "tokens/s"})
    yield from _table(compared, "rows", "ms a step", "tokens/s", "of full", "KV MiB").lines(rows)


def _table(methods: Iterable[str], *columns: str) -> LiveTable:
    """A table of decoding speeds with these of the columns."""
    forms = {"rows": "d", "ms a step": ".1f", "tokens/s": ".1f", "of full": ".2f", "of first": ".2f", "KV MiB": ".1f"}
    return LiveTable([name_column("method", methods), *(TerminalColumn(name, forms[name]) for name in columns)])


@torch.no_grad()
def _in_largest_batch(model: PreTrainedModel, method: Method, ids: Tensor) -> tuple[int, "_Decoding"]:
    """The number of rows and their decoding: of copies of a prompt [1, N], or of random entries where none can join."""
    alone = method.start(model, ids)
    length = ids.shape[1]
    config = model.config.get_text_config()
    row_bytes = alone.kv_bytes * (1 + GROWTH + 2 / config.num_hidden_layers) + 8 * config.vocab_size  # and room to grow
    rows = int(min(free_tokens(model) * entry_bytes(model) * 0.9 / row_bytes, _MOST_ROWS))
    if not can_join(alone):  # it may hold entries in CPU memory, which come in powers of two
        rows = min(rows, int(psutil.virtual_memory().available * 0.4 / (entry_bytes(model) * length)))
    while True:
        try:
            return max(rows, 1), _Decoding(method.reader(model), _of_rows(model, method, alone, max(rows, 1), length))
        except torch.OutOfMemoryError:
            if rows < 2:
                raise
            rows //= 2


def _of_rows(model: PreTrainedModel, method: Method, alone: State, rows: int, length: int) -> State:
    if can_join(alone):
        return join([alone] * rows)
    assert isinstance(method, CacheMethod)
    return method.compress_state(model, random_state(model, method.needs(), rows, length))


class _Decoding:
    """Greedy decoding from a state, with the seconds that each step took."""

    @torch.no_grad()
    def __init__(self, reader: Reader, state: State) -> None:
        self.reader = reader
        self.state = read_greedily(reader, state, _WARM_UP)
        self.seconds_of_steps: list[float] = []

    @torch.no_grad()
    def step(self) -> None:
        self.seconds_of_steps.append(seconds_of(self._read))

    def _read(self) -> None:
        self.state = read_greedily(self.reader, self.state, 1)

    @property
    def seconds(self) -> float:
        return statistics.median(self.seconds_of_steps)

    def figures(self, rows: int) -> Row:
        """Milliseconds a step, tokens per second of all rows, and MiB of entries."""
        kv_mib = self.state.kv_bytes / 2**20
        return {"ms a step": self.seconds * 1000, "tokens/s": rows / self.seconds, "KV MiB": kv_mib}


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
    results = []
    for prompt in progress_bar(prompts, name="prompts", unit="prompt"):
        results.append(_compare(target, head, prompt, criteria, draft_tokens))
    lengths = list(map(len, prompts))
    yield (
        f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, answers of at most {answer_tokens}, "
        f"drafts of {draft_tokens}, {target.model.dtype}, {torch.get_num_threads()} threads"
    )
    tokens = 0
    seconds = 0.0
    speculated_tokens = 0
    speculating_seconds = 0.0
    same = 0
    rounds: list[Round] = []
    for result in results:
        tokens += result.plain.shape[1]
        seconds += result.plain_seconds
        speculated_tokens += result.speculated.ids.shape[1]
        speculating_seconds += result.seconds
        same += torch.equal(result.plain, result.speculated.ids)
        rounds += result.speculated.rounds
    counted = {"plain": (tokens, seconds), "speculative": (speculated_tokens, speculating_seconds)}

    def speed(tokens_and_seconds: tuple[int, float], _: int) -> Row:
        token_count, duration = tokens_and_seconds
        return {"answer tokens": token_count, "seconds": duration, "tokens/s": token_count / duration}

    table = LiveTable(
        [
            name_column("method", counted),
            TerminalColumn("answer tokens", "d"),
            TerminalColumn("seconds", ".2f"),
            TerminalColumn("tokens/s", ".1f"),
            TerminalColumn("of plain", ".2f"),
        ]
    )
    yield from table.lines(compare(counted, speed, ratios={"of plain": "tokens/s"}))
    yield f"acceptance length {acceptance_length(rounds):.2f} tokens a pass of the model (1 is plain decoding)"
    shares = " ".join(f"{share:.2f}" for share in acceptance_by_position(rounds))
    yield f"share of drafts accepted up to position 1, 2, ...: {shares or 'nothing was drafted'}"
    yield f"{same} of {len(results)} answers are the same, token for token"


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


def bench_sweep(
    target: Target, methods: Mapping[str, Method], tokens: int, answer_tokens: int, samples: int
) -> Iterator[str]:
    """Seconds per sample of the sweep, and of a separate prefill and decode per variant, as a few lines of text.

    The sweep's time includes the full cache's own answer, the teacher-forced scores and the recall, which separate
    runs lack. Every answer has exactly `answer_tokens` tokens in both: end tokens are ignored.
    """
    require_room(target.model, tokens)
    variants = list(map(Variant, methods.keys(), methods.values()))
    batch_tokens = default_batch_tokens(target.model)
    warm_up, *timed = (
        replace(sample, max_new_tokens=answer_tokens)
        for sample in make_samples("single", tokens, samples + 1, 0, target.tokenizer)
    )

    def swept() -> None:
        for _ in sweep(target, plan(target, timed, variants), variants, batch_tokens, RowStore()):
            pass

    def one_by_one() -> None:
        for sample in timed:
            ids = sample.prompt_ids[None].to(target.model.device)
            for method in methods.values():
                generate(target.model, ids, method, max_new_tokens=answer_tokens, do_sample=False)

    def seconds_a_sample(run: Callable[[], None], _: int) -> Row:
        return {"s a sample": seconds_of(run) / samples}

    with _endless(target.model):
        run_samples(target, [warm_up], variants, batch_tokens)
        runs = {"sweep": swept, "separate runs": one_by_one}
        rows = list(compare(runs, seconds_a_sample, ratios={"of sweep": "s a sample"}))
    yield (
        f"{len(methods)} variants, {tokens} prompt tokens, {answer_tokens} answer tokens, {samples} samples, "
        f"{torch.get_num_threads()} threads"
    )
    columns = [name_column("method", runs), TerminalColumn("s a sample", ".2f"), TerminalColumn("of sweep", ".2f")]
    yield from LiveTable(columns).lines(rows)


@contextmanager
def _endless(model: PreTrainedModel) -> Iterator[None]:
    """No token ends an answer within the block."""
    config = model.generation_config
    assert config is not None
    before = config.eos_token_id
    config.eos_token_id = model.config.get_text_config().vocab_size  # which no logit is for
    try:
        yield
    finally:
        config.eos_token_id = before
