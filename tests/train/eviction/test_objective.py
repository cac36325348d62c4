"""The loss and the measurement of heads' weights, against models that hold the selected entries alone."""

from dataclasses import replace

import pytest
import torch

from keepsight.errors import UserError
from keepsight.runtime.allocate import Global
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import NO_POOL
from keepsight.runtime.methods.positions import RandomScores
from keepsight.runtime.state import read
from keepsight.train.dataset import Batch
from keepsight.train.eviction import EvictionObjective
from keepsight.train.replay import ReplayBuffer
from keepsight.train.settings import FinetuneSettings, ReplaySettings
from tests.close import assert_close
from tests.families import family_model
from tests.tiny import tiny_model
from tests.train.lookahead.test_objective import batch_of, samples

METHOD = Evict(1, RandomScores(seed=5), pool=NO_POOL)
SETTINGS = FinetuneSettings(budgets=[12])
FAMILIES = ["Llama 3", "Gemma 3 (text)", "GPT-OSS", "Qwen3-Next"]


def objective(model, budgets: tuple[int, ...] = (12,), floor: float = 0.25) -> EvictionObjective:
    made = EvictionObjective(model, METHOD, Global(floor), FinetuneSettings(budgets=[*budgets]))
    torch.manual_seed(2)
    with torch.no_grad():
        made.log_weights.normal_()
    return made


def nats(model, method: Evict, batch: Batch) -> torch.Tensor:
    """Of each sample alone: the cross-entropy of its answer after the first token, from a state as methods make it."""
    losses = []
    for prompt, answer in batch_rows(batch):
        with torch.no_grad():
            state = method.start(model, prompt[None])
            logits = read(model, state, answer[None, :-1], logits_to_keep=len(answer) - 1)[1]
        losses.append(torch.nn.functional.cross_entropy(logits[0].float(), answer[1:]))
    return torch.stack(losses)


def batch_rows(batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pairs = zip(batch.prompt_ids, batch.prompt_lengths(), batch.answer_ids, batch.answer_lengths(), strict=True)
    return [(prompt[-n:], answer[:t]) for prompt, n, answer, t in pairs]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_measured_is_what_the_method_costs(family):
    """In a padded batch, each row as alone; a prompt within the budget loses nothing."""
    model = family_model(family)
    made, batch = objective(model, (12, 30)), Batch(**batch_of(samples((40, 5), (25, 9))))
    weights = tuple(map(tuple, made.head_weights().tolist()))
    full = nats(model, replace(METHOD, budget=200), batch)
    measured = made.excess_nll(batch)
    for budget in (12, 30):
        method = replace(METHOD, budget=budget, allocate=Global(0.25, weights))
        assert_close(torch.tensor(measured[budget]) + full, nats(model, method, batch))
    assert abs(measured[12][0]) > 1e-4
    assert measured[30][1] == pytest.approx(0, abs=1e-5)


def test_the_weights_decide_what_is_measured():
    model, batch = tiny_model(), Batch(**batch_of(samples((40, 9))))
    made = objective(model)
    first = made.excess_nll(batch)[12]
    with torch.no_grad():
        made.log_weights.mul_(-1)
    assert made.excess_nll(batch)[12] != first
    with torch.no_grad():
        made.log_weights.add_(3)
    assert made.head_weights().log().mean().item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_has_the_mean_loss_of_its_rows(family):
    rows = samples((40, 5), (25, 9), (33, 7))
    made = objective(family_model(family))
    loss = made(**batch_of(rows))["loss"]
    alone = torch.stack([made(**batch_of([row]))["loss"] for row in rows])
    assert loss.item() > 1e-3
    assert_close(loss, alone.mean())


@pytest.mark.parametrize("lengths", [(40, 20), (40, 5)])
def test_a_row_within_the_budget_or_its_floor_is_read_as_alone(lengths):
    made = objective(tiny_model(), (30,), floor=0.8)
    rows = samples(*((prompt, 6) for prompt in lengths))
    alone = torch.stack([made(**batch_of([row]))["loss"] for row in rows])
    assert alone[1] == 0 and alone[0] > 1e-4
    assert_close(made(**batch_of(rows))["loss"], alone.mean())


def test_answers_of_one_token_cost_nothing():
    made = objective(tiny_model(), (12, 30))
    assert made.excess_nll(Batch(**batch_of(samples((40, 1), (25, 1))))) == {12: [0.0, 0.0], 30: [0.0, 0.0]}


def test_the_target_stays_in_evaluation_mode_and_weights_go_on_where_they_were():
    start = tuple((1.0, 2.0) for _ in range(3))
    made = EvictionObjective(tiny_model(), METHOD, Global(0.25, start), SETTINGS).train()
    assert made.training and not made.model.training
    assert torch.allclose(made.head_weights()[:, 1] / made.head_weights()[:, 0], torch.tensor(2.0))
    with pytest.raises(UserError, match=r"weights of heads have shape \[1, 2\], this model's is \[3, 2\]$"):
        EvictionObjective(tiny_model(), METHOD, Global(0.25, start[:1]), SETTINGS)
    with pytest.raises(UserError, match=r"budget 2 with floor 0\.25 can leave a head without entries"):
        EvictionObjective(tiny_model(), METHOD, Global(0.25), FinetuneSettings(budgets=[2]))


def test_only_the_weights_learn_and_the_loss_falls():
    model = tiny_model()
    made = objective(model)
    batch = batch_of(samples((40, 9), (37, 6)))
    assert [name for name, each in made.named_parameters() if each.requires_grad] == ["log_weights"]
    optimizer = torch.optim.Adam([made.log_weights], lr=0.1)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = made(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert made.log_weights.shape == (3, 2)


def test_a_kept_reading_gives_the_fresh_loss():
    made, batch = objective(tiny_model()), batch_of(samples((40, 9)))
    fresh = made(**batch)["loss"]
    with ReplayBuffer(ReplaySettings(dtype="int8")) as buffer:
        made.buffer = buffer
        kept = [made(**batch | {"indices": [4], "turn": turn, "last": turn == 1})["loss"] for turn in (0, 1)]
    assert kept[0] == kept[1]
    assert kept[0].item() == pytest.approx(fresh.item(), rel=0.05)


@pytest.mark.parametrize("lengths", [(10, 5), (40, 1)])
def test_where_nothing_can_be_learned_the_loss_is_zero(lengths):
    made = objective(tiny_model())
    loss = made(**batch_of(samples(lengths)))["loss"]
    loss.backward()
    assert loss.item() == 0 and made.log_weights.grad is not None and not made.log_weights.grad.any()


def test_samples_and_turns_decide_on_the_budget():
    batch = batch_of(samples((40, 9)))
    single = {budget: objective(tiny_model(), (budget,))(**batch)["loss"].item() for budget in (12, 30)}
    made = objective(tiny_model(), (12, 30))
    losses = [made(**batch | {"indices": [4], "turn": turn})["loss"].item() for turn in (*range(8), *range(8))]
    assert losses[:8] == losses[8:] and {*losses} == {*single.values()}


def test_latents_are_refused():
    with pytest.raises(UserError, match=r"deepseek_v3 caches latents: heads that share a budget need keys and values$"):
        objective(family_model("DeepSeek-V3"))


def test_the_methods_own_budget_and_allocation_do_not_matter():
    batch = batch_of(samples((40, 9)))
    losses = []
    for method in (METHOD, replace(METHOD, budget=30, allocate=Global(0.5))):
        made = objective(tiny_model())
        made.method = method
        losses.append(made(**batch)["loss"].item())
    assert losses[0] == losses[1]
