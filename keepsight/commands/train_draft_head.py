"""keepsight train_draft_head: train an EAGLE-3 draft head."""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from transformers import PreTrainedModel, set_seed

from keepsight.commands.config import TrainDraftHead as Config
from keepsight.commands.from_recipe import target_of
from keepsight.commands.training import (
    basics_of,
    check_inputs,
    ending,
    length_summary,
    read_samples,
    require_finished,
    run_of,
)
from keepsight.data_gen.store import TrainingSample
from keepsight.errors import UserError
from keepsight.files import require_writable
from keepsight.models.draft_head import WEIGHTS, DraftHead
from keepsight.models.targets import Target
from keepsight.train.draft_head import (
    DraftHeadObjective,
    RunModel,
    StoredStates,
    Teacher,
    frequent_tokens,
    new_draft_head,
    write_states,
)
from keepsight.train.plots import draft_head_figure
from keepsight.train.trainer import ModuleTrainer


def run(config: Config) -> None:
    """Train, then write the head, its card and the training curves."""
    settings = config.draft_head
    check_inputs(config, "draft_head.train", settings.train)
    if config.features is not None:
        require_writable(Path(config.features), key="features")
    if config.init is not None:
        _initial(config.init)
    out, target = Path(config.out), target_of(config)
    samples, manifest = read_samples(config, target)
    set_seed(settings.train.seed)
    head = _head(config, target, samples)
    teacher = _teacher(config, target, head, samples, manifest["digest"])
    objective = DraftHeadObjective(head, target.model, teacher, settings)
    trainer = ModuleTrainer(objective, settings.train, run_of(config, target, samples, "init", WEIGHTS))
    finished = trainer.fit()
    if trainer.is_world_process_zero():
        lengths = [len(each.prompt_ids) + len(each.answer_ids) for each in samples]
        basics = basics_of(config, target, manifest, trainer.trained(), length_summary("tokens of a sample", lengths))
        card, curves = head.card(basics, trainer.metrics), draft_head_figure(trainer.trained().log)
        head.save(out, basics.provenance, card, {"training.png": curves})
        print(ending(trainer, config, "head", f"bench speculate draft.head={quote(config.out)} draft.layers=null"))
    require_finished(finished, config, trainer)


def _head(config: Config, target: Target, samples: Sequence[TrainingSample]) -> DraftHead:
    if config.init is None:
        vocabulary_size = target.model.config.get_text_config().vocab_size
        count = config.draft_head.vocabulary
        vocabulary = frequent_tokens(samples, count, target.end_tokens, vocabulary_size)
        return new_draft_head(target.model, vocabulary, config.draft_head.max_tokens)
    return _initial(config.init, target.model).float().train()


def _initial(name: str, model: PreTrainedModel | None = None) -> DraftHead:
    try:
        return DraftHead.from_pretrained(name, model=model)
    except UserError as error:
        raise UserError(f"init={name}: {error}") from None


def _teacher(
    config: Config, target: Target, head: DraftHead, samples: Sequence[TrainingSample], digest: str
) -> Teacher:
    layers = head.layers_of(target.model)
    run_model = RunModel(target.model, layers)
    if config.features is None:
        return run_model
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
    write_states(Path(config.features), run_model, texts, made_of)
    return StoredStates(Path(config.features))
