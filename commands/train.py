"""keepsight train: train a lookahead module, or several side by side."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from transformers import set_seed
from transformers.integrations import is_deepspeed_zero3_enabled

from keepsight.commands import training
from keepsight.commands.config import Train as Config
from keepsight.commands.config_shared import UsesModel
from keepsight.commands.from_recipe import outline_of, training_dtype, training_target
from keepsight.data_gen.store import TrainingSample
from keepsight.errors import UserError, require_same
from keepsight.eval.report.tables import Column, Table
from keepsight.files import write_png
from keepsight.models.distributed import created_divided, launched
from keepsight.models.lookahead import CONFIG, Lookahead, LookaheadAdapter
from keepsight.models.lora import chosen_targets
from keepsight.models.targets import Target, keep_gradients
from keepsight.train.ablation import AblationTrainer, Cell
from keepsight.train.dataset import UnseenQuestions
from keepsight.train.distributed import DIVIDED, divide_layers
from keepsight.train.importance import ImportanceObjective
from keepsight.train.plots import ablation_figure, lookahead_figure
from keepsight.train.trainer import ModuleTrainer, Trained, TrainingRun

_SHAPE = ("tokens", "rank", "targets", "alpha", "group")
"""Settings of a module that its weights depend on."""


Cells = dict[str, tuple[dict[str, str], Config]]
"""For each cell of an ablation by name, the values of the keys that have several, and its configuration."""


def run(config: Config | Cells) -> None:
    """Train, then write the adapters, their cards and the training curves."""
    if not isinstance(config, Config):
        _run_cells(config)
        return
    initial = check(config)
    target = placed_target(config)
    samples, manifest = training.read_samples(config, target)
    objective = new_objective(config, target, initial)
    trainer = ModuleTrainer(objective, config.train, _run_of(config, target, samples))
    finished = trainer.fit()
    if trainer.is_world_process_zero():
        save(config, Path(config.out), target, objective.lookahead, trainer.trained(), samples, manifest)
        print(training.ending(trainer, config, "adapter", f"eval adapter={quote(config.out)} out=runs/eval"))
    training.require_finished(finished, config, trainer)


def _run_cells(cells: Cells) -> None:
    """Train all cells, then write their adapters, the table and the plot."""
    configs = {name: config for name, (_, config) in cells.items()}
    (first, *_), (initial, *_) = configs.values(), [check(each) for each in configs.values()]
    out, target = Path(first.out), placed_target(first)
    samples, manifest = training.read_samples(first, target)
    modules = [Cell(name, new_objective(each, target, initial), each.train) for name, each in configs.items()]
    trainer = AblationTrainer(modules, _run_of(first, target, samples))
    finished = trainer.fit()
    if trainer.is_world_process_zero():
        trained = dict(zip(configs, trainer.trained_cells(), strict=True))
        for cell in modules:
            config = replace(configs[cell.name], title=f"{first.title}: {cell.name}")
            folder = out / "cells" / cell.name
            save(config, folder, target, cell.objective.lookahead, trained[cell.name], samples, manifest)
        table = _table(cells, modules, trained)
        table.save(out)
        write_png(out / "ablation.png", ablation_figure({name: each.log for name, each in trained.items()}))
        print(table.markdown())
    training.require_finished(finished, first, trainer)


def _run_of(config: Config, target: Target, samples: Sequence[TrainingSample]) -> TrainingRun:
    unseen = UnseenQuestions.for_tokenizer(target.tokenizer, config.train.unseen, config.train.seed)
    return replace(training.run_of(config, target, samples, "init", CONFIG), unseen=unseen)


def check(config: Config) -> LookaheadAdapter | None:
    """The adapter of `init`, if named, after all checks (UserError) that need no base model."""
    training.check_inputs(config, "train", config.train)
    if config.lookahead.rank and config.lookahead.targets[0] not in ("all", "none"):
        chosen_targets(outline_of(config), config.lookahead.targets)
    if config.init is None:
        return None
    artifact = LookaheadAdapter.from_pretrained(config.init)
    was, now = ({name: getattr(each, name) for name in _SHAPE} for each in (artifact.settings, config.lookahead))
    require_same(f"init={config.init}: this adapter was trained", was, now, "give the values that it was trained with")
    return artifact


def placed_target(config: UsesModel) -> Target:
    """The base model; sharded over the processes of the launch by ZeRO-3 or `model.device_map=fsdp2`.

    UserError: it cannot be loaded, there is one process, or sharded weights are to be quantised.
    """
    dtype = training_dtype(config.model)
    if config.model.device_map != DIVIDED:
        with created_divided(dtype):
            if (quantize := config.model.quantize) and is_deepspeed_zero3_enabled():
                start = "start with recipes/accelerate/ddp.yaml or zero2.yaml, which hold them on each GPU"
                raise UserError(f"model.quantize={quantize}: ZeRO-3 cannot shard quantised weights; {start}")
            target = training_target(config)
        keep_gradients(target.model)
        return target
    processes = launched()
    if processes.num_processes == 1:
        raise UserError(f"model.device_map={DIVIDED}: there is one process; start with recipes/accelerate/fsdp2.yaml")
    on_cpu = replace(config, model=replace(config.model, device="cpu", device_map=None, dtype=dtype))
    target = training_target(on_cpu, {"": "cpu" if processes.is_main_process else "meta"})
    divide_layers(target.model)
    return target


def new_objective(config: Config, target: Target, initial: LookaheadAdapter | None = None) -> ImportanceObjective:
    """A new module, initialised by the seed or with an adapter's weights."""
    set_seed(config.train.seed)
    lookahead = Lookahead(target.model, config.lookahead)
    if initial is not None:
        initial.check_base(target.model)
        lookahead.load_state(initial.lora, initial.tokens)
    return ImportanceObjective(lookahead, config.train.far, config.train.gradient_checkpointing, config.train.cuts)


