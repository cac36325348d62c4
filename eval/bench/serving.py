"""Speed of batched serving, from evicted caches and from full ones, by `keepsight serve`'s engine or vLLM's."""

import importlib.util
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.eval.answers import entry_bytes
from keepsight.eval.bench.measure import random_ids, require_room
from keepsight.models.targets import Target
from keepsight.runtime.allocate import Global
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import FullCache, Method
from keepsight.serving.engine import Engine, Job
from keepsight.serving.export import export
from keepsight.serving.prefix import alphabet_of, placeholders, transfer_config

_BLOCK = 32
"""Tokens of a block of the engine, and entries of a page."""
_DOCUMENTS, _QUESTION = 4, 16
"""Number of prompts, which requests take in turn, and tokens that each request adds to its prompt."""
_WARM = 2


def bench_serve(
    model: PreTrainedModel, methods: Mapping[str, Method], tokens: int, answer_tokens: int, requests: int, rows: int
) -> Iterator[str]:
    """A line for each method, the full cache first; prompts are random tokens, and answers all have one length."""
    rows = min(rows, requests)
    require_room(model, tokens + answer_tokens, rows)
    prompts = random_ids(model, requests, tokens).cpu()
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
        seconds, jobs, engine, steps, most = _served(model, method, prompts, answer_tokens, rows)
        step = statistics.median(steps)
        full = full or step
        first = statistics.median(job.first or 0.0 for job in jobs)
        yield (
            f"{name:<{width}}{requests / seconds:>11.3f}{first:>9.2f}{engine.totals.prefill_seconds / requests:>11.2f}"
            f"{step * 1000:>11.1f}{rows / step:>10.1f}{step / full:>9.2f}{most / 2**20:>9.1f}"
        )


def _served(
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


@dataclass
class Run:
    """Times of all requests: seconds in total, to each first token, and of each decoding step with all rows filled.

    `usage` is the largest share of the engine's cache that was in use.
    """

    seconds: float = 0.0
    first: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    usage: float = 0.0


def bench_vllm(
    target: Target,
    source: str | Path,
    methods: Mapping[str, Evict],
    tokens: int,
    answer_tokens: int,
    requests: int,
    rows: int,
) -> Iterator[str]:
    """A line for each method, full caches first; prompts are random tokens, and answers all have one length.

    vLLM loads the model from `source`; `target` reads the prompts of the prefixes. Where heads share the budget
    (`Global`), it is in pages of 32. All requests arrive at once. UserError if vLLM is missing or there is no room.
    """
    rows, model = min(rows, requests), target.model
    length = tokens + _QUESTION + answer_tokens
    require_room(model, length)
    if importlib.util.find_spec("vllm") is None:
        raise UserError("vllm=true needs vLLM; run `make setup-vllm`")
    ids = random_ids(model, _DOCUMENTS, tokens)
    asked = random_ids(model, requests, _QUESTION).tolist()
    with TemporaryDirectory(prefix="keepsight-") as folder:
        prompts, reading = {"full cache": [each.tolist() for each in ids]}, {"full cache": 0.0}
        for name, method in methods.items():
            start = time.perf_counter()
            prompts[name] = [_prefix(target, method, each[None], Path(folder)) for each in ids]
            reading[name] = (time.perf_counter() - start) / _DOCUMENTS
        ragged = any(isinstance(method.allocate, Global) for method in methods.values())
        cache = -(-length // _BLOCK + 2) * _BLOCK * (rows + 1) * entry_bytes(model)
        engine = _engine(source, str(model.dtype).removeprefix("torch."), folder, length, rows, cache, ragged)
        yield (
            f"{requests} requests of {tokens} tokens and {answer_tokens} of the answer, {rows} at once, "
            f"{torch.get_num_threads()} threads, {model.dtype}, vLLM's cache of {cache / 2**20:.0f} MiB"
        )
        yield from _lines(engine, prompts, reading, asked, answer_tokens, rows, cache)


def _lines(
    engine: Any,
    prompts: Mapping[str, list[list[int]]],
    reading: Mapping[str, float],
    asked: list[list[int]],
    answer_tokens: int,
    rows: int,
    cache: int,
) -> Iterator[str]:
    width = max(18, *(len(name) + 2 for name in prompts))
    columns = f"{'read s':>8}{'requests/s':>12}{'first s':>9}{'ms a step':>11}{'tokens/s':>10}{'times full':>12}"
    yield f"{'method':<{width}}{columns}{'KV MiB':>9}"
    full = 0.0
    for name, documents in prompts.items():
        whole = [documents[place % len(documents)] + own for place, own in enumerate(asked)]
        _answered(engine, whole[:rows], _WARM, rows)
        run = _answered(engine, whole, answer_tokens, rows)
        step = statistics.median(run.steps)
        full = full or step
        yield (
            f"{name:<{width}}{reading[name]:>8.2f}{len(whole) / run.seconds:>12.3f}{statistics.median(run.first):>9.2f}"
            f"{step * 1000:>11.1f}{rows / step:>10.1f}{full / step:>12.2f}{run.usage * cache / 2**20:>9.1f}"
        )


@torch.no_grad()
def _prefix(target: Target, method: Evict, ids: torch.Tensor, root: Path) -> list[int]:
    """The placeholders of a prompt [1, N]."""
    page = _BLOCK if isinstance(method.allocate, Global) else 0
    if isinstance(method.allocate, Global):
        method = replace(method, allocate=replace(method.allocate, page=page))
    digest, header = export(target.model, method.start(target.model, ids), root, page=page)
    return placeholders(digest, header.entries, alphabet_of(target.tokenizer))


def _engine(source: str | Path, dtype: str, root: str, length: int, rows: int, cache: int, ragged: bool) -> Any:
    """An engine in this process, so that a step is one of the scheduler's."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "KEEPSIGHT_RAGGED": f"{ragged:d}"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    vllm: Any = importlib.import_module("vllm")
    transfer = importlib.import_module("vllm.config").KVTransferConfig(**transfer_config(root))
    return vllm.LLM(
        model=str(source),
        dtype=dtype,
        block_size=_BLOCK,
        max_model_len=length,
        max_num_seqs=rows,
        kv_cache_memory_bytes=cache,
        enable_prefix_caching=False,
        enforce_eager=not torch.cuda.is_available(),
        kv_transfer_config=transfer,
    ).llm_engine


def _answered(engine: Any, prompts: list[list[int]], answer_tokens: int, rows: int) -> Run:
    exactly = importlib.import_module("vllm").SamplingParams(
        temperature=0.0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False
    )
    run, begun, manager = Run(), set[str](), engine.engine_core.engine_core.scheduler.kv_cache_manager
    start = time.perf_counter()
    for place, ids in enumerate(prompts):
        engine.add_request(f"{start}-{place}", {"prompt_token_ids": ids}, exactly)
    while engine.has_unfinished_requests():
        before = time.perf_counter()
        names = {each.request_id for each in engine.step()}
        now = time.perf_counter()
        if len(names) == rows and names <= begun:
            run.steps.append(now - before)
        run.first += [now - start] * len(names - begun)
        begun |= names
        run.usage = max(run.usage, manager.usage)
    run.seconds = time.perf_counter() - start
    return run
