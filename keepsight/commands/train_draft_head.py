r"""keepsight train_draft_head: train an EAGLE-3 head to draft what the target says next.

    accelerate launch train_draft_head.py recipe=smollm2-135m data=runs/data out=runs/draft_head
    python train_draft_head.py recipe=smollm2-135m data=runs/data out=runs/draft_head model.dtype=bfloat16 \
        draft_head.train.precision=bf16 draft_head.vocabulary=24576

Writes the head, its model card and training curves to `out`. A training that was stopped resumes from its last
checkpoint when the same command is run again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import set_seed

from keepsight.commands.from_recipe import target_of
from keepsight.commands.training import (
    TrainingConfig,
    basics_of,
    length_summary,
    metrics_text,
    require_finished,
    run_of,
)
from keepsight.data_gen.store import TrainingSample, read_training_samples
from keepsight.errors import UserError
from keepsight.files import require_writable
from keepsight.models.draft_head import DraftHead
from keepsight.models.draft_head_card import draft_head_card
from keepsight.models.draft_head_files import WEIGHTS, load_draft_head, save_draft_head
from keepsight.models.hub import fetch
from keepsight.models.targets import Target
from keepsight.train.draft_head.init import frequent_tokens, new_draft_head
from keepsight.train.draft_head.objective import DraftHeadObjective
from keepsight.train.draft_head.plots import draft_head_figure
from keepsight.train.draft_head.teacher import RunTarget, TargetReader
from keepsight.train.draft_head.teacher_files import StoredReadings, write_readings
from keepsight.train.draft_head.trainer import DraftHeadTrainer


@dataclass
class Config(TrainingConfig):
    """Keys of `keepsight train_draft_head`.

    Attributes:
        features: Folder for the target's hidden states over the data, written if absent and then read instead of
            running the target; worth it over several epochs, for about 4 * hidden size * 2 bytes per token.
        init: EAGLE-3 head to start from, a folder or a Hub id; a new one by default.
    """

    title: str = "keepsight draft head"
    features: str | None = None
    init: str | None = None


def run(config: Config) -> None:
    """Train, then write the head, its card and the training curves."""
    settings = config.draft_head
    settings.check()
    require_writable(out := Path(config.out))
    target = target_of(config)
    samples, manifest = read_training_samples(Path(config.data), target.name, target.template_digest, target.vocabulary)
    set_seed(settings.train.seed)
    head = _head(config, target, samples)
    reader = _reader(config, target, head, samples, manifest["digest"])
    objective = DraftHeadObjective(head, target.model, reader, settings.unroll, settings.decay, settings.max_tokens)
    trainer = DraftHeadTrainer(objective, settings, run_of(config, target, samples, "init", WEIGHTS))
    finished = trainer.fit()
    if trainer.is_world_process_zero():
        lengths = [len(each.prompt_ids) + len(each.answer_ids) for each in samples]
        basics = basics_of(config, target, manifest, trainer.trained(), length_summary("tokens of a sample", lengths))
        card, curves = draft_head_card(basics, trainer.metrics), draft_head_figure(trainer.log_rows())
        save_draft_head(head, out, basics.provenance, card, curves)
        print(f"head after step {trainer.state.global_step} in {out}: {metrics_text(trainer.metrics)}")
    require_finished(finished, config, trainer)


def _head(config: Config, target: Target, samples: Sequence[TrainingSample]) -> DraftHead:
    if config.init is None:
        vocabulary_size = target.model.config.get_text_config().vocab_size
        count = config.draft_head.vocabulary
        vocabulary = frequent_tokens(samples, count, target.end_tokens, vocabulary_size)
        return new_draft_head(target.model, vocabulary, config.draft_head.max_tokens)
    head = load_draft_head(fetch(config.init), target.model)
    if not isinstance(head, DraftHead):
        raise UserError(f"init={config.init}: this is an EAGLE-1 or EAGLE-2 head; only EAGLE-3 heads can be trained")
    return head.float().train()


def _reader(
    config: Config, target: Target, head: DraftHead, samples: Sequence[TrainingSample], digest: str
) -> TargetReader:
    layers = head.layers_of(target.model)
    run_target = RunTarget(target.model, layers)
    if config.features is None:
        return run_target
    length = config.draft_head.max_tokens
    made_of = {
        "data": digest,
        "model": target.name,
        "version": target.version,
        "layers": list(layers),
        "dtype": str(target.model.dtype),
        "max_tokens": length,
    }
    texts = [(sample.prompt_ids + sample.answer_ids)[:length] for sample in samples]
    write_readings(Path(config.features), run_target, texts, made_of)
    return StoredReadings(Path(config.features))
