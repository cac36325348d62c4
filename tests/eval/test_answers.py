"""Answers that start from a guess are those of plain greedy decoding, whatever is guessed and whatever was evicted."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.eval.answers import Answered, Limits, answer_all, answer_alone, answer_full, default_batch_tokens
from keepsight.runtime.generate import decode, generate, stop_after
from keepsight.runtime.methods import H2O, TOVA, AdaKV, PyramidKV, SnapKV, StreamingLLM, Truncation
from keepsight.runtime.state import State, prefill, read
from tests.close import assert_close
from tests.runtime.scoring import score_answer
from tests.tiny import FAMILY_PARAMS, prompt_ids, tiny_model

END_TOKENS = [2, *range(100, 128)]
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
NO_QUESTION = torch.empty(1, 0, dtype=torch.long)
MANY = 100_000


@pytest.fixture(scope="module", params=FAMILY_PARAMS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def states(model: PreTrainedModel) -> list[State]:
    ids, _ = prompt_ids(90)
    return [method.start(model, ids) for method in METHODS]


def greedy_ids(model: PreTrainedModel, state: State, limits: Limits, question: Tensor = NO_QUESTION) -> list[int]:
    """The answer by greedy decoding of one state alone."""
    state = after_question(model, state, question)
    return decode(model, state, stop_after(limits.max_new_tokens, limits.end_tokens), pad_token=0).ids[0].tolist()


def after_question(model: PreTrainedModel, state: State, question: Tensor) -> State:
    """A copy of a state that has read the question, if there is one."""
    if question.shape[1] == 0:
        return state.copy()
    with_question, _ = read(model, state.copy(), question)
    return with_question


def nll_of(model: PreTrainedModel, state: State, answer: Tensor) -> Tensor:
    """[T] float32, how unlikely an answer [1, T] is after a state."""
    nll, _ = score_answer(model, state, answer)
    return nll[0]


def ids_of(answered: Sequence[Answered]) -> list[list[int]]:
    return [answer.ids.tolist() for answer in answered]


def distinct(answers: list[list[int]]) -> int:
    return len({tuple(ids) for ids in answers})


def guesses(model: PreTrainedModel, states: list[State], limits: Limits) -> dict[str, Tensor]:
    """Answers [1, T] that end as an answer may: at an end token, or when they are long enough."""
    by_name: dict[str, Tensor] = {}
    for index, state in enumerate(states):
        by_name[f"of state {index}"] = torch.tensor([greedy_ids(model, state, limits)])
    generator = torch.Generator().manual_seed(1)
    random = torch.randint(3, 100, (1, limits.max_new_tokens), generator=generator)
    half = random[:, : (limits.max_new_tokens - 1) // 2]
    by_name["random"] = random
    by_name["random, ending early"] = torch.cat([half, torch.tensor([[limits.end_tokens[0]]])], dim=1)
    by_name["an end token alone"] = torch.tensor([[limits.end_tokens[-1]]])
    return by_name


@pytest.mark.parametrize(("max_new_tokens", "end_tokens"), [(1, END_TOKENS), (16, END_TOKENS), (16, [2])])
def test_any_guess_gives_the_greedy_answer_and_its_likelihood(
    model: PreTrainedModel, states: list[State], max_new_tokens: int, end_tokens: list[int]
) -> None:
    limits = Limits(max_new_tokens, end_tokens, MANY)
    expected = [greedy_ids(model, state, limits) for state in states]
    if max_new_tokens == 16:
        assert distinct(expected) > 4
        if end_tokens == END_TOKENS:
            assert len({len(ids) for ids in expected}) > 2
    for name, guess in guesses(model, states, limits).items():
        answered = answer_all(model, states, NO_QUESTION, guess, limits)
        assert ids_of(answered) == expected, name
        for state, answer in zip(states, answered, strict=True):
            nll, hits = score_answer(model, state.copy(), guess)
            assert_close(answer.nll, nll[0])
            assert answer.hits.tolist() == hits[0].tolist()
            assert (answer.tokens_per_second is None) == (answer.rows == 0)


def test_a_question_is_read_first(model: PreTrainedModel, states: list[State]) -> None:
    question, _ = prompt_ids(7, seed=3)
    limits = Limits(12, END_TOKENS, MANY)
    lengths = [state.length for state in states]
    full_ids, full = answer_full(model, states[0], question, limits)
    assert full.ids.tolist() == full_ids[0].tolist()
    assert full.hits.all()
    assert full.rows == 1
    answered = answer_all(model, states, question, full_ids, limits)
    for state, answer in ((states[0], full), *zip(states, answered, strict=True)):
        assert answer.ids.tolist() == greedy_ids(model, state, limits, question)
        assert_close(answer.nll, nll_of(model, after_question(model, state, question), full_ids))
    assert distinct(ids_of(answered)) > 4
    assert [state.length for state in states] == lengths


def test_small_batches_and_blocks_give_the_same(
    model: PreTrainedModel, states: list[State], monkeypatch: pytest.MonkeyPatch
) -> None:
    guess, _ = prompt_ids(16, seed=4)
    at_once = answer_all(model, states, NO_QUESTION, guess, Limits(16, END_TOKENS, MANY))
    for batch_tokens, block in ((1, 64), (60, 1), (150, 3), (MANY, 15)):
        monkeypatch.setattr("keepsight.eval.answers._TOKENS_AT_ONCE", block)
        answered = answer_all(model, states, NO_QUESTION, guess, Limits(16, END_TOKENS, batch_tokens))
        assert ids_of(answered) == ids_of(at_once)
        for answer, expected in zip(answered, at_once, strict=True):
            assert_close(answer.nll, expected.nll)


def test_a_padded_state_and_one_of_other_tokens_answer_together(model: PreTrainedModel) -> None:
    """Rows whose prompts differ, one of them padded on the left: nothing of one reaches another."""
    ids, mask = prompt_ids(60, 45)
    longer = prefill(model, ids[:1])
    unpadded = prefill(model, ids[1:, 15:])
    padded = prefill(model, ids[1:], mask[1:])
    assert padded.tokens_mask is not None
    limits = Limits(16, END_TOKENS, MANY)
    guess, _ = answer_full(model, longer, NO_QUESTION, limits)
    answered = answer_all(model, [longer, padded], NO_QUESTION, guess, limits)
    assert ids_of(answered) == [greedy_ids(model, longer, limits), greedy_ids(model, unpadded, limits)]


EVICTING: list[Any] = [
    SnapKV(40, window=8, every=4),
    AdaKV(24, window=4, every=3),
    H2O(20, window=8, every=1),
    StreamingLLM(40, every=30),
]


@pytest.mark.parametrize("max_new_tokens", [1, 15])
@pytest.mark.parametrize("method", EVICTING, ids=lambda method: f"{type(method).__name__} {method.budget}")
def test_eviction_while_decoding(model: PreTrainedModel, method: Any, max_new_tokens: int) -> None:
    ids, _ = prompt_ids(90)
    guess, _ = prompt_ids(max_new_tokens, seed=5)
    limits = Limits(max_new_tokens, [2], MANY)
    state = method.start(model, ids)
    answered = answer_alone((model, model), state, NO_QUESTION, guess, limits, method.periodic_eviction(model))
    generated = generate(model, ids, method, max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=2)
    assert answered.ids.tolist() == generated[0].tolist()
    logits = logits_with_eviction(model, method, state, guess)
    nll = -logits.log_softmax(-1).gather(1, guess.T)[:, 0]
    assert_close(answered.nll, nll)
    assert answered.hits.tolist() == (logits.argmax(-1) == guess[0]).tolist()
    assert state.length <= max(method.budget, 90)


def logits_with_eviction(model: PreTrainedModel, method: Any, state: State, answer: Tensor) -> Tensor:
    """[T, V] float32, token by token; the method evicts after every `method.every` tokens."""
    logits = [state.logits]
    state = state.copy()
    for index, token in enumerate(answer[0, :-1]):
        if index > 0 and index % method.every == 0:
            state = method.compress_state(model, state)
        state, _ = read(model, state, token.view(1, 1))
        logits.append(state.logits)
    return torch.cat(logits)


def test_the_default_fills_a_quarter_of_free_memory(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 4 * 1000 * (2 * 3 * 2 * 8 * 4)  # an entry is keys and values of 3 layers, 2 KV heads of 8 floats

    monkeypatch.setattr("keepsight.eval.answers.psutil.virtual_memory", Memory)
    assert default_batch_tokens(model) == 1000
    Memory.available = 0
    assert default_batch_tokens(model) == 1
