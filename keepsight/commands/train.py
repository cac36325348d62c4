"""keepsight train: train a lookahead module to predict which prompt entries the target's answers attend to.

    accelerate launch train_lookahead.py recipe=smollm2-135m data=runs/data out=runs/adapter
    python train_lookahead.py recipe=smollm2-135m data=runs/data out=runs/adapter train.steps=50 train.held_out=4

Writes the adapter, its model card and training curves to `out`. A training that was stopped resumes from its last
checkpoint when the same command is run again.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from transformers import set_seed

from keepsight.commands.training import (
    TrainingConfig,
    basics_of,
    begun_with,
    length_summary,
    metrics_text,
    require_finished,
    training_target,
)
from keepsight.data_gen.shards import read_training_samples
from keepsight.errors import UserError, require_same
from keepsight.files import require_writable, write_png
from keepsight.models.hub import fetch
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_card import lookahead_card
from keepsight.models.lookahead_files import CONFIG, load_lookahead, save_lookahead
from keepsight.models.lora import lora_targets
from keepsight.train.lookahead.objective import LookaheadObjective
from keepsight.train.lookahead.plots import lookahead_figure
from keepsight.train.lookahead.trainer import LookaheadTrainer

_SHAPE = ("tokens", "rank", "alpha", "group")
"""Of a module's settings, those that its weights were trained with."""


@dataclass
class Config(TrainingConfig):
    """Keys of `keepsight train`.

    Attributes:
        init: Adapter to start from, a folder, a Hub id or shipped:NAME; random soft tokens by default.
        max_prompt_tokens: Leaves out longer prompts; 0 keeps all.
    """

    title: str = "keepsight lookahead adapter"
    init: str | None = None
    max_prompt_tokens: int = 0


def run(config: Config) -> None:
    """Train, then write the adapter, its card and the training curves."""
    require_writable(out := Path(config.out))
    target = training_target(config)
    samples, manifest = read_training_samples(Path(config.data), target.name, target.template_digest, target.vocabulary)
    samples = [each for each in samples if len(each.prompt_ids) <= (config.max_prompt_tokens or 1 << 60)]
    if not samples:
        raise UserError(f"max_prompt_tokens={config.max_prompt_tokens} leaves no sample of {config.data}; raise it")
    set_seed(config.train.seed)
    lookahead = Lookahead(target.model, config.lookahead)
    if config.init:
        _start_from(config.init, lookahead)
    begun = begun_with(target, "init", fetch(config.init) / CONFIG if config.init else None)
    objective = LookaheadObjective(lookahead, config.train.far)
    trainer = LookaheadTrainer(objective, config.train, out / "training", samples, config.replay, begun)
    finished = trainer.fit()
    if trainer.is_world_process_zero():
        lengths = length_summary("prompt tokens", [len(each.prompt_ids) for each in samples])
        far = {"share of the loss on far entries": config.train.far}
        adapted = {"modules with a LoRA": _counted(lora_targets(target.model)) if config.lookahead.rank else "none"}
        basics = basics_of(config, target, manifest, trainer, lengths | far | adapted)
        save_lookahead(lookahead, out, basics.provenance, lookahead_card(basics, config.lookahead, trainer.metrics))
        write_png(out / "training.png", lookahead_figure(trainer.log_rows()))
        print(f"adapter after step {trainer.state.global_step} in {out}: {metrics_text(trainer.metrics)}")
    require_finished(finished, config, trainer)


def _counted(names: Iterable[str]) -> str:
    """Names of modules without their layers, and in how many layers each occurs: `self_attn.q_proj 30, ...`."""
    counts = Counter(name.partition(".layers.")[2].partition(".")[2] for name in names)
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _start_from(init: str, lookahead: Lookahead) -> None:
    """Load an adapter's weights into a new module, which must have been trained as it is to be."""
    artifact = load_lookahead(fetch(init))
    artifact.check_base(lookahead.model)
    was, now = ({name: getattr(each.settings, name) for name in _SHAPE} for each in (artifact, lookahead))
    require_same(f"init={init}: this adapter was trained", was, now, "give the values that it was trained with")
    lookahead.load_state(artifact.lora, artifact.tokens)
