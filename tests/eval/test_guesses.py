"""Guesses change how fast an answer is written, never what it says."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.eval import guesses as module
from keepsight.eval.answers import Limits, answer_full
from keepsight.eval.guesses import Guesses, Writing, write
from keepsight.runtime.generate import decode, stop_after
from keepsight.runtime.methods import AdaKV, PyramidKV, SnapKV, StreamingLLM
from keepsight.runtime.state import State
from keepsight.runtime.together import Rows
from tests.close import assert_close
from tests.runtime.scoring import score_answer
from tests.tiny import FAMILIES, prompt_ids, tiny_model

MOST = 16
END = [2, *range(100, 128)]
METHODS = [SnapKV(200), SnapKV(12, window=4), AdaKV(24, window=4), PyramidKV(24, window=4), StreamingLLM(8)]
TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=4)


def test_the_longer_the_match_the_longer_the_guess() -> None:
    guesses = Guesses()
    guesses.learn([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14])
    assert guesses.after([4], 99) == [5]
    assert guesses.after([0, 4], 99) == [5]
    assert guesses.after([3, 4], 99) == [5, 6]
    assert guesses.after([2, 3, 4], 99) == [5, 6, 7, 8]
    assert guesses.after([1, 2, 3, 4], 99) == [5, 6, 7, 8, 9, 10, 11, 12]
    assert guesses.after([0, 1, 2, 3, 4], 99) == [5, 6, 7, 8, 9, 10, 11, 12]
    assert guesses.after([1, 2, 3, 4], 3) == [5, 6, 7]
    assert guesses.after([10, 11, 12], 99) == [13, 14]


def test_nothing_is_guessed_where_nothing_is_known() -> None:
    guesses = Guesses()
    assert guesses.after([1], 9) == []
    guesses.learn([1, 2])
    assert guesses.after([2], 9) == guesses.after([3], 9) == guesses.after([1], 0) == guesses.after([], 9) == []


def test_what_is_near_counts_before_what_is_wider_where_both_match_equally() -> None:
    wider = Guesses()
    wider.learn([1, 2, 3, 4, 5])
    guesses = Guesses(wider)
    guesses.learn([0, 3, 7])
    assert guesses.after([3], 9) == [7]
    assert guesses.after([2, 3], 9) == [4, 5]
    guesses.learn([8, 9])
    assert wider.after([8], 9) == []
    assert Guesses(guesses).after([2, 3], 9) == [4, 5]


def test_the_oldest_places_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PLACES", 9)
    guesses = Guesses()
    guesses.learn([1, 2, 3])
    assert guesses.after([1, 2], 9) == [3]
    guesses.learn([1, 2])  # known again
    guesses.learn([4, 5, 6, 7])
    assert guesses.after([1], 9) == [2]
    assert guesses.after([4, 5, 6], 9) == [7]
    guesses.learn([8, 9, 10, 11])
    assert guesses.after([1], 9) == guesses.after([2], 9) == []
    assert guesses.after([10], 9) == [11]


def test_what_was_learned_last_counts() -> None:
    guesses = Guesses()
    guesses.learn([1, 2, 3])
    guesses.learn([1, 2, 4])
    assert guesses.after([1, 2], 1) == [4]
    assert guesses.after([2], 1) == [4]


def test_a_text_that_grows_is_followed_to_its_end() -> None:
    guesses, text = Guesses(), [7, 8]
    guesses.learn(text)
    text += [9, 7, 8]
    guesses.learn(text, 2)
    assert guesses.after([0, 7, 8], 9) == [9, 7]
    assert guesses.after([9], 9) == [7]


@given(TEXTS, st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(0, 9))
def test_a_guess_stands_in_a_text_after_the_longest_match(texts: list[list[int]], answer: list[int], most: int) -> None:
    guesses = Guesses()
    for text in texts:
        guesses.learn(text)
    found = guesses.after(answer, most)
    for length in range(min(4, len(answer)), 0, -1):
        follows = [
            text[place : place + min(2 ** (length - 1), most)]
            for text in texts
            for place in range(length, len(text))
            if text[place - length : place] == answer[-length:]
        ]
        if follows:
            assert found == follows[-1]
            return
    assert found == []


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def states(model: PreTrainedModel) -> list[State]:
    return [method.start(model, prompt_ids(90)[0]) for method in METHODS]


def greedy(model: PreTrainedModel, state: State, most: int, end_tokens: Sequence[int]) -> list[int]:
    return decode(model, state.copy(), stop_after(most, list(end_tokens)), pad_token=0).ids[0].tolist()


def begin(model: PreTrainedModel, states: list[State]) -> tuple[Rows, list[Writing]]:
    firsts = [state.logits.argmax(dim=-1).tolist() for state in states]
    return Rows(model, states, MOST), [Writing(row, first) for row, first in enumerate(firsts)]


class Scripted(Guesses):
    """Guesses what a script says comes after so many tokens of the answer."""

    def __init__(self, script: list[int]) -> None:
        super().__init__()
        self.script = script

    def after(self, answer: Sequence[int], most: int) -> list[int]:
        return self.script[len(answer) : len(answer) + most]


@pytest.mark.parametrize("end_tokens", [END, [2]])
@pytest.mark.parametrize("most", [1, 2, 3, MOST])
def test_answers_are_greedy_whatever_is_guessed(
    model: PreTrainedModel, states: list[State], most: int, end_tokens: list[int]
) -> None:
    expected = [greedy(model, state, most, end_tokens) for state in states]
    longest = [greedy(model, state, MOST + 9, []) for state in states]
    scripts = [*longest, [5] * 30, [2] * 30, []]
    scripts += [[*longest[0][:4], 99, *longest[0][5:]], [*longest[1][:3], 2, *longest[1][3:]], longest[2][1:]]
    for script in scripts:
        rows, writings = begin(model, states)
        write(rows, writings, Scripted(script), most, end_tokens)
        assert [each.ids for each in writings] == expected, script
    if most == MOST:
        assert len({len(each) for each in expected}) > (1 if end_tokens == END else 0)


@pytest.mark.parametrize("texts", [0, 1, 5])
def test_learned_texts_change_no_answer(model: PreTrainedModel, states: list[State], texts: int) -> None:
    expected = [greedy(model, state, MOST, END) for state in states]
    guesses = Guesses()
    for state in states[:texts]:
        guesses.learn(greedy(model, state, MOST, END))
    rows, writings = begin(model, states)
    write(rows, writings, guesses, MOST, END)
    assert [each.ids for each in writings] == expected


def test_answers_that_are_known_or_ended_go_on_from_there(model: PreTrainedModel, states: list[State]) -> None:
    first, second = states[:2]
    rows, (ended, writing, full) = begin(model, [first, second, first])
    ended.ids, full.ids = [5, END[0]], list(range(3, 3 + MOST))
    for _ in range(2):
        write(rows, [ended, writing, full], Guesses(), MOST, END)
        assert ended.ids == [5, END[0]] and full.ids == list(range(3, 3 + MOST))
        assert writing.ids == greedy(model, second, MOST, END)


def test_how_likely_the_full_caches_answer_is_does_not_depend_on_guesses(
    model: PreTrainedModel, states: list[State]
) -> None:
    """To the bit: an evaluation that was stopped has learned other texts when it goes on."""
    limits, empty = Limits(MOST, [], 1), torch.zeros(1, 0, dtype=torch.long)
    for state in states:
        script = greedy(model, state, MOST, [])
        changed = [*script[:7], script[7] ^ 1, *script[8:]]
        found = [
            answer_full(model, state, empty, limits, Scripted(each))[1] for each in (changed, script, [], [5] * 30)
        ]
        nll, hits = score_answer(model, state.copy(), torch.tensor([script]))
        assert hits.all()
        assert_close(found[0].nll, nll[0])
        assert all(each.ids.tolist() == script and torch.equal(each.nll, found[0].nll) for each in found)


class Counted(Rows):
    """Keeps the token counts of each pass."""

    def __init__(self, model: PreTrainedModel, states: Sequence[State], room: int) -> None:
        super().__init__(model, states, room)
        self.passes: list[list[int]] = []

    def read(self, tokens: Sequence[Tensor]) -> list[Tensor]:
        self.passes.append([len(each) for each in tokens])
        return super().read(tokens)


def passes(model: PreTrainedModel, state: State, script: list[int], end_tokens: list[int]) -> list[list[int]]:
    rows, (_, writings) = Counted(model, [state], MOST), begin(model, [state])
    write(rows, writings, Scripted(script), MOST, end_tokens)
    return rows.passes


def test_right_guesses_save_passes(model: PreTrainedModel, states: list[State]) -> None:
    script = greedy(model, states[0], MOST, [])
    assert passes(model, states[0], [], []) == [[1]] * (MOST - 1)
    assert passes(model, states[0], script, []) == [[MOST - 1]]  # it never reads a last token


def test_nothing_is_read_after_an_end_token(model: PreTrainedModel, states: list[State]) -> None:
    script = greedy(model, states[0], MOST, [])
    end = next(token for token in script if token != script[0])
    assert passes(model, states[0], script, [end]) == [[script.index(end)]]


def test_answers_that_have_ended_are_read_no_more(model: PreTrainedModel, states: list[State]) -> None:
    script = greedy(model, states[0], MOST, [])
    rows, (_, writings) = Counted(model, states[:2], MOST), begin(model, states[:2])
    writings[1].ids = script[:]
    write(rows, writings, Scripted(script), MOST, [])
    assert rows.passes == [[MOST - 1, 0]]
