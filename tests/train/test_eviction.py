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
from tests.train.runs import at_batch, batch_of, crash, same
from tests.train.runs import sized as samples

SHAPE = (3, 2, 2, 50)  # layers, rows, KV heads, entries


def scores(seed: int = 0) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * 2


def gates_of(scores: torch.Tensor, budget: int, floor: float, temperature: float, real=None) -> torch.Tensor:
    """The gates of logarithms of importance, with equal weights of heads."""
    importance = scores.exp() if real is None else scores.exp().masked_fill(~real, -torch.inf)
    return soft_gates(importance, torch.zeros(3, 2), budget, floor, temperature)


@pytest.mark.parametrize(("floor", "temperature"), [(0.0, 0.1), (0.2, 0.5), (0.2, 2.0), (1.0, 0.5)])
def test_the_gates_of_a_row_sum_to_the_budget(temperature, floor):
    gates = gates_of(scores(), 10, floor, temperature).exp()
    assert ((gates >= 0) & (gates <= 1)).all()
    assert gates.sum(dim=(0, 2, 3)).tolist() == pytest.approx([60, 60], abs=0.05 + 60 * (floor == 1) * temperature)
    assert ((gates == 1).sum(dim=-1) >= int(10 * floor)).all()


class Plateaus(Observer):
    """Few different scores, so that pooling makes plateaus, which budgets cut through."""

    def __call__(self, model: Any, state: State, reduce: Reduce) -> list[torch.Tensor]:
        return [*torch.randint(1, 9, SHAPE, generator=torch.Generator().manual_seed(4)).float() / 8]


@pytest.mark.parametrize("pooling", [Pool("max", 7), Pool("avg", 3), NO_POOL])
@pytest.mark.parametrize(
    ("budget", "floor", "weighted", "window"),
    [(10, 0.1, False, 0), (11, 0.3, True, 0), (7, 1.0, False, 0), (11, 0.5, True, 3), (10, 0.1, True, 4)],
)
def test_at_temperature_0_the_gates_are_what_an_eviction_keeps(pooling, budget, floor, weighted, window):
    """Index for index, also of equal entries and beside padding; at a low temperature where none are equal."""
    logarithms = torch.randn(SHAPE[0], SHAPE[2], generator=torch.Generator().manual_seed(5)) * weighted
    weights = tuple(map(tuple, logarithms.exp().tolist())) if weighted else None
    method = Evict(budget, Plateaus(), pool=pooling, allocate=Global(floor, weights), window=window)
    with torch.no_grad():
        state = prefill(tiny_model(), *prompt_ids(50, 37))
        layers = method.importance(tiny_model(), state)
        kept, importance = (torch.stack(each) for each in (method.select(state, layers), layers))
    assert kept[:, 1].sum() == budget * 6 and not kept[:, 1, :, :13].any()
    assert torch.equal(soft_gates(importance, logarithms, budget, floor, 0.0).exp(), kept.float())
    untied = torch.where(importance.isinf(), importance, scores().exp())
    soft, hard = (soft_gates(untied, logarithms, budget, floor, each).exp() for each in (1e-3, 0.0))
    assert torch.equal(soft > 0.5, hard > 0.5)
    guaranteed = soft_gates(importance, logarithms, budget, floor, 0.5) == 0
    assert (guaranteed <= kept).all() and (guaranteed.sum(dim=-1) >= max(int(budget * floor), window)).all()


@pytest.mark.parametrize(
    ("budget", "floor", "padding", "temperature"),
    [(10, 0.2, 20, 0.5), (10, 0.2, 42, 50.0), (30, 0.9, 40, 0.5), (60, 1.0, 40, 50.0)],
)
def test_a_padded_row_has_the_gates_of_the_row_alone(budget, floor, padding, temperature):
    """Also where it has fewer entries than the budget, or than the floor promises: then it keeps them all."""
    real = (torch.arange(50) >= torch.tensor([0, padding])[None, :, None, None]).expand(SHAPE)
    gates = gates_of(scores(), budget, floor, temperature, real)
    alone = [gates_of(scores()[:, :1], budget, floor, temperature)]
    alone += [gates_of(scores()[:, 1:, :, padding:], budget, floor, temperature)]
    assert not gates[:, 1, :, :padding].exp().any()
    assert_close(gates[:, 0].exp(), alone[0][:, 0].exp())
    assert_close(gates[:, 1, :, padding:].exp(), alone[1][:, 0].exp())
    if 50 - padding <= budget:
        assert (gates[:, 1, :, padding:] == 0).all()


