"""The sweep shares one prefill and decodes in batches; each row is what the method alone would give."""

import copy
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.eval import answers as answers_module
from keepsight.eval import sweep as sweep_module
from keepsight.eval.answers import Sampling
from keepsight.eval.record import ResultRow, RowStore
from keepsight.eval.sweep import Refused, Variant, check_samples, run_samples
from keepsight.eval.tasks.samples import RenderedSample, Sample, render
from keepsight.models.card import Provenance
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.models.targets import Target, load_target
from keepsight.runtime.drafting.observer import DraftObserver
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import FullCache, generate
from keepsight.runtime.importance import Reduce
from keepsight.runtime.methods import H2O, AdaKV, LookaheadKV, Oracle, SnapKV, StreamingLLM, Truncation
from keepsight.runtime.methods.drafts import OwnAnswer
from keepsight.runtime.observe import Observer
from keepsight.runtime.state import Needs, State, cache_bytes, prefill
from tests.eval.rows import comparable, swept, without_clocks
from tests.refused import refused
from tests.runtime.scoring import score_answer

MANY = 100_000
TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps. " * 6
SAMPLE = Sample("one", "test", 256, TEXT, ("fox",), "string_match_all", 24, answer_prefix="It is")
OTHER = replace(SAMPLE, id="two", prompt=TEXT[:170] + "for i in range(10): print(i)", length=128)


@pytest.fixture(scope="module")
def variants(target: Target, tmp_path_factory: pytest.TempPathFactory) -> list[Variant]:
    folder = tmp_path_factory.mktemp("adapter")
    module = Lookahead(load_target(target.name, device="cpu").model, LookaheadSettings(tokens=4, rank=2))
    module.adapter().save(folder, Provenance(target.name), "# Card\n")
    return [
        Variant("oracle", Oracle(16)),
        Variant("oracle", Oracle(0.5)),
        Variant("snapkv", SnapKV(40)),
        Variant("snapkv", SnapKV(64)),
        Variant("streamingllm", StreamingLLM(8)),
        Variant("streamingllm", StreamingLLM(0.25)),
        Variant("lookaheadkv", LookaheadKV.from_pretrained(folder, 12)),
        Variant("lookaheadkv", LookaheadKV.from_pretrained(folder, 100_000)),
    ]


@pytest.fixture(scope="module")
def rows(target: Target, variants: list[Variant]) -> list[ResultRow]:
    return run(target, SAMPLE, variants)


def ids_of(target: Target, sample: Sample = SAMPLE) -> Tensor:
    return render(sample, target.tokenizer).prompt_ids[None].to(target.model.device)


def run(target: Target, sample: Sample, variants: list[Variant], batch_tokens: int = MANY) -> list[ResultRow]:
    return run_samples(target, render_all(target, sample), variants, batch_tokens)[0]


def render_all(target: Target, *samples: Sample) -> list[RenderedSample]:
    return [render(sample, target.tokenizer) for sample in samples]


def outside_a_sweep(method: Any) -> Any:
    """The method as it is used alone; an oracle answers as long as the sample allows."""
    if isinstance(method, Oracle):
        return replace(method, observer=DraftObserver(OwnAnswer(SAMPLE.max_new_tokens)))
    return method


def generated(target: Target, method: Any) -> Tensor:
    """[1, T], the method's answer to `SAMPLE` by `generate`."""
    return generate(
        target.model,
        ids_of(target),
        outside_a_sweep(method),
        max_new_tokens=SAMPLE.max_new_tokens,
        do_sample=False,
    )


def test_the_full_cache_comes_first_and_agrees_with_itself(target: Target, rows: list[ResultRow]) -> None:
    methods = [row.method for row in rows]
    assert methods.count("full") == 1
    full = rows[0]
    assert full.method == "full"
    assert full.budget is None
    assert full.agreement == 1.0
    assert abs(full.excess_nll) < 1e-4
    assert full.kept == full.prompt_tokens == ids_of(target).shape[1]
    assert full.references == ["fox"]
    assert full.key == ("test", 256, "one")


def test_a_budget_above_the_prompt_is_the_full_cache(rows: list[ResultRow]) -> None:
    full, unevicted = rows[0], rows[-1]
    assert (unevicted.method, unevicted.budget) == ("lookaheadkv", 100_000)
    assert abs(unevicted.excess_nll) < 1e-4
    renamed = replace(unevicted, excess_nll=full.excess_nll, method="full", budget=None)
    assert without_clocks([renamed]) == without_clocks([full])


def test_answers_equal_generate_one_by_one(target: Target, variants: list[Variant], rows: list[ResultRow]) -> None:
    methods = [FullCache(), *(variant.method for variant in variants)]
    for row, method in zip(rows, methods, strict=True):
        answer = generated(target, method)
        assert row.answer == target.tokenizer.decode(answer[0], skip_special_tokens=True)
    answers = {row.answer for row in rows}
    assert len(answers) > 4


