"""Decoding steps in CUDA graphs against `decode`'s own loop on the same device."""

import gc
import logging
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers import RepetitionPenaltyLogitsProcessor as Penalty

from keepsight.experimental import VARIABLE
from keepsight.runtime import static_step
from keepsight.runtime.generate import FullCache, decode, generate, stop_after
from keepsight.runtime.methods import AdaKV, PyramidKV, SnapKV, StreamingLLM
from keepsight.runtime.state import State
from keepsight.serving.engine import Engine, Job
from tests.close import assert_close
from tests.gpu.device import CUDA_ALONE, FLOATS, GPU, settled, there
from tests.tiny import prompt_ids, tiny_model

pytestmark = [*GPU, CUDA_ALONE]
TOKENS = 40
METHODS: dict[str, Any] = {
    "full": FullCache(),
    "snapkv": SnapKV(64),
    "adakv": AdaKV(64),
    "pyramidkv": PyramidKV(64),
    "streamingllm": StreamingLLM(64),
}
WARPERS = LogitsProcessorList([TemperatureLogitsWarper(1.5), TopKLogitsWarper(40), TopPLogitsWarper(0.9)])


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "graph")


def started(model: Any, name: str, *lengths: int) -> State:
    ids, mask = prompt_ids(*lengths)
    state: State = METHODS[name].start(model, there(ids), there(mask))
    return state.unrecorded()


def captured(model: Any) -> int:
    """Number of graphs that the model has."""
    steps: list[Any] = [*static_step._GRAPHS.get(model, {}).values()]
    return sum(step is not None and step._graph is not None for step in steps)


def answer(model: Any, state: State, monkeypatch: Any, graph: bool, **options: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, "graph" if graph else "")
        torch.manual_seed(3)
        ends = options.pop("ends", None)
        return decode(model, state.copy(), stop_after(TOKENS, ends), pad_token=0, **options)


@pytest.mark.parametrize("lengths", [(200,), (200, 130)])
@pytest.mark.parametrize("name", METHODS)
def test_a_graph_gives_the_answer_of_single_launches(name: str, lengths: tuple[int, ...], monkeypatch: Any) -> None:
    model = there(tiny_model(head_dim=16))
    state = started(model, name, *lengths)
    expected = answer(model, state, monkeypatch, graph=False)
    ends = [expected.ids[0, 20].item()]
    for end_tokens in (None, ends, None):
        expected = answer(model, state, monkeypatch, graph=False, ends=end_tokens)
        replayed = answer(model, state, monkeypatch, graph=True, ends=end_tokens)
        assert torch.equal(replayed.ids, expected.ids)
        assert torch.equal(replayed.state.tokens, expected.state.tokens)
        assert_close(replayed.state.logits, expected.state.logits)
    assert captured(model) == 2, "one with an end token, one without, each for two answers"


@pytest.mark.parametrize("name", ["snapkv", "adakv"])
def test_sampled_answers_have_the_draws_of_the_seed(name: str, monkeypatch: Any) -> None:
    model = there(tiny_model(head_dim=16))
    state = started(model, name, 200)
    options: dict[str, Any] = {"logits_processor": WARPERS, "do_sample": True}
    expected = answer(model, state, monkeypatch, graph=False, **options)
    for _ in range(2):
        assert torch.equal(answer(model, state, monkeypatch, graph=True, **options).ids, expected.ids)
    assert captured(model) == 1


def test_other_processors_run_after_the_graph(monkeypatch: Any) -> None:
    model = there(tiny_model(head_dim=16))
    state = started(model, "adakv", 200, 130)
    options = {"logits_processor": LogitsProcessorList([Penalty(1.5)])}
    expected = answer(model, state, monkeypatch, graph=False, **options)
    assert torch.equal(answer(model, state, monkeypatch, graph=True, **options).ids, expected.ids)
    assert captured(model) == 1


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_dtype(dtype: torch.dtype, monkeypatch: Any) -> None:
    model = there(tiny_model(head_dim=64).to(dtype))
    state = started(model, "adakv", 200)
    tokens = answer(model, state, monkeypatch, graph=False).ids
    logits: dict[bool, list[torch.Tensor]] = {}
    for is_captured in (False, True):
        with torch.no_grad():
            step = static_step.StaticStep(state, static_step.capacity_of(state, TOKENS), None)
            step.load(state, TOKENS)
            if is_captured:
                step.capture(model, state)
            logits[is_captured] = [step.read(model, token) for token in tokens.T]
    for replayed, expected in zip(logits[True], logits[False], strict=True):
        assert_close(replayed, expected, dtype)


def test_replays_do_not_wait_for_the_device() -> None:
    model = there(tiny_model(head_dim=16))
    state = started(model, "adakv", 200)
    with torch.no_grad():
        step = static_step.StaticStep(state, static_step.capacity_of(state, TOKENS), static_step.Choice((), False, 0))
        step.load(state, TOKENS)
        step.capture(model, state)
        settled()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(8):
                step.advance(model)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert int(step.appended) == 8


def test_generate_takes_the_graph(caplog: pytest.LogCaptureFixture) -> None:
    model = there(tiny_model(head_dim=16))
    with caplog.at_level(logging.WARNING, logger="keepsight"):
        for seed in (0, 1):
            ids = there(prompt_ids(200, seed=seed)[0])
            generate(model, ids, AdaKV(64), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
    assert captured(model) == 1
    assert "without a CUDA graph" not in caplog.text


def test_a_server_whose_batch_changes_gives_the_answers_of_single_launches(monkeypatch: Any) -> None:
    model = there(tiny_model(head_dim=16))
    engine = Engine(model, METHODS["adakv"], rows=3)
    jobs = []
    for index, length in enumerate((200, 90, 130, 70, 160)):
        jobs.append(Job(prompt_ids(length, seed=index)[0][0], max_new_tokens=8 + 9 * (index % 3), do_sample=False))
    for job in jobs:
        engine.submit(job)
    while engine.step():
        pass
    assert captured(model)
    monkeypatch.setenv(VARIABLE, "")
    for job in jobs:
        alone = generate(model, there(job.ids[None]), METHODS["adakv"], **job.options)
        assert job.result(0) == alone[0].tolist()


def test_memory_is_freed_with_the_model() -> None:
    settled()
    before = torch.cuda.memory_allocated()
    model = there(tiny_model(head_dim=16))
    decode(model, started(model, "snapkv", 200), stop_after(TOKENS, None), pad_token=0)
    assert captured(model) == 1
    del model
    gc.collect()
    settled()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() - before < 2**20
