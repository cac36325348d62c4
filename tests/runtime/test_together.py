"""Several states read in one pass say what each of them says when it is read alone."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.runtime import together as module
from keepsight.runtime.layer import LayerEntries
from keepsight.runtime.generate import FullCache
from keepsight.runtime.methods import AdaKV, PyramidKV, SnapKV, StreamingLLM
from keepsight.runtime.state import prefill, read
from keepsight.runtime.shared_pass import SharedPass, StateGroup, _by_token
from keepsight.runtime.attention import Softmax
from keepsight.runtime.state import State
from keepsight.runtime.together import Rows
from tests.close import assert_close
from tests.families import family_model
from tests.tiny import FAMILIES, prompt_ids, tiny_model

METHODS = [
    FullCache(),
    SnapKV(20, window=4),
    SnapKV(12, window=4),
    AdaKV(24, window=4),
    AdaKV(9, window=1),
    PyramidKV(24, window=4),
    StreamingLLM(8),
]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(request.param)


def states_of(model: PreTrainedModel) -> list[State]:
    """States of different forms and lengths; one of them is padded on the left."""
    whole = [method.start(model, prompt_ids(60)[0]) for method in METHODS]
    ids = torch.cat([torch.zeros(1, 5, dtype=torch.long), prompt_ids(30, seed=1)[0]], dim=1)
    return [*whole, prefill(model, ids, ids > 0)]


def drawn(counts: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 128, (count,), generator=generator) for count in counts]


def assert_as_alone(
    model: PreTrainedModel, states: list[State], read_before: list[Tensor], new: list[Tensor], logits: list[Tensor]
) -> None:
    for state, before, each, row in zip(states, read_before, new, logits, strict=True):
        assert row.shape[0] == len(each)
        if len(each):
            _, alone = read(model, state.copy(), torch.cat([before, each])[None])
            assert_close(row, alone[0, -len(each) :])


COUNTS = [[1] * 8, [5] * 8, [1, 4, 2, 7, 1, 3, 9, 2], [70, 1, 80, 1, 64, 65, 1, 2], [0, 0, 3, 0, 0, 1, 0, 0]]


@pytest.mark.parametrize("limit", [4096, 100, 1])
@pytest.mark.parametrize("counts", COUNTS)
def test_each_reads_as_it_does_alone(
    model: PreTrainedModel, counts: list[int], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many states one call of the attention serves."""
    monkeypatch.setattr(module, "_ENTRIES_TOGETHER", limit)
    states = states_of(model)
    rows, before = Rows(model, states, 230), [torch.empty(0, dtype=torch.long)] * 8
    for tokens in (drawn(counts), drawn(counts[::-1], seed=1), drawn(counts, seed=2)):
        assert_as_alone(model, states, before, tokens, rows.read(tokens))
        before = [torch.cat(pair) for pair in zip(before, tokens, strict=True)]


@pytest.mark.parametrize("shape", [{"num_key_value_heads": 1}, {"num_key_value_heads": 4}, {"head_dim": 16}])
def test_heads_of_any_number_and_width(shape: dict[str, Any]) -> None:
    model = tiny_model(**shape)
    states, tokens = states_of(model), drawn([1, 4, 0, 7, 1, 3, 9, 2])
    assert_as_alone(model, states, [torch.empty(0, dtype=torch.long)] * 8, tokens, Rows(model, states, 9).read(tokens))


def test_values_may_be_wider_or_narrower_than_keys() -> None:
    """As those of latent attention are."""
    keys, values = torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 6)
    group = StateGroup([0], [[LayerEntries(keys, values, None)]], 3, [None])
    each = SharedPass(group, [2], [0], [0], 0, 4, torch.device("cpu"))
    new_keys, new_values, query = torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 6), torch.randn(1, 4, 2, 8)
    (entries,) = group.layers
    each.write(entries, (_by_token(new_keys), _by_token(new_values)))
    found = each.attend(entries, _by_token(query), Softmax(0.3))
    everything = torch.cat([keys, new_keys], dim=2), torch.cat([values, new_values], dim=2)
    hidden = torch.ones(2, 9, dtype=torch.bool).triu(8)
    weights = (query @ everything[0].repeat_interleave(2, 1).mT * 0.3).masked_fill(hidden, -torch.inf).softmax(-1)
    assert_close(found, (weights @ everything[1].repeat_interleave(2, 1))[0].transpose(0, 1))


