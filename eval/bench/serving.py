"""Speed of batched serving, from evicted caches and from full ones, by `keepsight serve`'s engine or vLLM's."""

import importlib.util
import itertools
import math
import os
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.eval.answers import entry_bytes
from keepsight.eval.bench.measure import random_ids, require_room
from keepsight.eval.bench.runner import Runner, TableRow
from keepsight.models.targets import Target
from keepsight.runtime.allocate import Global
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import FullCache, Method
from keepsight.serving.engine import Engine, Job
from keepsight.serving.export import export
from keepsight.serving.prefix import alphabet_of, placeholders, transfer_config
from keepsight.tables import TerminalColumn, name_column

_BLOCK = 32
"""Tokens of a block of the engine, and entries of a page."""
_DOCUMENTS = 4
"""Number of prompts, which requests take in turn."""
_QUESTION = 16
"""Tokens that each request adds to its prompt."""
_WARM_UP_TOKENS = 2
_IDLE = 0.002
"""Seconds to wait where no request is there."""


def bench_serve(
    runner: Runner,
    model: PreTrainedModel,
    methods: Mapping[str, Method],
    tokens: int,
    answer_tokens: int,
    requests: int,
    rows: int,
    interval: float = 0.0,
    prefill_tokens: int | None = None,
) -> Iterator[str]:
    """A line for each method, the full cache first; prompts are random tokens, and answers all have one length.

    A request arrives every `interval` seconds; new prompts are read as by an `Engine` of these `prefill_tokens`.
    """
    rows = min(rows, requests)
    require_room(model, tokens + answer_tokens, rows)
    prompts = random_ids(model, requests, tokens).cpu()
    compared = {"full cache": FullCache(), **methods}
    yield (
        f"{requests} requests of {tokens} tokens and {answer_tokens} of the answer, {rows} at once, "
        f"{torch.get_num_threads()} threads, {model.dtype}"
    )

    def measure(method: Method, _: int) -> TableRow:
        served = _serve(model, method, prompts, answer_tokens, rows, interval, prefill_tokens)
        step = _median_step(served.steps, rows)
        gaps = list(itertools.chain.from_iterable(job.gaps for job in served.jobs)) or [0.0]
        return {
            "requests/s": requests / served.seconds,
            "in all s": served.seconds,
            "gap ms": statistics.median(gaps) * 1000,
            "p99 gap": percentile(gaps, 0.99) * 1000,
            "first s": statistics.median(job.first or 0.0 for job in served.jobs),
            "prefill s": served.engine.totals.prefill_seconds / requests,
            "ms a step": step * 1000,
            "tokens/s": rows / step,
            "KV MiB": served.peak_bytes / 2**20,
        }

    figures = ("requests/s", "first s", "prefill s", "ms a step", "tokens/s", "of full", "gap ms", "p99 gap", "KV MiB")
    columns = _columns(compared, "in all s", *figures)
    served_rows = runner.compare("serve", compared, measure, lengths=[tokens], ratios={"of full": "ms a step"})
    yield from runner.table("serve", columns, served_rows)