def test_gradients_are_those_of_the_gates_with_the_threshold_that_moves():
    """Against central differences, in which the threshold is found anew."""
    weights = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def value(shift: torch.Tensor) -> torch.Tensor:
        return (soft_gates(scores().double().exp(), shift, 10, 0.2, 0.5).exp() * weights).sum()

    shift = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    value(shift).backward()
    assert shift.grad is not None
    for place in np.ndindex(3, 2):
        moved = torch.zeros_like(shift)
        moved[place] = 1e-4
        with torch.no_grad():
            expected = (value(moved) - value(-moved)) / 2e-4
        assert shift.grad[place].item() == pytest.approx(expected.item(), abs=2e-3)
    assert shift.grad.sum().item() == pytest.approx(0, abs=1e-3), "a shift of all scores selects nothing else"


METHOD = Evict(1, RandomScores(seed=5), pool=NO_POOL)
SETTINGS = FinetuneSettings(budgets=[12])
FAMILIES = ["Llama 3", "Gemma 3 (text)", "GPT-OSS", "Qwen3-Next", "Inkling"]


def objective(model, budgets: tuple[int, ...] = (12,), floor: float = 0.25) -> EvictionObjective:
    made = EvictionObjective(model, METHOD, Global(floor), FinetuneSettings(budgets=[*budgets]))
    torch.manual_seed(2)
    with torch.no_grad():
        made.log_weights.normal_()
    return made


@torch.no_grad()
def answer_logits(model, method: Evict, rows: list[TrainingSample]) -> Iterator[torch.Tensor]:
    """For each sample alone, logits [T - 1, V] of its answer after the first token, from a state as methods make it."""
    for row in rows:
        state = method.start(model, torch.tensor([row.prompt_ids]))
        answer = torch.tensor([row.answer_ids[:-1]])
        yield read(model, state, answer, logits_to_keep=answer.shape[1])[1][0].float()


def nats(model, method: Evict, rows: list[TrainingSample]) -> torch.Tensor:
    """Their cross-entropies."""
    pairs = zip(answer_logits(model, method, rows), rows, strict=True)
    losses = [torch.nn.functional.cross_entropy(logits, torch.tensor(row.answer_ids[1:])) for logits, row in pairs]
    return torch.stack(losses)


@pytest.mark.parametrize("lengths", [(40, 20)])
def test_a_row_within_the_budget_or_its_floor_is_read_as_alone(lengths):
    made = objective(tiny_model(), (30,), floor=0.8)
    rows = samples(*((prompt, 6) for prompt in lengths))
    alone = torch.stack([made(**batch_of([row]))["loss"] for row in rows])
    assert alone[1] == 0 and alone[0] > 1e-4
    assert_close(made(**batch_of(rows))["loss"], alone.mean())


def test_the_target_stays_in_evaluation_mode_and_weights_go_on_where_they_were():
    start = tuple((1.0, 2.0) for _ in range(3))
    made = EvictionObjective(tiny_model(), METHOD, Global(0.25, start), SETTINGS).train()
    assert made.training and not made.model.training
    assert torch.allclose(made.head_weights()[:, 1] / made.head_weights()[:, 0], torch.tensor(2.0))
    with refused("head_weights", "model"):
        EvictionObjective(tiny_model(), METHOD, Global(0.25, start[:1]), SETTINGS)
    with refused("budget", "range"):
        EvictionObjective(tiny_model(), METHOD, Global(0.25), FinetuneSettings(budgets=[2]))


