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

from dataclasses import dataclass
from pathlib import Path

from keepsight.commands.on_answers import Described, OnAnswersConfig, given_to, write_adapter
from keepsight.commands.training import require_finished
from keepsight.models.card import HEAD_WEIGHTS
from keepsight.train.eviction.head_weights import HeadWeightsObjective
from keepsight.train.eviction.trainer import HeadWeightsTrainer


@dataclass
class Config(OnAnswersConfig):
    """Keys of `keepsight train_head_weights`."""


def run(config: Config) -> None:
    """Train the weights, then write the adapter with them, its card and the curves."""
    settings = config.head_weights
    given = given_to(config, settings, "head_weights")
    shared = given.shared
    objective = HeadWeightsObjective(
        given.target.model, shared.method, shared.allocate, settings.budgets, settings.temperature
    )
    trainer = HeadWeightsTrainer(objective, settings, given.run)
    finished = trainer.fit()
    if trainer.is_world_process_zero():
        described = Described("head weights", HEAD_WEIGHTS, "head_weights.png", given.data_digest)
        write_adapter(Path(config.out), shared, trainer, described)
    require_finished(finished, config, trainer)
