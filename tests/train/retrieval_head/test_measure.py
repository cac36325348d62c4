"""What is measured of a retrieval head, against sets and loops."""

import pytest
import torch

from keepsight.train.dataset import SampleDataset, collate
from keepsight.train.retrieval_head import MEASURES, at_budget, measure_retrieval_head
from tests.models.retrieval_heads import tiny_retrieval_head
from tests.tiny import tiny_model
from tests.train.retrieval_head.heads import objective_of
from tests.train.runs import samples


def causal(kv_heads, rows, length, seed):
    """Random weights of the last `rows` of `length` tokens, that add up to 1."""
    torch.manual_seed(seed)
    logits = torch.randn(kv_heads, rows, length)
    hidden = torch.ones(rows, length).bool().triu(length - rows + 1)
    return logits.masked_fill(hidden, -torch.inf).softmax(-1)


def top(weights, budget):
    order = sorted(range(len(weights)), key=lambda place: -weights[place])
    return set(order[:budget])


def slow(target, guess, budget):
    """The measures by sets, step by step."""
    kv_heads, rows, length = target.shape
    found: dict[str, list[float]] = {name: [] for name in MEASURES}
    for head in range(kv_heads):
        before = None
        for row in range(rows):
            last = length - rows + row
            if last + 1 <= budget:
                continue
            true, chosen = top(target[head, row].tolist(), budget), top(guess[head, row].tolist(), budget)
            window = {*range(min(4, budget)), *range(last, last - max(budget - 4, 0), -1)}
            found["hit"].append(len(true & chosen) / budget)
            found["window_hit"].append(len(true & window) / budget)
            found["mass"].append(sum(target[head, row, place].item() for place in chosen))
            found["window_mass"].append(sum(target[head, row, place].item() for place in window))
            found["best_mass"].append(sum(target[head, row, place].item() for place in true))
            if before is not None:
                found["overlap"].append(len(before & chosen) / budget)
            before = chosen
    return {name: sum(values) / len(values) for name, values in found.items() if values}


@pytest.mark.parametrize(("rows", "budget"), [(6, 5), (30, 7), (30, 3), (6, 29), (30, 30)])
def test_measures_are_those_of_sets(rows, budget):
    target, guess = causal(2, rows, 30, 0), causal(2, rows, 30, 1)
    assert at_budget(target, guess, budget) == pytest.approx(slow(target, guess, budget), rel=1e-4)


def test_a_head_that_is_right_finds_everything():
    target = causal(2, 10, 30, 0)
    measured = at_budget(target, target.log(), 6)
    assert measured["hit"] == 1
    assert measured["mass"] == measured["best_mass"]


def test_samples_within_the_budget_do_not_count():
    target = causal(2, 10, 30, 0)
    assert at_budget(target, target, 30) == at_budget(target, target, 64) == {}
    assert set(at_budget(target, target, 29)) == set(MEASURES) - {"overlap"}


@pytest.mark.parametrize("size", [1, 3])
def test_batches_measure_what_single_samples_do(size):
    objective = objective_of(tiny_retrieval_head(), tiny_model(), 6).train()
    rows = SampleDataset(samples(6))
    batches = [collate([rows[place] for place in range(start, start + size)]) for start in range(0, 6, size)]
    metrics = measure_retrieval_head(objective, batches, [4, 30, 500])
    assert (metrics["eval_samples_4"], metrics["eval_samples_30"]) == (6, 1)
    assert "eval_hit_500" not in metrics
    single = measure_retrieval_head(objective, [collate([rows[place]]) for place in range(6)], [4, 30, 500])
    assert metrics == pytest.approx(single, rel=1e-4)
    assert objective.training and objective.head.training


def test_scores_that_are_no_numbers_are_refused():
    objective = objective_of(tiny_retrieval_head(), tiny_model(), 6)
    with torch.no_grad():
        objective.head.q_proj.weight[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="scores of held-out samples are not finite"):
        measure_retrieval_head(objective, [collate([SampleDataset(samples(1))[0]])], [4])
