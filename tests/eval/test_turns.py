"""Conversations: every turn's prompt is compressed, and each variant goes on from its own answers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keepsight.errors import UserError
from keepsight.eval.record import RowStore
from keepsight.eval.sweep import Refused, Variant, groups_of, run_samples
from keepsight.eval.tasks.samples import RenderedSample, Sample, render_turns
from keepsight.models.targets import Target
from keepsight.runtime.generate import FullCache, decode, stop_after
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


def test_every_variant_goes_on_from_what_it_has_said_and_evicts_from_it(
    target: Target, turns: list[RenderedSample]
) -> None:
    rows = run_samples(target, turns, VARIANTS, MANY)
    texts = []
    for place, variant in enumerate([None, *VARIANTS]):
        method, whole, before = variant.method if variant else FullCache(), turns[0].prompt_ids[None], list[str]()
        for turn, made in zip(turns, rows, strict=True):
            whole = torch.cat([whole, turn.question_ids[None]], dim=1)
            answer = decoded(target, method.reader(target.model), method.start(target.model, whole))
            text: Any = target.tokenizer.decode(answer[0], skip_special_tokens=True)
            assert made[place].answer == text, (variant, turn.task)
            assert (made[place].before or []) == before
            before.append(text)
            whole = torch.cat([whole, without_end(target, answer)], dim=1)
        texts.append(tuple(before))
    assert len(set(texts)) > 4
    assert [made[1].kept for made in rows] == [40, 40, 40]
    for index, rows_of_turn in enumerate(rows):
        prompt_tokens = rows_of_turn[0].prompt_tokens
        assert prompt_tokens is not None and prompt_tokens > 100 + index


def test_later_turns_are_measured_in_the_full_caches_conversation(target: Target, turns: list[RenderedSample]) -> None:
    rows = [made[1] for made in run_samples(target, turns, VARIANTS[:1], MANY)]
    prompt = turns[0].prompt_ids[None]
    for turn, row in zip(turns, rows, strict=True):
        prompt = torch.cat([prompt, turn.question_ids[None]], dim=1)
        whole, state = prefill(target.model, prompt), SnapKV(40).start(target.model, prompt)
        answer = decoded(target, target.model, whole)
        (nll, _), (base, _) = (score_answer(target.model, each.copy(), answer) for each in (state, whole))
        assert row.excess_nll == pytest.approx((nll - base).mean().item(), abs=1e-4)
        prompt = torch.cat([prompt, without_end(target, answer)], dim=1)


def test_a_short_first_turn_leaves_a_later_one_to_evict_from(target: Target) -> None:
    """As in MT-Bench: of most questions nothing is evicted before the first answer."""
    samples = [
        Sample("0", f"turn_{place}", 128, turn, ("fox",), "qa_f1", 12, earlier=("Who?",)[:place])
        for place, turn in enumerate(("Who?", TURNS[0]))
    ]
    turns = render_turns(samples, target.tokenizer)
    first, second = (made[1] for made in run_samples(target, turns, VARIANTS[:1], MANY))
    assert second.prompt_tokens is not None
    assert first.kept == len(turns[0].prompt_ids) < 40 == second.kept < second.prompt_tokens


def test_a_method_that_refuses_a_later_turn_is_left_out_from_there(target: Target, turns: list[RenderedSample]) -> None:
    class Short(SnapKV):
        def check(self, length: int, context: int) -> None:
            if length > len(turns[0].prompt_ids):
                raise UserError("too long for a method of this test")

    refused, mixed = Refused(), [VARIANTS[0], Variant("short", Short(40))]
    made = run_samples(target, turns, mixed, MANY, refused=refused)
    assert [[row.method for row in rows] for rows in made] == [
        ["full", "snapkv", "short"],
        *[["full", "snapkv"]] * 2,
    ]
    assert {cell: str(error) for cell, error in refused.items()} == {
        ("short", 40): "too long for a method of this test"
    }
    with pytest.raises(UserError, match="too long for a method of this test"):
        run_samples(target, turns, mixed, MANY)


def test_small_batches_and_blocks_change_nothing(
    target: Target, turns: list[RenderedSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_samples(target, turns[:2], VARIANTS[:4], MANY)
    monkeypatch.setattr("keepsight.eval.answers._TOKENS_AT_ONCE", 5)
    small = run_samples(target, turns[:2], VARIANTS[:4], 1)
    assert list(map(without_clocks, small)) == list(map(comparable, whole))


def test_a_conversation_is_one_group_of_the_sweep(target: Target, turns: list[RenderedSample], tmp_path: Path) -> None:
    other = [replace(turn, id="1") for turn in turns]
    assert groups_of([*turns, *other], "seen") == [turns, other]
    made = swept(target, turns[:2], VARIANTS[:1])
    assert [row.task for row, _ in made] == ["turn_0", "turn_1"]
    store = RowStore(tmp_path)
    store.add(made[0])
    (again,) = swept(target, turns[:2], VARIANTS[:1], store=store)
    assert [(row.answer, row.before) for row in again] == [(row.answer, row.before) for row in made[1]]
