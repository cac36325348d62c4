"""Threads and asyncio tasks that share models, with random methods: each answer is what it is alone."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from random import Random
from threading import Barrier
from typing import Any

from keepsight.models.draft_sources import LayerSubset
from keepsight.models.targets import load_target
from keepsight.runtime.generate import generate
from keepsight.runtime.methods import Resources, make_method
from tests.faults.texts import Verdict, accepted, judged
from tests.faults.world import World
from tests.tiny import prompt_ids, tiny_model

_FOR_ALL: dict[str, dict[str, Any]] = {
    **{name: {"window": 8} for name in ("snapkv", "adakv", "pyramidkv", "h2o", "speckv")},
    **{name: {} for name in ("tova", "streamingllm", "lacache", "key_norm", "dapq", "laq", "quest", "full")},
    "kivi": {"bits": 2, "group": 8, "residual": 8},
}
_TRAINED = ("lookaheadkv", "specontext")
_BUDGETS = {"kivi": (None,), "full": (None,), "quest": (32, 48), "specontext": (32, 48)}
Job = tuple[int, str, int | None, int, int, str]
"""Number of the model, method, budget, tokens of the prompt, its seed, and how the method is called."""


def threads(world: World, rng: Random, count: int) -> Iterator[Verdict]:
    """Two to eight jobs at once, on one or two models, in threads or in tasks."""
    target = load_target(str(world.folder / "tiny"), device="cpu")
    trained = Resources(world.folder / "adapter", LayerSubset((0, 2)), retrieval=world.folder / "retrieval")
    models: tuple[Any, ...] = (target.model, tiny_model("qwen3", seed=1))
    resources = (trained, Resources(draft=LayerSubset((0, 2))))

    @cache
    def method(model: int, name: str, budget: int | None) -> Any:
        return make_method(name, budget, resources[model], **_FOR_ALL.get(name, {}))

    @cache
    def alone(job: Job) -> list[int]:
        return answer(job)

    def answer(job: Job) -> list[int]:
        number, name, budget, tokens, seed, way = job
        model = models[number]
        ids, _ = prompt_ids(tokens, seed=seed)
        options: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": None, "do_sample": False}
        if way == "plain":
            return list(model.generate(ids, **options)[0, tokens:].tolist())
        if way == "custom_generate":
            sequences = model.generate(ids, custom_generate=method(number, name, budget), **options)
            return list(sequences[0, tokens:].tolist())
        return list(generate(model, ids, method(number, name, budget), **options)[0].tolist())

    def trial(jobs: list[Job], run: Callable[[Any, list[Job]], list[list[int]]]) -> str:
        expected = accepted(lambda: [alone(job) for job in jobs])
        answers = accepted(lambda: run(answer, jobs))
        differing: list[Job] = []
        for job, answer_alone, answer_together in zip(jobs, expected, answers, strict=True):
            if answer_together != answer_alone:
                differing.append(job)
        assert not differing, f"other answers of {differing}"
        return "right"

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        for _ in range(count):
            jobs = [_job(rng) for _ in range(rng.randint(2, 8))]
            run = rng.choice((_in_threads, _in_tasks))
            yield judged((run.__name__, jobs), partial(trial, jobs, run))
    finally:
        sys.setswitchinterval(before)


def _job(rng: Random) -> Job:
    model = rng.randrange(2)
    name = rng.choice([*_FOR_ALL, *(_TRAINED * 2 if model == 0 else ())])
    budget = rng.choice(_BUDGETS.get(name, (40, 48)))
    way = rng.choice(("generate", "generate", "custom_generate", "plain"))
    return model, name, budget, rng.choice((60, 75, 90)), rng.randrange(4), way


def _in_threads(answer: Callable[[Job], list[int]], jobs: list[Job]) -> list[list[int]]:
    together = Barrier(len(jobs))

    def start(job: Job) -> list[int]:
        together.wait()
        return answer(job)

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(start, jobs))


def _in_tasks(answer: Callable[[Job], list[int]], jobs: list[Job]) -> list[list[int]]:
    async def main() -> list[list[int]]:
        return list(await asyncio.gather(*(asyncio.to_thread(answer, job) for job in jobs)))

    return asyncio.run(main())
