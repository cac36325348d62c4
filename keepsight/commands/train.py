"""keepsight train: train a lookahead module to predict which prompt entries the target's answers attend to.

    accelerate launch train_lookahead.py recipe=smollm2-135m data=runs/data out=runs/adapter
    python train_lookahead.py recipe=smollm2-135m data=runs/data out=runs/adapter train.steps=50 train.held_out=4

Writes the adapter, its model card and training curves to `out`. A training that was stopped resumes from its last
checkpoint when the same command is run again.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import set_seed
from transformers.integrations import is_deepspeed_zero3_enabled

from keepsight.commands.from_recipe import training_dtype, training_target
from keepsight.commands.training import (
    TrainingConfig,
    basics_of,
    length_summary,
    metrics_text,
    require_finished,
    run_of,
)
from keepsight.data_gen.store import TrainingSample, read_training_samples
from keepsight.errors import UserError, require_same
from keepsight.files import require_writable
from keepsight.models.hub import fetch
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_card import lookahead_card
from keepsight.models.lookahead_files import CONFIG, load_lookahead, save_lookahead
from keepsight.models.processes import launched
from keepsight.models.quantization import keep_gradients
from keepsight.models.targets import Target
from keepsight.models.zero3 import created_divided
from keepsight.train.dataset import no_longer_than
from keepsight.train.distributed import DIVIDED, divide_layers
from keepsight.train.lookahead.objective import LookaheadObjective
from keepsight.train.lookahead.plots import lookahead_figure
from keepsight.train.lookahead.trainer import LookaheadTrainer
from keepsight.train.trained import Trained

_SHAPE = ("tokens", "rank", "targets", "alpha", "group")
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
    target = placed_target(config)
    samples, manifest = training_samples(config, target, config.max_prompt_tokens)
    objective = new_objective(config, target)
    trainer = LookaheadTrainer(objective, config.train, run_of(config, target, samples, "init", CONFIG))
    finished = trainer.fit()
    if trainer.is_world_process_zero():
        save(config, out, target, objective.lookahead, trainer.trained(), samples, manifest)
        print(f"adapter after step {trainer.state.global_step} in {out}: {metrics_text(trainer.metrics)}")
    require_finished(finished, config, trainer)


def placed_target(config: Config) -> Target:
    """The target; divided over the processes of the launch where ZeRO-3 or `model.device_map` asks for that.

    Raises:
        UserError: it cannot be loaded, or is to be divided over one process or though it is quantised.
    """
    dtype = training_dtype(config.model)
    if config.model.device_map != DIVIDED:
        with created_divided(dtype):
            if (quantize := config.model.quantize) and is_deepspeed_zero3_enabled():
                raise UserError(
                    f"model.quantize={quantize}: ZeRO-3 cannot divide quantised weights; start with "
                    "recipes/accelerate/ddp.yaml or zero2.yaml, which hold them on each GPU"
                )
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


def training_samples(
    config: TrainingConfig, target: Target, max_prompt_tokens: int
) -> tuple[Sequence[TrainingSample], dict[str, Any]]:
    """The data's samples but for those with longer prompts, and its manifest.

    Raises:
        UserError: none is left, or the data is not what the target answered.
    """
    samples, manifest = read_training_samples(Path(config.data), target.name, target.template_digest, target.vocabulary)
    if max_prompt_tokens:
        samples = no_longer_than(samples, max_prompt_tokens)
    if not samples:
        raise UserError(f"max_prompt_tokens={max_prompt_tokens} leaves no sample of {config.data}; raise it")
    return samples, manifest


def new_objective(config: Config, target: Target) -> LookaheadObjective:
    """A new module beside the target, which the seed decides, or one that begins with the weights of `init`."""
    set_seed(config.train.seed)
    lookahead = Lookahead(target.model, config.lookahead)
    if config.init:
        _start_from(config.init, lookahead)
    return LookaheadObjective(lookahead, config.train.far, config.train.gradient_checkpointing, config.train.cuts)


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
    lengths = length_summary("prompt tokens", [len(each.prompt_ids) for each in samples])
    loss: dict[str, Any] = {"share of the loss on far entries": config.train.far}
    if config.train.cuts > 1:
        loss["cuts of each answer"] = config.train.cuts
    adapted = {"modules with a LoRA": _counted(lookahead.lora.names) if lookahead.lora else "none"}
    basics = basics_of(config, target, manifest, trained, lengths | loss | adapted)
    card = lookahead_card(basics, config.lookahead, trained.metrics)
    save_lookahead(lookahead, folder, basics.provenance, card, lookahead_figure(trained.log))


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
