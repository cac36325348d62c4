"""`question=unseen` and `multi`: the context is compressed alone, then asked."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keepsight.eval import sweep as sweep_module
from keepsight.eval.compress import SharedPrompt
from keepsight.eval.record import ResultRow, RowStore
from keepsight.eval.sweep import Variant, groups_of, run_samples
from keepsight.eval.tasks.samples import RenderedSample, Sample, render, render_apart
from keepsight.models.draft_sources import LayerSubset
from keepsight.models.targets import Target
from keepsight.runtime.drafting.observer import DraftIds, DraftObserver, FixedDraft
from keepsight.runtime.generate import decode, stop_after
from keepsight.runtime.methods import H2O, LAQ, AdaKV, Oracle, SnapKV, SpecKV, SpecPC, StreamingLLM, Truncation
from keepsight.runtime.state import State, prefill, read
from tests.eval.rows import comparable, swept, without_clocks
from tests.runtime.scoring import score_answer

MANY = 100_000
TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps for a while in the sun. " * 4
WORDS = ("fox", "dog")


def sample(word: str) -> Sample:
    question = f"\nWhere is the {word}?"
    return Sample(word, "test", 128, TEXT + question, (word,), "qa_f1", 12, answer_prefix="It is", question=question)


SAMPLES = [sample(word) for word in WORDS]
DRAFT = LayerSubset((0, 1))
VARIANTS = [
    Variant("oracle", Oracle(24)),
    Variant("snapkv", SnapKV(40)),
    Variant("snapkv", SnapKV(0.4)),
    Variant("snapkv", SnapKV(9999)),
    Variant("adakv", AdaKV(40)),
    Variant("h2o", H2O(36)),
    Variant("laq", LAQ(48)),
    Variant("streamingllm", StreamingLLM(12)),
    Variant("speckv", SpecKV.with_draft(DRAFT, 48)),
    Variant("specpc", SpecPC(40, window=8, kernel=4, draft=DRAFT)),
    Variant("truncation", Truncation(30)),
    Variant("snapkv every=4", SnapKV(40, window=8, every=4)),
]


def apart(target: Target, each: Sample) -> RenderedSample:
    return render_apart(render(each, target.tokenizer), target.tokenizer)


def all_apart(target: Target, samples: Sequence[Sample] = SAMPLES) -> list[RenderedSample]:
    return [apart(target, each) for each in samples]


def ids_of(target: Target, each: Sample) -> tuple[Tensor, Tensor]:
    parts = apart(target, each)
    return parts.prompt_ids[None], parts.question_ids[None]


def decoded(target: Target, state: State, variant: Variant | None = None) -> Tensor:
    criteria = stop_after(12, target.end_tokens)
    eviction = variant.method.periodic_eviction(target.model) if variant else None
    return decode(target.model, state.copy(), criteria, pad_token=0, eviction=eviction).ids


def full_answer(target: Target, each: Sample) -> Tensor:
    return decoded(target, prefill(target.model, torch.cat(ids_of(target, each), dim=1)))


def by_hand(target: Target, variant: Variant, asked: Sample, group: Sequence[Sample]) -> tuple[State, State]:
    """The compressed context, and the same after the question."""
    context, rest = ids_of(target, asked)
    method: Any = variant.method
    if isinstance(method, Oracle):
        coming = [part for each in group for part in (ids_of(target, each)[1], full_answer(target, each))]
        method = replace(method, observer=DraftObserver(FixedDraft(DraftIds(torch.cat(coming, dim=1)))))
    state = method.start(target.model, context)
    after = read(target.model, state.copy(), rest)[0]
    eviction = method.periodic_eviction(target.model)
    if eviction is None:
        return state, after
    after = eviction.compress(after)  # the question has filled what was spared for generated tokens
    assert after.counts().float().mean() <= method.budget - method.every
    return state, after


def check_rows(target: Target, rows: list[ResultRow], asked: Sample, group: Sequence[Sample]) -> None:
    context, rest = ids_of(target, asked)
    answer = full_answer(target, asked)
    assert rows[0].answer == target.tokenizer.decode(answer[0], skip_special_tokens=True)
    assert rows[0].kept == context.shape[1]
    assert {row.prompt_tokens for row in rows} == {context.shape[1] + rest.shape[1]}
    base = score_answer(target.model, prefill(target.model, torch.cat([context, rest], dim=1)), answer)[0]
    for row, variant in zip(rows[1:], VARIANTS, strict=True):
        state, after = by_hand(target, variant, asked, group)
        assert row.kept == pytest.approx(state.counts().float().mean().item(), abs=1e-3)
        assert row.kv_bytes == state.kv_bytes
        own = decoded(target, after, variant)
        assert row.answer == target.tokenizer.decode(own[0], skip_special_tokens=True), variant
        if variant.method.periodic_eviction(target.model) is None:
            nll = score_answer(target.model, after, answer)[0]
            assert row.excess_nll == pytest.approx((nll - base).mean().item(), abs=1e-4)
    assert len({row.answer for row in rows}) > 4


def test_unseen_compresses_the_context_and_reads_the_question(target: Target) -> None:
    for asked in SAMPLES:
        rows = run_samples(target, [apart(target, asked)], VARIANTS, MANY, "unseen")[0]
        assert {row.question for row in rows} == {"unseen"}
        check_rows(target, rows, asked, [asked])


def test_multi_asks_all_questions_of_one_cache(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    prefills, compressed, compress, plain = [], [], SharedPrompt.compress, sweep_module.prefill

    def noted(self: SharedPrompt, method: Any) -> Any:
        compressed.append(method)
        return compress(self, method)

    def counted(*arguments: Any, **options: Any) -> State:
        prefills.append(arguments[1].shape[1])
        return plain(*arguments, **options)

    monkeypatch.setattr(SharedPrompt, "compress", noted)
    monkeypatch.setattr(sweep_module, "prefill", counted)
    made = swept(target, all_apart(target), VARIANTS, "multi")
    assert compressed == [variant.method for variant in VARIANTS] and len(prefills) == 1
    assert [{row.sample for row in rows} for rows in made] == [{word} for word in WORDS]
    assert {row.context for rows in made for row in rows} == {made[0][0].sample_digest}
    assert all(row.question == "multi" for rows in made for row in rows)
    for asked, rows in zip(SAMPLES, made, strict=True):
        check_rows(target, rows, asked, SAMPLES)
        (alone,) = run_samples(target, [apart(target, asked)], VARIANTS[1:], MANY, "unseen")
        alone = [replace(row, question="multi", recall=None, mass=None, tau=None) for row in alone]
        # Recall, mass and tau are against what is asked in all, and the digests are of all questions.
        others: Any = {"recall": None, "mass": None, "tau": None}
        others.update({"sample_digest": None, "inputs_digest": None, "context": None})
        assert without_clocks(alone) == comparable(replace(row, **others) for row in [rows[0], *rows[2:]])
    assert [len(group) for group in groups_of(all_apart(target), "unseen")] == [1, 1]


def test_a_question_asked_again_after_a_stop_has_its_group(target: Target, tmp_path: Path) -> None:
    samples = all_apart(target)
    whole = swept(target, samples, VARIANTS, "multi")
    store = RowStore(tmp_path)
    store.add(whole[0])
    (again,) = swept(target, samples, VARIANTS, "multi", store)
    assert without_clocks(again) == comparable(whole[1])
    store.add(again)
    assert not swept(target, samples, VARIANTS, "multi", store)


def test_groups_share_task_length_and_context(target: Target) -> None:
    other = replace(SAMPLES[0], id="other", prompt="Else." + SAMPLES[0].question)
    longer = replace(SAMPLES[0], id="longer", length=256)
    asked = all_apart(target, [*SAMPLES, other, longer, replace(SAMPLES[0], id="again")])
    groups = groups_of(asked, "multi")
    assert [[each.id for each in group] for group in groups] == [list(WORDS), ["other"], ["longer"], ["again"]]
