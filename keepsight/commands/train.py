"""keepsight train: a lookahead module learns which prompt entries the target's answers attend to.

    accelerate launch train_lookahead.py recipe=smollm2-135m data=runs/data out=runs/adapter
    python train_lookahead.py recipe=smollm2-135m data=runs/data out=runs/adapter train.steps=50 train.held_out=4

The adapter is written to `out`, checkpoints and logs to `out/training`. A stopped training goes on from its last
checkpoint when the same command is given again.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import set_seed

from keepsight import __version__
from keepsight.commands.config import Recipe
from keepsight.commands.from_recipe import target_of
from keepsight.data_gen.shards import TrainingSample, read_training_samples
from keepsight.errors import UserError
from keepsight.models.hub import fetch
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_card import model_card
from keepsight.models.lookahead_files import Provenance, load_lookahead, save_lookahead
from keepsight.models.targets import Target
from keepsight.train.lookahead.objective import LookaheadObjective
from keepsight.train.lookahead.trainer import LookaheadTrainer, train
from keepsight.train.plots import plot_training


@dataclass
class Config(Recipe):
    """Keys of `keepsight train`.

    Attributes:
        data: Folder made by `keepsight data`.
        out: Folder for the adapter.
        init: Adapter to start from, a folder or a Hub id; random soft tokens by default.
        max_prompt_tokens: Leaves out longer prompts; 0 keeps all.
        title: Heading of the model card.
        license: Of the adapter, as the Hub names licences.
        data_notes: Lines for the model card: origins and licences of the data.
    """

    data: str = "???"
    out: str = "???"
    init: str | None = None
    max_prompt_tokens: int = 0
    title: str = "keepsight lookahead adapter"
    license: str = "apache-2.0"
    data_notes: str = ""


def run(config: Config) -> None:
    """Train, then write the adapter, its card and the training curves."""
    target = target_of(config)
    samples, manifest = read_training_samples(Path(config.data), target.name, target.template_digest)
    samples = [sample for sample in samples if len(sample.prompt_ids) <= (config.max_prompt_tokens or 1 << 60)]
    if not samples:
        raise UserError(f"max_prompt_tokens={config.max_prompt_tokens} leaves no sample of {config.data}; raise it")
    out, work = Path(config.out), Path(config.out) / "training"
    set_seed(config.train.seed)
    lookahead = Lookahead(target.model, config.lookahead)
    if config.init:
        artifact = load_lookahead(fetch(config.init))
        lookahead.load_state(artifact.lora, artifact.tokens)
    trainer, finished = train(LookaheadObjective(lookahead), config.train, work, samples)
    if trainer.is_world_process_zero():
        provenance = _provenance(target, manifest, samples, trainer)
        notes = [config.data_notes] if config.data_notes else []
        card = model_card(
            config.title, config.lookahead, provenance, manifest["sources"], trainer.metrics, notes, config.license
        )
        save_lookahead(lookahead, out, provenance, card)
        plot_training(trainer.log_rows(), out / "training.png")
        print(f"adapter after step {trainer.state.global_step} in {out}: {_show(trainer.metrics)}")
    if not finished:
        raise UserError(
            f"interrupted at step {trainer.state.global_step}; the checkpoint and the adapter so far are in {out}: "
            "run the same command again to go on"
        )


def _provenance(
    target: Target, manifest: dict[str, Any], samples: list[TrainingSample], trainer: LookaheadTrainer
) -> Provenance:
    lengths = sorted(len(sample.prompt_ids) for sample in samples)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    training = {
        "steps": trainer.state.global_step,
        "samples": len(samples),
        "prompt tokens (shortest, median, longest)": [lengths[0], lengths[len(lengths) // 2], lengths[-1]],
        "learning rate": trainer.settings.learning_rate,
        "samples a step": trainer.settings.batch_size * trainer.settings.accumulation * trainer.args.world_size,
        "first and last logged loss (KL, nats)": [round(losses[0], 4), round(losses[-1], 4)] if losses else [],
    }
    return Provenance(target.name, target.version, target.template_digest, manifest["digest"], training, __version__)


def _show(fidelity: dict[str, float]) -> str:
    return ", ".join(f"{name.removeprefix('eval_')} {value:.3f}" for name, value in fidelity.items()) or "not measured"
