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
from keepsight.eval.tasks.samples import Sample, render
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
    return run_samples(target, [render(sample, target.tokenizer)], variants, batch_tokens)[0]


def alone(method: Any) -> Any:
    """The method as it is used outside a sweep; an oracle answers as long as the sample allows."""
    own = isinstance(method, Oracle)
    return replace(method, observer=DraftObserver(OwnAnswer(SAMPLE.max_new_tokens))) if own else method


def test_the_full_cache_comes_first_and_agrees_with_itself(target: Target, rows: list[ResultRow]) -> None:
    assert [row.method for row in rows].count("full") == 1
    full, tokens = rows[0], ids_of(target).shape[1]
    assert (full.method, full.budget, full.agreement) == ("full", None, 1.0)
    assert abs(full.excess_nll) < 1e-4
    assert full.kept == full.prompt_tokens == tokens
    assert full.references == ["fox"] and (full.task, full.length, full.sample) == ("test", 256, "one")


def test_a_budget_above_the_prompt_is_the_full_cache(rows: list[ResultRow]) -> None:
    full, whole = rows[0], rows[-1]
    assert (whole.method, whole.budget) == ("lookaheadkv", 100_000)
    assert abs(whole.excess_nll) < 1e-4
    same = replace(whole, excess_nll=full.excess_nll, method="full", budget=None)
    assert without_clocks([same]) == without_clocks([full])


def test_answers_equal_generate_one_by_one(target: Target, variants: list[Variant], rows: list[ResultRow]) -> None:
    ids = ids_of(target)
    options: dict[str, Any] = {"max_new_tokens": SAMPLE.max_new_tokens, "do_sample": False}
    for row, method in zip(rows, [FullCache(), *(variant.method for variant in variants)], strict=True):
        answer = generate(target.model, ids, alone(method), **options)
        assert row.answer == target.tokenizer.decode(answer[0], skip_special_tokens=True)
    assert len({row.answer for row in rows}) > 4


def test_scores_equal_those_of_each_cache_alone(target: Target, variants: list[Variant], rows: list[ResultRow]) -> None:
    prefilled = prefill(target.model, ids_of(target))
    options: dict[str, Any] = {"max_new_tokens": SAMPLE.max_new_tokens, "do_sample": False}
    answer = generate(target.model, ids_of(target), FullCache(), **options)
    base, _ = score_answer(target.model, FullCache().compress_state(target.model, prefilled), answer)
    for row, variant in zip(rows[1:], variants, strict=True):
        kept = alone(variant.method).compress_state(target.model, prefilled)
        assert (row.kept, row.kv_bytes) == (kept.length, cache_bytes(kept.cache))
        nll, hits = score_answer(target.model, kept, answer)
        assert row.excess_nll == pytest.approx((nll - base).mean().item(), abs=1e-4)
        assert row.agreement == pytest.approx(hits.float().mean().item())
    assert min(row.agreement for row in rows) < 1 and max(row.excess_nll for row in rows) > 0.01


@pytest.mark.parametrize("ending", [False, True])
def test_answers_of_one_token(target: Target, variants: list[Variant], ending: bool) -> None:
    """As short as allowed, or because the full cache's first token ends its answer."""
    first = int(prefill(target.model, ids_of(target)).logits.argmax())
    config: Any = target.model.generation_config
    before, short = config.eos_token_id, SAMPLE if ending else replace(SAMPLE, max_new_tokens=1)
    evicting = [*variants, Variant("h2o every=4", H2O(48, every=4)), Variant("adakv", AdaKV(48))]
    config.eos_token_id = [first, *before] if ending else before
    try:
        rows = run(target, short, evicting)
    finally:
        config.eos_token_id = before
    expected = target.tokenizer.decode([first], skip_special_tokens=True)
    # No eviction changes the first token: it comes from the prefill.
    assert [(row.answer, row.agreement, row.excess_nll) for row in rows] == [(expected, 1.0, 0.0)] * 11


@pytest.mark.parametrize("batch_tokens", [1, 400])
def test_the_size_of_batches_changes_nothing(
    target: Target, variants: list[Variant], rows: list[ResultRow], batch_tokens: int
) -> None:
    assert without_clocks(run(target, SAMPLE, variants, batch_tokens)) == comparable(rows)


