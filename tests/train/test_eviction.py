"""The soft selection, the loss that eviction causes, and training with it, against methods that evict."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributions import Categorical, kl_divergence
from transformers import AutoConfig, AutoModelForCausalLM

from keepsight import LookaheadKV
from keepsight.data_gen.store import TrainingSample
from keepsight.models.card import Provenance
from keepsight.models.decoder import decoder_of, logits_of
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.runtime.allocate import Global, Uniform
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import NO_POOL, Pool, Reduce
from keepsight.runtime.methods import make_method
from keepsight.runtime.methods.lookaheadkv import adapter_fields
from keepsight.runtime.methods.positions import RandomScores
from keepsight.runtime.observe import Observer
from keepsight.runtime.state import State, prefill, read
from keepsight.train.dataset import Batch
from keepsight.train.eviction import EvictionObjective, soft_gates
from keepsight.train.replay import ReplayBuffer
from keepsight.train.settings import FinetuneSettings, ReplaySettings, TrainSettings
from keepsight.train.trainer import ModuleTrainer, TrainingRun
from tests.close import assert_close
from tests.devices import FIRST, in_halves, several_devices
from tests.families import FAMILIES as ALL_FAMILIES
from tests.families import SMALL, family_model
from tests.refused import refused
from tests.tiny import prompt_ids, tiny_model
from tests.train.runs import at_batch, batch_of, crash, same, samples_of_lengths

SHAPE = (3, 2, 2, 50)  # layers, rows, KV heads, entries


def scores(seed: int = 0) -> torch.Tensor:
    """Logarithms of importance."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * 2


def gates_of(scores: torch.Tensor, budget: int, floor: float, temperature: float, real=None) -> torch.Tensor:
    """The logarithms of gates for logarithms of importance, with equal weights of heads."""
    importance = scores.exp()
    if real is not None:
        importance = importance.masked_fill(~real, -torch.inf)
    return soft_gates(importance, torch.zeros(3, 2), budget, floor, temperature)


def as_head_weights(weights: torch.Tensor) -> tuple[tuple[float, ...], ...]:
    """Weights [layers, heads] in the form of `Global`."""
    return tuple(map(tuple, weights.tolist()))


@pytest.mark.parametrize(("floor", "temperature"), [(0.0, 0.1), (0.2, 0.5), (0.2, 2.0), (1.0, 0.5)])
def test_the_gates_of_a_row_sum_to_the_budget(temperature, floor):
    budget = 10
    gates = gates_of(scores(), budget, floor, temperature).exp()
    assert ((gates >= 0) & (gates <= 1)).all()
    tolerance = 0.05 + (60 * temperature if floor == 1 else 0)
    sums_of_rows = gates.sum(dim=(0, 2, 3)).tolist()
    assert sums_of_rows == pytest.approx([60, 60], abs=tolerance)
    guaranteed = int(budget * floor)
    assert ((gates == 1).sum(dim=-1) >= guaranteed).all()


class Plateaus(Observer):
    """Few different scores, so that pooling makes plateaus, which budgets cut through."""

    def __call__(self, model: Any, state: State, reduce: Reduce) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(4)
        return list(torch.randint(1, 9, SHAPE, generator=generator).float() / 8)


