"""Conversations: the first turn's prompt is compressed once, and each variant goes on from its own answers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from keepsight.eval.sweep import Variant, groups_of, run_samples, sweep
from keepsight.eval.tasks.samples import RenderedSample, Sample, render_turns
from keepsight.models.targets import Target
from keepsight.runtime.generate import decode, stop_after
from keepsight.runtime.methods import AdaKV, KeyNorm, Kivi, SnapKV, StreamingLLM, Truncation
from keepsight.runtime.state import State, prefill, read
from tests.eval.rows import CLOCKS, comparable
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


@pytest.fixture
def turns(target: Target) -> list[RenderedSample]:
    samples = [
        Sample("0", f"turn_{place}", 128, turn, ("fox",), "qa_f1", 12, earlier=TURNS[:place])
        for place, turn in enumerate(TURNS)
    ]
    return render_turns(samples, target.tokenizer)


def decoded(target: Target, model: Any, state: State) -> Tensor:
    return decode(model, state.copy(), stop_after(12, target.end_tokens), pad_token=0).ids


def without_end(target: Target, answer: Tensor) -> Tensor:
    return answer[:, :-1] if int(answer[0, -1]) in target.end_tokens else answer


def test_turns_are_what_the_chat_template_makes_of_the_conversation(
    target: Target, turns: list[RenderedSample]
) -> None:
    told = [
        {"role": "user", "content": TURNS[0]},
        {"role": "assistant", "content": "A fox"},
        {"role": "user", "content": TURNS[1]},
        {"role": "assistant", "content": "It likes to"},
        {"role": "user", "content": TURNS[2]},
    ]
    whole = target.tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
    first, second, third = (target.tokenizer.decode(turn.question_ids) for turn in turns)
    prompt = target.tokenizer.decode(turns[0].prompt_ids)
    assert f"{prompt}A fox{second}It likes to{third}" == whole and not first
    assert all(turn.prompt_ids is turns[0].prompt_ids for turn in turns)


def test_every_variant_goes_on_from_what_it_has_said(target: Target, turns: list[RenderedSample]) -> None:
    rows = run_samples(target, turns, VARIANTS, MANY)
    prompt = turns[0].prompt_ids[None]
    texts = []
    for place, variant in enumerate([None, *VARIANTS]):
        method = variant.method if variant else None
        state = method.start(target.model, prompt) if method else prefill(target.model, prompt)
        model = method.reader(target.model) if method and not state.joins else target.model
        said, before = list[Tensor](), list[str]()
        for turn, made in zip(turns, rows, strict=True):
            question = torch.cat([*said, turn.question_ids[None]], dim=1)
            state, said = read(model, state, question)[0] if question.shape[1] else state, []
            answer = decoded(target, model, state)
            text: Any = target.tokenizer.decode(answer[0], skip_special_tokens=True)
            assert made[place]["answer"] == text, (variant, turn.task)
            assert made[place].get("before", []) == before
            before.append(text)
            said.append(without_end(target, answer))
        texts.append(tuple(before))
    assert len(set(texts)) > 4


def test_later_turns_are_measured_in_the_full_caches_conversation(target: Target, turns: list[RenderedSample]) -> None:
    rows = [made[1] for made in run_samples(target, turns, VARIANTS[:1], MANY)]
    prompt = turns[0].prompt_ids[None]
    state, whole, question = SnapKV(40).start(target.model, prompt), prefill(target.model, prompt), prompt[:, :0]
    for turn, row in zip(turns, rows, strict=True):
        question = torch.cat([question, turn.question_ids[None]], dim=1)
        if question.shape[1]:
            state, whole = (read(target.model, each, question)[0] for each in (state, whole))
        answer = decoded(target, target.model, whole)
        (nll, _), (base, _) = (score_answer(target.model, each.copy(), answer) for each in (state, whole))
        assert row["excess_nll"] == pytest.approx((nll - base).mean().item(), abs=1e-4)
        question = without_end(target, answer)


def test_small_batches_and_blocks_change_nothing(
    target: Target, turns: list[RenderedSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_samples(target, turns[:2], VARIANTS[:4], MANY)
    monkeypatch.setattr("keepsight.eval.answers._TOKENS_AT_ONCE", 5)
    small = run_samples(target, turns[:2], VARIANTS[:4], 1)
    assert [[row | CLOCKS for row in rows] for rows in small] == [comparable(rows) for rows in whole]


def test_a_conversation_is_one_group_of_the_sweep(target: Target, turns: list[RenderedSample]) -> None:
    other = [replace(turn, id="1") for turn in turns]
    assert groups_of([*turns, *other], "seen") == [turns, other]
    made = list(sweep(target, turns[:2], VARIANTS[:1], set(), MANY))
    assert [row["task"] for row, _ in made] == ["turn_0", "turn_1"]
    (again,) = sweep(target, turns[:2], VARIANTS[:1], {turns[0].key}, MANY)
    assert [(row["answer"], row["before"]) for row in again] == [(row["answer"], row["before"]) for row in made[1]]
