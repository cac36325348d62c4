"""Speed of batched serving: requests through the engine of `keepsight serve`."""

import statistics
import time
from collections.abc import Iterator, Mapping

import torch
from transformers import PreTrainedModel

from keepsight.eval.bench.measure import random_ids, require_room
from keepsight.models.decoder import context_of
from keepsight.runtime.generate import FullCache, Method
from keepsight.serving.engine import Engine, Job


def bench_serve(
    model: PreTrainedModel, methods: Mapping[str, Method], tokens: int, answer_tokens: int, requests: int, rows: int
) -> Iterator[str]:
    """A line for each method, the full cache first; prompts are random tokens, and answers all have one length."""
    rows = min(rows, requests)
    require_room(model, tokens + answer_tokens, rows)
    prompts = random_ids(model, requests, tokens).cpu()
    for method in methods.values():
        method.check(tokens, context_of(model))
    compared = {"full cache": FullCache(), **methods}
    width = max(18, *(len(name) + 2 for name in compared))
    yield (
        f"{requests} requests of {tokens} tokens and {answer_tokens} of the answer, {rows} at once, "
        f"{torch.get_num_threads()} threads, {model.dtype}"
    )
    columns = f"{'requests/s':>11}{'first s':>9}{'prefill s':>11}{'ms a step':>11}{'tokens/s':>10}{'of full':>9}"
    yield f"{'method':<{width}}{columns}{'KV MiB':>9}"
    full = 0.0
    for name, method in compared.items():
        seconds, jobs, engine, steps, most = _run(model, method, prompts, answer_tokens, rows)
        step = statistics.median(steps)
        full = full or step
        first = statistics.median(job.first or 0.0 for job in jobs)
        yield (
            f"{name:<{width}}{requests / seconds:>11.3f}{first:>9.2f}{engine.totals.prefill_seconds / requests:>11.2f}"
            f"{step * 1000:>11.1f}{rows / step:>10.1f}{step / full:>9.2f}{most / 2**20:>9.1f}"
        )


def _run(
    model: PreTrainedModel, method: Method, prompts: torch.Tensor, answer_tokens: int, rows: int
) -> tuple[float, list[Job], Engine, list[float], int]:
    """Seconds in all, requests, engine, seconds of each step with all rows filled, and most bytes of entries."""
    engine = Engine(model, method, rows=rows, waiting=len(prompts))
    exactly = {"max_new_tokens": answer_tokens, "min_new_tokens": answer_tokens, "do_sample": False}
    jobs, steps, most = [Job(ids, **exactly) for ids in prompts], list[float](), 0
    start = time.perf_counter()
    for job in jobs:
        engine.submit(job)
    left = True
    while left:
        before, spent = engine.totals.decode_steps, engine.totals.decode_seconds
        left = engine.step()
        if engine.load[0] == rows and engine.totals.decode_steps > before:
            steps.append(engine.totals.decode_seconds - spent)
        most = max(most, engine.kv_bytes)
    return time.perf_counter() - start, jobs, engine, steps, most