@pytest.mark.parametrize("pooling", [Pool("max", 7), Pool("avg", 3), NO_POOL])
@pytest.mark.parametrize(
    ("budget", "floor", "weighted", "window"),
    [(10, 0.1, False, 0), (11, 0.3, True, 0), (7, 1.0, False, 0), (11, 0.5, True, 3), (10, 0.1, True, 4)],
)
def test_at_temperature_0_the_gates_are_what_an_eviction_keeps(pooling, budget, floor, weighted, window):
    """Index for index, also of equal entries and beside padding; at a low temperature where none are equal."""
    log_weights = torch.zeros(3, 2)
    weights = None
    if weighted:
        log_weights = torch.randn(3, 2, generator=torch.Generator().manual_seed(5))
        weights = as_head_weights(log_weights.exp())
    method = Evict(budget, Plateaus(), pool=pooling, allocate=Global(floor, weights), window=window)
    with torch.no_grad():
        state = prefill(tiny_model(), *prompt_ids(50, 37))
        layer_importance = method.importance(tiny_model(), state)
        kept = torch.stack(method.select(state, layer_importance))
        importance = torch.stack(layer_importance)
    kept_of_padded_row = kept[:, 1]
    assert kept_of_padded_row.sum() == budget * 6
    assert not kept_of_padded_row[:, :, :13].any()

    gates = soft_gates(importance, log_weights, budget, floor, temperature=0.0).exp()
    assert torch.equal(gates, kept.float())

    untied = torch.where(importance.isinf(), importance, scores().exp())
    soft = soft_gates(untied, log_weights, budget, floor, temperature=1e-3).exp()
    hard = soft_gates(untied, log_weights, budget, floor, temperature=0.0).exp()
    assert torch.equal(soft > 0.5, hard > 0.5)

    guaranteed = soft_gates(importance, log_weights, budget, floor, temperature=0.5) == 0
    assert (guaranteed <= kept).all()
    assert (guaranteed.sum(dim=-1) >= max(int(budget * floor), window)).all()


@pytest.mark.parametrize(
    ("budget", "floor", "padding", "temperature"),
    [(10, 0.2, 20, 0.5), (10, 0.2, 42, 50.0), (30, 0.9, 40, 0.5), (60, 1.0, 40, 50.0)],
)
def test_a_padded_row_has_the_gates_of_the_row_alone(budget, floor, padding, temperature):
    """Also where it has fewer entries than the budget, or than the floor promises: then it keeps them all."""
    row_padding = torch.tensor([0, padding])[None, :, None, None]
    real = (torch.arange(50) >= row_padding).expand(SHAPE)
    gates = gates_of(scores(), budget, floor, temperature, real)
    first_alone = gates_of(scores()[:, :1], budget, floor, temperature)
    second_alone = gates_of(scores()[:, 1:, :, padding:], budget, floor, temperature)
    assert not gates[:, 1, :, :padding].exp().any()
    assert_close(gates[:, 0].exp(), first_alone[:, 0].exp())
    assert_close(gates[:, 1, :, padding:].exp(), second_alone[:, 0].exp())
    if 50 - padding <= budget:
        assert (gates[:, 1, :, padding:] == 0).all()


def test_gradients_are_those_of_the_gates_with_the_threshold_that_moves():
    """Against central differences, for which each threshold is searched again."""
    factors = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def weighted_sum(log_weights: torch.Tensor) -> torch.Tensor:
        gates = soft_gates(scores().double().exp(), log_weights, 10, 0.2, 0.5).exp()
        return (gates * factors).sum()

    log_weights = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    weighted_sum(log_weights).backward()
    gradient = log_weights.grad
    assert gradient is not None
    for layer, head in np.ndindex(3, 2):
        step = torch.zeros_like(log_weights)
        step[layer, head] = 1e-4
        with torch.no_grad():
            expected = (weighted_sum(step) - weighted_sum(-step)) / 2e-4
        assert gradient[layer, head].item() == pytest.approx(expected.item(), abs=2e-3)
    assert gradient.sum().item() == pytest.approx(0, abs=1e-3), "a shift of all scores selects nothing else"


METHOD = Evict(1, RandomScores(seed=5), pool=NO_POOL)
SETTINGS = FinetuneSettings(budgets=[12])
FAMILIES = ["Llama 3", "Gemma 3 (text)", "GPT-OSS", "Qwen3-Next", "Inkling"]


def weights_objective(model, budgets: tuple[int, ...] = (12,), floor: float = 0.25) -> EvictionObjective:
    """An objective that trains random head weights alone."""
    objective = EvictionObjective(model, METHOD, Global(floor), FinetuneSettings(budgets=[*budgets]))
    torch.manual_seed(2)
    with torch.no_grad():
        objective.log_weights.normal_()
    return objective


@torch.no_grad()
def answer_logits(model, method: Evict, samples: list[TrainingSample]) -> Iterator[torch.Tensor]:
    """For each sample alone, logits [T - 1, V] of its answer after the first token, from a state as methods make it."""
    for sample in samples:
        state = method.start(model, torch.tensor([sample.prompt_ids]))
        answer = torch.tensor([sample.answer_ids[:-1]])
        _, logits = read(model, state, answer, logits_to_keep=answer.shape[1])
        yield logits[0].float()


