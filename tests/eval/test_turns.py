"""Conversations: every turn's prompt is compressed, and each variant goes on from its own answers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keepsight.errors import UserError
from keepsight.eval.record import RowStore
from keepsight.eval.sweep import FULL_CACHE, Refused, Variant, groups_of, run_samples
from keepsight.eval.tasks.samples import RenderedSample, Sample, render_turns
from keepsight.models.targets import Target
from keepsight.runtime.generate import decode, stop_after
from keepsight.runtime.methods import AdaKV, KeyNorm, Kivi, SnapKV, StreamingLLM, Truncation
from keepsight.runtime.state import State, prefill
from tests.eval.rows import comparable, swept, without_clocks
from tests.runtime.scoring import score_answer

MANY = 100_000
TURNS = ("The quick brown fox jumps over the lazy dog. " * 9 + "Who jumps?", "Why does it jump so high?", "And then?")
VARIANTS = [
    Variant("snapkv", SnapKV(40)),
    Variant("snapkv", SnapKV(9999)),
    Variant("adakv", AdaKV(40)),
    Variant("streamingllm", StreamingLLM(12)),
    Variant("key_norm", KeyNorm(24)),
    Variant("truncation", Truncation(30)),
    Variant("kivi", Kivi(group=8, residual=32)),
]


def conversation(target: Target, *prompts: str) -> list[RenderedSample]:
    """The turns of one conversation."""
    samples = [
        Sample("0", f"turn_{index}", 128, prompt, ("fox",), "qa_f1", 12, earlier=prompts[:index])
        for index, prompt in enumerate(prompts)
    ]
    return render_turns(samples, target.tokenizer)


@pytest.fixture
def turns(target: Target) -> list[RenderedSample]:
    return conversation(target, *TURNS)


def decoded(target: Target, model: Any, state: State) -> Tensor:
    return decode(model, state.copy(), stop_after(12, target.end_tokens), pad_token=0).ids


def without_end(target: Target, answer: Tensor) -> Tensor:
    """[1, T], an answer as the chat template goes on from it."""
    return answer[:, :-1] if int(answer[0, -1]) in target.end_tokens else answer


def test_turns_are_what_the_chat_template_makes_of_the_conversation(
    target: Target, turns: list[RenderedSample]
) -> None:
    messages = [
        {"role": "user", "content": TURNS[0]},
        {"role": "assistant", "content": "A fox"},
        {"role": "user", "content": TURNS[1]},
        {"role": "assistant", "content": "It likes to"},
        {"role": "user", "content": TURNS[2]},
    ]
    expected = target.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = target.tokenizer.decode(turns[0].prompt_ids)
    first, second, third = (target.tokenizer.decode(turn.question_ids) for turn in turns)
    assert not first
    assert f"{prompt}A fox{second}It likes to{third}" == expected
    for turn in turns:
        assert turn.prompt_ids is turns[0].prompt_ids


def test_every_variant_goes_on_from_what_it_has_said_and_evicts_from_it(
    target: Target, turns: list[RenderedSample]
) -> None:
    rows_of_turns = run_samples(target, turns, VARIANTS, MANY)
    conversations: set[tuple[str, ...]] = set()
    for index, variant in enumerate([FULL_CACHE, *VARIANTS]):
        method = variant.method
        prompt = turns[0].prompt_ids[None]
        earlier_answers: list[str] = []
        for turn, rows in zip(turns, rows_of_turns, strict=True):
            prompt = torch.cat([prompt, turn.question_ids[None]], dim=1)
            answer = decoded(target, method.reader(target.model), method.start(target.model, prompt))
            text = str(target.tokenizer.decode(answer[0], skip_special_tokens=True))
            assert rows[index].answer == text, (variant, turn.task)
            assert (rows[index].before or []) == earlier_answers
            earlier_answers.append(text)
            prompt = torch.cat([prompt, without_end(target, answer)], dim=1)
        conversations.add(tuple(earlier_answers))
    assert len(conversations) > 4
    for index, (full, snapkv, *_) in enumerate(rows_of_turns):
        assert snapkv.kept == 40
        assert full.prompt_tokens is not None
        assert full.prompt_tokens > 100 + index


def test_later_turns_are_measured_in_the_full_caches_conversation(target: Target, turns: list[RenderedSample]) -> None:
    rows_of_turns = run_samples(target, turns, VARIANTS[:1], MANY)
    prompt = turns[0].prompt_ids[None]
    for turn, (_, row) in zip(turns, rows_of_turns, strict=True):
        prompt = torch.cat([prompt, turn.question_ids[None]], dim=1)
        full_state = prefill(target.model, prompt)
        evicted_state = SnapKV(40).start(target.model, prompt)
        answer = decoded(target, target.model, full_state)
        full_nll, _ = score_answer(target.model, full_state.copy(), answer)
        evicted_nll, _ = score_answer(target.model, evicted_state.copy(), answer)
        assert row.excess_nll == pytest.approx((evicted_nll - full_nll).mean().item(), abs=1e-4)
        prompt = torch.cat([prompt, without_end(target, answer)], dim=1)


def test_a_short_first_turn_leaves_a_later_one_to_evict_from(target: Target) -> None:
    """As in MT-Bench: of most questions nothing is evicted before the first answer."""
    turns = conversation(target, "Who?", TURNS[0])
    (_, first), (_, second) = run_samples(target, turns, VARIANTS[:1], MANY)
    assert first.kept == len(turns[0].prompt_ids)
    assert first.kept < 40
    assert second.kept == 40
    assert second.prompt_tokens is not None
    assert second.prompt_tokens > 40


def test_a_method_that_refuses_a_later_turn_is_left_out_from_there(target: Target, turns: list[RenderedSample]) -> None:
    class Short(SnapKV):
        def check(self, length: int, context: int) -> None:
            if length > len(turns[0].prompt_ids):
                raise UserError("too long for a method of this test")

    mixed = [VARIANTS[0], Variant("short", Short(40))]
    refusals = Refused()
    rows_of_turns = run_samples(target, turns, mixed, MANY, refused=refusals)
    methods_of_turns = [[row.method for row in rows] for rows in rows_of_turns]
    assert methods_of_turns == [["full", "snapkv", "short"], ["full", "snapkv"], ["full", "snapkv"]]
    reasons = {cell: str(error) for cell, error in refusals.items()}
    assert reasons == {("short", 40): "too long for a method of this test"}
    with pytest.raises(UserError, match="too long for a method of this test"):
        run_samples(target, turns, mixed, MANY)


def test_small_batches_and_blocks_change_nothing(
    target: Target, turns: list[RenderedSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = run_samples(target, turns[:2], VARIANTS[:4], MANY)
    monkeypatch.setattr("keepsight.eval.answers._TOKENS_AT_ONCE", 5)
    in_blocks = run_samples(target, turns[:2], VARIANTS[:4], 1)
    for rows, expected in zip(in_blocks, at_once, strict=True):
        assert without_clocks(rows) == comparable(expected)


def test_a_conversation_is_one_group_of_the_sweep(target: Target, turns: list[RenderedSample], tmp_path: Path) -> None:
    other_turns = [replace(turn, id="1") for turn in turns]
    assert groups_of([*turns, *other_turns], "seen") == [turns, other_turns]
    first_rows, second_rows = swept(target, turns[:2], VARIANTS[:1])
    assert first_rows[0].task == "turn_0"
    assert second_rows[0].task == "turn_1"
    store = RowStore(tmp_path)
    store.add(first_rows)
    (resumed_rows,) = swept(target, turns[:2], VARIANTS[:1], store=store)
    for resumed, row in zip(resumed_rows, second_rows, strict=True):
        assert resumed.answer == row.answer
        assert resumed.before == row.before