def test_samples_and_turns_decide_on_the_budget():
    batch = batch_of(samples((40, 9)))
    single = {budget: objective(tiny_model(), (budget,))(**batch)["loss"].item() for budget in (12, 30)}
    made = objective(tiny_model(), (12, 30))
    losses = [made(**batch | {"indices": [4], "turn": turn})["loss"].item() for turn in (*range(8), *range(8))]
    assert losses[:8] == losses[8:] and {*losses} == {*single.values()}


def test_without_a_floor_every_head_has_the_budget_and_gradients_to_its_scores_alone():
    """Against gates of one head alone, and central differences of its scores."""
    importance = scores().double().exp().requires_grad_()
    shift = torch.ones(3, 2, requires_grad=True)
    gates = soft_gates(importance, shift, 10, None, 0.5)
    assert gates.exp().sum(dim=-1).flatten().tolist() == pytest.approx([10.0] * 12, abs=1e-6)
    alone = soft_gates(importance[:1, :1, :1].detach(), shift[:1, :1].detach(), 10, 0.0, 0.5)
    assert_close(gates[:1, :1, :1], alone)
    factors = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (slope,) = torch.autograd.grad((gates.exp() * factors).sum(), importance)
    for place in [(0, 0, 0, 3), (2, 1, 1, 49)]:
        sums = []
        for step in (1e-4, -1e-4):
            moved = importance.detach().clone()
            moved[place] += step
            sums.append((soft_gates(moved, shift, 10, None, 0.5).exp() * factors).sum().item())
        assert slope[place].item() == pytest.approx((sums[0] - sums[1]) / 2e-4, rel=1e-3, abs=1e-5)


def test_a_coin_per_batch_trains_for_both_selections():
    """Its side is the seed's, the samples' and the turn's; uniform batches move no weight of a head."""
    made, batch = finetuned(tiny_model()), batch_of(samples((40, 9)))
    sides = {}
    for share in (0.0, 1.0):
        made.settings = replace(made.settings, uniform_share=share)
        sides[made(**batch)["loss"].item()] = share
    assert len(sides) == 2
    made.settings = replace(made.settings, uniform_share=0.5)
    tossed = [[sides[made(**batch | {"turn": turn})["loss"].item()] for turn in range(12)] for _ in range(2)]
    assert tossed[0] == tossed[1] and {*tossed[0]} == {0.0, 1.0}
    made(**batch | {"turn": tossed[0].index(1.0)})["loss"].backward()
    assert made.log_weights.grad is not None and not made.log_weights.grad.any()
    assert made.lookahead is not None and made.lookahead.tokens.grad is not None and made.lookahead.tokens.grad.any()
    again = FinetuneSettings(budgets=[12], uniform_share=0.5, train=TrainSettings(seed=3))
    made.settings = again
    assert [sides[made(**batch | {"turn": turn})["loss"].item()] for turn in range(12)] != tossed[0]
    with refused("finetune.freeze_module", "conflict"):
        EvictionObjective(tiny_model(), METHOD, Uniform(), SETTINGS)


def test_latents_are_refused():
    with refused("model", "model"):
        objective(family_model("DeepSeek-V3"))


MODULE = LookaheadSettings(tokens=4, rank=2, alpha=8, queries="max", kernel=1, pooling="avg", floor=0.25)
STEP = 3e-3


def finetuned(model, budgets: tuple[int, ...] = (12,)) -> EvictionObjective:
    torch.manual_seed(7)
    lookahead = Lookahead(model, MODULE)
    assert lookahead.lora is not None
    with torch.no_grad():
        for weight in lookahead.lora.parameters():  # LoRA begins with B = 0, where A has no gradient
            weight.normal_(std=0.2)
    method = Evict(1, RandomScores(seed=0), reduce=Reduce("max"), value_norm=True, pool=NO_POOL)
    settings = FinetuneSettings(budgets=[*budgets], head_weights_rate=0.1)
    return EvictionObjective(model, method, Global(0.25), settings, lookahead)


def learned(made: EvictionObjective) -> dict[str, torch.Tensor]:
    return {name: each for name, each in made.named_parameters() if each.requires_grad}