def answer_nats(model, method: Evict, samples: list[TrainingSample]) -> torch.Tensor:
    """The cross-entropies of the samples' answers."""
    losses = []
    for sample, logits in zip(samples, answer_logits(model, method, samples), strict=True):
        targets = torch.tensor(sample.answer_ids[1:])
        losses.append(torch.nn.functional.cross_entropy(logits, targets))
    return torch.stack(losses)


@pytest.mark.parametrize("lengths", [(40, 20)])
def test_a_row_within_the_budget_or_its_floor_is_read_as_alone(lengths):
    objective = weights_objective(tiny_model(), (30,), floor=0.8)
    samples = samples_of_lengths(*((prompt, 6) for prompt in lengths))
    losses_alone = torch.stack([objective(**batch_of([sample]))["loss"] for sample in samples])
    assert losses_alone[1] == 0
    assert losses_alone[0] > 1e-4
    batch_loss = objective(**batch_of(samples))["loss"]
    assert_close(batch_loss, losses_alone.mean())


def test_the_target_stays_in_evaluation_mode_and_weights_go_on_where_they_were():
    weights = tuple((1.0, 2.0) for _ in range(3))
    objective = EvictionObjective(tiny_model(), METHOD, Global(0.25, weights), SETTINGS).train()
    assert objective.training
    assert not objective.model.training
    ratios = objective.head_weights()[:, 1] / objective.head_weights()[:, 0]
    assert torch.allclose(ratios, torch.tensor(2.0))
    with refused("head_weights", "model"):
        EvictionObjective(tiny_model(), METHOD, Global(0.25, weights[:1]), SETTINGS)
    with refused("budget", "range"):
        EvictionObjective(tiny_model(), METHOD, Global(0.25), FinetuneSettings(budgets=[2]))


def test_samples_and_turns_decide_on_the_budget():
    batch = batch_of(samples_of_lengths((40, 9)))
    losses_of_budgets = set()
    for budget in (12, 30):
        objective = weights_objective(tiny_model(), (budget,))
        losses_of_budgets.add(objective(**batch)["loss"].item())

    objective = weights_objective(tiny_model(), (12, 30))

    def losses_of_turns() -> list[float]:
        return [objective(**batch | {"indices": [4], "turn": turn})["loss"].item() for turn in range(8)]

    losses = losses_of_turns()
    assert set(losses) == losses_of_budgets
    assert losses_of_turns() == losses


def test_without_a_floor_every_head_has_the_budget_and_gradients_to_its_scores_alone():
    """Against gates of one head alone, and central differences of its scores."""
    importance = scores().double().exp().requires_grad_()
    log_weights = torch.ones(3, 2, requires_grad=True)
    gates = soft_gates(importance, log_weights, 10, None, 0.5)
    sums_of_heads = gates.exp().sum(dim=-1).flatten().tolist()
    assert sums_of_heads == pytest.approx([10.0] * 12, abs=1e-6)

    one_head = importance[:1, :1, :1].detach()
    gates_alone = soft_gates(one_head, log_weights[:1, :1].detach(), 10, 0.0, 0.5)
    assert_close(gates[:1, :1, :1], gates_alone)

    factors = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((gates.exp() * factors).sum(), importance)
    for entry in [(0, 0, 0, 3), (2, 1, 1, 49)]:
        sums = []
        for step in (1e-4, -1e-4):
            moved = importance.detach().clone()
            moved[entry] += step
            moved_gates = soft_gates(moved, log_weights, 10, None, 0.5)
            sums.append((moved_gates.exp() * factors).sum().item())
        expected = (sums[0] - sums[1]) / 2e-4
        assert gradient[entry].item() == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_a_coin_per_batch_trains_for_both_selections():
    """Its side is the seed's, the samples' and the turn's; uniform batches move no weight of a head."""
    objective = module_objective(tiny_model())
    batch = batch_of(samples_of_lengths((40, 9)))
    share_of_loss = {}
    for share in (0.0, 1.0):
        objective.settings = replace(objective.settings, uniform_share=share)
        share_of_loss[objective(**batch)["loss"].item()] = share
    assert len(share_of_loss) == 2

    def tosses() -> list[float]:
        """For each turn, the share that its loss belongs to."""
        losses = [objective(**batch | {"turn": turn})["loss"].item() for turn in range(12)]
        return [share_of_loss[loss] for loss in losses]

    objective.settings = replace(objective.settings, uniform_share=0.5)
    sides = tosses()
    assert set(sides) == {0.0, 1.0}
    assert tosses() == sides

    uniform_turn = sides.index(1.0)
    objective(**batch | {"turn": uniform_turn})["loss"].backward()
    weights_gradient = objective.log_weights.grad
    assert weights_gradient is not None
    assert not weights_gradient.any()
    assert objective.lookahead is not None
    tokens_gradient = objective.lookahead.tokens.grad
    assert tokens_gradient is not None
    assert tokens_gradient.any()

    objective.settings = FinetuneSettings(budgets=[12], uniform_share=0.5, train=TrainSettings(seed=3))
    assert tosses() != sides
    with refused("finetune.freeze_module", "conflict"):
        EvictionObjective(tiny_model(), METHOD, Uniform(), SETTINGS)