def test_scores_equal_those_of_each_cache_alone(target: Target, variants: list[Variant], rows: list[ResultRow]) -> None:
    prefilled = prefill(target.model, ids_of(target))
    answer = generated(target, FullCache())
    full_state = FullCache().compress_state(target.model, prefilled)
    full_nll, _ = score_answer(target.model, full_state, answer)
    for row, variant in zip(rows[1:], variants, strict=True):
        state = outside_a_sweep(variant.method).compress_state(target.model, prefilled)
        assert row.kept == state.length
        assert row.kv_bytes == cache_bytes(state.cache)
        nll, hits = score_answer(target.model, state, answer)
        excess_nll = (nll - full_nll).mean().item()
        agreement = hits.float().mean().item()
        assert row.excess_nll == pytest.approx(excess_nll, abs=1e-4)
        assert row.agreement == pytest.approx(agreement)
    assert min(row.agreement for row in rows) < 1
    assert max(row.excess_nll for row in rows) > 0.01


@pytest.mark.parametrize("ending", [False, True])
def test_answers_of_one_token(target: Target, variants: list[Variant], ending: bool) -> None:
    """As short as allowed, or because the full cache's first token ends its answer."""
    first_token = int(prefill(target.model, ids_of(target)).logits.argmax())
    evicting = [*variants, Variant("h2o every=4", H2O(48, every=4)), Variant("adakv", AdaKV(48))]
    config: Any = target.model.generation_config
    end_tokens = config.eos_token_id
    if ending:
        sample = SAMPLE
        config.eos_token_id = [first_token, *end_tokens]
    else:
        sample = replace(SAMPLE, max_new_tokens=1)
    try:
        rows = run(target, sample, evicting)
    finally:
        config.eos_token_id = end_tokens
    assert len(rows) == 11
    expected = target.tokenizer.decode([first_token], skip_special_tokens=True)
    for row in rows:  # no eviction changes the first token: it comes from the prefill
        assert row.answer == expected
        assert row.agreement == 1.0
        assert row.excess_nll == 0.0


@pytest.mark.parametrize("batch_tokens", [1, 400])
def test_the_size_of_batches_changes_nothing(
    target: Target, variants: list[Variant], rows: list[ResultRow], batch_tokens: int
) -> None:
    assert without_clocks(run(target, SAMPLE, variants, batch_tokens)) == comparable(rows)


