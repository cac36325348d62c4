"""A module trained on what evicting with it costs: it scores as its adapter does, and all of it learns."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from keepsight import LookaheadKV
from keepsight.models.card import Provenance
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.runtime.allocate import Global
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import NO_POOL, Reduce
from keepsight.runtime.methods.lookaheadkv import parts_of
from keepsight.runtime.methods.positions import RandomScores
from keepsight.runtime.state import prefill
from keepsight.train.dataset import Batch
from keepsight.train.eviction import EvictionObjective
from keepsight.train.replay import ReplayBuffer
from keepsight.train.settings import FinetuneSettings, ReplaySettings, TrainSettings
from keepsight.train.trainer import ModuleTrainer, TrainingRun
from tests.close import assert_close
from tests.families import family_model
from tests.tiny import tiny_model
from tests.train.eviction.test_objective import nats
from tests.train.lookahead.test_objective import batch_of, samples
from tests.train.runs import crash, same

SHAPE = LookaheadSettings(tokens=4, rank=2, alpha=8, queries="max", kernel=1, pooling="avg", floor=0.25)
STEP = 3e-3
FAMILIES = ["Llama 3", "Gemma 3 (text)", "GPT-OSS", "Qwen3-Next"]


def objective(model, budgets: tuple[int, ...] = (12,)) -> EvictionObjective:
    torch.manual_seed(7)
    lookahead = Lookahead(model, SHAPE)
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
    model = family_model(family)
    made, batch = objective(model, (12, 30)), Batch(**batch_of(samples((40, 5), (25, 9))))
    with torch.no_grad():
        measured = made.excess_nll(batch)
    weights = tuple(map(tuple, made.head_weights().tolist()))
    parts: dict[str, Any] = {"observer": made.method.observer, "reduce": Reduce("max"), "value_norm": True}
    full = nats(model, Evict(200, **parts, pool=NO_POOL), batch)
    for budget in (12, 30):
        method = Evict(budget, **parts, pool=NO_POOL, allocate=Global(0.25, weights))
        assert_close(torch.tensor(measured[budget]) + full, nats(model, method, batch))
    assert abs(measured[12][0]) > 1e-4


def test_the_module_in_training_scores_as_its_adapter_does(tmp_path: Path):
    made, batch = objective(tiny_model()), Batch(**batch_of(samples((40, 5))))
    settings = LookaheadSettings(**{**vars(SHAPE), "sharing": "model", "value_norm": True})
    assert made.lookahead is not None
    made.lookahead.settings = settings
    made.lookahead.adapter().save(tmp_path / "adapter", Provenance("tiny"), "# tiny\n")
    method = LookaheadKV.from_pretrained(tmp_path / "adapter", budget=12)
    assert parts_of(method.observer.artifact)["allocate"] == Global(0.25)  # type: ignore[attr-defined]
    with torch.no_grad():
        importance = made.importance(made.teacher_outputs(batch), batch)
        state = prefill(made.model, batch.prompt_ids)
    for ours, theirs in zip(importance, method.importance(made.model, state), strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_has_the_mean_loss_and_gradients_of_its_rows(family):
    rows = samples((40, 5), (25, 9), (33, 7))
    made = objective(family_model(family))
    loss = made(**batch_of(rows))["loss"]
    loss.backward()
    together = gradient(made)
    made.zero_grad()
    alone = torch.stack([made(**batch_of([row]))["loss"] for row in rows])
    alone.mean().backward()
    assert loss.item() > 1e-3
    assert_close(loss, alone.mean())
    assert (together - gradient(made)).norm() < 1e-3 * together.norm(), "terms cancel, so that rounding is larger"


def test_gradients_are_those_of_the_loss():
    """Against central differences, along a direction of everything that learns."""
    made = objective(tiny_model())
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
    made, batch = objective(tiny_model()), batch_of(samples((40, 9), (37, 6)))
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


def test_a_kept_reading_gives_the_fresh_loss_and_gradients():
    made, batch = objective(tiny_model()), batch_of(samples((40, 9)))
    made(**batch)["loss"].backward()
    fresh = {name: each.grad.clone() for name, each in learned(made).items() if each.grad is not None}
    with ReplayBuffer(ReplaySettings(dtype="int8")) as buffer:
        made.buffer = buffer
        for turn in (0, 1):
            made.zero_grad()
            made(**batch | {"indices": [4], "turn": turn, "last": turn == 1})["loss"].backward()
            for name, each in learned(made).items():
                if each.grad is not None:
                    cosine = torch.cosine_similarity(each.grad.flatten(), fresh[name].flatten(), dim=0)
                    assert cosine > 0.98 or fresh[name].norm() < 1e-5


def test_where_nothing_can_be_learned_every_gradient_is_zero():
    made = objective(tiny_model())
    loss = made(**batch_of(samples((10, 5))))["loss"]
    loss.backward()
    assert loss.item() == 0
    for each in learned(made).values():
        assert each.grad is not None and not each.grad.any()


def trained(work: Path, made: EvictionObjective | None = None) -> EvictionObjective:
    made = made or objective(tiny_model())
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


class Crashing(EvictionObjective):
    """Its fifth loss is its last: in the second use of readings that are kept."""

    calls = 0

    def loss(self, batch: Batch) -> torch.Tensor:
        Crashing.calls += 1
        if Crashing.calls == 5:
            crash(batch)
        return super().loss(batch)


def test_a_training_that_is_killed_in_a_replay_resumes_bit_for_bit(tmp_path: Path):
    whole = learned(trained(tmp_path / "whole"))
    broken = objective(tiny_model())
    broken.__class__ = Crashing
    with pytest.raises(RuntimeError, match="power failure"):
        trained(tmp_path / "parts", broken)
    again = learned(trained(tmp_path / "parts"))
    assert same(again, whole)
    saved = load_file(tmp_path / "parts" / "checkpoint-6" / "finetuned.safetensors")
    assert torch.equal(saved["log_weights"], again["log_weights"])
    assert torch.equal(saved["tokens"], again["lookahead.soft_tokens.weight"])
