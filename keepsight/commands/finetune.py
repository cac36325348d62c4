"""keepsight finetune: train a lookahead module, or the weights of its heads alone, on the loss that eviction causes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from keepsight.commands.config import Finetune as Config
from keepsight.commands.config import TrainHeadWeights
from keepsight.commands.from_recipe import training_target
from keepsight.commands.training import check_paths, metrics_text, read_samples, require_finished, run_of
from keepsight.errors import UserError
from keepsight.models.head_weights_files import save_with_head_weights
from keepsight.models.hub import fetch
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_card import FINETUNING, HEAD_WEIGHTS, with_eviction
from keepsight.models.lookahead_files import CONFIG, Artifact, load_lookahead
from keepsight.models.quantization import keep_gradients
from keepsight.models.targets import Target
from keepsight.runtime.allocate import Global
from keepsight.runtime.methods.lookaheadkv import LookaheadKV, parts_of
from keepsight.train.eviction.finetune import FinetuneObjective
from keepsight.train.eviction.head_weights import HeadWeightsObjective
from keepsight.train.eviction.plots import eviction_figure
from keepsight.train.eviction.trainer import EvictionTrainer, FinetuneTrainer, HeadWeightsTrainer
from keepsight.train.head_settings import EvictionSettings
from keepsight.train.run import TrainingRun
from keepsight.train.seen import as_text

Configs = Config | TrainHeadWeights


def run(config: Config) -> None:
    """Train, then write the adapter, its card and the curves."""
    settings = config.finetune
    given = given_to(config, settings, "finetune")
    shared = given.shared
    lookahead = shared.artifact.module(given.target.model)
    objective = FinetuneObjective(lookahead, shared.method, shared.allocate, settings.budgets, settings.temperature)
    trainer = FinetuneTrainer(objective, settings, given.run)
    finished = trainer.fit()
    if trainer.is_world_process_zero():
        described = Described("fine-tuning", FINETUNING, "finetuning.png", given.data_digest)
        write_adapter(Path(config.out), shared, trainer, described, lookahead)
    require_finished(finished, config, trainer)


def run_head_weights(config: TrainHeadWeights) -> None:
    """Train the weights, then write the adapter with them, its card and the curves."""
    settings = config.head_weights
    given = given_to(config, settings, "head_weights")
    shared = given.shared
    objective = HeadWeightsObjective(
        given.target.model, shared.method, shared.allocate, settings.budgets, settings.temperature
    )
    trainer = HeadWeightsTrainer(objective, settings, given.run)
    finished = trainer.fit()
    if trainer.is_world_process_zero():
        described = Described("head weights", HEAD_WEIGHTS, "head_weights.png", given.data_digest)
        write_adapter(Path(config.out), shared, trainer, described)
    require_finished(finished, config, trainer)


@dataclass(frozen=True)
class Shared:
    """An adapter whose heads, of all layers, share one budget.

    Attributes:
        artifact: The adapter.
        method: The method with it; its budget and allocation stand for any.
        allocate: What divides the budget.
    """

    artifact: Artifact
    method: LookaheadKV
    allocate: Global


def shared_of(config: Configs) -> Shared:
    """The adapter that a training starts from.

    Raises:
        UserError: none is named, its heads do not share one budget, or `out` is its folder.
    """
    if config.adapter is None:
        raise UserError("adapter= is required: the lookahead module to train on what evicting with it costs")
    artifact = load_lookahead(fetch(config.adapter))
    if Path(config.out).resolve() == artifact.folder.resolve():
        raise UserError(f"out={config.out} holds the adapter that the training begins with; choose another folder")
    parts = parts_of(artifact)
    if not isinstance(allocate := parts.pop("allocate"), Global):
        raise UserError(
            f"adapter={config.adapter}: the heads of all its layers do not share one budget, which this training "
            "needs; train it with lookahead.floor=0.2 lookahead.sharing=model"
        )
    return Shared(artifact, LookaheadKV(1, **parts), allocate)


@dataclass(frozen=True)
class Given:
    """What a training on what evicting costs is given.

    Attributes:
        shared: The adapter that it goes on with.
        target: The target; gradients flow through it.
        run: Where it trains, and on what.
        data_digest: Of the data's manifest.
    """

    shared: Shared
    target: Target
    run: TrainingRun
    data_digest: str


def given_to(config: Configs, settings: EvictionSettings, section: str) -> Given:
    """Load what a training is given, and set its seed; `section` is the settings' name in a recipe.

    Raises:
        UserError: see `shared_of`; `out` cannot be written, the data do not fit, or no prompt is above a budget.
    """
    check_paths(config)
    shared, target = shared_of(config), training_target(config)
    keep_gradients(target.model)
    samples, manifest = read_samples(config, target, config.max_prompt_tokens)
    if (longest := max(len(each.prompt_ids) for each in samples)) <= min(settings.budgets):
        raise UserError(f"{section}.budgets={settings.budgets}: the longest prompt has {longest} tokens; lower them")
    set_seed(settings.train.seed)
    return Given(shared, target, run_of(config, target, samples, "adapter", CONFIG), manifest["digest"])


@dataclass(frozen=True)
class Described:
    """What the adapter and its card call a training.

    Attributes:
        name: What the lines of both begin with.
        about: What the card's section begins with.
        picture: File of the curves.
        data_digest: Of the data's manifest.
    """

    name: str
    about: str
    picture: str
    data_digest: str


def write_adapter(
    out: Path, shared: Shared, trainer: EvictionTrainer[Any], training: Described, module: Lookahead | None = None
) -> None:
    """Write the adapter with its weights of heads, its card and the curves.

    Args:
        out: The folder.
        shared: What the training went on with.
        trainer: It has trained.
        training: How it is described.
        module: Its tensors, where they were trained too.

    Raises:
        UserError: a weight of a head is infinite or 0.
    """
    name = training.name
    artifact, trained, objective = shared.artifact, trainer.trained(), trainer.objective
    weights = objective.weights()
    if not (torch.isfinite(weights) & (weights > 0)).all():
        raise trainer.not_finite(f"the weight of a head is infinite or 0 ({trainer.weights_rate} is too high)")
    extremes = [round(each.item(), 3) for each in (weights.min(), weights.max())]
    described: dict[str, Any] = {
        f"{name}, steps": trained.steps,
        f"{name}, samples": trained.samples,
        f"{name}, held-out samples among them": trained.held_out,
        f"{name}, data": training.data_digest,
        f"{name}, samples a step": trained.samples_per_step,
        f"{name}, steps on each reading of the target": trained.settings.replays,
        f"{name}, learning rate": trained.settings.learning_rate,
        **{f"{name}, {key.partition('.')[2]}": value for key, value in trainer.deciding.items()},
        f"{name}, smallest and largest weight of a head": extremes,
    }
    before = {key: value for key, value in artifact.provenance.training.items() if not key.startswith(f"{name}, ")}
    provenance = replace(artifact.provenance, training=before | described, trained_on=as_text(trained.seen))
    figure = eviction_figure(trainer.log_rows(), weights, objective.budgets)
    rows = trainer.measurements()
    card = with_eviction(artifact.folder, training.about, described, *((rows[0], rows[-1]) if rows else ({}, {})))
    numbers = tuple(map(tuple, weights.tolist()))
    save_with_head_weights(artifact, out, numbers, provenance, card, {training.picture: figure}, module)
    print(f"adapter after step {trained.steps} in {out}: {metrics_text(trained.metrics)}")
