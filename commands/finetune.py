"""keepsight finetune: train a lookahead module, or head weights alone, on the loss that eviction causes."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

import torch
import yaml
from matplotlib.figure import Figure
from transformers import set_seed

from keepsight.commands.config import Finetune as Config
from keepsight.commands.from_recipe import next_command, resources_of, without_weights
from keepsight.commands.saved_config import save_config
from keepsight.commands.train import placed_target
from keepsight.commands.training import check_inputs, ending, read_samples, require_finished, run_of
from keepsight.commands.variants import require_evict
from keepsight.errors import UserError
from keepsight.files import write_json, write_png
from keepsight.models.card import FINETUNING, HEAD_WEIGHTS, with_eviction
from keepsight.models.distributed import launched
from keepsight.models.lookahead import CONFIG, LookaheadAdapter
from keepsight.models.lookahead_settings import SELECTION, SELECTIONS, HeadWeights
from keepsight.runtime.allocate import Global, Uniform
from keepsight.runtime.evict import Evict
from keepsight.runtime.methods import make_method
from keepsight.runtime.methods.lookaheadkv import LookaheadKV, adapter_fields
from keepsight.train.dataset import UnseenQuestions, digests_as_text
from keepsight.train.eviction import EvictionObjective
from keepsight.train.plots import eviction_figure
from keepsight.train.trainer import ModuleTrainer

_ABOUT = {"fine-tuning": FINETUNING, "head weights": HEAD_WEIGHTS}
"""The kinds of trainings for eviction, and what a card says of each."""
METHOD = "lookaheadkv"
"""The method whose module is trained; for others, only head weights are."""


def run(config: Config, selected: Mapping[str, Any] | None = None) -> str:
    """Train, then write the adapter, its card and the curves; returns the command that evaluates it.

    `selected` are the fields of the module's selection; by default those of `selection=`, or the adapter's own.
    """
    settings = config.finetune
    samples = check_inputs(config, "finetune.train", settings.train)
    if selected is None:
        selected = SELECTIONS.get(config.selection or "", {})
    artifact = _adapter(config, selected) if config.method == METHOD else None
    method = _method(config, artifact)
    longest = max(len(sample.prompt_ids) for sample in samples)
    if longest <= min(settings.budgets):
        raise UserError(
            f"finetune.budgets={settings.budgets}: the longest prompt has {longest} tokens; lower them",
            field="finetune.budgets",
            code="range",
        )

    target = placed_target(config)
    samples, manifest = read_samples(config, target)
    set_seed(settings.train.seed)
    lookahead = None
    if artifact is None:
        settings = replace(settings, freeze_module=True)
    elif not settings.freeze_module:
        lookahead = artifact.module(target.model)
    allocate = method.allocate
    assert isinstance(allocate, Global | Uniform)
    objective = EvictionObjective(target.model, method, allocate, settings, lookahead)

    run = run_of(config, target, samples, "adapter", CONFIG)
    start = {**run.start, "method": config.method, "options": config.options}
    if artifact is not None:
        for key in SELECTION:
            start[f"selection.{key}"] = getattr(artifact.settings, key)
    unseen = UnseenQuestions.for_tokenizer(target.tokenizer, settings.unseen, settings.train.seed)
    trainer = ModuleTrainer(objective, settings.train, replace(run, start=start, unseen=unseen))
    finished = trainer.fit()

    following = f"eval adapter={quote(config.out)} out=runs/eval"
    if trainer.is_world_process_zero():
        save_config(config)
        if artifact is None:
            following = _write_weights(config, trainer)
            print(ending(trainer, config, "head weights"))
        else:
            _write(Path(config.out), artifact, trainer, manifest["digest"])
            print(ending(trainer, config, "adapter"))
    require_finished(finished, config, trainer)
    return next_command(config, following)


def _method(config: Config, artifact: LookaheadAdapter | None) -> Evict:
    """The method to train, at the smallest budget; UserError if it cannot have head weights."""
    budget = min(config.finetune.budgets)
    key = f"method={config.method}"
    if artifact is not None:
        if config.options:
            raise UserError(f"{key}: options= is for other methods; give selection=", field="options", code="conflict")
        return LookaheadKV(budget, **adapter_fields(artifact))

    if config.selection is not None:
        raise UserError(
            f"{key}: selection= is for a lookahead module; give options=", field="selection", code="conflict"
        )
    resources = resources_of(config, without_weights(config))
    any_method = make_method(config.method, budget, resources, **config.options)
    method = require_evict(any_method, f"{key} scores no entries of the cache, so there is nothing to weight")
    if method.observer.signed is not False:
        raise UserError(
            f"{key}: its scores can be negative, which weights cannot multiply; use another method",
            field="method",
            code="model",
        )
    if not isinstance(method.allocate, Global):
        raise UserError(
            f"{key}: its heads share no budget; give options={{allocate: {{name: global, floor: 0.2}}}}",
            field="allocate",
            code="conflict",
        )
    return method


def _adapter(config: Config, selected: Mapping[str, Any]) -> LookaheadAdapter:
    """The adapter to start from, with these fields of its selection; UserError if there is none, or if it is `out`."""
    if config.adapter is None:
        raise UserError("adapter= is required: the lookahead adapter to start from", field="adapter", code="missing")
    artifact = LookaheadAdapter.from_pretrained(config.adapter)
    if Path(config.out).resolve() == artifact.folder.resolve():
        raise UserError(
            f"out={config.out} is the folder of the adapter that the training starts from; choose another",
            field="out",
            code="conflict",
        )
    settings = replace(artifact.settings, **selected)
    if settings.floor is not None and settings.sharing == "layer":
        settings = replace(settings, sharing="model")
    changed = []
    for key in SELECTION:
        value = getattr(settings, key)
        if value != getattr(artifact.settings, key):
            changed.append(f"{key}={value}")
    if changed and launched().is_main_process:
        print(f"{config.adapter}: from here on it selects with {', '.join(changed)}")
    return replace(artifact, settings=settings)


def _weights_of(trainer: ModuleTrainer[EvictionObjective]) -> tuple[HeadWeights, Figure]:
    """The head weights and the curves of the training; UserError if a weight is infinite or 0."""
    weights = trainer.objective.head_weights()
    if not (torch.isfinite(weights) & (weights > 0)).all():
        raise trainer.not_finite("the weight of a head is infinite or 0 (finetune.head_weights_rate is too high)")
    figure = eviction_figure(trainer.trained().log, weights, trainer.objective.settings.budgets)
    return tuple(map(tuple, weights.tolist())), figure


def _write_weights(config: Config, trainer: ModuleTrainer[EvictionObjective]) -> str:
    """Write another method's head weights and the curves; returns the command that evaluates with them."""
    weights, figure = _weights_of(trainer)
    path = Path(config.out, "head_weights.json")
    write_json(path, weights)
    write_png(path.with_suffix(".png"), figure)
    allocate = config.options.get("allocate", {})
    if isinstance(allocate, str):
        allocate = {"name": allocate}
    method = {"name": config.method, **config.options, "allocate": {**allocate, "weights": str(path)}}
    text = yaml.safe_dump(method, default_flow_style=True, sort_keys=False, width=1 << 20)
    return f"eval {quote(f'methods=[full,{text.strip()}]')} out=runs/eval"


