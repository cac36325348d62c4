"""keepsight train: train a lookahead module, or one for each combination of values."""

import gc
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
from keepsight.commands.from_recipe import next_command, outline_of, training_dtype, training_target
from keepsight.commands.saved_config import save_config
from keepsight.data_gen.store import TrainingSample
from keepsight.errors import UserError, require_same
from keepsight.eval.bench.measure import median_seconds, random_ids, require_room
from keepsight.eval.report.tables import Column, Table
from keepsight.files import write_png
from keepsight.models.distributed import created_sharded, launched
from keepsight.models.lookahead import CONFIG, Lookahead, LookaheadAdapter
from keepsight.models.lora import chosen_targets
from keepsight.models.targets import Target, keep_gradients
from keepsight.runtime.importance import Reduce
from keepsight.runtime.methods.lookaheadkv import SoftTokens
from keepsight.runtime.state import prefill
from keepsight.train.dataset import UnseenQuestions
from keepsight.train.distributed import SHARDED, shard_layers
from keepsight.train.importance import ImportanceObjective
from keepsight.train.plots import ablation_figure, lookahead_figure
from keepsight.train.trainer import ModuleTrainer, Trained

_SHAPE = ("tokens", "rank", "targets", "alpha", "group")
"""Settings of a module that its weights depend on."""


Cells = dict[str, tuple[dict[str, str], Config]]
"""For each cell of an ablation by name, the values of the keys that have several, and its configuration."""


def run(config: Config | Cells) -> str | None:
    """Train, then write the adapters, their cards and the training curves.

    Returns:
        The command that evaluates the adapter; None after an ablation, which has several.
    """
    if not isinstance(config, Config):
        _run_cells(config)
        return None
    _train(config, check(config))
    return next_command(config, f"eval adapter={quote(config.out)} out=runs/eval")


def _run_cells(cells: Cells) -> None:
    """Train the modules one after another, each in a folder of its own, then write the table and the plot."""
    configs = {}
    for name, (_, config) in cells.items():
        out = Path(config.out, "cells", name)
        configs[name] = replace(config, out=str(out), title=f"{config.title}: {name}")
    initial_adapters = [check(config) for config in configs.values()]

    rows = []
    logs = {}
    title = ""
    for (name, config), initial in zip(configs.items(), initial_adapters, strict=True):
        trainer = _train(config, initial)
        if trainer.is_world_process_zero():
            trained = trainer.trained()
            values_by_key, _ = cells[name]
            rows.append({"cell": name, **values_by_key, **_measured(trainer, config.timed_tokens)})
            logs[name] = trained.log
            title = f"Fidelity after {trained.steps} steps on held-out samples ({trained.held_out})."
        del trainer
        gc.collect()  # frees the model before the next cell loads another

    if rows:  # on the main process
        varied_values, first = next(iter(cells.values()))
        table = Table("ablation", title, _columns(varied_values, first), rows)
        table.save(Path(first.out))
        write_png(Path(first.out) / "ablation.png", ablation_figure(logs))
        print(table.markdown())


def _train(config: Config, initial: LookaheadAdapter | None) -> ModuleTrainer[ImportanceObjective]:
    """Train a module, then write its adapter, card and curves; UserError if the training was interrupted."""
    target = placed_target(config)
    samples, manifest = training.read_samples(config, target)
    objective = new_objective(config, target, initial)
    unseen = UnseenQuestions.for_tokenizer(target.tokenizer, config.train.unseen, config.train.seed)
    run = replace(training.run_of(config, target, samples, "init", CONFIG), unseen=unseen)
    trainer = ModuleTrainer(objective, config.train, run)
    finished = trainer.fit()
    if trainer.is_world_process_zero():
        save(config, Path(config.out), target, objective.lookahead, trainer.trained(), samples, manifest)
        save_config(config)
        print(training.ending(trainer, config, "adapter"))
    training.require_finished(finished, config, trainer)
    return trainer


def check(config: Config) -> LookaheadAdapter | None:
    """The adapter of `init`, if named, after all checks (UserError) that need no base model."""
    training.check_inputs(config, "train", config.train)
    if config.timed_tokens:
        require_room(outline_of(config), config.timed_tokens + config.lookahead.tokens)
    if config.lookahead.rank and config.lookahead.targets[0] not in ("all", "none"):
        chosen_targets(outline_of(config), config.lookahead.targets)
    if config.init is None:
        return None
    artifact = LookaheadAdapter.from_pretrained(config.init)
    trained_shape = {name: getattr(artifact.settings, name) for name in _SHAPE}
    shape = {name: getattr(config.lookahead, name) for name in _SHAPE}
    subject = f"init={config.init}: this adapter was trained"
    require_same(subject, trained_shape, shape, "give the values that it was trained with")
    return artifact


