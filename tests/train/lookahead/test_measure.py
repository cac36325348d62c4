"""Fidelity of predicted importance: recall, Kendall's tau and KL by layer, by hand and against another reckoning."""

import itertools

import pytest
import torch
from torch import Tensor

from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.train.dataset import Batch, collate
from keepsight.train.fidelity import Fidelity
from keepsight.train.importance import ImportanceObjective
from tests.tiny import tiny_model
from tests.train.runs import measured as fidelity_of


class Given(ImportanceObjective):
    """An objective whose importances are given, for as many batches as it is asked."""

    def __init__(self, *answers: tuple[list[Tensor], list[Tensor]]) -> None:
        super().__init__(Lookahead(tiny_model(), LookaheadSettings(tokens=2, rank=2)))
        self.answers = iter(answers)

    def importances(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        return next(self.answers)


def prompts(*lengths: int) -> dict:
    rows = [{"index": 0, "prompt_ids": [5] * length, "answer_ids": [6], "length": length + 1} for length in lengths]
    return collate(rows)


def heads(*rows: list[float]) -> Tensor:
    """[1, 4, N]: two KV heads; the query heads of each see the same."""
    return torch.tensor(rows).repeat_interleave(2, dim=0)[None]


def ranks(count: int, seed: int) -> Tensor:
    """[1, 4, N] of distinct values below 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(count, generator=generator) + 1.0 for _ in range(4)])[None] / (count + 1)


def test_a_perfect_prediction_scores_perfectly():
    layers = [ranks(30, seed) for seed in (1, 2, 3)]
    fidelity = fidelity_of(Given((layers, [layer * 0.5 for layer in layers])), [prompts(30)], budget=8)
    assert fidelity.recall == pytest.approx([1, 1, 1])
    assert fidelity.tau == pytest.approx([1, 1, 1])
    assert fidelity.kl == pytest.approx([0, 0, 0], abs=1e-6)


def test_the_opposite_order_scores_worst():
    layer = heads([0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1])
    fidelity = fidelity_of(Given(([layer], [0.5 - layer])), [prompts(4)], budget=2)
    assert (fidelity.recall, fidelity.tau) == ([0.0], pytest.approx([-1.0]))


def test_recall_and_tau_by_hand():
    """Of the true top 2, {0, 1} and {2, 3}, the prediction keeps 0 and 3; pairs in the wrong order: 2 and 1 of 6."""
    target = heads([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4])
    predicted = heads([0.4, 0.1, 0.3, 0.2], [0.1, 0.3, 0.2, 0.4])
    fidelity = fidelity_of(Given(([target], [predicted])), [prompts(4)], budget=2)
    assert fidelity.recall == [pytest.approx((1 / 2 + 1 / 2) / 2)]
    assert fidelity.tau == [pytest.approx(((6 - 2 * 2) / 6 + (6 - 2 * 1) / 6) / 2)]


def test_query_heads_are_averaged_before_entries_are_ranked():
    """Each query head of a KV head prefers another entry; their mean prefers a third."""
    target = torch.tensor([[[0.5, 0.0, 0.4], [0.0, 0.5, 0.4]] * 2])
    predicted = torch.tensor([[[0.1, 0.1, 0.7]] * 4])
    fidelity = fidelity_of(Given(([target], [predicted])), [prompts(3)], budget=1)
    assert fidelity.recall == [1.0]


def test_tau_counts_concordant_pairs():
    target, predicted = ranks(12, 1), ranks(12, 2)
    fidelity = fidelity_of(Given(([target], [predicted])), [prompts(12)], budget=3)
    taus = []
    for true, guess in zip(*(each.view(2, 2, 12).mean(1) for each in (target, predicted)), strict=True):
        signs = [
            ((true[a] - true[b]).sign() * (guess[a] - guess[b]).sign()).item()
            for a, b in itertools.combinations(range(12), 2)
        ]
        ties = [
            sum((each[a] == each[b]).item() for a, b in itertools.combinations(range(12), 2)) for each in (true, guess)
        ]
        taus.append(sum(signs) / ((66 - ties[0]) * (66 - ties[1])) ** 0.5)
    assert fidelity.tau == [pytest.approx(sum(taus) / 2, abs=1e-6)]


def test_padding_does_not_count():
    """A padded batch of two measures what its rows measure alone; their mean is over samples, not over batches."""
    rows = [[(ranks(size, seed), ranks(size, seed + 9)) for seed in (1, 2)] for size in (30, 12, 21)]
    single = [Given(([true for true, _ in row], [guess for _, guess in row])) for row in rows]
    alone = [
        fidelity_of(given, [prompts(row[0][0].shape[-1])], budget=5) for given, row in zip(single, rows, strict=True)
    ]

    def padded(which: int) -> list[Tensor]:
        pad = torch.zeros(1, 4, 18)
        return [torch.cat([rows[0][layer][which], torch.cat([pad, rows[1][layer][which]], -1)]) for layer in (0, 1)]

    third = ([true for true, _ in rows[2]], [guess for _, guess in rows[2]])
    together = fidelity_of(Given((padded(0), padded(1)), third), [prompts(30, 12), prompts(21)], budget=5)
    for name in ("kl", "recall", "tau"):
        expected = torch.tensor([getattr(each, name) for each in alone]).mean(dim=0).tolist()
        assert getattr(together, name) == pytest.approx(expected, abs=1e-6)


def test_a_prompt_no_longer_than_the_budget_counts_as_recalled():
    given = Given(([ranks(6, 1)], [ranks(6, 2)]))
    assert fidelity_of(given, [prompts(6)], budget=64).recall == [1.0]


def test_ties_are_broken_alike_on_both_sides():
    level = torch.full((1, 4, 10), 0.05)
    assert fidelity_of(Given(([level], [level.clone()])), [prompts(10)], budget=4).recall == [1.0]


def test_a_level_prediction_has_a_finite_tau():
    """Importance that underflows or is uniform has no ranking: tau must not poison the mean with NaN."""
    fidelity = fidelity_of(Given(([ranks(10, 1)], [torch.full((1, 4, 10), 0.05)])), [prompts(10)], budget=4)
    assert fidelity.tau == [0.0]


def test_measuring_leaves_no_gradient_and_the_lora_on():
    torch.manual_seed(0)
    objective = ImportanceObjective(Lookahead(tiny_model(), LookaheadSettings(tokens=2, rank=2)))
    fidelity = fidelity_of(objective, [prompts(12), prompts(9, 5)], budget=4)
    assert all(0 <= value <= 1 for value in fidelity.recall)
    assert all(-1 <= value <= 1 for value in fidelity.tau)
    assert (len(fidelity.kl), min(fidelity.kl) > 0) == (3, True)
    assert all(weight.grad is None for weight in objective.parameters())
    assert any(".lora_" in name and weight.requires_grad for name, weight in objective.named_parameters())


def test_metrics_are_means_over_layers_under_the_names_that_are_logged():
    fidelity = Fidelity(kl=[1.0, 3.0], recall=[0.5, 0.7], tau=[0.0, -0.5])
    assert fidelity.metrics() == {
        **{"eval_kl": 2.0, "eval_recall": pytest.approx(0.6), "eval_tau": -0.25},
        "eval_kl_by_layer": [1.0, 3.0],
        "eval_recall_by_layer": [0.5, 0.7],
        "eval_tau_by_layer": [0.0, -0.5],
    }
