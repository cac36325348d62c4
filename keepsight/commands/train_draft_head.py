"""train_draft_head.py: an EAGLE-3 head learns to guess what the target says next.

    accelerate launch train_draft_head.py recipe=smollm2-135m data=runs/data out=runs/draft_head
    python train_draft_head.py recipe=smollm2-135m data=runs/data out=runs/draft_head model.dtype=bfloat16 \
        draft_head.train.precision=bf16 draft_head.vocabulary=24576

The head is written to `out`, checkpoints and logs to `out/training`. A stopped training goes on from its last
checkpoint when the same command is given again.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import set_seed

from keepsight import __version__
from keepsight.commands.config import Recipe
from keepsight.commands.from_recipe import target_of
from keepsight.data_gen.shards import TrainingSample, read_training_samples
from keepsight.errors import UserError
from keepsight.models.draft_head import DraftHead
from keepsight.models.draft_head_card import draft_head_card
from keepsight.models.draft_head_files import load_draft_head, save_draft_head
from keepsight.models.hub import fetch
from keepsight.models.lookahead_files import Provenance
from keepsight.models.targets import Target
from keepsight.train.draft_head.init import frequent_tokens, new_draft_head
from keepsight.train.draft_head.objective import DraftHeadObjective
from keepsight.train.draft_head.plots import plot_head_training
from keepsight.train.draft_head.teacher import Reader, RunTarget
from keepsight.train.draft_head.teacher_files import StoredReadings, write_readings
from keepsight.train.draft_head.trainer import DraftHeadTrainer, train_draft_head
from keepsight.train.head_settings import DraftHeadSettings


@dataclass
class Config(Recipe):
    """Keys of `train_draft_head.py`.

    Attributes:
        data: Folder made by `keepsight data`.
        out: Folder for the head.
        features: Folder for what the target says about the data, made when absent, read instead of running the target:
            worth it over several epochs, for about 4 * hidden size * 2 bytes a token.
        init: EAGLE-3 head to start from, a folder or a Hub id; a new one by default.
        title: Heading of the model card.
        license: Of the head, as the Hub names licences.
        data_notes: Lines for the model card: origins and licences of the data.
    """

    data: str = "???"
    out: str = "???"
    features: str | None = None
    init: str | None = None
    title: str = "keepsight draft head"
    license: str = "apache-2.0"
    data_notes: str = ""


def run(config: Config) -> None:
    """Train, then write the head, its card and the training curves."""
    settings = config.draft_head
    _check(settings)
    target = target_of(config)
    samples, manifest = read_training_samples(Path(config.data), target.name, target.template_digest)
    out, work = Path(config.out), Path(config.out) / "training"
    set_seed(settings.train.seed)
    head = _head(config, target, samples)
    reader = _reader(config, target, head, samples, manifest["digest"])
    objective = DraftHeadObjective(head, target.model, reader, settings.unroll, settings.decay, settings.max_tokens)
    trainer, finished = train_draft_head(objective, settings, work, samples, config.init or "")
    if trainer.is_world_process_zero():
        provenance = _provenance(target, manifest, samples, trainer)
        notes = [config.data_notes] if config.data_notes else []
        card = draft_head_card(config.title, provenance, manifest["sources"], trainer.metrics, notes, config.license)
        save_draft_head(head, out, provenance, card)
        plot_head_training(trainer.log_rows(), out / "training.png")
        print(f"head after step {trainer.state.global_step} in {out}: {_show(trainer.metrics)}")
    if not finished:
        raise UserError(
            f"interrupted at step {trainer.state.global_step}; the checkpoint and the head so far are in {out}: "
            "run the same command again to go on"
        )


def _check(settings: DraftHeadSettings) -> None:
    for key, least in (("unroll", 1), ("max_tokens", 3)):
        if (value := getattr(settings, key)) < least:
            raise UserError(f"draft_head.{key}={value} must be at least {least}")
    if not 0 < settings.decay <= 1:
        raise UserError(f"draft_head.decay={settings.decay} must lie above 0 and be at most 1")


def _head(config: Config, target: Target, samples: list[TrainingSample]) -> DraftHead:
    if config.init is None:
        vocabulary_size = target.model.config.get_text_config().vocab_size
        count = config.draft_head.vocabulary
        vocabulary = frequent_tokens(samples, count, target.end_tokens, vocabulary_size)
        return new_draft_head(target.model, vocabulary, config.draft_head.max_tokens)
    head = load_draft_head(fetch(config.init), target.model)
    if not isinstance(head, DraftHead):
        raise UserError(f"init={config.init}: this is an EAGLE-1 or EAGLE-2 head; only EAGLE-3 heads can be trained")
    return head.float().train()


def _reader(config: Config, target: Target, head: DraftHead, samples: list[TrainingSample], data_digest: str) -> Reader:
    layers = head.layers_of(target.model)
    run_target = RunTarget(target.model, layers)
    if config.features is None:
        return run_target
    length = config.draft_head.max_tokens
    made_of = {
        "data": data_digest,
        "model": target.name,
        "version": target.version,
        "layers": list(layers),
        "dtype": str(target.model.dtype),
        "max_tokens": length,
    }
    texts = [(sample.prompt_ids + sample.answer_ids)[:length] for sample in samples]
    with PartialState(cpu=not torch.cuda.is_available()).main_process_first():
        write_readings(Path(config.features), run_target, texts, made_of)
    return StoredReadings(Path(config.features))


def _provenance(
    target: Target, manifest: dict[str, Any], samples: list[TrainingSample], trainer: DraftHeadTrainer
) -> Provenance:
    lengths = sorted(len(sample.prompt_ids) + len(sample.answer_ids) for sample in samples)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    training = {
        "steps": trainer.state.global_step,
        "samples": len(samples),
        "tokens of a sample (shortest, median, longest)": [lengths[0], lengths[len(lengths) // 2], lengths[-1]],
        "learning rate": trainer.settings.learning_rate,
        "samples a step": trainer.settings.batch_size * trainer.settings.accumulation * trainer.args.world_size,
        "first and last logged loss (nats)": [round(losses[0], 4), round(losses[-1], 4)] if losses else [],
    }
    return Provenance(target.name, target.version, target.template_digest, manifest["digest"], training, __version__)


def _show(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name.removeprefix('eval_')} {value:.3f}" for name, value in metrics.items()) or "not measured"