def placed_target(config: UsesModel) -> Target:
    """The base model; sharded over the processes of the launch by ZeRO-3 or `model.device_map=fsdp2`.

    UserError: it cannot be loaded, there is one process, or sharded weights are to be quantised.
    """
    dtype = training_dtype(config.model)
    if config.model.device_map != SHARDED:
        with created_sharded(dtype):
            if config.model.quantize and is_deepspeed_zero3_enabled():
                advice = "start with recipes/accelerate/ddp.yaml or zero2.yaml, which hold them on each GPU"
                raise UserError(
                    f"model.quantize={config.model.quantize}: ZeRO-3 cannot shard quantised weights; {advice}",
                    field="model.quantize",
                    code="conflict",
                )
            target = training_target(config)
        keep_gradients(target.model)
        return target

    processes = launched()
    if processes.num_processes == 1:
        raise UserError(
            f"model.device_map={SHARDED}: there is one process; start with recipes/accelerate/fsdp2.yaml",
            field="model.device_map",
            code="conflict",
        )
    on_cpu = replace(config, model=replace(config.model, device="cpu", device_map=None, dtype=dtype))
    device = "cpu" if processes.is_main_process else "meta"
    target = training_target(on_cpu, {"": device})
    shard_layers(target.model)
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
    described: dict[str, Any] = {
        **training.length_summary("prompt tokens", [len(sample.prompt_ids) for sample in samples]),
        "share of the loss on far entries": config.train.far,
    }
    if config.train.cuts > 1:
        described["cuts of each answer"] = config.train.cuts
    if config.train.unseen:
        described["share of samples with the question unseen"] = config.train.unseen
    described["modules with a LoRA"] = "none"
    if lookahead.lora:
        described["modules with a LoRA"] = _counted(lookahead.lora.names)
    basics = training.basics_of(config, target, manifest, trained, described)
    adapter = lookahead.adapter()
    card = adapter.card(basics, trained.metrics)
    adapter.save(folder, basics.provenance, card, {"training.png": lookahead_figure(trained.log)})


def _counted(names: Iterable[str]) -> str:
    """Names of modules without their layers, and in how many layers each occurs: `self_attn.q_proj 30, ...`."""
    layers = Counter[str]()
    for name in names:
        name_in_layer = name.partition(".layers.")[2].partition(".")[2]
        layers[name_in_layer] += 1
    return ", ".join(f"{name} {count}" for name, count in layers.items())


def _columns(varied_keys: Iterable[str], config: Config) -> list[Column]:
    """The columns of an ablation's table."""
    columns = [Column("cell", "cell", is_text=True)]
    for key in varied_keys:
        columns.append(Column(key, key.rpartition(".")[2].replace("_", " "), is_text=True))
    columns.append(Column("parameters", "parameters"))
    columns.append(Column("kl", "KL (nats)", digits=4))
    columns.append(Column("recall", f"recall at {config.train.budget}"))
    columns.append(Column("tau", "Kendall's tau"))
    if config.timed_tokens:
        columns.append(Column("overhead", f"overhead at {config.timed_tokens} tokens, %", digits=2))
    return columns


def _measured(trainer: ModuleTrainer[ImportanceObjective], timed_tokens: int) -> dict[str, Any]:
    """A trained module's number of parameters, its last measurement, and the time of its pass if it is asked for."""
    row: dict[str, Any] = {}
    row["parameters"] = sum(parameter.numel() for parameter in trainer.objective.trained_parameters())
    for name in ("kl", "recall", "tau"):
        row[name] = trainer.metrics.get(f"eval_{name}")
    if timed_tokens:
        row["overhead"] = _overhead(trainer.objective.lookahead, timed_tokens)
    return row


def _overhead(lookahead: Lookahead, tokens: int) -> float:
    """Time of a module's pass over a prompt of random tokens in percent of the prefill's, medians of three."""
    model = lookahead.model
    ids = random_ids(model, 1, tokens)
    observer = SoftTokens(lookahead.adapter())
    state = prefill(model, ids)
    reading = median_seconds(lambda: prefill(model, ids), 3)
    observing = median_seconds(lambda: observer(model, state, Reduce()), 3)
    return 100 * observing / reading
