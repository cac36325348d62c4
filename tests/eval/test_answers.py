"""Answers that start from a guess are those of plain greedy decoding, whatever is guessed and whatever was evicted."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.eval.answers import Limits, answer_all, answer_alone, answer_full, default_batch_tokens
from keepsight.runtime.generate import decode, generate, stop_after
from keepsight.runtime.methods import H2O, TOVA, AdaKV, PyramidKV, SnapKV, StreamingLLM, Truncation
from keepsight.runtime.state import State, prefill, read
from tests.close import assert_close
from tests.runtime.scoring import score_answer
from tests.tiny import FAMILY_PARAMS, prompt_ids, tiny_model

END = [2, *range(100, 128)]
"""So many that answers differ in length."""
METHODS = [
    SnapKV(200),
    SnapKV(40),
    AdaKV(24, window=4),
    AdaKV(9, window=1),
    PyramidKV(24, window=4),
    Truncation(7),
    TOVA(5),
]
NOTHING = torch.empty(1, 0, dtype=torch.long)
MANY = 100_000


@pytest.fixture(scope="module", params=FAMILY_PARAMS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def states(model: PreTrainedModel) -> list[State]:
    ids, _ = prompt_ids(90)
    return [method.start(model, ids) for method in METHODS]


def plain(model: PreTrainedModel, state: State, limits: Limits, question: Tensor = NOTHING) -> Tensor:
    """[T], by greedy decoding of one state alone."""
    state = read(model, state.copy(), question)[0] if question.shape[1] else state.copy()
    return decode(model, state, stop_after(limits.max_new_tokens, limits.end_tokens), pad_token=0).ids[0]


def guesses(model: PreTrainedModel, states: list[State], limits: Limits) -> dict[str, Tensor]:
    """Answers [1, T] that end as an answer may: at an end token, or when they are long enough."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(3, 100, (1, limits.max_new_tokens), generator=generator)
    own = {f"of state {index}": plain(model, state, limits)[None] for index, state in enumerate(states)}
    cut = torch.cat([drawn[:, : (limits.max_new_tokens - 1) // 2], torch.tensor([[limits.end_tokens[0]]])], dim=1)
    return own | {
        "of nobody": drawn,
        "of nobody, ending": cut,
        "an end token alone": torch.tensor([[limits.end_tokens[-1]]]),
    }


@pytest.mark.parametrize(("most", "end_tokens"), [(1, END), (16, END), (16, [2])])
def test_any_guess_gives_the_greedy_answer_and_its_likelihood(
    model: PreTrainedModel, states: list[State], most: int, end_tokens: list[int]
) -> None:
    limits = Limits(most, end_tokens, MANY)
    expected = [plain(model, state, limits).tolist() for state in states]
    if most == 16:
        assert len({len(each) for each in expected}) > (2 if end_tokens == END else 0)
        assert len({tuple(each) for each in expected}) > 4
    for name, guess in guesses(model, states, limits).items():
        answered = answer_all(model, states, NOTHING, guess, limits)
        assert [each.ids.tolist() for each in answered] == expected, name
        for state, each in zip(states, answered, strict=True):
            nll, hits = score_answer(model, state.copy(), guess)
            assert_close(each.nll, nll[0])
            assert each.hits.tolist() == hits[0].tolist()
            assert (each.tokens_per_second is None) == (each.rows == 0)


def test_a_question_is_read_first(model: PreTrainedModel, states: list[State]) -> None:
    question, limits = prompt_ids(7, seed=3)[0], Limits(12, END, MANY)
    before = [state.length for state in states]
    answer, full = answer_full(model, states[0], question, limits)
    assert answer[0].tolist() == full.ids.tolist() == plain(model, states[0], limits, question).tolist()
    assert full.hits.all() and full.rows == 1
    assert_close(full.nll, score_answer(model, read(model, states[0].copy(), question)[0], answer)[0][0])
    answered = answer_all(model, states, question, answer, limits)
    for state, each in zip(states, answered, strict=True):
        assert each.ids.tolist() == plain(model, state, limits, question).tolist()
        alone = read(model, state.copy(), question)[0]
        assert_close(each.nll, score_answer(model, alone, answer)[0][0])
    assert len({tuple(each.ids.tolist()) for each in answered}) > 4
    assert [state.length for state in states] == before


def test_small_batches_and_blocks_give_the_same(
    model: PreTrainedModel, states: list[State], monkeypatch: pytest.MonkeyPatch
) -> None:
    guess = prompt_ids(16, seed=4)[0]
    expected = answer_all(model, states, NOTHING, guess, Limits(16, END, MANY))
    for batch_tokens, block in ((1, 64), (60, 1), (150, 3), (MANY, 15)):
        monkeypatch.setattr("keepsight.eval.answers._TOKENS_AT_ONCE", block)
        small = answer_all(model, states, NOTHING, guess, Limits(16, END, batch_tokens))
        assert [each.ids.tolist() for each in small] == [each.ids.tolist() for each in expected]
        for each, other in zip(small, expected, strict=True):
            assert_close(each.nll, other.nll)


def test_a_padded_state_and_one_of_other_tokens_answer_together(model: PreTrainedModel) -> None:
    """Rows whose prompts differ, one of them padded on the left: nothing of one reaches another."""
    ids, mask = prompt_ids(60, 45)
    alone = [prefill(model, ids[:1]), prefill(model, ids[1:, 15:])]
    padded = prefill(model, ids[1:], mask[1:])
    assert padded.tokens_mask is not None
    limits = Limits(16, END, MANY)
    answer, _ = answer_full(model, alone[0], NOTHING, limits)
    answered = answer_all(model, [alone[0], padded], NOTHING, answer, limits)
    assert [each.ids.tolist() for each in answered] == [plain(model, each, limits).tolist() for each in alone]


EVICTING: list[Any] = [
    SnapKV(40, window=8, every=4),
    AdaKV(24, window=4, every=3),
    H2O(20, window=8, every=1),
    StreamingLLM(40, every=30),
]


@pytest.mark.parametrize("most", [1, 15])
@pytest.mark.parametrize("method", EVICTING, ids=lambda method: f"{type(method).__name__} {method.budget}")
def test_eviction_while_decoding(model: PreTrainedModel, method: Any, most: int) -> None:
    ids, _ = prompt_ids(90)
    limits, state = Limits(most, [2], MANY), method.start(model, ids)
    guess = prompt_ids(most, seed=5)[0]
    answered = answer_alone((model, model), state, NOTHING, guess, limits, method.periodic_eviction(model))
    alone = generate(model, ids, method, max_new_tokens=most, do_sample=False, eos_token_id=2)
    assert answered.ids.tolist() == alone[0].tolist()
    logits, step, since = [state.logits], state.copy(), 0
    for token in guess[0, :-1]:
        if since == method.every:
            step, since = method.compress_state(model, step), 0
        step, _ = read(model, step, token.view(1, 1))
        logits.append(step.logits)
        since += 1
    nll = -torch.cat(logits).log_softmax(-1).gather(1, guess.T)[:, 0]
    assert_close(answered.nll, nll)
    assert answered.hits.tolist() == (torch.cat(logits).argmax(-1) == guess[0]).tolist()
    assert state.length <= max(method.budget, 90)


def test_the_default_fills_a_quarter_of_free_memory(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 4 * 1000 * (2 * 3 * 2 * 8 * 4)  # an entry is keys and values of 3 layers, 2 KV heads of 8 floats

    monkeypatch.setattr("keepsight.eval.answers.psutil.virtual_memory", Memory)
    assert default_batch_tokens(model) == 1000
    Memory.available = 0
    assert default_batch_tokens(model) == 1
