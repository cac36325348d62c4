"""What all methods that shorten the prompt have in common."""

import pytest
import torch

from keepsight import generate
from keepsight.errors import UserError
from keepsight.runtime.prompt_compression import text
from keepsight.runtime.prompt_compression.r2c import R2C
from keepsight.runtime.prompt_compression.text import LLMLingua2, Truncation
from tests.runtime.prompt_compression.prompts import (
    PROSE,
    small_cascade,
    small_specpc,
    text_ids,
    text_methods,
    tiny_draft,
    wide_model,
)
from tests.tiny import prompt_ids, tiny_model


@pytest.mark.parametrize(
    ("length", "budget", "expected"),
    [(10, 5, [0, 1, 7, 8, 9]), (10, 1, [9]), (10, 0.4, [0, 1, 8, 9]), (3, 5, [0, 1, 2])],
)
def test_truncation_keeps_both_ends(length, budget, expected):
    ids = torch.arange(length)[None] + 3
    (short,) = Truncation(budget).shorten(tiny_model(), ids)
    assert (short - 3).tolist() == expected


def all_methods():
    draft = tiny_draft(vocab_size=512)
    return [Truncation(20), small_specpc(draft=draft), small_specpc(draft=draft, lookahead=4), *text_methods()]


@pytest.mark.parametrize("method", all_methods(), ids=lambda method: type(method).__name__)
def test_answers_follow_the_short_prompt(method):
    """The state is that of the kept tokens as a prompt of their own, and `generate` answers from it."""
    model, ids = wide_model(), text_ids(PROSE)[None]
    (short,) = method.shorten(model, ids)
    assert len(short) <= 20
    if not isinstance(method, LLMLingua2 | R2C):  # whole words, chunks and sentences
        assert len(short) == 20
    if method.window:
        assert torch.equal(short[-method.window :], ids[0, -method.window :])
    state = method.start(model, ids)
    assert state.lengths.tolist() == [len(short)]
    assert torch.equal(state.counts(), torch.full((3, 1, 2), len(short)))
    expected = model.generate(short[None], attention_mask=torch.ones(1, len(short)), max_new_tokens=6, do_sample=False)
    assert torch.equal(generate(model, ids, method, max_new_tokens=6, do_sample=False), expected[:, len(short) :])
    whole = model.generate(ids, custom_generate=method, max_new_tokens=6, do_sample=False)
    assert torch.equal(whole, torch.cat([ids, expected[:, len(short) :]], dim=1))


@pytest.mark.parametrize("method", [small_specpc(window=30, budget=40), small_cascade(prompt_window=30)])
def test_prompts_shorter_than_the_window_are_refused(method):
    """By `check`, before any model runs, and by `start`."""
    with pytest.raises(UserError, match="prompt of 20 tokens is shorter than the window of 30"):
        method.check(20, 256)
    with pytest.raises(UserError, match="prompt of 20 tokens is shorter than the window of 30"):
        method.start(tiny_model(), prompt_ids(31, 20)[0], prompt_ids(31, 20)[1])
    method.check(30, 256)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: small_specpc(window=0), "window 0 must be a whole number of at least 1"),
        (lambda: small_specpc(reduction="mean"), "reduction 'mean' is unknown; choose one of max, sum"),
        (lambda: small_cascade(budget=9), "budget 9 must be above the 9 protected entries"),
        (lambda: small_cascade(prompt_budget=0.5), "prompt_budget 0.5 must be a whole number"),
        (lambda: text.Package("some-encoder"), "model 'some-encoder' must have xlm-roberta-large or"),
        (lambda: small_specpc(4), "SpecPC: budget 4 must be above the window of 4 tokens that are always kept"),
    ],
)
def test_values_out_of_range_are_refused(make, message):
    with pytest.raises(UserError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