def eviction_records(training: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The records of a module's trainings for eviction, by the name of each.

    A record's key in `training` begins with the name: `fine-tuning, steps`, `fine-tuning 2, steps` of a second one.
    """
    records: dict[str, dict[str, Any]] = {}
    for key, value in training.items():
        name, comma, fact = key.partition(", ")
        if comma and _kind(name) in _ABOUT:
            records.setdefault(name, {})[fact] = value
    return records


def _kind(name: str) -> str:
    """The name of a training without its number."""
    return name.rstrip("0123456789 ")


def _write(out: Path, artifact: LookaheadAdapter, trainer: ModuleTrainer[EvictionObjective], data_digest: str) -> None:
    """Write the adapter with what was trained, its card and the curves."""
    trained = trainer.trained()
    objective = trainer.objective
    module = objective.lookahead
    weights, figure = _weights_of(trainer)
    facts: dict[str, Any] = {
        "steps": trained.steps,
        "samples": trained.samples,
        "held-out samples among them": trained.held_out,
        "data": data_digest,
        "samples a step": trained.samples_per_step,
        "steps on each teacher output": trained.settings.replays,
    }
    if module:
        facts["learning rate"] = trained.settings.learning_rate
    facts["budgets"] = objective.settings.budgets
    facts["temperature"] = objective.settings.temperature
    if objective.settings.unseen:
        facts["share of samples with the question unseen"] = objective.settings.unseen
    facts["head_weights_rate"] = objective.settings.weights_rate
    if objective.floor is not None:  # a uniform selection trains no weights
        smallest = min(map(min, weights))
        largest = max(map(max, weights))
        facts["smallest and largest weight of a head"] = [round(smallest, 3), round(largest, 3)]

    # A second training of a kind has a record of its own beside the first.
    kind = "fine-tuning" if module else "head weights"
    training = dict(artifact.provenance.training)
    earlier = sum(_kind(name) == kind for name in eviction_records(training))
    name = f"{kind} {earlier + 1}" if earlier else kind
    for fact, value in facts.items():
        training[f"{name}, {fact}"] = value
    records = {key: value for key, value in training.items() if _kind(key.partition(", ")[0]) == kind}
    provenance = replace(artifact.provenance, training=training, trained_on=digests_as_text(trained.prompts))
    measurements = trainer.measurements() or [{}]
    card = with_eviction(artifact.folder, _ABOUT[kind], records, measurements[0], measurements[-1])

    if module:
        artifact = replace(artifact, lora=module.lora_state(), tokens=module.tokens.detach().cpu())
    if objective.floor is not None:
        artifact = replace(artifact, head_weights=weights)
    picture = "finetuning.png" if module else "head_weights.png"
    artifact.save(out, provenance, card, {picture: figure})
