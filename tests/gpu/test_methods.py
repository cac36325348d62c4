"""Methods on CUDA against the CPU: answers, entries from CPU memory under load, syncs, memory against `kv_bytes`."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keepsight.experimental import VARIABLE
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.runtime.generate import FullCache
from keepsight.runtime.layer import GROWTH, ROOM
from keepsight.runtime.methods import AdaKV, Kivi, LookaheadKV, Quest, SnapKV, SpeCache, SpeContext, StreamingLLM
from keepsight.runtime.methods.lookaheadkv import adapter_fields
from keepsight.runtime.state import Needs, State, prefill, read
from keepsight.train.dataset import Batch
from keepsight.train.importance import ImportanceObjective
from tests.close import assert_close, rounding
from tests.families import family_model
from tests.gpu.device import CUDA_ALONE, DEVICE, FLOATS, GPU, settled, there
from tests.models.retrieval_heads import tiny_retrieval_head
from tests.runtime.family_methods import DRAFT, NAMES, PROMPT, method_of
from tests.runtime.scoring import score_answer
from tests.tiny import prompt_ids, tiny_model

pytestmark = GPU
FAMILY = "Llama 3"
ANSWER = prompt_ids(5, seed=1)[0]


@pytest.fixture(autouse=True)
def every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experimental ones too."""
    monkeypatch.setenv(VARIABLE, "all")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


def scored(model: Any, method: Any, ids: Tensor = PROMPT, answer: Tensor = ANSWER) -> tuple[State, Tensor]:
    """What a method holds of a prompt, and the negative log-likelihood [B, T] of an answer, on the CPU."""
    drafting: Any = DRAFT.draft
    drafting.model.to(model.device)
    state = method.start(model, ids.to(model.device))
    nll, _ = score_answer(method.reader(model), state.copy(), answer.to(model.device))
    return state, nll.cpu()


@pytest.mark.parametrize("name", NAMES)
def test_every_method_keeps_the_same_and_answers_alike(name: str, folder: Path) -> None:
    model = family_model(FAMILY)
    state, expected = scored(model, method_of(name, FAMILY, folder))
    device_state, nll = scored(there(copy.deepcopy(model)), method_of(name, FAMILY, folder))
    assert torch.equal(device_state.counts().cpu(), state.counts())
    assert_close(nll, expected)


METHODS = {
    "full": FullCache(),
    "kivi": Kivi(2, 8, 8),
    "specache": SpeCache(2, 8, 8, topk=41),
    "snapkv": SnapKV(20, window=8),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", METHODS)
def test_answers_in_every_dtype_are_those_in_float32(name: str, dtype: torch.dtype) -> None:
    """Of the same weights, rounded; no further apart than the full cache's on the CPU, with a margin."""
    model = tiny_model(head_dim=16).to(dtype)
    _, exact = scored(copy.deepcopy(model).float(), METHODS[name])
    _, device_nll = scored(there(copy.deepcopy(model)), METHODS[name])
    _, cpu_nll = scored(model, METHODS[name])
    cpu_error = (cpu_nll.float() - exact).abs().max().item()
    device_error = (device_nll.float() - exact).abs().max().item()
    assert device_error <= 4 * cpu_error + rounding(exact, dtype)


@contextmanager
def load() -> Iterator[None]:
    """Products queued on the model's stream and on another, so that copies have something to overtake."""
    if DEVICE.type != "cuda":
        yield
        return
    size = 2048
    other_stream = torch.cuda.Stream()
    factor = torch.randn(size, size, device=DEVICE)
    for stream in (torch.cuda.current_stream(), other_stream):
        with torch.cuda.stream(stream):
            for _ in range(200):
                torch.matmul(factor, factor)
    yield
    settled()


@pytest.mark.parametrize("streams", ["kernel,streams", "kernel", ""])
@pytest.mark.parametrize("name", ["specontext", "specache"])
def test_entries_from_cpu_memory_are_right_under_load(name: str, streams: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(head_dim=16, pad_token_id=None)
    device_model = there(copy.deepcopy(model))
    ids = prompt_ids(200)[0]
    answer = prompt_ids(40, seed=1)[0]
    makers: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "specontext": (
            lambda: SpeContext(24, tiny_retrieval_head("none", max_position_embeddings=1024)),
            lambda: SpeContext(24, tiny_retrieval_head("none", max_position_embeddings=1024), offload=3),
        ),
        "specache": (lambda: SpeCache(2, 8, 16, topk=12), lambda: SpeCache(2, 8, 16, topk=12)),
    }
    make_plain, make_offloaded = makers[name]
    expected = _steps(model, make_plain(), ids, answer)
    monkeypatch.setenv(VARIABLE, streams)
    for _ in range(5):
        with load():
            logits = _steps(device_model, make_offloaded(), ids, answer)
        assert_close(logits, expected)


@torch.no_grad()
def _steps(model: Any, method: Any, ids: Tensor, answer: Tensor) -> Tensor:
    """Logits [T, B, V] of an answer read token by token, on the CPU."""
    reader = method.reader(model)
    state = method.start(model, ids.to(model.device))
    logits_of_steps = [state.logits]
    for token in answer.to(model.device).split(1, dim=1):
        state, logits = read(reader, state, token)
        logits_of_steps.append(logits[:, -1])
    return torch.stack(logits_of_steps).cpu()


def test_a_training_step_gives_the_gradients_of_the_cpu() -> None:
    model = tiny_model()
    ids = prompt_ids(60)[0]
    torch.manual_seed(0)
    cpu_module = Lookahead(model, LookaheadSettings(tokens=4, rank=2))
    for weight in cpu_module.parameters():
        if weight.requires_grad and weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.1)
    gradients = []
    for module in (cpu_module, there(copy.deepcopy(cpu_module))):
        objective = ImportanceObjective(module)
        device_ids = ids.to(module.model.device)
        objective.loss(Batch(device_ids[:, :50], device_ids[:, 50:])).backward()
        gradients.append([weight.grad.cpu() for weight in objective.trained_parameters() if weight.grad is not None])
    cpu_gradients, device_gradients = gradients
    assert cpu_gradients
    assert any(gradient.abs().max() > 0 for gradient in cpu_gradients)
    assert_close(device_gradients, cpu_gradients)


