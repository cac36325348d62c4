"""The memory that a state reports, against the storages that its cache holds and what the allocator gave out."""

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
ENTRY_BYTES = 2 * 8 * 4
"""Key and value of 8 channels, float32."""


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors that a cache refers to, but for what was recorded for scoring."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)
    elif hasattr(value, "keys") and hasattr(value, "__dict__"):
        for name, attribute in vars(value).items():
            if name != "recorded":
                yield from tensors_of(attribute)


def stored_bytes(state: State) -> int:
    """Bytes of all storages that a cache refers to, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors_of(state.cache.layers)]
    bytes_by_address = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(bytes_by_address.values())


def allocated_bytes(profiler: Any) -> int:
    """Bytes that were allocated while the profiler ran, less those that were freed."""
    events = profiler.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


def entry_count(state: State) -> int:
    """Entries of all heads of all layers."""
    return int(state.counts().sum())


@pytest.mark.parametrize("question", [0, 7])
@pytest.mark.parametrize("name", METHODS)
def test_bytes_held_and_at_the_peak_are_those_of_the_storages(name: str, question: int) -> None:
    """Also when the room for new entries is used up and made anew; a batch of two rows."""
    model = tiny_model()
    method = METHODS[name]
    ids, _ = prompt_ids(90, 90)
    state = method.compress_state(model, prefill(model, ids, needs=method.needs())).unrecorded()
    assert stored_bytes(state) == state.kv_bytes == state.kv_peak_bytes([])
    has_ragged_layers = any(isinstance(layer, RaggedLayer) for layer in state.layers)
    assert has_ragged_layers == name.startswith("ragged")
    for answer_length in (1, 150):  # with the second, each layer makes room three times
        reads = [1] * answer_length
        if question:
            reads = [question, *reads]
        expected = state.copy().kv_peak_bytes(reads)
        after = state  # frees what the previous round read
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            after = state.copy()
            for count in reads:
                after = read(model, after, ids[:, :count])[0]  # logits are freed at once
        assert stored_bytes(after) == expected
        beside_entries = after.logits.nbytes + after.tokens.nbytes + after.lengths.nbytes
        assert allocated_bytes(profiler) == expected + beside_entries
        assert after.kv_bytes < expected == after.kv_peak_bytes([])
    assert state.kv_bytes == entry_count(state) * ENTRY_BYTES


@pytest.mark.parametrize("family", ["Gemma 2", "Gemma 4 E2B, E4B", "Falcon-H1", "Nemotron-H", "Inkling"])
@pytest.mark.parametrize("length", [5, 90])
def test_a_window_grows_until_it_is_full(length: int, family: str) -> None:
    """Beside entries that several layers read, wider heads, and recurrent states."""
    model = family_model(family)
    ids, _ = prompt_ids(length)
    state = prefill(model, ids, needs=Needs())
    reads = [1] * (WINDOW + 3)
    expected = state.kv_peak_bytes(reads)
    after = state.copy()
    for count in reads:
        after, _ = read(model, after, ids[:, :count])
    assert after.kv_peak_bytes([]) == expected


def test_a_batch_of_ragged_states_holds_their_entries_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its states have read different numbers of tokens, one is dense. Rows that are taken hold their own entries."""
    monkeypatch.setattr(batches, "CALL", 0)
    model = tiny_model()
    states = list[State]()
    for method, prompt_length in zip(METHODS.values(), (20, 70, 90, 90), strict=True):
        prefilled = prefill(model, prompt_ids(prompt_length)[0], needs=method.needs())
        state = method.compress_state(model, prefilled).unrecorded()
        question_length = prompt_length % 7
        if question_length:
            state, _ = read(model, state, prompt_ids(question_length)[0])
        states.append(state)
    batch = join(states)
    answered, _ = read(model, batch.copy(), prompt_ids(3, 3, 3, 3)[0])
    rows = take_rows(answered, [3, 1])
    for layer in (*batch.layers, *rows.layers):
        assert isinstance(layer, RaggedLayer)
    entries = sum(entry_count(state) for state in states)
    assert stored_bytes(batch) == batch.kv_bytes == entries * ENTRY_BYTES
    heads = states[0].counts().numel()
    entries = entry_count(states[3]) + entry_count(states[1]) + 2 * 3 * heads
    assert stored_bytes(rows) == rows.kv_bytes == entries * ENTRY_BYTES
