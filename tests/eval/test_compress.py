"""Compressed states of one prefilled prompt are those of each method alone; drafts and observations are shared."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.eval.compress import Compressed, SharedPrompt, attention_mass, needs_of_all, recall
from keepsight.models.draft_sources import LayerSubset
from keepsight.runtime.allocate import Adaptive
from keepsight.runtime.drafting.observer import Drafter, DraftIds, DraftObserver, FixedDraft
from keepsight.runtime.drafting.speckv import SparsePrefill
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import CacheMethod, FullCache, Method, decode, stop_after
from keepsight.runtime.importance import NO_POOL, Reduce
from keepsight.runtime.layer import LayerEntries
from keepsight.runtime.methods import (
    H2O,
    LAQ,
    AdaKV,
    DapQ,
    Oracle,
    PyramidKV,
    SnapKV,
    SpecKV,
    SpecKVPC,
    SpecPC,
    StreamingLLM,
    Truncation,
)
from keepsight.runtime.methods.drafts import OwnAnswer, PromptEnds
from keepsight.runtime.observe import observe
from keepsight.runtime.state import State, prefill
from tests.close import assert_close
from tests.runtime.scoring import recorded
from tests.tiny import FAMILY_PARAMS, prompt_ids, tiny_model

DRAFT = LayerSubset((0, 1))
METHODS: list[Method] = [
    FullCache(),
    SnapKV(40),
    SnapKV(200),
    AdaKV(24, window=4),
    PyramidKV(24, window=4),
    H2O(40),
    StreamingLLM(8),
    DapQ(16),
    LAQ(48),
    SpecKV.with_draft(DRAFT, 48, lookahead=6),
    SpecKV.with_draft(DRAFT, 48, lookahead=6, sparse=SparsePrefill(32, 64)),
    SpecPC(30, window=8, kernel=4, draft=DRAFT),
    SpecPC(300, draft=DRAFT),
    SpecKVPC(40, draft=DRAFT, prompt_budget=60, prompt_window=8, kernel=4),
    Truncation(0.5),
    SnapKV(40, window=8, every=4),
]
TOKENS = 150


@pytest.fixture(scope="module", params=FAMILY_PARAMS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(request.param, max_position_embeddings=512)


@pytest.fixture(scope="module")
def shared(model: PreTrainedModel) -> SharedPrompt:
    state = prefill(model, prompt_ids(TOKENS)[0], needs=needs_of_all(METHODS))
    answer = decode(model, state.copy(), stop_after(12, 2), pad_token=0).ids
    return SharedPrompt(model, state, DraftIds(answer), 1.5)


def real_of(entries: LayerEntries) -> Tensor:
    """[B, K, C] bool, which entries are no padding."""
    if entries.real is None:
        return torch.ones(entries.keys.shape[:3], dtype=torch.bool)
    return entries.real


def assert_same(state: State, expected: State) -> None:
    for entries, expected_entries in zip(state.entries(), expected.entries(), strict=True):
        real = real_of(entries)
        expected_real = real_of(expected_entries)
        assert_close(entries.keys[real], expected_entries.keys[expected_real])
        assert_close(entries.values[real], expected_entries.values[expected_real])
    assert torch.equal(state.counts(), expected.counts())
    assert torch.equal(state.lengths, expected.lengths)
    assert_close(state.logits, expected.logits)


def alone(shared: SharedPrompt, method: Method) -> State:
    """The state of a method that shares nothing."""
    return method.start(shared.model, prompt_ids(TOKENS)[0])


@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{type(method).__name__} {vars(method)}"[:40])
def test_each_state_is_that_of_the_method_alone(shared: SharedPrompt, method: Method) -> None:
    compressed = shared.compress(method)
    expected = alone(shared, method)
    assert_same(compressed.state, expected)
    if method.periodic_eviction(shared.model) is not None:  # goes on observing while it decodes
        queries = recorded(compressed.state, "queries")
        expected_queries = recorded(expected, "queries")
        assert [layer.shape for layer in queries] == [layer.shape for layer in expected_queries]
    assert compressed.state.kv_bytes == expected.kv_bytes


def test_the_oracle_observes_with_what_comes(shared: SharedPrompt) -> None:
    for method in (Oracle(16), Oracle(24, allocate=Adaptive(), window=4)):
        with_continuation = replace(method, observer=DraftObserver(FixedDraft(shared.continuation)))
        assert_same(shared.compress(method).state, alone(shared, with_continuation))
    short = Oracle(16, DraftObserver(OwnAnswer(2)))
    assert_same(shared.compress(short).state, alone(shared, short))


def test_seconds_are_split(shared: SharedPrompt) -> None:
    """Nothing is drafted or observed where the prompt is read sparsely, or the budget is above its length."""
    for method in METHODS:
        seconds = shared.compress(method).seconds
        budget = getattr(method, "budget", 0)
        is_sparse = isinstance(method, Evict) and not method.shares_prefill(TOKENS)
        has_drafter = isinstance(method, SpecPC | Truncation | SpecKV | DapQ)
        drafts = has_drafter and budget != 300 and not is_sparse
        observes = isinstance(method, Evict) and budget != 200 and not is_sparse
        shares_prefill = (isinstance(method, CacheMethod) and not is_sparse) or budget == 300
        assert (seconds.draft > 0) == drafts, method
        assert (seconds.observe > 0) == observes, method
        assert (seconds.prefill == 1.5) == shares_prefill, method
        assert (seconds.select > 0) == shares_prefill, method


@dataclass(frozen=True)
class CountingDrafter(Drafter):
    calls: list[int] = field(default_factory=list, compare=False)

    def __call__(self, model: PreTrainedModel, state: State) -> DraftIds:
        self.calls.append(state.length)
        return PromptEnds()(model, state)

    def longest(self) -> int:
        return 32


def test_drafts_and_observations_are_shared(shared: SharedPrompt, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[str] = []
    observe_draft = DraftObserver.__call__

    def recorded_observation(self: DraftObserver, model: PreTrainedModel, state: State, reduce: Reduce) -> list[Tensor]:
        passes.append(reduce.queries)
        return observe_draft(self, model, state, reduce)

    monkeypatch.setattr(DraftObserver, "__call__", recorded_observation)
    fresh = SharedPrompt(shared.model, shared.state, shared.continuation, 0.0)
    drafter = CountingDrafter()
    method = Evict(16, DraftObserver(drafter))
    fresh.compress(method)
    fresh.compress(replace(method, budget=40))
    fresh.compress(replace(method, pool=NO_POOL))
    fresh.compress(replace(method, window=4))
    assert drafter.calls == [TOKENS]
    assert passes == ["mean"]
    fresh.compress(replace(method, reduce=Reduce("max", "max")))
    fresh.compress(replace(method, observer=DraftObserver(drafter, window=4)))
    assert drafter.calls == [TOKENS]
    assert passes == ["mean", "max", "mean"]
    fresh.ranks()
    fresh.compress(Oracle(16))
    assert passes == ["mean", "max", "mean", "mean"]


def slow_recall(shared: SharedPrompt, compressed: Compressed) -> float:
    """By sorting what the answer attends to, head by head; what is kept is found by comparing keys."""
    embeddings = shared.model.get_input_embeddings()(shared.continuation.ids)
    observed = observe(shared.model, shared.state.cache, None, embeddings, observer_mask=shared.continuation.mask)
    counts = compressed.state.counts()
    average = round(counts.float().mean().item())
    recalled = 0
    wanted = 0
    for layer, (importance, full, kept) in enumerate(
        zip(observed, shared.state.entries(), compressed.state.entries(), strict=True)
    ):
        for head in range(2):
            mean = (importance[0, 2 * head] + importance[0, 2 * head + 1]) / 2
            most_attended = mean.argsort(descending=True, stable=True)[:average]
            padding = kept.keys.shape[2] - int(counts[layer, 0, head])
            kept_keys = {tuple(key) for key in kept.keys[0, head, padding:].tolist()}
            for key in full.keys[0, head, most_attended].tolist():
                recalled += tuple(key) in kept_keys
            wanted += average
    return recalled / wanted


def recall_of(shared: SharedPrompt, method: Method) -> float | None:
    return recall(shared.compress(method).kept, shared.ranks())


@pytest.mark.parametrize("method", [AdaKV(24, window=4), PyramidKV(24, window=4), StreamingLLM(8)])
def test_recall_is_the_share_of_what_the_answer_attends_to(shared: SharedPrompt, method: Method) -> None:
    compressed = shared.compress(method)
    measured = recall(compressed.kept, shared.ranks())
    assert measured == pytest.approx(slow_recall(shared, compressed))
    assert measured is not None
    assert 0 < measured < 1


def test_the_oracle_recalls_everything(shared: SharedPrompt) -> None:
    for budget in (1, 16, 0.5, 149, 150, 9999):
        assert recall_of(shared, Oracle(budget, pool=NO_POOL)) == 1.0
    pooled = recall_of(shared, Oracle(16))
    assert pooled is not None
    assert 0.2 < pooled < 1


def test_recall_of_shorter_prompts_is_that_of_their_tokens(shared: SharedPrompt) -> None:
    compressed = shared.compress(Truncation(30))
    assert compressed.kept is not None
    kept = torch.zeros(TOKENS, dtype=torch.bool)
    kept[:15] = kept[-15:] = True
    assert torch.equal(compressed.kept, kept.expand(3, 2, -1))
    truncated = recall(compressed.kept, shared.ranks())
    assert truncated is not None
    assert 0 < truncated < 1
    assert recall_of(shared, Truncation(150)) == 1.0
    cascade = SpecKVPC(40, draft=DRAFT, prompt_budget=60, prompt_window=8, kernel=4)
    assert recall_of(shared, cascade) is None


def test_attention_mass() -> None:
    attention = torch.tensor([[[1.0, 3.0, 4.0, 0.0]]])
    kept = torch.tensor([[[True, False, True, False]]])
    assert attention_mass(kept, attention) == 5 / 8
    assert attention_mass(None, attention) is None
    for factor in (0.0, float("nan"), float("inf")):  # no row of results may hold what comes of these
        assert attention_mass(kept, attention * factor) is None


def test_ranks_put_ties_in_their_order() -> None:
    class Tied(SharedPrompt):
        def _observe(self, *_: Any) -> Any:
            return [torch.tensor([[[1.0, 3.0, 3.0, 0.0]] * 4])] * 3, None

    model = tiny_model()
    ranks = Tied(model, prefill(model, prompt_ids(4)[0]), DraftIds(torch.tensor([[1]])), 0.0).ranks()
    assert ranks.tolist() == [[[2, 0, 1, 3]] * 2] * 3
