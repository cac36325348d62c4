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
    on_device, found = scored(there(copy.deepcopy(model)), method_of(name, FAMILY, folder))
    assert torch.equal(on_device.counts().cpu(), state.counts())
    assert_close(found, expected)


WHOLE = {
    "full": FullCache(),
    "kivi": Kivi(2, 8, 8),
    "specache": SpeCache(2, 8, 8, topk=41),
    "snapkv": SnapKV(20, window=8),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", WHOLE)
def test_answers_in_every_dtype_are_those_in_float32(name: str, dtype: torch.dtype) -> None:
    """Of the same weights, rounded; no further apart than the full cache's on the CPU, with a margin."""
    model = tiny_model(head_dim=16).to(dtype)
    _, exact = scored(copy.deepcopy(model).float(), WHOLE[name])
    _, there_found = scored(there(copy.deepcopy(model)), WHOLE[name])
    _, here_found = scored(model, WHOLE[name])
    apart = (here_found.float() - exact).abs().max().item()
    assert (there_found.float() - exact).abs().max().item() <= 4 * apart + rounding(exact, dtype)


@contextmanager
def load() -> Iterator[None]:
    """Products queued on the model's stream and on another, so that copies have something to overtake."""
    if DEVICE.type != "cuda":
        yield
        return
    size, other = 2048, torch.cuda.Stream()
    given = torch.randn(size, size, device=DEVICE)
    for stream in (torch.cuda.current_stream(), other):
        with torch.cuda.stream(stream):
            for _ in range(200):
                torch.matmul(given, given)
    yield
    settled()


@pytest.mark.parametrize("streams", ["kernel,streams", "kernel", ""])
@pytest.mark.parametrize("name", ["specontext", "specache"])
def test_entries_from_cpu_memory_are_right_under_load(name: str, streams: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(head_dim=16, pad_token_id=None)
    on_device, ids, answer = there(copy.deepcopy(model)), prompt_ids(200)[0], prompt_ids(40, seed=1)[0]
    makers: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "specontext": (
            lambda: SpeContext(24, tiny_retrieval_head("none", max_position_embeddings=1024)),
            lambda: SpeContext(24, tiny_retrieval_head("none", max_position_embeddings=1024), offload=3),
        ),
        "specache": (lambda: SpeCache(2, 8, 16, topk=12), lambda: SpeCache(2, 8, 16, topk=12)),
    }
    plain, offloaded = makers[name]
    expected = _steps(model, plain(), ids, answer)
    monkeypatch.setenv(VARIABLE, streams)
    for _ in range(5):
        with load():
            found = _steps(on_device, offloaded(), ids, answer)
        assert_close(found, expected)


@torch.no_grad()
def _steps(model: Any, method: Any, ids: Tensor, answer: Tensor) -> Tensor:
    """Logits [T, B, V] of an answer read token by token, on the CPU."""
    reader, state = method.reader(model), method.start(model, ids.to(model.device))
    found = [state.logits]
    for token in answer.to(model.device).split(1, dim=1):
        state, logits = read(reader, state, token)
        found.append(logits[:, -1])
    return torch.stack(found).cpu()


def test_a_training_step_gives_the_gradients_of_the_cpu() -> None:
    model, ids = tiny_model(), prompt_ids(60)[0]
    torch.manual_seed(0)
    here = Lookahead(model, LookaheadSettings(tokens=4, rank=2))
    for weight in here.parameters():
        if weight.requires_grad and weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.1)
    gradients = []
    for module in (here, there(copy.deepcopy(here))):
        objective, batch = ImportanceObjective(module), ids.to(module.model.device)
        objective.loss(Batch(batch[:, :50], batch[:, 50:])).backward()
        gradients.append([each.grad.cpu() for each in objective.trained_parameters() if each.grad is not None])
    assert gradients[0] and any(each.abs().max() > 0 for each in gradients[0])
    assert_close(gradients[1], gradients[0])


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
    method, ids = methods.get(name) or lookahead(model), there(prompt_ids(200)[0])
    reader, needs = method.reader(model), Needs() if name in ("full", "kivi") else method.needs()

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


def _now() -> int:
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
    method, ids = methods[name], there(prompt_ids(8192)[0])
    reader = method.reader(model)
    del methods
    read(reader, method.start(model, ids), ids[:, :1])  # what is cached for good
    before = _now()
    state = method.start(model, ids).unrecorded()
    said, held = state.kv_bytes, _now() - before
    assert said - SMALL <= held <= said * (1 + GROWTH) + SMALL
    for token in ids[:, : ROOM // 2].split(1, dim=1):
        state, _ = read(reader, state, token)
    assert _now() - before <= state.kv_bytes * (1 + 2 * GROWTH) + 2 * SMALL
    del state
    assert _now() - before <= SMALL
