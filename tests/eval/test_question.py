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
NO_MEASURES: dict[str, Any] = {"recall": None, "mass": None, "tau": None}
"""What `multi` measures against all questions of the context together."""
NO_DIGESTS: dict[str, Any] = {"sample_digest": None, "inputs_digest": None, "context": None}


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


def apart(target: Target, sample: Sample) -> RenderedSample:
    return render_apart(render(sample, target.tokenizer), target.tokenizer)


def all_apart(target: Target, samples: Sequence[Sample] = SAMPLES) -> list[RenderedSample]:
    return [apart(target, sample) for sample in samples]


def ids_of(target: Target, sample: Sample) -> tuple[Tensor, Tensor]:
    """Context and question, [1, N] each."""
    rendered = apart(target, sample)
    return rendered.prompt_ids[None], rendered.question_ids[None]


def decoded(target: Target, state: State, variant: Variant | None = None) -> Tensor:
    """[1, T], the greedy answer; the variant may evict while decoding."""
    criteria = stop_after(12, target.end_tokens)
    eviction = variant.method.periodic_eviction(target.model) if variant else None
    return decode(target.model, state.copy(), criteria, pad_token=0, eviction=eviction).ids


def full_prefill(target: Target, sample: Sample) -> State:
    context, question = ids_of(target, sample)
    return prefill(target.model, torch.cat([context, question], dim=1))


def full_answer(target: Target, sample: Sample) -> Tensor:
    return decoded(target, full_prefill(target, sample))


def continuation_of(target: Target, group: Sequence[Sample]) -> DraftIds:
    """The questions of a group, each with the full cache's answer: what an oracle observes with."""
    pieces: list[Tensor] = []
    for sample in group:
        _, question = ids_of(target, sample)
        pieces += [question, full_answer(target, sample)]
    return DraftIds(torch.cat(pieces, dim=1))


def compressed_by_hand(
    target: Target, variant: Variant, sample: Sample, group: Sequence[Sample]
) -> tuple[State, State]:
    """The compressed context, and the same after the question."""
    context, question = ids_of(target, sample)
    method: Any = variant.method
    if isinstance(method, Oracle):
        method = replace(method, observer=DraftObserver(FixedDraft(continuation_of(target, group))))
    state = method.start(target.model, context)
    with_question, _ = read(target.model, state.copy(), question)
    eviction = method.periodic_eviction(target.model)
    if eviction is None:
        return state, with_question
    with_question = eviction.compress(with_question)  # the question has filled what was spared for generated tokens
    assert with_question.counts().float().mean() <= method.budget - method.every
    return state, with_question


def check_rows(target: Target, rows: list[ResultRow], sample: Sample, group: Sequence[Sample]) -> None:
    context, question = ids_of(target, sample)
    answer = full_answer(target, sample)
    full, *evicted = rows
    assert full.answer == target.tokenizer.decode(answer[0], skip_special_tokens=True)
    assert full.kept == context.shape[1]
    for row in rows:
        assert row.prompt_tokens == context.shape[1] + question.shape[1]
    full_nll, _ = score_answer(target.model, full_prefill(target, sample), answer)
    for row, variant in zip(evicted, VARIANTS, strict=True):
        state, with_question = compressed_by_hand(target, variant, sample, group)
        assert row.kept == pytest.approx(state.counts().float().mean().item(), abs=1e-3)
        assert row.kv_bytes == state.kv_bytes
        evicted_answer = decoded(target, with_question, variant)
        assert row.answer == target.tokenizer.decode(evicted_answer[0], skip_special_tokens=True), variant
        if variant.method.periodic_eviction(target.model) is None:
            nll, _ = score_answer(target.model, with_question, answer)
            assert row.excess_nll == pytest.approx((nll - full_nll).mean().item(), abs=1e-4)
    answers = {row.answer for row in rows}
    assert len(answers) > 4


def test_unseen_compresses_the_context_and_reads_the_question(target: Target) -> None:
    for sample in SAMPLES:
        (rows,) = run_samples(target, [apart(target, sample)], VARIANTS, MANY, "unseen")
        assert {row.question for row in rows} == {"unseen"}
        check_rows(target, rows, sample, [sample])


def test_multi_asks_all_questions_of_one_cache(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    compressed: list[Any] = []
    prefills: list[int] = []
    compress = SharedPrompt.compress
    prefill_once = sweep_module.prefill

    def recorded_compress(self: SharedPrompt, method: Any) -> Any:
        compressed.append(method)
        return compress(self, method)

    def recorded_prefill(*arguments: Any, **options: Any) -> State:
        prefills.append(arguments[1].shape[1])
        return prefill_once(*arguments, **options)

    monkeypatch.setattr(SharedPrompt, "compress", recorded_compress)
    monkeypatch.setattr(sweep_module, "prefill", recorded_prefill)
    rows_of_samples = swept(target, all_apart(target), VARIANTS, "multi")
    assert compressed == [variant.method for variant in VARIANTS]
    assert len(prefills) == 1
    context = rows_of_samples[0][0].sample_digest
    for sample, rows in zip(SAMPLES, rows_of_samples, strict=True):
        for row in rows:
            assert row.sample == sample.id
            assert row.context == context
            assert row.question == "multi"
        check_rows(target, rows, sample, SAMPLES)
        full, _, *without_oracle = rows
        (unseen,) = run_samples(target, [apart(target, sample)], VARIANTS[1:], MANY, "unseen")
        as_multi = [replace(row, question="multi", **NO_MEASURES) for row in unseen]
        without_shared = [replace(row, **NO_MEASURES, **NO_DIGESTS) for row in (full, *without_oracle)]
        assert without_clocks(as_multi) == comparable(without_shared)
    assert [len(group) for group in groups_of(all_apart(target), "unseen")] == [1, 1]


def test_a_question_asked_again_after_a_stop_has_its_group(target: Target, tmp_path: Path) -> None:
    samples = all_apart(target)
    fox_rows, dog_rows = swept(target, samples, VARIANTS, "multi")
    store = RowStore(tmp_path)
    store.add(fox_rows)
    (resumed,) = swept(target, samples, VARIANTS, "multi", store)
    assert without_clocks(resumed) == comparable(dog_rows)
    store.add(resumed)
    assert not swept(target, samples, VARIANTS, "multi", store)


def test_groups_share_task_length_and_context(target: Target) -> None:
    other = replace(SAMPLES[0], id="other", prompt="Else." + SAMPLES[0].question)
    longer = replace(SAMPLES[0], id="longer", length=256)
    repeated = replace(SAMPLES[0], id="again")
    rendered = all_apart(target, [*SAMPLES, other, longer, repeated])
    groups = [[sample.id for sample in group] for group in groups_of(rendered, "multi")]
    assert groups == [list(WORDS), ["other"], ["longer"], ["again"]]
