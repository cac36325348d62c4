"""train_retrieval_head.py: prune a draft head to a retrieval head, and distil what the target looks at into it.

    accelerate launch train_retrieval_head.py recipe=smollm2-135m head=runs/head data=runs/data out=runs/retrieval
    python train_retrieval_head.py head=runs/head data=runs/data out=runs/retrieval retrieval_head.features=none

The head is written to `out`, checkpoints and logs to `out/training`. A stopped training goes on from its last
checkpoint when the same command is given again. Without `head=` it starts from random projections.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from keepsight import __version__
from keepsight.commands.config import Recipe
from keepsight.commands.from_recipe import target_of
from keepsight.data_gen.shards import read_training_samples
from keepsight.errors import UserError
from keepsight.models.draft_head import DraftHead
from keepsight.models.draft_head_files import load_draft_head
from keepsight.models.hub import fetch
from keepsight.models.lookahead_files import Provenance
from keepsight.models.retrieval_card import comparison, retrieval_card
from keepsight.models.retrieval_head import RetrievalHead, check_target, parameters, pruning
from keepsight.models.retrieval_head_files import save_retrieval_head
from keepsight.models.targets import Target
from keepsight.train.retrieval_head.objective import RetrievalObjective
from keepsight.train.retrieval_head.plots import plot_distillation
from keepsight.train.retrieval_head.trainer import RetrievalTrainer, cut, distil


@dataclass
class Config(Recipe):
    """Keys of `train_retrieval_head.py`.

    Attributes:
        data: Folder made by `keepsight data`.
        out: Folder for the retrieval head.
        head: Draft head to prune, a folder or a Hub id; without it the projections are random.
        title: Heading of the model card.
        license: Of the head, as the Hub names licences.
        data_notes: Lines for the model card: origins and licences of the data.
    """

    data: str = "???"
    out: str = "???"
    head: str | None = None
    title: str = "keepsight retrieval head"
    license: str = "apache-2.0"
    data_notes: str = ""


def run(config: Config) -> None:
    """Prune, distil, then write the head, its card and the training curves."""
    settings = config.retrieval_head
    if settings.queries < 1:
        raise UserError(f"retrieval_head.queries={settings.queries} must be at least 1")
    if settings.temperature <= 0:
        raise UserError(f"retrieval_head.temperature={settings.temperature} must be above 0")
    target = target_of(config)
    samples, manifest = read_training_samples(Path(config.data), target.name, target.template_digest)
    samples = cut(samples, settings.max_tokens)
    set_seed(settings.train.seed)
    longest = max(len(sample.prompt_ids) + len(sample.answer_ids) for sample in samples)
    head, pruned = _first_head(config, target, longest)
    objective = RetrievalObjective(head, target.model, settings.queries, settings.temperature)
    out = Path(config.out)
    trainer, finished = distil(objective, settings, out / "training", samples, config.head or "")
    if trainer.is_world_process_zero():
        _write(config, trainer, _provenance(target, manifest, longest, trainer, pruned), manifest["sources"])
    if not finished:
        raise UserError(
            f"interrupted at step {trainer.state.global_step}; the checkpoint and the head so far are in {out}: "
            "run the same command again to go on"
        )


def _first_head(config: Config, target: Target, longest: int) -> tuple[RetrievalHead, dict[str, Any]]:
    """The head that distillation begins with, and what the card says about where it is from."""
    settings = config.retrieval_head
    if config.head is None:
        print("no head= is given: the retrieval head starts from random projections")
        head = RetrievalHead.untrained(target.model, settings.features, longest)
        return head, {"pruned from": "nothing, it began with random projections"}
    draft = load_draft_head(fetch(config.head))
    head = RetrievalHead.from_draft(draft, settings.features).float()
    try:
        check_target(head, target.model)
    except UserError as error:
        raise UserError(f"head={config.head}: {error}") from None
    assert isinstance(draft, DraftHead)
    share = pruning(head, draft)
    text = (
        f"{share.kept:,} of the draft head's {share.draft:,} parameters stay: {share.gone:.1%} are gone, "
        f"{share.gone_with_embedding:.1%} counted with the embedding, which is the target's"
    )
    print(text)
    return head.to(target.model.device), {"pruned from": _shown(config.head), "pruning": text}


def _shown(reference: str) -> str:
    """A Hub id as it is, of a folder its name alone: the card is for others."""
    return Path(reference).resolve().name if Path(reference).is_dir() else reference


def _write(config: Config, trainer: RetrievalTrainer, provenance: Provenance, sources: dict[str, int]) -> None:
    out, settings = Path(config.out), config.retrieval_head
    distilled, longest = trainer.objective.head, provenance.training["longest sample (tokens)"]
    head = RetrievalHead(distilled.config.trained_on(longest, distilled.layers_of(trainer.objective.target)))
    head.load_state_dict(trainer.weights())
    measured = comparison(*trainer.first_and_last(), "pruned only" if config.head else "random")
    notes = [config.data_notes] if config.data_notes else []
    card = retrieval_card(
        config.title, head.config, parameters(head), provenance, sources, measured, notes, config.license
    )
    save_retrieval_head(head.to(torch.bfloat16), out, provenance, card)
    plot_distillation(trainer.log_rows(), out / "training.png")
    print(f"retrieval head ({settings.features}) after step {trainer.state.global_step} in {out}\n{measured}")


def _provenance(
    target: Target,
    manifest: dict[str, Any],
    longest: int,
    trainer: RetrievalTrainer,
    pruned: dict[str, Any],
) -> Provenance:
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    settings = trainer.settings
    training = pruned | {
        "steps": trainer.state.global_step,
        "samples": trainer.samples,
        "longest sample (tokens)": longest,
        "tokens of a sample that are distilled": trainer.objective.queries,
        "temperature": trainer.objective.temperature,
        "learning rate": settings.learning_rate,
        "samples a step": settings.batch_size * settings.accumulation * trainer.args.world_size,
        "first and last logged loss (KL at that temperature, nats)": [round(losses[0], 4), round(losses[-1], 4)]
        if losses
        else [],
    }
    return Provenance(target.name, target.version, target.template_digest, manifest["digest"], training, __version__)