def save(
    config: Config,
    folder: Path,
    target: Target,
    lookahead: Lookahead,
    trained: Trained,
    samples: Sequence[TrainingSample],
    manifest: Mapping[str, Any],
) -> None:
    """Write the adapter, its card and the training curves into a folder."""
    lengths = training.length_summary("prompt tokens", [len(each.prompt_ids) for each in samples])
    loss: dict[str, Any] = {"share of the loss on far entries": config.train.far}
    if config.train.cuts > 1:
        loss["cuts of each answer"] = config.train.cuts
    if config.train.unseen:
        loss["share of samples with the question unseen"] = config.train.unseen
    adapted = {"modules with a LoRA": _counted(lookahead.lora.names) if lookahead.lora else "none"}
    basics = training.basics_of(config, target, manifest, trained, lengths | loss | adapted)
    adapter = lookahead.adapter()
    card = adapter.card(basics, trained.metrics)
    adapter.save(folder, basics.provenance, card, {"training.png": lookahead_figure(trained.log)})


def _counted(names: Iterable[str]) -> str:
    """Names of modules without their layers, and in how many layers each occurs: `self_attn.q_proj 30, ...`."""
    counts = Counter(name.partition(".layers.")[2].partition(".")[2] for name in names)
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _table(cells: Cells, modules: list[Cell], trained: dict[str, Trained]) -> Table:
    varied, config = next(iter(cells.values()))
    columns = [
        Column("cell", "cell", is_text=True),
        *(Column(key, key.partition(".")[2].replace("_", " "), is_text=True) for key in varied),
        Column("parameters", "parameters"),
        Column("kl", "KL (nats)", digits=4),
        Column("recall", f"recall at {config.train.budget}"),
        Column("tau", "Kendall's tau"),
    ]
    rows = [
        {
            "cell": cell.name,
            **cells[cell.name][0],
            "parameters": sum(each.numel() for each in cell.objective.parameters() if each.requires_grad),
            **{name: trained[cell.name].metrics.get(f"eval_{name}") for name in ("kl", "recall", "tau")},
        }
        for cell in modules
    ]
    first = next(iter(trained.values()))
    title = f"Fidelity after {first.steps} steps on held-out samples ({first.held_out})."
    return Table("ablation", title, columns, rows)