def test_latents_are_refused():
    with refused("model", "model"):
        weights_objective(family_model("DeepSeek-V3"))


MODULE = LookaheadSettings(tokens=4, rank=2, alpha=8, queries="max", kernel=1, pooling="avg", floor=0.25)
STEP = 3e-3


def module_objective(model, budgets: tuple[int, ...] = (12,)) -> EvictionObjective:
    """An objective that trains a random lookahead module and the head weights."""
    torch.manual_seed(7)
    lookahead = Lookahead(model, MODULE)
    assert lookahead.lora is not None
    with torch.no_grad():
        for weight in lookahead.lora.parameters():  # LoRA begins with B = 0, where A has no gradient
            weight.normal_(std=0.2)
    method = Evict(1, RandomScores(seed=0), reduce=Reduce("max"), value_norm=True, pool=NO_POOL)
    settings = FinetuneSettings(budgets=[*budgets], head_weights_rate=0.1)
    return EvictionObjective(model, method, Global(0.25), settings, lookahead)


def trained_parameters(objective: EvictionObjective) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in objective.named_parameters() if weight.requires_grad}


def flat_gradient(objective: EvictionObjective) -> torch.Tensor:
    """The gradients of everything that learns, as one vector; 0 where there is none."""
    gradients = []
    for weight in trained_parameters(objective).values():
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        gradients.append(gradient.flatten())
    return torch.cat(gradients)


def mean_divergence(expected: Iterator[torch.Tensor], actual: Iterator[torch.Tensor]) -> torch.Tensor:
    """Over samples, the mean KL divergence of next-token distributions, given the logits of each."""
    divergences = []
    for expected_logits, actual_logits in zip(expected, actual, strict=True):
        divergence = kl_divergence(Categorical(logits=expected_logits), Categorical(logits=actual_logits))
        divergences.append(divergence.mean())
    return torch.stack(divergences).mean()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_measured_is_what_evicting_with_the_module_costs(family):
    """And, at temperature 0, so is the loss; pooling makes plateaus that the budgets cut through."""
    model = family_model(family)
    samples = samples_of_lengths((40, 5), (25, 9))
    objective = module_objective(model, (12, 30))
    objective.method = replace(objective.method, pool=Pool("max", 7))
    floors = [0.25, None]
    with torch.no_grad():
        excess = objective.excess_nll(Batch(**batch_of(samples)), floors)
    full_cache = replace(objective.method, budget=200)
    full_nats = answer_nats(model, full_cache, samples)

    shared = Global(0.25, as_head_weights(objective.head_weights()))
    for position, (allocate, uniform_share) in enumerate([(shared, 0.0), (Uniform(), 1.0)]):
        for budget in (12, 30):
            method = replace(full_cache, budget=budget, allocate=allocate)
            excess_of_samples = torch.tensor(excess[budget][position])
            assert_close(excess_of_samples + full_nats, answer_nats(model, method, samples))
        assert abs(excess[12][position][0]) > 1e-4

        objective.settings = replace(objective.settings, budgets=[12], temperature=0.0, uniform_share=uniform_share)
        with torch.no_grad():
            loss = objective(**batch_of(samples))["loss"]
        evicting = replace(full_cache, budget=12, allocate=allocate)
        expected = mean_divergence(answer_logits(model, full_cache, samples), answer_logits(model, evicting, samples))
        assert_close(loss, expected)