@pytest.mark.parametrize("batch_tokens", [1, 400])
def test_batches_stay_within_their_tokens(
    target: Target, variants: list[Variant], batch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, join = list[list[int]](), answers_module.join

    def noted(states: list[State]) -> Any:
        batches.append([state.length for state in states])
        return join(states)

    monkeypatch.setattr(answers_module, "join", noted)
    run(target, SAMPLE, variants, batch_tokens)
    assert batches
    assert all(len(sizes) == 1 or max(sizes) * len(sizes) <= batch_tokens for sizes in batches)
    assert all(len(sizes) == 1 for sizes in batches) == (batch_tokens == 1)


@dataclass(frozen=True, eq=False)
class Counting(Observer):
    """Random scores; keeps count of its calls."""

    calls: list[int] = field(default_factory=list)

    def __call__(self, model: PreTrainedModel, state: State, reduce: Reduce) -> list[Tensor]:
        self.calls.append(state.length)
        generator = torch.Generator().manual_seed(0)
        return [torch.rand(1, 4, state.length, generator=generator) for _ in state.cache.layers]


def test_one_prefill_a_sample_and_one_observation_a_method(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    prefills, one, two = [], Counting(), Counting()

    def noted(model: PreTrainedModel, ids: Tensor, needs: Needs, images: None) -> State:
        prefills.append(ids.shape[1])
        return prefill(model, ids, needs=needs, images=images)

    monkeypatch.setattr(sweep_module, "prefill", noted)
    budgets = (8, 16, 0.5, 9999)
    mixed = [Variant(str(id(each)), Evict(budget, each)) for budget in budgets for each in (one, two)]
    for sample in (SAMPLE, OTHER):
        run(target, sample, mixed)
    assert prefills == one.calls == two.calls == [ids_of(target, sample).shape[1] for sample in (SAMPLE, OTHER)]


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
    odd = {"nan": math.nan, "refusing": None, "whole": 3}
    mixed = [variants[2], *(Variant(name, Evict(8, Plugin(value))) for name, value in odd.items())]
    samples = [render(sample, target.tokenizer) for sample in (SAMPLE, OTHER)]
    refused = Refused()
    made = swept(target, samples, mixed, refused=refused)
    assert [[row.method for row in rows] for rows in made] == [["full", "snapkv", "whole"]] * 2
    assert {name: str(error) for (name, _), error in refused.items()} == {
        "nan": "Plugin returned scores that are NaN",
        "refusing": "not this prompt",
    }
    for sample, rows in zip((SAMPLE, OTHER), made, strict=True):
        alone = run(target, sample, [mixed[0], mixed[3]])
        unnamed = [replace(row, sample_digest=None, inputs_digest=None) for row in rows]
        assert without_clocks(unnamed) == comparable(alone)
    for name in ("nan", "refusing"):
        with pytest.raises(UserError, match=r"NaN|not this"):
            swept(target, samples, [each for each in mixed if each.name == name], refused=Refused())


def test_samples_are_checked_before_the_first_runs(target: Target, variants: list[Variant]) -> None:
    samples = [render(sample, target.tokenizer) for sample in (SAMPLE, OTHER)]
    check_samples(target, samples, variants)
    with refused("prompt", "range"):
        render(replace(SAMPLE, spans=("lazy dog", "lazy cat")), target.tokenizer)
    with refused("prompt", "range"):
        check_samples(target, samples, [Variant("truncation", Truncation(1000, window=999))])
    refusals = Refused()
    check_samples(target, samples, [*variants, Variant("truncation", Truncation(1000, window=999))], refusals)
    assert [*refusals] == [("truncation", 1000)]

    longest = 4096 - ids_of(target).shape[1]
    with refused("lengths", "range"):
        run(target, replace(SAMPLE, max_new_tokens=longest + 1), variants[:1])


def test_what_is_done_is_passed_over(target: Target, variants: list[Variant], tmp_path: Path) -> None:
    store = RowStore(tmp_path)
    samples = [render(sample, target.tokenizer) for sample in (SAMPLE, OTHER)]
    (made,) = swept(target, samples[:1], variants[:3])
    for key in (("test", 999, "two"), ("other", 128, "two")):
        task, length, sample = key
        store.add([replace(row, task=task, length=length, sample=sample) for row in made])
    store.add(made)
    (again,) = swept(target, samples, variants[:3], store=store)
    assert [(row.sample, row.method) for row in again] == [("two", row.method) for row in made]
    assert not swept(target, samples[:1], variants[:3], store=store)
    assert not swept(target, samples[:1], variants[:3], store=RowStore(tmp_path))


def test_in_bfloat16_no_sample_changes_another(target: Target, variants: list[Variant]) -> None:
    """There the number of tokens that a pass reads can decide between two that are about equally likely."""
    half = replace(target, model=copy.deepcopy(target.model).bfloat16())
    cut = [replace(SAMPLE, id=str(start), prompt=TEXT[start : start + 200]) for start in range(0, 120, 10)]
    samples = [render(sample, target.tokenizer) for sample in cut]
    together = swept(half, samples, variants[:3])
    alone = [rows for sample in samples for rows in swept(half, [sample], variants[:3])]
    assert list(map(without_clocks, together)) == list(map(without_clocks, alone))


def test_answers_may_be_sampled(target: Target) -> None:
    """By the seed and the prompt: a method that keeps all answers as the full cache does, and has no excess."""
    every = SnapKV(10_000, window=8, every=4)  # answers alone
    variants = [Variant("whole", SnapKV(10_000)), Variant("snapkv", SnapKV(40)), Variant("every", every)]
    rendered = [render(SAMPLE, target.tokenizer)]

    def made(seed: int) -> list[ResultRow]:
        return run_samples(target, rendered, variants, MANY, sampling=Sampling(1.5, 0.95, seed))[0]

    full, whole, evicted, alone = made(0)
    greedy = run(target, SAMPLE, variants)
    assert full.answer != greedy[0].answer and full.agreement < 1 == greedy[0].agreement
    assert whole.excess_nll == pytest.approx(0, abs=1e-5) and whole.agreement == full.agreement
    assert whole.answer == alone.answer == full.answer and whole.first_difference is None
    assert evicted.answer not in (full.answer, greedy[2].answer)
    assert [each.answer for each in made(0)] == [each.answer for each in (full, whole, evicted, alone)]
    assert made(1)[0].answer != full.answer