def percentile(values: list[float], share: float) -> float:
    """The least of the values that so large a share of them does not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


_FORMS = {
    "read s": ".2f",
    "requests/s": ".3f",
    "in all s": ".1f",
    "gap ms": ".0f",
    "p99 gap": ".0f",
    "first s": ".2f",
    "prefill s": ".2f",
    "ms a step": ".1f",
    "tokens/s": ".1f",
    "of full": ".2f",
    "times full": ".2f",
    "KV MiB": ".1f",
}
"""How each figure is written."""


def _columns(methods: Iterable[str], *names: str) -> list[TerminalColumn]:
    """The columns of a table of served requests: the method, and these figures."""
    return [name_column("method", methods), *(TerminalColumn(name, _FORMS[name]) for name in names)]


def _median_step(seconds_of_steps: list[float], rows: int) -> float:
    """Seconds of a step with all rows; UserError if the first answers ended before the last row was filled."""
    if not seconds_of_steps:
        raise UserError(
            f"answer_tokens= is too small: no step had all {rows} rows, as answers end before the last prompt is read; "
            "raise it",
            field="answer_tokens",
            code="range",
        )
    return statistics.median(seconds_of_steps)


class _TimedJob(Job):
    """A request that notes the seconds between the tokens of its answer."""

    def __init__(self, ids: torch.Tensor, **options: Any) -> None:
        super().__init__(ids, **options)
        self.gaps: list[float] = []
        self._before: float | None = None

    @override
    def took(self, token: int) -> bool:
        now = time.perf_counter()
        if self._before is not None:
            self.gaps.append(now - self._before)
        self._before = now
        return False


@dataclass
class _Served:
    """Seconds in all, and of steps, and the most bytes of entries.

    Steps are those with all rows filled, or, where requests arrive one after another, all that read no prompt.
    """

    engine: Engine
    jobs: list[_TimedJob] = field(default_factory=list)
    seconds: float = 0.0
    steps: list[float] = field(default_factory=list)
    peak_bytes: int = 0


def _serve(
    model: PreTrainedModel,
    method: Method,
    prompts: torch.Tensor,
    answer_tokens: int,
    rows: int,
    interval: float,
    prefill_tokens: int | None,
) -> _Served:
    """Serve all prompts, of which one arrives every `interval` seconds."""
    engine = Engine(model, method, rows=rows, waiting=len(prompts), prefill_tokens=prefill_tokens)
    options: dict[str, Any] = {
        "max_new_tokens": answer_tokens,
        "min_new_tokens": answer_tokens,
        "do_sample": False,
    }
    served = _Served(engine)
    for ids in prompts:
        served.jobs.append(_TimedJob(ids, **options))

    def submit_all() -> None:
        for number, job in enumerate(served.jobs):
            time.sleep(max(start + number * interval - time.perf_counter(), 0))
            engine.submit(job)

    start = time.perf_counter()
    arrivals = threading.Thread(target=submit_all, name="arrivals", daemon=True)
    arrivals.start()
    if not interval:
        arrivals.join()
    while not all(job.done.is_set() for job in served.jobs):
        steps_before = engine.totals.decode_steps
        seconds_before = engine.totals.decode_seconds
        if not engine.step():
            time.sleep(_IDLE)
        rows_filled = engine.load[0]
        if (rows_filled == rows or interval) and engine.totals.decode_steps == steps_before + 1:
            served.steps.append(engine.totals.decode_seconds - seconds_before)
        served.peak_bytes = max(served.peak_bytes, engine.kv_bytes)
    served.seconds = time.perf_counter() - start
    return served


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
    runner: Runner,
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
    model = target.model
    rows = min(rows, requests)
    length = tokens + _QUESTION + answer_tokens
    require_room(model, length)
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "vllm=true needs vLLM beside keepsight, in an environment of its own: in a clone, run `make setup-vllm`",
            field="vllm",
            code="missing",
        )
    documents = random_ids(model, _DOCUMENTS, tokens)
    questions = random_ids(model, requests, _QUESTION).tolist()
    with TemporaryDirectory(prefix="keepsight-") as folder:
        prompts = {"full cache": documents.tolist()}
        seconds_to_read = {"full cache": 0.0}
        for name, method in methods.items():
            start = time.perf_counter()
            prompts[name] = [_prefix(target, method, document[None], Path(folder)) for document in documents]
            seconds_to_read[name] = (time.perf_counter() - start) / _DOCUMENTS
        is_ragged = any(isinstance(method.allocate, Global) for method in methods.values())
        blocks = math.ceil(length / _BLOCK) + 2
        cache_bytes = blocks * _BLOCK * (rows + 1) * entry_bytes(model)
        dtype = str(model.dtype).removeprefix("torch.")
        engine = _engine(source, dtype, folder, length, rows, cache_bytes, is_ragged)
        yield (
            f"{requests} requests of {tokens} tokens and {answer_tokens} of the answer, {rows} at once, "
            f"{torch.get_num_threads()} threads, {model.dtype}, vLLM's cache of {cache_bytes / 2**20:.0f} MiB"
        )
        yield from _lines(runner, engine, prompts, seconds_to_read, questions, answer_tokens, rows, cache_bytes)


def _lines(
    runner: Runner,
    engine: Any,
    prompts: Mapping[str, list[list[int]]],
    seconds_to_read: Mapping[str, float],
    questions: list[list[int]],
    answer_tokens: int,
    rows: int,
    cache_bytes: int,
) -> Iterator[str]:
    """A heading, and a line for each method with the prompts that it has."""

    def measure(name: str, _: int) -> TableRow:
        documents = prompts[name]
        requests = []
        for index, question in enumerate(questions):
            requests.append(documents[index % len(documents)] + question)
        _answer(engine, requests[:rows], _WARM_UP_TOKENS, rows)
        run = _answer(engine, requests, answer_tokens, rows)
        step = _median_step(run.steps, rows)
        return {
            "read s": seconds_to_read[name],
            "requests/s": len(requests) / run.seconds,
            "first s": statistics.median(run.first),
            "ms a step": step * 1000,
            "tokens/s": rows / step,
            "KV MiB": run.usage * cache_bytes / 2**20,
        }

    measured = runner.compare("serve", {name: name for name in prompts}, measure, ratios={"times full": "tokens/s"})
    columns = _columns(prompts, "read s", "requests/s", "first s", "ms a step", "tokens/s", "times full", "KV MiB")
    yield from runner.table("serve", columns, measured)


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


def _answer(engine: Any, prompts: list[list[int]], answer_tokens: int, rows: int) -> Run:
    """Answer all prompts, which arrive at once, with answers of exactly so many tokens."""
    sampling = importlib.import_module("vllm").SamplingParams(
        temperature=0.0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False
    )
    manager = engine.engine_core.engine_core.scheduler.kv_cache_manager
    run = Run()
    begun: set[str] = set()
    start = time.perf_counter()
    for index, ids in enumerate(prompts):
        engine.add_request(f"{start}-{index}", {"prompt_token_ids": ids}, sampling)
    while engine.has_unfinished_requests():
        before = time.perf_counter()
        names = {output.request_id for output in engine.step()}
        now = time.perf_counter()
        if len(names) == rows and names <= begun:
            run.steps.append(now - before)
        run.first += [now - start] * len(names - begun)
        begun |= names
        run.usage = max(run.usage, manager.usage)
    run.seconds = time.perf_counter() - start
    return run