def test_the_module_in_training_scores_as_its_adapter_does(tmp_path: Path):
    objective = module_objective(tiny_model())
    batch = Batch(**batch_of(samples_of_lengths((40, 5))))
    assert objective.lookahead is not None
    objective.lookahead.settings = LookaheadSettings(**{**vars(MODULE), "sharing": "model", "value_norm": True})
    objective.lookahead.adapter().save(tmp_path / "adapter", Provenance("tiny"), "# tiny\n")
    method = LookaheadKV.from_pretrained(tmp_path / "adapter", budget=12)
    assert adapter_fields(method.observer.artifact)["allocate"] == Global(0.25)  # type: ignore[attr-defined]
    with torch.no_grad():
        importance = objective.importance(objective.teacher_outputs(batch), batch)
        state = prefill(objective.model, batch.prompt_ids)
    expected = method.importance(objective.model, state)
    for layer_importance, layer_expected in zip(importance, expected, strict=True):
        assert_close(layer_importance, layer_expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_has_the_mean_loss_and_gradients_of_its_rows(family):
    samples = samples_of_lengths((40, 5), (25, 9), (33, 7))
    objective = module_objective(family_model(family))
    loss = objective(**batch_of(samples))["loss"]
    loss.backward()
    batch_gradient = flat_gradient(objective)

    objective.zero_grad()
    losses_alone = torch.stack([objective(**batch_of([sample]))["loss"] for sample in samples])
    losses_alone.mean().backward()
    assert loss.item() > 1e-3
    assert_close(loss, losses_alone.mean())
    difference = (batch_gradient - flat_gradient(objective)).norm()
    assert difference < 1e-3 * batch_gradient.norm(), "terms cancel, so that rounding is larger"


def test_the_eviction_stage_of_a_model_on_several_devices():
    def loss_and_excess(objective):
        loss = objective(**batch)["loss"]
        loss.backward()
        with torch.no_grad():
            excess = objective.excess_nll(Batch(**batch), [0.25, None])
        return loss.item(), torch.tensor(excess[12])

    batch = batch_of(samples_of_lengths((40, 9), (37, 6)))
    expected_loss, expected_excess = loss_and_excess(module_objective(tiny_model()))
    with several_devices():
        for name in ("prompt_ids", "prompt_mask", "answer_ids", "answer_mask"):
            batch[name] = batch[name].to(FIRST)
        loss, excess = loss_and_excess(module_objective(in_halves(tiny_model())))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert torch.allclose(excess, expected_excess, atol=1e-5)


SCALED: dict[str, dict[str, Any]] = {
    "hyperclovax": {"logits_scaling": 0.125},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {},
}


@pytest.mark.parametrize("family", [*ALL_FAMILIES, *SCALED])
def test_logits_of_hidden_states_are_the_models_own(family):
    if family in SCALED:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL | SCALED[family])).eval()
    else:
        model = family_model(family)
    ids = prompt_ids(9)[0]
    with torch.no_grad():
        hidden = decoder_of(model)(input_ids=ids).last_hidden_state
        assert_close(logits_of(model, hidden), model(input_ids=ids).logits)