def gradient(made: EvictionObjective) -> torch.Tensor:
    """Of everything that learns, as one vector; 0 where there is none."""
    parts = [torch.zeros_like(each) if each.grad is None else each.grad for each in learned(made).values()]
    return torch.cat([each.flatten() for each in parts])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_measured_is_what_evicting_with_the_module_costs(family):
    """And, at temperature 0, so is the loss; pooling makes plateaus that the budgets cut through."""
    model, rows = family_model(family), samples((40, 5), (25, 9))
    made = finetuned(model, (12, 30))
    made.method = replace(made.method, pool=Pool("max", 7))
    with torch.no_grad():
        measured = made.excess_nll(Batch(**batch_of(rows)), [0.25, None])
    weights = tuple(map(tuple, made.head_weights().tolist()))
    whole = replace(made.method, budget=200)
    full = nats(model, whole, rows)
    for place, allocate in enumerate((Global(0.25, weights), Uniform())):
        for budget in (12, 30):
            method = replace(whole, budget=budget, allocate=allocate)
            assert_close(torch.tensor(measured[budget][place]) + full, nats(model, method, rows))
        assert abs(measured[12][place][0]) > 1e-4
        made.settings = replace(made.settings, budgets=[12], temperature=0.0, uniform_share=float(place))
        with torch.no_grad():
            loss = made(**batch_of(rows))["loss"]
        evicting = replace(whole, budget=12, allocate=allocate)
        pairs = zip(answer_logits(model, whole, rows), answer_logits(model, evicting, rows), strict=True)
        costs = [kl_divergence(Categorical(logits=full), Categorical(logits=evicted)).mean() for full, evicted in pairs]
        assert_close(loss, torch.stack(costs).mean())


