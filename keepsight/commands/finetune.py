"""keepsight finetune: train a lookahead module further, on what evicting with it costs the target's answers.

    keepsight finetune recipe=smollm2-135m adapter=runs/adapter data=runs/data out=runs/finetuned
    accelerate launch -m keepsight finetune recipe=llama3.1-8b adapter=DIR data=DIR out=DIR
    keepsight finetune adapter=runs/adapter data=runs/data out=runs/finetuned max_prompt_tokens=4096

`keepsight train` teaches a module to attend to what answers attend to. This goes on from there: the target reads its
own answer again behind a soft form of the selection, and the gradient of how far what it says then is from what it
says with all entries flows through the selection to the soft tokens, the LoRA and the weights of heads (see
`keepsight train_head_weights`, which trains those alone and is a good step before this one). An answer's attention to
its whole prompt is held for its gradients: max_prompt_tokens= bounds the memory.

adapter= names the module, whose heads, of all layers, must share one budget (it was trained with
lookahead.sharing=model); a recipe may name one. Its shape stays, and finetune.train.* are the settings that count, not
train.*. What its card says stays too and gets a section, in place of that of an earlier fine-tuning; so title=, base=,
license= and data_notes= have no place here.

`out` gets the adapter, which every command takes. A training that was stopped resumes from its last checkpoint when
the same command is run again.
"""

from dataclasses import dataclass
from pathlib import Path

from keepsight.commands.on_answers import Described, OnAnswersConfig, given_to, write_adapter
from keepsight.commands.training import require_finished
from keepsight.models.card import FINETUNING
from keepsight.train.eviction.finetune import FinetuneObjective
from keepsight.train.eviction.trainer import FinetuneTrainer


@dataclass
class Config(OnAnswersConfig):
    """Keys of `keepsight finetune`."""


def run(config: Config) -> None:
    """Train, then write the adapter, its card and the curves."""
    settings = config.finetune
    given = given_to(config, settings, "finetune")
    shared = given.shared
    lookahead = shared.artifact.module(given.target.model)
    objective = FinetuneObjective(lookahead, shared.method, shared.allocate, settings.budgets, settings.temperature)
    trainer = FinetuneTrainer(objective, settings, given.run)
    finished = trainer.fit()
    if trainer.is_world_process_zero():
        described = Described("fine-tuning", FINETUNING, "finetuning.png", given.data_digest)
        write_adapter(Path(config.out), shared, trainer, described, lookahead)
    require_finished(finished, config, trainer)
