"""Several threads, and asyncio tasks, use one model at once: each answer is what it is alone."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from keepsight.models.draft_sources import LoadedDraft
from keepsight.runtime.generate import generate
from keepsight.runtime.methods import Resources, make_method
from tests.models.modules import SHAPE, random_on, save
from tests.tiny import SmallVocabulary, prompt_ids, tiny_model

METHODS: dict[str, dict[str, Any]] = {
    "lookaheadkv": {},
    "adakv": {"window": 8},
    "snapkv": {"window": 8, "every": 4},
    "speckv": {"window": 8, "observer": {"drafter": {"lookahead": 5}}},
    "h2o": {"window": 4},
    "kivi": {"bits": 2, "group": 8, "residual": 8},
    "kvzip+": {"observer": {"chunk": 40}},
    "kvgrad": {"observer": {"chunk": 40}},
    "quest": {},
}
BUDGETS = {"quest": 40, "kivi": None}
PLAIN = "transformers"


@pytest.fixture(scope="module")
def models() -> list[Any]:
    return [tiny_model(), tiny_model("qwen3", seed=1)]


@pytest.fixture(scope="module")
def methods(models, tmp_path_factory) -> list[dict[str, Any]]:
    """For each model, the methods by name."""
    methods = []
    for index, model in enumerate(models):
        module = random_on(model, replace(SHAPE, queries="max"))
        adapter = save(module, tmp_path_factory.mktemp("adapter") / str(index))
        draft = LoadedDraft("tiny", "1", tiny_model(seed=3))
        resources = Resources(adapter=adapter, draft=draft, tokenizer=cast(Any, SmallVocabulary()))
        by_name = {}
        for name, options in METHODS.items():
            by_name[name] = make_method(name, BUDGETS.get(name, 16), resources, **options)
        methods.append(by_name)
    return methods


def answer_of(model: Any, method: Any, seed: int) -> list[int]:
    ids = prompt_ids(60 + seed, seed=seed)[0]
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None, "do_sample": False}
    if method is None:
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()
    return generate(model, ids, method, **options)[0].tolist()


def jobs_of(models: list[Any], methods: list[dict[str, Any]]) -> list[tuple[Any, Any, int]]:
    """Models, methods or none, and seeds of prompts."""
    jobs = []
    for seed in range(4):
        for name in [*METHODS, PLAIN]:
            for model, by_name in zip(models, methods, strict=True):
                jobs.append((model, by_name.get(name), seed))
    return jobs


def test_threads_answer_as_one_after_the_other(models, methods):
    jobs = jobs_of(models, methods)
    alone = [answer_of(*job) for job in jobs]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda job: answer_of(*job), jobs))
    assert together == alone
    assert [model.config._attn_implementation for model in models] == ["sdpa", "sdpa"]


def test_tasks_answer_as_one_after_the_other(models, methods):
    jobs = jobs_of(models, methods)[:24]

    async def all_at_once() -> list[list[int]]:
        return await asyncio.gather(*(asyncio.to_thread(answer_of, *job) for job in jobs))

    assert asyncio.run(all_at_once()) == [answer_of(*job) for job in jobs]


def test_steps_attend_without_cudnn_and_prompts_with_it(models):
    """Threads that overlap leave the setting of the process as it was."""
    model, _ = models
    enabled = torch.backends.cuda.cudnn_sdp_enabled
    snapkv = make_method("snapkv", 16, window=8)
    during: dict[int, set[bool]] = {}

    def look(module, inputs, options):
        during.setdefault(options["input_ids"].shape[1], set()).add(enabled())

    hook = model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        assert enabled()
        answer_of(model, None, 20)
        assert during.pop(1) == {True}  # a plain call is the caller's own
        during.clear()
        answer_of(model, snapkv, 20)
        assert during == {80: {True}, 1: {False}}
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda seed: answer_of(model, snapkv, seed), range(8)))
        assert enabled()
    finally:
        hook.remove()
