"""Predicted importance against the answer's: the measures equal loops over the scores; the answer predicts itself."""

from typing import Any

import pytest
import torch
from scipy.stats import kendalltau
from torch import Tensor

from keepsight.eval.predicted import Predicted, predictions
from keepsight.models.draft_sources import LayerSubset
from keepsight.models.targets import Target
from keepsight.runtime.drafting.observer import DraftObserver
from keepsight.runtime.importance import NO_POOL
from keepsight.runtime.methods import Oracle, SnapKV, SpecPC, StreamingLLM
from keepsight.runtime.methods.drafts import OwnAnswer, SampledAnswer
from keepsight.runtime.state import prefill
from tests.tiny import prompt_ids, tiny_model, tiny_tokenizer

BUDGET = 12
TOKENS = 6


@pytest.fixture(scope="module")
def target():
    return Target(tiny_model(num_hidden_layers=4), tiny_tokenizer(), "tiny", "1")


@pytest.fixture(scope="module")
def prompt() -> Tensor:
    """[1, 50]."""
    ids, _ = prompt_ids(50)
    return ids


def prediction(target: Target, prompt: Tensor, method: Any) -> Predicted:
    """The only row of one method at `BUDGET`."""
    (predicted,) = predictions(target, prompt[0], [("method", method)], [BUDGET], TOKENS)
    return predicted


def test_the_answer_predicts_itself(target, prompt):
    oracle = Oracle(BUDGET, pool=NO_POOL)
    (predicted,) = predictions(target, prompt[0], [("oracle", oracle)], [BUDGET, 99], TOKENS)
    assert predicted.name == "oracle"
    assert predicted.budget == BUDGET, "a budget that holds the prompt has no row"
    for measure in ("recall", "cosine", "correlation", "tau"):
        for values_of_heads in getattr(predicted, measure):
            assert values_of_heads == pytest.approx([1] * len(values_of_heads), abs=1e-4), measure


@torch.no_grad()
def test_measures_are_those_of_loops(target, prompt):
    model = target.model
    method = SnapKV(BUDGET, window=4, pool=NO_POOL)
    predicted = prediction(target, prompt, method)
    state = prefill(model, prompt, needs=method.needs())
    importance = method.importance(model, state)
    attention = DraftObserver(OwnAnswer(TOKENS))(model, state, method.reduce)
    for layer, entries in enumerate(state.entries()):
        kv_heads = entries.keys.shape[1]
        by_kv_head = attention[layer][0].unflatten(0, (kv_heads, -1)).mean(dim=1)
        for head in range(kv_heads):
            scores = importance[layer][0, head]
            most_important = scores.argsort(descending=True, stable=True)[:BUDGET].tolist()
            attended = by_kv_head[head].tolist()
            most_attended = by_kv_head[head].argsort(descending=True, stable=True)[:BUDGET].tolist()
            recall = len(set(most_important) & set(most_attended)) / BUDGET
            mass = sum(attended[index] for index in most_important) / sum(attended)
            assert predicted.recall[layer][head] == pytest.approx(recall, abs=1e-5)
            assert predicted.mass[layer][head] == pytest.approx(mass, abs=1e-4)


@torch.no_grad()
def test_likeness_of_scores_is_that_of_loops(target, prompt):
    sampled = Oracle(BUDGET, DraftObserver(SampledAnswer(temperature=3.0, max_new_tokens=TOKENS)), pool=NO_POOL)
    predicted = prediction(target, prompt, sampled)
    state = prefill(target.model, prompt)
    sampled_scores = sampled.observer(target.model, state, sampled.reduce)
    answer_scores = DraftObserver(OwnAnswer(TOKENS))(target.model, state, sampled.reduce)
    group = sampled_scores[0].shape[1] // len(predicted.tau[0])
    for layer in range(len(predicted.tau)):
        scores = sampled_scores[layer][0, :group].mean(dim=0).double()
        truth = answer_scores[layer][0, :group].mean(dim=0).double()
        tau: Any = kendalltau(scores, truth)
        cosine = (scores @ truth) / (scores.norm() * truth.norm())
        correlation = torch.corrcoef(torch.stack([scores, truth]))[0, 1]
        assert predicted.tau[layer][0] == pytest.approx(tau.statistic, abs=1e-4)
        assert predicted.cosine[layer][0] == pytest.approx(cosine.item(), abs=1e-4)
        assert predicted.correlation[layer][0] == pytest.approx(correlation.item(), abs=1e-4)


def test_a_draft_of_all_layers_scores_as_the_base_model_does(target, prompt):
    all_layers = SpecPC(BUDGET, window=4, draft=LayerSubset((0, 1, 2, 3)), first_layer=0)
    two_layers = SpecPC(BUDGET, window=4, draft=LayerSubset((0, 2)), first_layer=0)
    of_all, of_two = predictions(target, prompt[0], [("all", all_layers), ("two", two_layers)], [BUDGET], TOKENS)
    assert of_all.recall == [[1.0]]
    assert of_all.correlation[0][0] == pytest.approx(1, abs=1e-5)
    assert of_two.correlation[0][0] < 0.9999
    assert len(of_all.points) == 50
    for reference, score in of_all.points:
        assert reference == score


def test_positions_alone_have_a_ranking_too(target, prompt):
    predicted = prediction(target, prompt, StreamingLLM(BUDGET))
    for recall_of_heads in predicted.recall:
        for recall in recall_of_heads:
            assert 0 <= recall <= 1


def test_a_sampled_answer_depends_on_its_seed(target, prompt):
    state = prefill(target.model, prompt)

    def sampled(seed: int) -> list[list[int]]:
        return SampledAnswer(temperature=5.0, seed=seed)(target.model, state).ids.tolist()

    assert sampled(0) == sampled(0)
    assert sampled(0) != sampled(1)