def test_the_answer_is_read_with_all_entries_once_a_prompt():
    """Two uses of a batch: the prompt, the answer with all entries, and twice soft tokens and answer with gates."""
    objective = module_objective(tiny_model())
    batch = batch_of(samples_of_lengths((40, 9)))
    passes: list[int] = []

    def count_pass(module, args, options) -> None:
        passes.append(1)

    decoder_of(objective.model).register_forward_pre_hook(count_pass, with_kwargs=True)
    with ReplayBuffer(ReplaySettings()) as objective.buffer:
        losses = [objective(**batch | {"turn": turn, "last": turn == 1})["loss"] for turn in range(2)]
    assert len(passes) == 2 + 2 * 2
    assert all(loss > 1e-3 for loss in losses)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_what_is_kept_for_replays_costs_nothing_where_nothing_is_evicted(dtype):
    objective = module_objective(tiny_model(), (12, 60))
    batch = Batch(**batch_of(samples_of_lengths((40, 9))))
    with torch.no_grad():
        exact = objective.excess_nll(batch, [0.25])
        with ReplayBuffer(ReplaySettings(dtype=dtype)) as objective.buffer:
            replayed = objective.excess_nll(batch, [0.25])
    assert replayed[60] == exact[60] == [[0.0]]
    assert replayed[12][0][0] == pytest.approx(exact[12][0][0], rel=0.05)


def test_gradients_are_those_of_the_loss():
    """Against central differences, along a direction of everything that learns."""
    objective = module_objective(tiny_model())
    batch = batch_of(samples_of_lengths((40, 9)))
    objective(**batch)["loss"].backward()
    generator = torch.Generator().manual_seed(1)
    weights = trained_parameters(objective)
    direction = {}
    slope = 0.0
    for name, weight in weights.items():
        direction[name] = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        if weight.grad is not None:
            slope += float((weight.grad * direction[name]).sum())

    losses = []
    for step in (STEP, -STEP):
        with torch.no_grad():
            for name, weight in weights.items():
                weight.add_(direction[name], alpha=step)
            losses.append(objective(**batch)["loss"])
            for name, weight in weights.items():
                weight.sub_(direction[name], alpha=step)
    expected = (losses[0] - losses[1]) / (2 * STEP)
    assert slope == pytest.approx(expected.item(), rel=0.05)


def test_everything_but_the_target_learns_and_the_loss_falls():
    objective = module_objective(tiny_model())
    batch = batch_of(samples_of_lengths((40, 9), (37, 6)))
    target = {name: tensor.clone() for name, tensor in objective.model.state_dict().items()}
    weights = trained_parameters(objective)
    first_and_last_names = {(name.split(".")[0], name.split(".")[-1]) for name in weights}
    assert first_and_last_names == {
        ("log_weights", "log_weights"),
        ("lookahead", "lora_A"),
        ("lookahead", "lora_B"),
        ("lookahead", "weight"),
    }

    optimizer = torch.optim.Adam(weights.values(), lr=0.02)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = objective(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(tensor, target[name]) for name, tensor in objective.model.state_dict().items())


def test_mamba_2_learns_from_an_answer_of_two_tokens():
    objective = module_objective(family_model("Granite 4 (Mamba-2)"))
    samples = samples_of_lengths((40, 2))
    batch = batch_of(samples)
    objective(**batch)["loss"].backward()
    assert flat_gradient(objective).norm() > 1e-3

    full_nats = answer_nats(objective.model, replace(objective.method, budget=200), samples)
    allocate = Global(0.25, as_head_weights(objective.head_weights()))
    method = replace(objective.method, budget=12, allocate=allocate)
    with torch.no_grad():
        excess = torch.tensor(objective.excess_nll(Batch(**batch), [0.25])[12][0])
    assert_close(excess + full_nats, answer_nats(objective.model, method, samples))


OTHER_METHODS: dict[str, dict[str, Any]] = {
    "snapkv": {"window": 4, "value_norm": True},
    "laq": {"observer": {"lookahead": 3, "first_window": 4}},
    "h2o": {"window": 2},
}


@pytest.mark.parametrize("name", OTHER_METHODS)
def test_weights_are_learned_for_other_methods_which_then_evict_by_them(name):
    """The loss falls; what is measured is what the method costs with the weights, its window kept."""
    model = tiny_model()
    samples = samples_of_lengths((40, 9), (37, 6))
    batch = batch_of(samples)
    method: Any = make_method(name, 12, allocate={"name": "global", "floor": 0.25}, **OTHER_METHODS[name])
    settings = FinetuneSettings(budgets=[12], freeze_module=True)
    objective = EvictionObjective(model, method, method.allocate, settings)
    optimizer = torch.optim.Adam([objective.log_weights], lr=0.2)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = objective(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss)
    assert losses[-1] < 0.95 * losses[0]

    with torch.no_grad():
        excess = torch.tensor(objective.excess_nll(Batch(**batch), [0.25])[12][0])
    weighted = replace(method, allocate=Global(0.25, as_head_weights(objective.head_weights())))
    measured = excess + answer_nats(model, replace(METHOD, budget=200), samples)
    assert_close(measured, answer_nats(model, weighted, samples))
    assert not torch.allclose(measured, answer_nats(model, method, samples), atol=1e-4)