def lookahead(model: Any) -> LookaheadKV:
    return LookaheadKV(budget=64, **adapter_fields(Lookahead(model, LookaheadSettings(tokens=4, rank=2)).adapter()))


@CUDA_ALONE
@pytest.mark.parametrize("name", ["full", "snapkv", "streamingllm", "lookaheadkv", "kivi"])
def test_neither_eviction_nor_decoding_waits_for_the_device(name: str) -> None:
    model = there(tiny_model(head_dim=16))
    methods: dict[str, Any] = {
        "full": FullCache(),
        "snapkv": SnapKV(64),
        "streamingllm": StreamingLLM(64),
        "kivi": Kivi(2, 8, 32),
    }
    method = methods.get(name) or lookahead(model)
    ids = there(prompt_ids(200)[0])
    reader = method.reader(model)
    needs = Needs() if name in ("full", "kivi") else method.needs()

    def step(state: State) -> State:
        return read(reader, state, state.logits.argmax(dim=-1, keepdim=True))[0]

    state = prefill(model, ids, needs=needs)
    step(step(method.compress_state(model, state).unrecorded()))  # caches of masks, kernels, room
    torch.cuda.set_sync_debug_mode("error")
    try:
        compressed = method.compress_state(model, state).unrecorded()
        for _ in range(3):
            compressed = step(compressed)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compressed.logits.isfinite().all()


SMALL = 2**21
"""Bytes of what is held beside entries: logits, tokens, recorded queries, and the allocator's rounding."""


def _allocated_bytes() -> int:
    settled()
    return int(torch.cuda.memory_stats()["allocated_bytes.all.current"])


@CUDA_ALONE
@pytest.mark.parametrize("name", ["full", "snapkv", "adakv", "lookaheadkv", "kivi", "specache", "quest", "specontext"])
def test_what_is_allocated_is_what_kv_bytes_says(name: str) -> None:
    model = there(tiny_model(head_dim=64, max_position_embeddings=16384))
    head = there(tiny_retrieval_head("none", max_position_embeddings=16384))
    methods = {
        "full": FullCache(),
        "snapkv": SnapKV(1024),
        "adakv": AdaKV(1024),
        "kivi": Kivi(),
        "specache": SpeCache(),
    }
    methods |= {"quest": Quest(1024), "specontext": SpeContext(1024, head), "lookaheadkv": lookahead(model)}
    method = methods[name]
    ids = there(prompt_ids(8192)[0])
    reader = method.reader(model)
    del methods
    read(reader, method.start(model, ids), ids[:, :1])  # what is cached for good
    before = _allocated_bytes()
    state = method.start(model, ids).unrecorded()
    kv_bytes = state.kv_bytes
    allocated = _allocated_bytes() - before
    assert kv_bytes - SMALL <= allocated <= kv_bytes * (1 + GROWTH) + SMALL
    for token in ids[:, : ROOM // 2].split(1, dim=1):
        state, _ = read(reader, state, token)
    assert _allocated_bytes() - before <= state.kv_bytes * (1 + 2 * GROWTH) + 2 * SMALL
    del state
    assert _allocated_bytes() - before <= SMALL
