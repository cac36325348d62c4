"""Several states read in one pass say what each of them says when it is read alone."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.runtime.cache import cache_bytes
from keepsight.runtime.method import FullCache
from keepsight.runtime.methods import AdaKV, PyramidKV, SnapKV, StreamingLLM
from keepsight.runtime.prefill import prefill, read
from keepsight.runtime.state import State
from keepsight.runtime.together import apart, forget_last, read_together
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
    return [torch.randint(3, 128, (1, count), generator=generator) for count in counts]


@pytest.mark.parametrize("counts", [[1] * 8, [5] * 8, [1, 4, 2, 7, 1, 3, 9, 2], [70, 1, 80, 1, 64, 65, 1, 2]])
def test_each_reads_as_it_does_alone(model: PreTrainedModel, counts: list[int]) -> None:
    states = states_of(model)
    together = [apart(state) for state in states]
    read_so_far: list[list[Tensor]] = [[] for _ in states]
    for tokens in (drawn(counts), drawn(counts[::-1], seed=1)):
        together, logits = read_together(model, together, tokens)
        parts = logits.split([each.shape[1] for each in tokens])
        for state, after, part, new, before in zip(states, together, parts, tokens, read_so_far, strict=True):
            before.append(new)
            expected, alone = read(model, state.copy(), torch.cat(before, dim=1))
            torch.testing.assert_close(part, alone[0, -len(part) :], atol=2e-4, rtol=1e-4)
            assert torch.equal(after.logits, part[-1:])
            assert after.tokens.tolist() == expected.tokens.tolist()
            assert after.lengths.tolist() == expected.lengths.tolist()
            assert after.held().tolist() == expected.held().tolist()


def test_bfloat16() -> None:
    model = tiny_model(dtype=torch.bfloat16).to(torch.bfloat16)
    states, tokens = states_of(model), drawn([1, 4, 2, 7, 1, 3, 9, 2])
    _, logits = read_together(model, [apart(state) for state in states], tokens)
    assert logits.dtype == torch.float32
    for state, new, part in zip(states, tokens, logits.split([each.shape[1] for each in tokens]), strict=True):
        torch.testing.assert_close(part, read(model, state.copy(), new)[1][0], atol=0.1, rtol=0.05)


@pytest.mark.parametrize("rounds", [1, 3])
def test_what_was_forgotten_leaves_no_trace(model: PreTrainedModel, rounds: int) -> None:
    states = states_of(model)
    together, counts = [apart(state) for state in states], [0, 1, 2, 3, 4, 5, 6, 7]
    for seed in range(rounds):
        wrong, _ = read_together(model, together, drawn([count + 1 for count in counts], seed))
        together = [forget_last(state, count + 1) for state, count in zip(wrong, counts, strict=True)]
    tokens = drawn([3] * 8, seed=9)
    together, logits = read_together(model, together, tokens)
    for state, after, new, part in zip(states, together, tokens, logits.split(3), strict=True):
        expected, alone = read(model, state.copy(), new)
        torch.testing.assert_close(part, alone[0], atol=2e-4, rtol=1e-4)
        assert after.tokens.tolist() == expected.tokens.tolist()
        assert after.lengths.tolist() == expected.lengths.tolist()
        assert after.held().tolist() == expected.held().tolist()


def test_nothing_is_written_to_what_others_hold(model: PreTrainedModel) -> None:
    """Two states made of one, and a copy of one of them, each read and forget on their own."""
    whole = FullCache().start(model, prompt_ids(40)[0])
    before = cache_bytes(whole.cache)
    (first, second), _ = read_together(model, [apart(whole), apart(whole)], drawn([6, 2]))
    copied = first.copy()
    expected = read(model, first.copy(), drawn([2])[0])[1][0]
    (first, second), _ = read_together(model, [forget_last(first, 4), second], drawn([9, 5], seed=1))
    torch.testing.assert_close(read(model, copied, drawn([2])[0])[1][0], expected)
    assert cache_bytes(whole.cache) == before
    assert [first.length, second.length, whole.length] == [40 + 2 + 9, 40 + 2 + 5, 40]


def test_to_forget_nothing_changes_nothing(model: PreTrainedModel) -> None:
    state = apart(FullCache().start(model, prompt_ids(20)[0]))
    assert forget_last(state, 0) is state
