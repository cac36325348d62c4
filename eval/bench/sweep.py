"""Speed and memory of an evaluation's sweep, and of eviction."""

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from keepsight.eval.answers import default_batch_tokens
from keepsight.eval.bench.memory import peak_bytes, peak_kv_bytes
from keepsight.eval.bench.timing import median_seconds, random_ids, seconds_of
from keepsight.eval.rows import Variant
from keepsight.eval.run_samples import run_sample
from keepsight.eval.sweep import sweep
from keepsight.eval.tasks.niah import make_samples
from keepsight.eval.tasks.samples import RenderedSample
from keepsight.models.targets import Target
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import generate
from keepsight.runtime.method import Method
from keepsight.runtime.prefill import context_of, prefill
from keepsight.runtime.state import State

_LEAST_SECONDS = 2.0


def bench_sweep(
    target: Target, methods: Mapping[str, Method], tokens: int, answer_tokens: int, samples: int
) -> Iterator[str]:
    """Seconds per sample of the sweep, and of a separate prefill and decode per variant, as a few lines of text.

    The sweep's time includes the full cache's own answer, the teacher-forced scores and the recall, which separate
    runs lack. Every answer has exactly `answer_tokens` tokens in both: end tokens are ignored. In float32 a sweep
    guesses from its earlier samples' answers, so that it gets faster with more of them; it starts with none.
    """
    variants = [Variant(name, method) for name, method in methods.items()]
    chosen = [
        replace(sample, max_new_tokens=answer_tokens)
        for sample in make_samples("single", tokens, samples + 1, 0, target.tokenizer)
    ]
    most = default_batch_tokens(target.model)
    with _endless(target.model):
        warm_up, *timed = chosen
        run_sample(target, warm_up, variants, most)
        shared = seconds_of(lambda: list(sweep(target, timed, variants, set(), most))) / samples
        separate = seconds_of(lambda: _one_by_one(target, timed, methods)) / samples
    yield (
        f"{len(methods)} variants, {tokens} prompt tokens, {answer_tokens} answer tokens, {samples} samples, "
        f"{torch.get_num_threads()} threads"
    )
    yield f"sweep     {shared:7.2f} s a sample"
    yield f"separate  {separate:7.2f} s a sample"
    yield f"ratio     {separate / shared:7.2f}"


def _one_by_one(target: Target, samples: Sequence[RenderedSample], methods: Mapping[str, Method]) -> None:
    for sample in samples:
        ids = sample.prompt_ids[None].to(target.model.device)
        for method in methods.values():
            generate(target.model, ids, method, max_new_tokens=sample.max_new_tokens, do_sample=False)


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


def bench_evict(target: Target, methods: Mapping[str, Evict], lengths: Sequence[int], repeats: int) -> Iterator[str]:
    """A line for each length and method: time and memory of observe and of select, against the prefill.

    Args:
        target: The model; prompts are random tokens.
        methods: Methods by the name to print.
        lengths: Prompt lengths in tokens.
        repeats: Timed repetitions, after one to warm up; medians are printed. Observing and selecting, which are short,
            are repeated for two seconds each.
    """
    yield (
        f"{torch.get_num_threads()} threads, median of at least {repeats}; peak: beyond what the prefill holds; "
        "KV: the most bytes of keys and values while the prompt is read and compressed"
    )
    heads = f"{'observe ms':>11}{'select ms':>11}{'of prefill':>12}{'peak MiB':>10}{'KV MiB':>9}"
    yield f"{'tokens':>7}  {'method':<14}{heads}"
    for length in tqdm(lengths, desc="lengths"):
        yield from _at_length(target, methods, length, repeats)


def _at_length(target: Target, methods: Mapping[str, Evict], length: int, repeats: int) -> Iterator[str]:
    ids = random_ids(target.model, 1, length)
    for method in methods.values():
        method.check(length, context_of(target.model))
    needs = functools.reduce(operator.or_, (method.needs() for method in methods.values()))

    def plain() -> State:
        return prefill(target.model, ids, needs=replace(needs, received=False))

    seconds, peak = median_seconds(plain, repeats), peak_bytes(plain) / 2**20
    held = peak_kv_bytes(target.model, plain) / 2**20
    yield f"{length:>7}  {'prefill':<14}{seconds * 1000:>11.0f}{'':>11}{'':>12}{peak:>10.1f}{held:>9.1f}"
    if needs.received:  # H2O sums up attention during the prefill, not after it
        with_sums = median_seconds(lambda: prefill(target.model, ids, needs=needs), repeats)
        extra, share = (with_sums - seconds) * 1000, with_sums / seconds - 1
        yield f"{length:>7}  {'sums for h2o':<14}{extra:>11.0f}{'':>11}{share:>12.2%}"
    state = prefill(target.model, ids, needs=needs)
    for name, method in methods.items():
        held = peak_kv_bytes(target.model, functools.partial(method.start, target.model, ids)) / 2**20
        yield f"{_line(name, method, target, state, repeats, seconds)}{held:>9.1f}"


def _line(name: str, method: Evict, target: Target, state: State, repeats: int, prefill_seconds: float) -> str:
    observed = method.observe(target.model, state)

    def select() -> State:
        return method.keep(state, method.reduced(target.model, state, observed))

    def observe() -> list[torch.Tensor]:
        return method.observe(target.model, state)

    seconds = [median_seconds(step, repeats, _LEAST_SECONDS) for step in (observe, select)]
    peak = max(peak_bytes(step) for step in (observe, select)) / 2**20
    share = sum(seconds) / prefill_seconds
    return (
        f"{state.length:>7}  {name:<14}{seconds[0] * 1000:>11.1f}{seconds[1] * 1000:>11.1f}{share:>12.2%}{peak:>10.1f}"
    )
