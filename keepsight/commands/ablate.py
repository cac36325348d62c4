"""keepsight ablate: train lookahead modules of several shapes or settings side by side, and compare them.

    keepsight ablate data=runs/data out=runs/ablation 'lookahead.tokens=[8,16,32]' 'lookahead.rank=[8,32]'
    keepsight ablate data=runs/data out=runs/targets 'lookahead.tokens=[8,16,32]' 'lookahead.targets=[none,qv,all]'
    keepsight ablate data=runs/data out=runs/rates 'train.learning_rate=[3e-4,1e-3,3e-3]' train.steps=400
    accelerate launch -m keepsight ablate recipe=llama3.1-8b data=runs/data out=runs/ablation 'lookahead.rank=[0,8,32]'

Every combination of the values is a cell: a module with an optimiser and a schedule of its own, which learns what it
would learn alone. All cells learn from the same readings of the target in the same order, and reading is most of the
work: six cells cost far less than six trainings. All other keys mean what they mean for `keepsight train`.

`out` gets a table (ablation.md, .tex, .csv) and a plot (ablation.png) of the cells' fidelity on held-out samples, and
in cells/ an adapter for each, which every command takes:

    keepsight eval out=runs/eval 'methods=[{name: lookaheadkv, adapter: runs/ablation/cells/tokens8-rank8, label: 8}]'

A run that was stopped resumes from its last checkpoint when the same command is run again.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from keepsight.commands import train
from keepsight.commands.config import parse
from keepsight.commands.grid import cells
from keepsight.commands.training import require_finished, run_of
from keepsight.errors import UserError
from keepsight.eval.report.tables import Column, Table
from keepsight.files import require_writable, write_png
from keepsight.models.lookahead import CONFIG
from keepsight.train.lookahead.ablation import AblationTrainer, Cell
from keepsight.train.lookahead.plots import ablation_figure
from keepsight.train.trained import Trained

VARIED = (
    *(f"lookahead.{name}" for name in ("tokens", "rank", "targets", "alpha", "dropout")),
    *(f"train.{name}" for name in ("learning_rate", "clip", "far")),
)
"""Keys that may have several values; the cells share all others, and with them the data and its order."""


@dataclass
class Config(train.Config):
    """Keys of `keepsight ablate`."""

    title: str = "keepsight lookahead adapter of an ablation"


Grid = dict[str, tuple[dict[str, str], Config]]
"""For each cell by name, its values of the keys that have several, and its configuration."""


def configure(overrides: list[str]) -> Grid:
    """The cells that the arguments name.

    Raises:
        UserError: no key has several values, or a cell's configuration is refused.
    """
    grid = {_name(varied): (varied, parse(Config, given)) for varied, given in cells(overrides, VARIED)}
    if len(grid) < 2:
        raise UserError(f"give a key several values, such as lookahead.tokens=[8,16]; choose from {', '.join(VARIED)}")
    return grid


def _name(varied: dict[str, str]) -> str:
    """`tokens8-rank32`: the name of a folder."""
    words = ((key.partition(".")[2], "+".join(re.findall(r"[\w.-]+", value))) for key, value in varied.items())
    return "-".join(f"{key}{value}" for key, value in words)


def run(grid: Grid) -> None:
    """Train all cells, then write their adapters, the table and the plot."""
    configs = {name: config for name, (_, config) in grid.items()}
    first = next(iter(configs.values()))
    require_writable(out := Path(first.out))
    target = train.placed_target(first)
    samples, manifest = train.training_samples(first, target, first.max_prompt_tokens)
    modules = [Cell(name, train.new_objective(each, target), each.train) for name, each in configs.items()]
    trainer = AblationTrainer(modules, run_of(first, target, samples, "init", CONFIG))
    finished = trainer.fit()
    if trainer.is_world_process_zero():
        trained = dict(zip(configs, trainer.trained_cells(), strict=True))
        for cell in modules:
            config = replace(configs[cell.name], title=f"{first.title}: {cell.name}")
            folder = out / "cells" / cell.name
            train.save(config, folder, target, cell.objective.lookahead, trained[cell.name], samples, manifest)
        table = _table(grid, modules, trained)
        table.save(out)
        write_png(out / "ablation.png", ablation_figure({name: each.log for name, each in trained.items()}))
        print(table.markdown())
    require_finished(finished, first, trainer)


def _table(grid: Grid, modules: list[Cell], trained: dict[str, Trained]) -> Table:
    varied, config = next(iter(grid.values()))
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
            **grid[cell.name][0],
            "parameters": sum(each.numel() for each in cell.objective.parameters() if each.requires_grad),
            **{name: trained[cell.name].metrics.get(f"eval_{name}") for name in ("kl", "recall", "tau")},
        }
        for cell in modules
    ]
    first = next(iter(trained.values()))
    title = f"Fidelity after {first.steps} steps on held-out samples ({first.held_out})."
    return Table("ablation", title, columns, rows)
