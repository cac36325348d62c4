"""What a state reports of its memory, against the storages that its cache holds and what the allocator gave out."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from keepsight import AdaKV, FullCache, SnapKV
from keepsight.runtime import join as batches
from keepsight.runtime.allocate import Global
from keepsight.runtime.join import join, take_rows
from keepsight.runtime.layer import RaggedLayer
from keepsight.runtime.state import Needs, State, prefill, read
from tests.families import WINDOW, family_model
from tests.tiny import prompt_ids, tiny_model

METHODS = {
    "full": FullCache(),
    "dense": SnapKV(budget=16, window=4),
    "ragged": AdaKV(budget=16, window=4),
    "ragged over all layers": SnapKV(budget=16, window=4, allocate=Global(0.2)),
}


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors that a cache refers to, but for what was recorded for scoring."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each)
    elif hasattr(value, "keys") and hasattr(value, "__dict__"):
        yield from tensors_of([each for name, each in vars(value).items() if name != "recorded"])


def held(state: State) -> int:
    storages = [each.untyped_storage() for each in tensors_of(state.cache.layers)]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def allocated(allocator: Any) -> int:
    """Bytes that were given out meanwhile, and not taken back."""
    events = allocator.profiler.kineto_results.events()
    return sum(each.nbytes() for each in events if each.name() == "[memory]")


@pytest.mark.parametrize("question", [0, 7])
@pytest.mark.parametrize("name", METHODS)
def test_both_numbers_are_those_of_the_storages(name: str, question: int) -> None:
    """Also across the end of the room, and read on from there; a batch of two rows."""
    model, method, (ids, _) = tiny_model(), METHODS[name], prompt_ids(90, 90)
    state = method.compress_state(model, prefill(model, ids, needs=method.needs())).unrecorded()
    assert held(state) == state.kv_bytes == state.kv_peak_bytes([])
    assert name.startswith("ragged") == any(isinstance(each, RaggedLayer) for each in state.layers)
    for tokens in (1, 150):  # with the second, each layer makes room three times
        reads = [question, *[1] * tokens] if question else [1] * tokens
        expected, after = state.copy().kv_peak_bytes(reads), state  # what was read before is freed
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as allocator:
            after = state.copy()
            for count in reads:
                after = read(model, after, ids[:, :count])[0]
        assert held(after) == expected
        others = after.logits, after.tokens, after.lengths
        assert allocated(allocator) == expected + sum(each.nbytes for each in others)
        assert after.kv_bytes < expected == after.kv_peak_bytes([])
    assert state.kv_bytes == state.counts().sum() * 2 * 8 * 4


@pytest.mark.parametrize("family", ["Gemma 2", "Gemma 4 E2B, E4B", "Falcon-H1", "Nemotron-H", "Inkling"])
@pytest.mark.parametrize("length", [5, 90])
def test_a_window_grows_until_it_is_full(length: int, family: str) -> None:
    """Beside entries that several layers read, wider heads, and recurrent states."""
    model, ids = family_model(family), prompt_ids(length)[0]
    state, reads = prefill(model, ids, needs=Needs()), [1] * (WINDOW + 3)
    expected, after = state.kv_peak_bytes(reads), state.copy()
    for count in reads:
        after = read(model, after, ids[:, :count])[0]
    assert after.kv_peak_bytes([]) == expected


def test_a_batch_of_ragged_states_holds_their_entries_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its states have read different numbers of tokens, one is dense. Rows that are taken hold their own entries."""
    monkeypatch.setattr(batches, "CALL", 0)
    model, states = tiny_model(), list[State]()
    for name, length in zip(METHODS, (20, 70, 90, 90), strict=True):
        prefilled = prefill(model, prompt_ids(length)[0], needs=METHODS[name].needs())
        evicted = METHODS[name].compress_state(model, prefilled).unrecorded()
        states.append(read(model, evicted, prompt_ids(length % 7)[0])[0] if length % 7 else evicted)
    batch = join(states)
    rows = take_rows(read(model, batch.copy(), prompt_ids(3, 3, 3, 3)[0])[0], [3, 1])
    assert all(isinstance(layer, RaggedLayer) for state in (batch, rows) for layer in state.layers)
    entries = sum(int(state.counts().sum()) for state in states)
    assert held(batch) == batch.kv_bytes == entries * 2 * 8 * 4
    entries = sum(int(states[row].counts().sum()) + 3 * states[row].counts().numel() for row in (3, 1))
    assert held(rows) == rows.kv_bytes == entries * 2 * 8 * 4
