"""Predicted importance against the answer's: the measures equal loops over the scores; the answer predicts itself."""

import math
from typing import Any

import pytest
import torch
from scipy.stats import kendalltau

from keepsight.eval.predicted import predictions
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


def test_the_answer_predicts_itself(target):
    (found,) = predictions(
        target, prompt_ids(50)[0][0], [("oracle", Oracle(BUDGET, pool=NO_POOL))], [BUDGET, 99], TOKENS
    )
    assert (found.name, found.budget) == ("oracle", BUDGET), "a budget that holds the prompt has no row"
    for measure in ("recall", "cosine", "correlation", "tau"):
        assert all(value == pytest.approx(1, abs=1e-4) for layer in getattr(found, measure) for value in layer), measure


@torch.no_grad()
def test_measures_are_those_of_loops(target):
    model = target.model
    prompt = prompt_ids(50)[0]
    method = SnapKV(BUDGET, window=4, pool=NO_POOL)
    (found,) = predictions(target, prompt[0], [("snapkv", method)], [BUDGET], TOKENS)
    state = prefill(model, prompt, needs=method.needs())
    importance = method.importance(model, state)
    own = OwnAnswer(TOKENS)
    answered = DraftObserver(own)(model, state, method.reduce)
    for layer, entries in enumerate(state.entries()):
        kv_heads = entries.keys.shape[1]
        group = answered[layer].shape[1] // kv_heads
        for head in range(kv_heads):
            truth = answered[layer][0, head * group : (head + 1) * group].mean(dim=0).tolist()
            ranked = sorted(range(50), key=lambda index: (-importance[layer][0, head, index].item(), index))[:BUDGET]
            wanted = sorted(range(50), key=lambda index: (-truth[index], index))[:BUDGET]
            assert found.recall[layer][head] == pytest.approx(len({*ranked} & {*wanted}) / BUDGET, abs=1e-5)
            mass = sum(truth[index] for index in ranked) / sum(truth)
            assert found.mass[layer][head] == pytest.approx(mass, abs=1e-4)


@torch.no_grad()
def test_likeness_of_scores_is_that_of_loops(target):
    prompt = prompt_ids(50)[0]
    observed = Oracle(BUDGET, DraftObserver(SampledAnswer(temperature=3.0, max_new_tokens=TOKENS)), pool=NO_POOL)
    (found,) = predictions(target, prompt[0], [("sampled", observed)], [BUDGET], TOKENS)
    state = prefill(target.model, prompt)
    sampled = observed.observer(target.model, state, observed.reduce)
    own = DraftObserver(OwnAnswer(TOKENS))(target.model, state, observed.reduce)
    group = sampled[0].shape[1] // len(found.tau[0])
    for layer in range(len(found.tau)):
        scores = sampled[layer][0, :group].mean(dim=0).double()
        truth = own[layer][0, :group].mean(dim=0).double()
        result: Any = kendalltau(scores, truth)
        assert found.tau[layer][0] == pytest.approx(result.statistic, abs=1e-4)
        product = float((scores * truth).sum())
        norms = math.sqrt(float((scores**2).sum()) * float((truth**2).sum()))
        assert found.cosine[layer][0] == pytest.approx(product / norms, abs=1e-4)
        assert found.correlation[layer][0] == pytest.approx(
            float(torch.corrcoef(torch.stack([scores, truth]))[0, 1]), abs=1e-4
        )


def test_a_draft_of_all_layers_scores_as_the_base_model_does(target):
    whole = SpecPC(BUDGET, window=4, draft=LayerSubset((0, 1, 2, 3)), first_layer=0)
    part = SpecPC(BUDGET, window=4, draft=LayerSubset((0, 2)), first_layer=0)
    found = predictions(target, prompt_ids(50)[0][0], [("whole", whole), ("part", part)], [BUDGET], TOKENS)
    same, other = found
    assert same.recall == [[1.0]] and same.correlation[0][0] == pytest.approx(1, abs=1e-5)
    assert other.correlation[0][0] < 0.9999
    assert all(reference == score for reference, score in same.points) and len(same.points) == 50


def test_positions_alone_have_a_ranking_too(target):
    (found,) = predictions(target, prompt_ids(50)[0][0], [("streamingllm", StreamingLLM(BUDGET))], [BUDGET], TOKENS)
    assert all(0 <= value <= 1 for layer in found.recall for value in layer)


def test_a_sampled_answer_depends_on_its_seed(target):
    state = prefill(target.model, prompt_ids(50)[0])
    drafts = [SampledAnswer(temperature=5.0, seed=seed)(target.model, state).ids for seed in (0, 0, 1)]
    assert drafts[0].tolist() == drafts[1].tolist() != drafts[2].tolist()