def test_the_entries_are_freed_at_once(model: PreTrainedModel) -> None:
    """Not when the garbage collector comes, which does not know how large they are."""
    rows = Rows(model, states_of(model), 9)
    rows.read(drawn([1, 4, 2, 7, 1, 3, 9, 2]))
    held = [weakref.ref(layer) for group in rows._groups for layer in group.layers]
    gc.disable()
    try:
        del rows
        assert not any(each() is not None for each in held)
    finally:
        gc.enable()


def test_bfloat16() -> None:
    model = tiny_model(dtype=torch.bfloat16).to(torch.bfloat16)
    states, tokens = states_of(model), drawn([1, 4, 2, 7, 1, 3, 9, 2])
    for state, new, row in zip(states, tokens, Rows(model, states, 9).read(tokens), strict=True):
        assert row.dtype == torch.float32
        assert_close(row, read(model, state.copy(), new[None])[1][0], torch.bfloat16)


@pytest.mark.parametrize("rounds", [1, 3])
def test_what_was_forgotten_leaves_no_trace(model: PreTrainedModel, rounds: int) -> None:
    states, counts = states_of(model), [0, 1, 2, 3, 4, 5, 6, 7]
    rows = Rows(model, states, 8)
    for seed in range(rounds):
        rows.read(drawn([count + 1 for count in counts], seed))
        for row, count in enumerate(counts):
            rows.forget(row, count + 1)
    tokens = drawn([3] * 8, seed=9)
    assert_as_alone(model, states, [torch.empty(0, dtype=torch.long)] * 8, tokens, rows.read(tokens))


def test_part_of_what_was_read_is_forgotten(model: PreTrainedModel) -> None:
    states = states_of(model)
    rows, tokens = Rows(model, states, 8), drawn([5] * 8)
    rows.read(tokens)
    kept = [each[: row % 4 + 2] for row, each in enumerate(tokens)]
    for row, each in enumerate(kept):
        rows.forget(row, 5 - len(each))
    more = drawn([3, 1, 2, 3, 1, 2, 3, 1], seed=1)
    assert_as_alone(model, states, kept, more, rows.read(more))


@pytest.mark.parametrize("family", ["DeepSeek-V3", "Qwen3-Next"])
def test_states_that_are_read_alone_forget_more_than_the_latest_pass(family: str) -> None:
    model = family_model(family)
    states = [prefill(model, prompt_ids(length)[0]) for length in (40, 30)]
    rows, tokens = Rows(model, states, 12), drawn([7, 7])
    for start, stop in ((0, 3), (3, 4), (4, 7)):
        rows.read([each[start:stop] for each in tokens])
    rows.forget(0, 5)
    rows.forget(0, 1)
    rows.forget(1, 2)
    more = drawn([3, 2], seed=1)
    assert_as_alone(model, states, [tokens[0][:1], tokens[1][:5]], more, rows.read(more))


def test_no_more_is_read_than_there_is_room_for(model: PreTrainedModel) -> None:
    rows = Rows(model, states_of(model)[:2], 4)
    rows.read(drawn([4, 3]))
    with pytest.raises(AssertionError):
        rows.read(drawn([0, 2]))


def test_the_states_stay_as_they_are(model: PreTrainedModel) -> None:
    states = states_of(model)
    before = [[each.clone() for layer in state.entries() for each in layer[:2]] for state in states]
    Rows(model, [*states, states[0]], 6).read(drawn([6, 2] * 4 + [1]))
    for state, expected in zip(states, before, strict=True):
        assert all(map(torch.equal, [each for layer in state.entries() for each in layer[:2]], expected))


def groups(lengths: list[int]) -> list[list[int]]:
    states: list[Any] = [SimpleNamespace(length=length) for length in lengths]
    return list(module._groups(states))


def test_states_of_about_one_length_are_attended_to_together() -> None:
    assert groups([64, 96, 90, 65]) == [[0, 3, 2, 1]]
    assert groups([64, 128, 97, 65]) == [[0, 3], [2, 1]]
    assert groups([1500, 1500, 1500]) == [[0, 1], [2]]
    assert groups([9000, 9000]) == [[0], [1]]
    assert groups([5]) == [[0]]
