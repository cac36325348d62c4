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
from keepsight.commands.from_recipe import resources_later, resources_of
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
from keepsight.runtime.methods import Resources, make_method
from keepsight.runtime.methods.lookaheadkv import LookaheadKV, adapter_fields
from keepsight.train.dataset import UnseenQuestions, digests_as_text
from keepsight.train.eviction import EvictionObjective
from keepsight.train.plots import eviction_figure
from keepsight.train.trainer import ModuleTrainer

_ABOUT = {"fine-tuning": FINETUNING, "head weights": HEAD_WEIGHTS}
"""The kinds of trainings for eviction, and what a card says of each."""
METHOD = "lookaheadkv"
"""The method whose module is trained; for others, only head weights are."""


def run(config: Config, selected: Mapping[str, Any] | None = None) -> None:
    """Train, then write the adapter, its card and the curves.

    `selected` are the fields of the module's selection; by default those of `selection=`, or the adapter's own.
    """
    settings = config.finetune
    samples = check_inputs(config, "finetune.train", settings.train)
    selected = SELECTIONS.get(config.selection or "", {}) if selected is None else selected
    artifact = _adapter(config, selected) if config.method == METHOD else None
    method = _method(config, artifact, resources_later(config))
    if (longest := max(len(each.prompt_ids) for each in samples)) <= min(settings.budgets):
        raise UserError(f"finetune.budgets={settings.budgets}: the longest prompt has {longest} tokens; lower them")
    target = placed_target(config)
    samples, manifest = read_samples(config, target)
    set_seed(settings.train.seed)
    if artifact is None:
        settings, method = replace(settings, freeze_module=True), _method(config, None, resources_of(config, target))
    lookahead = None if artifact is None or settings.freeze_module else artifact.module(target.model)
    allocate = method.allocate
    assert isinstance(allocate, Global | Uniform)
    objective = EvictionObjective(target.model, method, allocate, settings, lookahead)
    run = run_of(config, target, samples, "adapter", CONFIG)
    unseen = UnseenQuestions.for_tokenizer(target.tokenizer, settings.unseen, settings.train.seed)
    selection = {f"selection.{key}": getattr(artifact.settings, key) for key in SELECTION} if artifact else {}
    start = {**run.start, "method": config.method, "options": config.options, **selection}
    run = replace(run, start=start, unseen=unseen)
    trainer = ModuleTrainer(objective, settings.train, run)
    finished = trainer.fit()
    if trainer.is_world_process_zero():
        if artifact is None:
            print(ending(trainer, config, "head weights", _write_weights(config, trainer)))
        else:
            _write(Path(config.out), artifact, trainer, manifest["digest"])
            print(ending(trainer, config, "adapter", f"eval adapter={quote(config.out)} out=runs/eval"))
    require_finished(finished, config, trainer)


def _method(config: Config, artifact: LookaheadAdapter | None, resources: Resources) -> Evict:
    """The method to train, at the smallest budget; UserError if it cannot have head weights."""
    budget, name = min(config.finetune.budgets), f"method={config.method}"
    if artifact is not None:
        if config.options:
            raise UserError(f"{name}: options= is for other methods; give selection=")
        return LookaheadKV(budget, **adapter_fields(artifact))
    if config.selection is not None:
        raise UserError(f"{name}: selection= is for a lookahead module; give options=")
    made = make_method(config.method, budget, resources, **config.options)
    method = require_evict(made, f"{name} scores no entries of the cache, so there is nothing to weight")
    if method.observer.signed is not False:
        raise UserError(f"{name}: its scores can be negative, which weights cannot multiply; use another method")
    if not isinstance(method.allocate, Global):
        raise UserError(f"{name}: its heads share no budget; give options={{allocate: {{name: global, floor: 0.2}}}}")
    return method


def _adapter(config: Config, selected: Mapping[str, Any]) -> LookaheadAdapter:
    """The adapter to start from, with these fields of its selection; UserError if there is none, or if it is `out`."""
    if config.adapter is None:
        raise UserError("adapter= is required: the lookahead adapter to start from")
    artifact = LookaheadAdapter.from_pretrained(config.adapter)
    if Path(config.out).resolve() == artifact.folder.resolve():
        raise UserError(f"out={config.out} is the folder of the adapter that the training starts from; choose another")
    settings = replace(artifact.settings, **selected)
    if settings.floor is not None and settings.sharing == "layer":
        settings = replace(settings, sharing="model")
    changed = [
        f"{key}={value}" for key in SELECTION if (value := getattr(settings, key)) != getattr(artifact.settings, key)
    ]
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
    allocate = {"name": allocate} if isinstance(allocate, str) else allocate
    options = config.options | {"allocate": {**allocate, "weights": str(path)}}
    named = yaml.safe_dump({"name": config.method, **options}, default_flow_style=True, sort_keys=False, width=1 << 20)
    return f"eval {quote(f'methods=[full,{named.strip()}]')} out=runs/eval"


def eviction_records(training: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The records of a module's trainings for eviction, by the name of each.

    A record's key in `training` begins with the name: `fine-tuning, steps`, `fine-tuning 2, steps` of a second one.
    """
    found: dict[str, dict[str, Any]] = {}
    for key, value in training.items():
        name, comma, what = key.partition(", ")
        if comma and _kind(name) in _ABOUT:
            found.setdefault(name, {})[what] = value
    return found


def _kind(name: str) -> str:
    """The name of a training without its number."""
    return name.rstrip("0123456789 ")


def _range_of(weights: HeadWeights) -> list[float]:
    numbers = [each for row in weights for each in row]
    return [round(min(numbers), 3), round(max(numbers), 3)]


def _write(out: Path, artifact: LookaheadAdapter, trainer: ModuleTrainer[EvictionObjective], data_digest: str) -> None:
    """Write the adapter with what was trained, its card and the curves."""
    trained, objective, module = trainer.trained(), trainer.objective, trainer.objective.lookahead
    kind, before = "fine-tuning" if module else "head weights", artifact.provenance.training
    earlier = sum(_kind(each) == kind for each in eviction_records(before))
    name = f"{kind} {earlier + 1}" if earlier else kind
    weights, figure = _weights_of(trainer)
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
        **({"share of samples with the question unseen": share} if (share := objective.settings.unseen) else {}),
        "head_weights_rate": objective.settings.weights_rate,
        **({"smallest and largest weight of a head": _range_of(weights)} if objective.floor is not None else {}),
    }
    described = {f"{name}, {key}": value for key, value in described.items()}
    provenance = replace(artifact.provenance, training=before | described, trained_on=digests_as_text(trained.prompts))
    rows = trainer.measurements()
    records = {key: value for key, value in (before | described).items() if _kind(key.partition(", ")[0]) == kind}
    card = with_eviction(artifact.folder, _ABOUT[kind], records, *((rows[0], rows[-1]) if rows else ({}, {})))
    if module:
        artifact = replace(artifact, lora=module.lora_state(), tokens=module.tokens.detach().cpu())
    kept = artifact.head_weights if objective.floor is None else weights  # a uniform selection trains none
    picture = "finetuning.png" if module else "head_weights.png"
    replace(artifact, head_weights=kept).save(out, provenance, card, {picture: figure})
