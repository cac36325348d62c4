"""keepsight train_head_weights: learn how the heads of a lookahead module share one budget.

    keepsight train_head_weights recipe=smollm2-135m adapter=runs/adapter data=runs/data out=runs/weighted
    accelerate launch -m keepsight train_head_weights recipe=llama3.1-8b adapter=DIR data=DIR out=DIR
    keepsight train_head_weights adapter=runs/adapter data=runs/data out=runs/weighted max_prompt_tokens=4096

Where the heads of all layers share a budget (lookahead.sharing=model), those with the most important entries keep the
most of them. How much an answer loses with them differs from head to head, so each KV head gets a weight, by which its
importance is multiplied before heads are compared. The weights are learned from the target's own answers, which it
reads again behind a soft form of the selection; the module stays as it is, and weights that it already has are where
training begins. A few hundred samples do. All attention weights of an answer's tokens to a prompt are held for their
gradients: max_prompt_tokens= bounds the memory.

adapter= names the module; a recipe may name one. What the card says of it stays, so title=, base=, license= and
data_notes= have no place here.

`out` gets the adapter with its weights, which every command takes. A training that was stopped resumes from its last
checkpoint when the same command is run again.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from keepsight.commands.from_recipe import training_target
from keepsight.commands.train import training_samples
from keepsight.commands.training import TrainingConfig, metrics_text, require_finished, run_of
from keepsight.errors import UserError
from keepsight.files import require_writable
from keepsight.models.head_weights_files import save_with_head_weights
from keepsight.models.hub import fetch
from keepsight.models.lookahead_card import with_head_weights
from keepsight.models.lookahead_files import CONFIG, Artifact, load_lookahead
from keepsight.models.quantization import keep_gradients
from keepsight.runtime.allocate import Global
from keepsight.runtime.methods.lookaheadkv import LookaheadKV, parts_of
from keepsight.train.head_weights.objective import HeadWeightsObjective
from keepsight.train.head_weights.plots import head_weights_figure
from keepsight.train.head_weights.trainer import HeadWeightsTrainer
from keepsight.train.seen import as_text


@dataclass
class Config(TrainingConfig):
    """Keys of `keepsight train_head_weights`.

    Attributes:
        max_prompt_tokens: Leaves out longer prompts; 0 keeps all.
    """

    max_prompt_tokens: int = 0


def run(config: Config) -> None:
    """Train the weights, then write the adapter with them, its card and the curves."""
    settings = config.head_weights
    require_writable(Path(config.out))
    if config.adapter is None:
        raise UserError("adapter= is required: the lookahead module whose heads get weights")
    given = {key: getattr(config, key) for key in ("title", "base", "license", "data_notes")}
    if odd := [key for key, value in given.items() if value != getattr(Config(), key)]:
        raise UserError(f"{odd[0]}= has no place here: the adapter's card stays and gets a section")
    artifact = load_lookahead(fetch(config.adapter))
    parts = parts_of(artifact)
    if not isinstance(allocate := parts.pop("allocate"), Global):
        raise UserError(
            f"adapter={config.adapter}: the heads of all its layers do not share one budget, so that weights would "
            "select nothing else; train it with lookahead.floor=0.2 lookahead.sharing=model"
        )
    target = training_target(config)
    keep_gradients(target.model)
    samples, manifest = training_samples(config, target, config.max_prompt_tokens)
    if (longest := max(len(each.prompt_ids) for each in samples)) <= min(settings.budgets):
        raise UserError(f"head_weights.budgets={settings.budgets}: the longest prompt has {longest} tokens; lower them")
    set_seed(settings.train.seed)
    method = LookaheadKV(1, **parts)
    objective = HeadWeightsObjective(target.model, method, allocate, settings.budgets, settings.temperature)
    trainer = HeadWeightsTrainer(objective, settings, run_of(config, target, samples, "adapter", CONFIG))
    finished = trainer.fit()
    if trainer.is_world_process_zero():
        _write(Path(config.out), artifact, trainer, manifest["digest"])
    require_finished(finished, config, trainer)


def _write(out: Path, artifact: Artifact, trainer: HeadWeightsTrainer, data_digest: str) -> None:
    trained, weights = trainer.trained(), trainer.objective.weights()
    if not (torch.isfinite(weights) & (weights > 0)).all():
        raise trainer.not_finite("the weight of a head is infinite or 0")
    described: dict[str, Any] = {
        "head weights, steps": trained.steps,
        "head weights, samples": trained.samples,
        "head weights, held-out samples among them": trained.held_out,
        "head weights, data": data_digest,
        "head weights, learning rate": trained.settings.learning_rate,
        "head weights, temperature (nats)": trainer.objective.temperature,
        "head weights, smallest and largest": [round(weights.min().item(), 3), round(weights.max().item(), 3)],
    }
    training = {name: value for name, value in artifact.provenance.training.items() if name not in described}
    provenance = replace(artifact.provenance, training=training | described, trained_on=as_text(trained.seen))
    figure = head_weights_figure(trainer.log_rows(), weights, trainer.objective.budgets)
    rows = trainer.measurements()
    card = with_head_weights(artifact.folder, described, *((rows[0], rows[-1]) if rows else ({}, {})))
    save_with_head_weights(artifact, out, tuple(map(tuple, weights.tolist())), provenance, card, figure)
    print(f"adapter with weights of heads after step {trained.steps} in {out}: {metrics_text(trained.metrics)}")