def test_the_module_in_training_scores_as_its_adapter_does(tmp_path: Path):
    made, batch = finetuned(tiny_model()), Batch(**batch_of(samples((40, 5))))
    settings = LookaheadSettings(**{**vars(MODULE), "sharing": "model", "value_norm": True})
    assert made.lookahead is not None
    made.lookahead.settings = settings
    made.lookahead.adapter().save(tmp_path / "adapter", Provenance("tiny"), "# tiny\n")
    method = LookaheadKV.from_pretrained(tmp_path / "adapter", budget=12)
    assert adapter_fields(method.observer.artifact)["allocate"] == Global(0.25)  # type: ignore[attr-defined]
    with torch.no_grad():
        importance = made.importance(made.teacher_outputs(batch), batch)
        state = prefill(made.model, batch.prompt_ids)
    for ours, theirs in zip(importance, method.importance(made.model, state), strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_has_the_mean_loss_and_gradients_of_its_rows(family):
    rows = samples((40, 5), (25, 9), (33, 7))
    made = finetuned(family_model(family))
    loss = made(**batch_of(rows))["loss"]
    loss.backward()
    together = gradient(made)
    made.zero_grad()
    alone = torch.stack([made(**batch_of([row]))["loss"] for row in rows])
    alone.mean().backward()
    assert loss.item() > 1e-3
    assert_close(loss, alone.mean())
    assert (together - gradient(made)).norm() < 1e-3 * together.norm(), "terms cancel, so that rounding is larger"


def test_the_eviction_stage_of_a_model_on_several_devices():
    def results(made):
        loss = made(**batch)["loss"]
        loss.backward()
        with torch.no_grad():
            return loss.item(), made.excess_nll(Batch(**batch), [0.25, None])[12]

    batch = batch_of(samples((40, 9), (37, 6)))
    expected = results(finetuned(tiny_model()))
    with several_devices():
        for name in ("prompt_ids", "prompt_mask", "answer_ids", "answer_mask"):
            batch[name] = batch[name].to(FIRST)
        found = results(finetuned(in_halves(tiny_model())))
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert torch.allclose(torch.tensor(found[1]), torch.tensor(expected[1]), atol=1e-5)


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
    made, batch, passes = finetuned(tiny_model()), batch_of(samples((40, 9))), []
    decoder_of(made.model).register_forward_pre_hook(lambda _, args, options: passes.append(1), with_kwargs=True)
    with ReplayBuffer(ReplaySettings()) as made.buffer:
        losses = [made(**batch | {"turn": turn, "last": turn == 1})["loss"] for turn in range(2)]
    assert len(passes) == 2 + 2 * 2 and all(loss > 1e-3 for loss in losses)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_what_is_kept_for_replays_costs_nothing_where_nothing_is_evicted(dtype):
    made, batch = finetuned(tiny_model(), (12, 60)), Batch(**batch_of(samples((40, 9))))
    with torch.no_grad():
        exact = made.excess_nll(batch, [0.25])
        with ReplayBuffer(ReplaySettings(dtype=dtype)) as made.buffer:
            kept = made.excess_nll(batch, [0.25])
    assert kept[60] == exact[60] == [[0.0]]
    assert kept[12][0][0] == pytest.approx(exact[12][0][0], rel=0.05)


def test_gradients_are_those_of_the_loss():
    """Against central differences, along a direction of everything that learns."""
    made = finetuned(tiny_model())
    batch = batch_of(samples((40, 9)))
    made(**batch)["loss"].backward()
    generator = torch.Generator().manual_seed(1)
    moved = {n: torch.randn(each.shape, generator=generator, dtype=each.dtype) for n, each in learned(made).items()}
    slope = sum((each.grad * moved[name]).sum() for name, each in learned(made).items() if each.grad is not None)
    losses = []
    for step in (STEP, -STEP):
        with torch.no_grad():
            for name, each in learned(made).items():
                each.add_(moved[name], alpha=step)
            losses.append(made(**batch)["loss"])
            for name, each in learned(made).items():
                each.sub_(moved[name], alpha=step)
    assert float(slope) == pytest.approx(((losses[0] - losses[1]) / (2 * STEP)).item(), rel=0.05)


def test_everything_but_the_target_learns_and_the_loss_falls():
    made, batch = finetuned(tiny_model()), batch_of(samples((40, 9), (37, 6)))
    target = {name: each.clone() for name, each in made.model.state_dict().items()}
    kinds = {name.split(".")[0] + name.rpartition(".")[2] for name in learned(made)}
    assert kinds == {"log_weights" * 2, "lookaheadlora_A", "lookaheadlora_B", "lookaheadweight"}
    optimizer = torch.optim.Adam(learned(made).values(), lr=0.02)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = made(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(each, target[name]) for name, each in made.model.state_dict().items())


def test_mamba_2_learns_from_an_answer_of_two_tokens():
    made, rows = finetuned(family_model("Granite 4 (Mamba-2)")), samples((40, 2))
    made(**batch_of(rows))["loss"].backward()
    assert gradient(made).norm() > 1e-3
    full = nats(made.model, replace(made.method, budget=200), rows)
    method = replace(made.method, budget=12, allocate=Global(0.25, tuple(map(tuple, made.head_weights().tolist()))))
    with torch.no_grad():
        measured = torch.tensor(made.excess_nll(Batch(**batch_of(rows)), [0.25])[12][0])
    assert_close(measured + full, nats(made.model, method, rows))


OTHERS: dict[str, dict[str, Any]] = {
    "snapkv": {"window": 4, "value_norm": True},
    "laq": {"observer": {"lookahead": 3, "first_window": 4}},
    "h2o": {"window": 2},
}


@pytest.mark.parametrize("name", OTHERS)
def test_weights_are_learned_for_other_methods_which_then_evict_by_them(name):
    """The loss falls; what is measured is what the method costs with the weights, its window kept."""
    model, rows = tiny_model(), samples((40, 9), (37, 6))
    method: Any = make_method(name, 12, allocate={"name": "global", "floor": 0.25}, **OTHERS[name])
    made = EvictionObjective(model, method, method.allocate, FinetuneSettings(budgets=[12], freeze_module=True))
    optimizer, losses, batch = torch.optim.Adam([made.log_weights], lr=0.2), [], batch_of(rows)
    for _ in range(15):
        optimizer.zero_grad()
        losses.append(made(**batch)["loss"])
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.95 * losses[0]
    with torch.no_grad():
        measured = torch.tensor(made.excess_nll(Batch(**batch), [0.25])[12][0])
    weighted = replace(method, allocate=Global(0.25, tuple(map(tuple, made.head_weights().tolist()))))
    full = nats(model, replace(METHOD, budget=200), rows)
    assert_close(measured + full, nats(model, weighted, rows))
    assert not torch.allclose(measured + full, nats(model, method, rows), atol=1e-4)


@pytest.mark.parametrize("lengths", [(10, 5), (40, 1)])
def test_where_nothing_can_be_learned_every_gradient_is_zero(lengths):
    made = finetuned(tiny_model())
    loss = made(**batch_of(samples(lengths)))["loss"]
    loss.backward()
    assert loss.item() == 0
    for each in learned(made).values():
        assert each.grad is not None and not each.grad.any()


def trained(work: Path, made: EvictionObjective | None = None) -> EvictionObjective:
    made = made or finetuned(tiny_model())
    often: dict[str, Any] = {"measure_every": 4, "save_every": 3, "report_to": []}
    train = TrainSettings(steps=6, held_out=2, replays=3, learning_rate=0.01, **often)
    rows = samples(*((30 + 2 * number, 6) for number in range(8)))
    trainer = ModuleTrainer(made, train, TrainingRun(work, rows, replay=ReplaySettings(memory="1MiB")))
    assert trainer.fit()
    optimizer: Any = trainer.optimizer
    assert not any(group["weight_decay"] for group in optimizer.param_groups)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates[-1] == pytest.approx(10 * rates[0])
    return made


def test_a_training_that_is_killed_in_a_replay_resumes_bit_for_bit(tmp_path: Path):
    whole = learned(trained(tmp_path / "whole"))
    with pytest.raises(RuntimeError, match="power failure"):  # in the second use of teacher outputs that are kept
        trained(tmp_path / "parts", at_batch(finetuned(tiny_model()), 5, crash))
    again = learned(trained(tmp_path / "parts"))
    assert same(again, whole)
    saved = load_file(tmp_path / "parts" / "checkpoint-6" / "finetuned.safetensors")
    assert torch.equal(saved["log_weights"], again["log_weights"])
    assert torch.equal(saved["tokens"], again["lookahead.soft_tokens.weight"])


def test_a_sample_gets_other_budgets_in_other_epochs():
    made, losses = finetuned(tiny_model(), (6, 12, 24)), set()
    for epoch in range(8):
        made.epoch = epoch
        losses.add(round(made(**batch_of(samples((40, 6))))["loss"].item(), 6))
    assert len(losses) == 3


def test_a_measurement_lists_its_samples():
    """Means over budgets, by the samples' indices, so that two measurements can be compared sample by sample."""
    made = finetuned(tiny_model(), (6, 12))
    batches = [{**batch_of(samples(length)), "indices": [index]} for index, length in ((4, (40, 6)), (9, (30, 5)))]
    measured = made.measure(batches, 12)
    assert measured["eval_samples"] == [4, 9]
    expected = []
    for batch in batches:
        found = made.excess_nll(Batch(**batch), [made.floor])
        expected.append((found[6][0][0] + found[12][0][0]) / 2)
    assert measured["eval_by_sample"] == pytest.approx(expected)
    mean = (measured["eval_excess_nll_at_6"] + measured["eval_excess_nll_at_12"]) / 2
    assert sum(expected) / 2 == pytest.approx(mean)


def test_a_measurement_that_is_no_number_is_not_reported(monkeypatch):
    made = finetuned(tiny_model())
    monkeypatch.setattr(made, "excess_nll", lambda batch, floors: {12: [[float("nan")]]})
    with pytest.raises(FloatingPointError, match="eval_excess_nll_at_12 is nan"):
        made.measure([batch_of(samples((40, 6)))], 12)