@pytest.mark.parametrize("batch_tokens", [1, 400])
def test_batches_stay_within_their_tokens(
    target: Target, variants: list[Variant], batch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[list[int]] = []
    join = answers_module.join

    def recorded_join(states: list[State]) -> Any:
        batches.append([state.length for state in states])
        return join(states)

    monkeypatch.setattr(answers_module, "join", recorded_join)
    run(target, SAMPLE, variants, batch_tokens)
    assert batches
    shared_batches = [lengths for lengths in batches if len(lengths) > 1]
    for lengths in shared_batches:
        assert max(lengths) * len(lengths) <= batch_tokens
    assert bool(shared_batches) == (batch_tokens > 1)


@dataclass(frozen=True, eq=False)
class Counting(Observer):
    """Random scores; keeps the length of the state in each of its calls."""

    calls: list[int] = field(default_factory=list)

    def __call__(self, model: PreTrainedModel, state: State, reduce: Reduce) -> list[Tensor]:
        self.calls.append(state.length)
        generator = torch.Generator().manual_seed(0)
        return [torch.rand(1, 4, state.length, generator=generator) for _ in state.cache.layers]


def test_one_prefill_a_sample_and_one_observation_a_method(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    prefills: list[int] = []

    def recorded_prefill(model: PreTrainedModel, ids: Tensor, needs: Needs, images: None) -> State:
        prefills.append(ids.shape[1])
        return prefill(model, ids, needs=needs, images=images)

    monkeypatch.setattr(sweep_module, "prefill", recorded_prefill)
    observers = {"one": Counting(), "two": Counting()}
    mixed: list[Variant] = []
    for budget in (8, 16, 0.5, 9999):
        for name, observer in observers.items():
            mixed.append(Variant(name, Evict(budget, observer)))
    for sample in (SAMPLE, OTHER):
        run(target, sample, mixed)
    prompt_lengths = [ids_of(target, sample).shape[1] for sample in (SAMPLE, OTHER)]
    assert prefills == prompt_lengths
    assert observers["one"].calls == prompt_lengths
    assert observers["two"].calls == prompt_lengths


@dataclass(frozen=True)
class Plugin(Observer):
    """Scores everything with one value, or refuses."""

    value: float | None = None

    def __call__(self, model: PreTrainedModel, state: State, reduce: Reduce) -> list[Tensor]:
        if self.value is None:
            raise UserError("not this prompt")
        return [torch.full((1, 4, state.length), self.value) for _ in state.cache.layers]


def test_a_method_that_is_refused_leaves_the_rows_of_the_others(target: Target, variants: list[Variant]) -> None:
    """It is left out from then on; scores that are whole numbers are as good as any."""
    snapkv = variants[2]
    nan = Variant("nan", Evict(8, Plugin(math.nan)))
    refusing = Variant("refusing", Evict(8, Plugin(None)))
    whole_numbers = Variant("whole", Evict(8, Plugin(3)))
    samples = render_all(target, SAMPLE, OTHER)
    refusals = Refused()
    swept_rows = swept(target, samples, [snapkv, nan, refusing, whole_numbers], refused=refusals)
    reasons = {name: str(error) for (name, _), error in refusals.items()}
    assert reasons == {"nan": "Plugin returned scores that are NaN", "refusing": "not this prompt"}
    for sample, rows in zip((SAMPLE, OTHER), swept_rows, strict=True):
        assert [row.method for row in rows] == ["full", "snapkv", "whole"]
        accepted_alone = run(target, sample, [snapkv, whole_numbers])
        without_digests = [replace(row, sample_digest=None, inputs_digest=None) for row in rows]
        assert without_clocks(without_digests) == comparable(accepted_alone)
    for variant in (nan, refusing):
        with pytest.raises(UserError, match=r"NaN|not this"):
            swept(target, samples, [variant], refused=Refused())


def test_samples_are_checked_before_the_first_runs(target: Target, variants: list[Variant]) -> None:
    samples = render_all(target, SAMPLE, OTHER)
    check_samples(target, samples, variants)
    with refused("prompt", "range"):
        render(replace(SAMPLE, spans=("lazy dog", "lazy cat")), target.tokenizer)
    too_wide = Variant("truncation", Truncation(1000, window=999))
    with refused("prompt", "range"):
        check_samples(target, samples, [too_wide])
    refusals = Refused()
    check_samples(target, samples, [*variants, too_wide], refusals)
    assert list(refusals) == [("truncation", 1000)]

    longest = 4096 - ids_of(target).shape[1]
    with refused("lengths", "range"):
        run(target, replace(SAMPLE, max_new_tokens=longest + 1), variants[:1])


def test_what_is_done_is_passed_over(target: Target, variants: list[Variant], tmp_path: Path) -> None:
    store = RowStore(tmp_path)
    samples = render_all(target, SAMPLE, OTHER)
    (first_rows,) = swept(target, samples[:1], variants[:3])
    for task, length in (("test", 999), ("other", 128)):
        store.add([replace(row, task=task, length=length, sample="two") for row in first_rows])
    store.add(first_rows)
    (second_rows,) = swept(target, samples, variants[:3], store=store)
    assert {row.sample for row in second_rows} == {"two"}
    assert [row.method for row in second_rows] == [row.method for row in first_rows]
    assert not swept(target, samples[:1], variants[:3], store=store)
    assert not swept(target, samples[:1], variants[:3], store=RowStore(tmp_path))


def test_in_bfloat16_no_sample_changes_another(target: Target, variants: list[Variant]) -> None:
    """There the number of tokens that a pass reads can decide between two that are about equally likely."""
    bfloat16_target = replace(target, model=copy.deepcopy(target.model).bfloat16())
    excerpts = [replace(SAMPLE, id=str(start), prompt=TEXT[start : start + 200]) for start in range(0, 120, 10)]
    samples = render_all(target, *excerpts)
    together = swept(bfloat16_target, samples, variants[:3])
    for sample, rows in zip(samples, together, strict=True):
        (alone,) = swept(bfloat16_target, [sample], variants[:3])
        assert without_clocks(rows) == without_clocks(alone)


def test_answers_may_be_sampled(target: Target) -> None:
    """By the seed and the prompt: a method that keeps all answers as the full cache does, and has no excess."""
    variants = [
        Variant("unevicted", SnapKV(10_000)),
        Variant("snapkv", SnapKV(40)),
        Variant("periodic", SnapKV(10_000, window=8, every=4)),  # answers in a batch of its own
    ]
    rendered = render_all(target, SAMPLE)

    def sampled(seed: int) -> list[ResultRow]:
        return run_samples(target, rendered, variants, MANY, sampling=Sampling(1.5, 0.95, seed))[0]

    rows = sampled(0)
    full, unevicted, evicted, periodic = rows
    greedy_full, _, greedy_evicted, _ = run(target, SAMPLE, variants)
    assert greedy_full.agreement == 1
    assert full.agreement < 1
    assert full.answer != greedy_full.answer
    assert unevicted.excess_nll == pytest.approx(0, abs=1e-5)
    assert unevicted.agreement == full.agreement
    assert unevicted.first_difference is None
    assert unevicted.answer == full.answer
    assert periodic.answer == full.answer
    assert evicted.answer not in (full.answer, greedy_evicted.answer)
    assert [row.answer for row in sampled(0)] == [row.answer for row in rows]
    assert sampled(1)[0].answer != full.answer