@pytest.mark.parametrize("lengths", [(10, 5), (40, 1)])
def test_where_nothing_can_be_learned_every_gradient_is_zero(lengths):
    objective = module_objective(tiny_model())
    loss = objective(**batch_of(samples_of_lengths(lengths)))["loss"]
    loss.backward()
    assert loss.item() == 0
    for weight in trained_parameters(objective).values():
        assert weight.grad is not None
        assert not weight.grad.any()


def train(work: Path, objective: EvictionObjective | None = None) -> EvictionObjective:
    """The objective after a training that replays teacher outputs."""
    objective = objective or module_objective(tiny_model())
    settings = TrainSettings(
        steps=6, held_out=2, replays=3, learning_rate=0.01, measure_every=4, save_every=3, report_to=[]
    )
    samples = samples_of_lengths(*((30 + 2 * index, 6) for index in range(8)))
    run = TrainingRun(work, samples, replay=ReplaySettings(memory="1MiB"))
    trainer = ModuleTrainer(objective, settings, run)
    assert trainer.fit()
    optimizer: Any = trainer.optimizer
    assert not any(group["weight_decay"] for group in optimizer.param_groups)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates[-1] == pytest.approx(10 * rates[0])
    return objective


def test_a_training_that_is_killed_in_a_replay_resumes_bit_for_bit(tmp_path: Path):
    uninterrupted = trained_parameters(train(tmp_path / "uninterrupted"))
    with pytest.raises(RuntimeError, match="power failure"):  # in the second use of teacher outputs that are kept
        train(tmp_path / "killed", at_batch(module_objective(tiny_model()), 5, crash))
    resumed = trained_parameters(train(tmp_path / "killed"))
    assert same(resumed, uninterrupted)
    saved = load_file(tmp_path / "killed" / "checkpoint-6" / "finetuned.safetensors")
    assert torch.equal(saved["log_weights"], resumed["log_weights"])
    assert torch.equal(saved["tokens"], resumed["lookahead.soft_tokens.weight"])


def test_a_sample_gets_other_budgets_in_other_epochs():
    objective = module_objective(tiny_model(), (6, 12, 24))
    batch = batch_of(samples_of_lengths((40, 6)))
    losses = set()
    for epoch in range(8):
        objective.epoch = epoch
        losses.add(round(objective(**batch)["loss"].item(), 6))
    assert len(losses) == 3


def test_a_measurement_lists_its_samples():
    """Means over budgets, by the samples' indices, so that two measurements can be compared sample by sample."""
    objective = module_objective(tiny_model(), (6, 12))
    batches: list[dict[str, Any]] = [
        batch_of(samples_of_lengths((40, 6))) | {"indices": [4]},
        batch_of(samples_of_lengths((30, 5))) | {"indices": [9]},
    ]
    measurements = objective.measure(batches, 12)
    assert measurements["eval_samples"] == [4, 9]
    expected = []
    for batch in batches:
        excess = objective.excess_nll(Batch(**batch), [objective.floor])
        expected.append((excess[6][0][0] + excess[12][0][0]) / 2)
    assert measurements["eval_by_sample"] == pytest.approx(expected)
    mean_over_budgets = (measurements["eval_excess_nll_at_6"] + measurements["eval_excess_nll_at_12"]) / 2
    assert sum(expected) / 2 == pytest.approx(mean_over_budgets)


def test_a_measurement_that_is_no_number_is_not_reported(monkeypatch):
    objective = module_objective(tiny_model())
    monkeypatch.setattr(objective, "excess_nll", lambda batch, floors: {12: [[float("nan")]]})
    with pytest.raises(FloatingPointError, match="eval_excess_nll_at_12 is nan"):
        objective.measure([batch_of(samples_of_lengths((40, 6)))], 12)
