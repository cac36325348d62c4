"""keepsight finetune: train a lookahead module, or the weights of its heads alone, on the loss that eviction causes."""

from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from transformers import set_seed

from keepsight.commands.config import Finetune as Config
from keepsight.commands.from_recipe import training_target
from keepsight.commands.training import check_inputs, ending, read_samples, require_finished, run_of
from keepsight.errors import UserError
from keepsight.models.card import FINETUNING, HEAD_WEIGHTS, with_eviction
from keepsight.models.distributed import launched
from keepsight.models.lookahead import CONFIG, LookaheadAdapter
from keepsight.models.targets import keep_gradients
from keepsight.runtime.allocate import Global, Uniform
from keepsight.runtime.methods.lookaheadkv import LookaheadKV, parts_of
from keepsight.train.dataset import prompts_as_text
from keepsight.train.eviction import EvictionObjective
from keepsight.train.plots import eviction_figure
from keepsight.train.trainer import ModuleTrainer


def run(config: Config) -> None:
    """Train, then write the adapter, its card and the curves."""
    settings = config.finetune
    samples = check_inputs(config, "finetune.train", settings.train)
    artifact, method, allocate = _start(config)
    if (longest := max(len(each.prompt_ids) for each in samples)) <= min(settings.budgets):
        raise UserError(f"finetune.budgets={settings.budgets}: the longest prompt has {longest} tokens; lower them")
    target = training_target(config)
    keep_gradients(target.model)
    samples, manifest = read_samples(config, target)
    set_seed(settings.train.seed)
    lookahead = None if settings.freeze_module else artifact.module(target.model)
    objective = EvictionObjective(target.model, method, allocate, settings, lookahead)
    trainer = ModuleTrainer(objective, settings.train, run_of(config, target, samples, "adapter", CONFIG))
    finished = trainer.fit()
    if trainer.is_world_process_zero():
        _write(Path(config.out), artifact, trainer, manifest["digest"])
        print(ending(trainer, config, "adapter", f"eval adapter={quote(config.out)} out=runs/eval"))
    require_finished(finished, config, trainer)


def _start(config: Config) -> tuple[LookaheadAdapter, LookaheadKV, Global | Uniform]:
    """The adapter that the training starts from, the method with it, of any budget, and its allocation.

    How an adapter is used to select entries is no condition, and may change here.

    Raises:
        UserError: none is named, or `out` is its folder.
    """
    if config.adapter is None:
        raise UserError("adapter= is required: the lookahead adapter to start from")
    artifact = LookaheadAdapter.from_pretrained(config.adapter)
    if Path(config.out).resolve() == artifact.folder.resolve():
        raise UserError(f"out={config.out} is the folder of the adapter that the training starts from; choose another")
    settings = artifact.settings if config.selection is None else artifact.settings.selecting(config.selection)
    if settings.floor is not None and settings.sharing == "layer":
        settings = replace(settings, sharing="model")
        if launched().is_main_process:
            print(f"{config.adapter}: the heads of all layers will share one budget")
    artifact = replace(artifact, settings=settings)
    parts = parts_of(artifact)
    allocate = parts.pop("allocate")
    return artifact, LookaheadKV(1, **parts), allocate


def _write(out: Path, artifact: LookaheadAdapter, trainer: ModuleTrainer[EvictionObjective], data_digest: str) -> None:
    """Write the adapter with what was trained, its card and the curves.

    Raises:
        UserError: a weight of a head is infinite or 0.
    """
    trained, objective, module = trainer.trained(), trainer.objective, trainer.objective.lookahead
    name, about = ("fine-tuning", FINETUNING) if module else ("head weights", HEAD_WEIGHTS)
    weights = objective.head_weights()
    if not (torch.isfinite(weights) & (weights > 0)).all():
        raise trainer.not_finite("the weight of a head is infinite or 0 (finetune.head_weights_rate is too high)")
    described: dict[str, Any] = {
        "steps": trained.steps,
        "samples": trained.samples,
        "held-out samples among them": trained.held_out,
        "data": data_digest,
        "samples a step": trained.samples_per_step,
        "steps on each teacher output": trained.settings.replays,
        **({"learning rate": trained.settings.learning_rate} if module else {}),
        "budgets": objective.settings.budgets,
        "temperature": objective.settings.temperature,
        "head_weights_rate": objective.settings.weights_rate,
        "smallest and largest weight of a head": [round(each.item(), 3) for each in (weights.min(), weights.max())],
    }
    described = {f"{name}, {key}": value for key, value in described.items()}
    before = {key: value for key, value in artifact.provenance.training.items() if not key.startswith(f"{name}, ")}
    provenance = replace(artifact.provenance, training=before | described, trained_on=prompts_as_text(trained.prompts))
    rows = trainer.measurements()
    card = with_eviction(artifact.folder, about, described, *((rows[0], rows[-1]) if rows else ({}, {})))
    if module:
        artifact = replace(artifact, lora=module.lora_state(), tokens=module.tokens.detach().cpu())
    picture = "finetuning.png" if module else "head_weights.png"
    figure = eviction_figure(trained.log, weights, objective.settings.budgets)
    numbers = tuple(map(tuple, weights.tolist()))
    replace(artifact, head_weights=numbers).save(out, provenance, card, {picture: figure})
