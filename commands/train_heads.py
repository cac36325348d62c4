"""keepsight train_draft_head, train_retrieval_head: train an EAGLE-3 draft head; distil attention into a pruned one."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote

import torch
from transformers import PreTrainedModel, set_seed

from keepsight.commands import training
from keepsight.commands.config import TrainDraftHead, TrainRetrievalHead
from keepsight.commands.from_recipe import next_command, target_of, training_target
from keepsight.commands.saved_config import save_config
from keepsight.data_gen.store import TrainingSample
from keepsight.errors import UserError
from keepsight.files import require_writable
from keepsight.models.artifacts import fetch
from keepsight.models.card import CardBasics
from keepsight.models.draft_head import WEIGHTS as DRAFT_WEIGHTS
from keepsight.models.draft_head import DraftHead
from keepsight.models.identity import MadeWith
from keepsight.models.model_files import published_name
from keepsight.models.retrieval_head import (
    WEIGHTS,
    RetrievalHead,
    comparison,
    has_draft_head,
    pruning,
    require_layers_for,
)
from keepsight.models.targets import Target
from keepsight.train.dataset import hold_out, truncated
from keepsight.train.draft_head import (
    DraftHeadObjective,
    RunModel,
    StoredStates,
    Teacher,
    frequent_tokens,
    new_draft_head,
    write_states,
)
from keepsight.train.plots import draft_head_figure, retrieval_figure
from keepsight.train.retrieval_head import RetrievalObjective
from keepsight.train.trainer import ModuleTrainer


def draft(config: TrainDraftHead) -> str:
    """Train a draft head, then write the head, its card and the training curves; returns the command that tries it."""
    settings = config.draft_head
    training.check_inputs(config, "draft_head.train", settings.train)
    if config.features is not None:
        require_writable(Path(config.features), key="features")
    if config.init is not None:
        _named_draft_head(config.init)
    target = target_of(config)
    samples, manifest = training.read_samples(config, target)
    set_seed(settings.train.seed)
    head = _new_draft_head(config, target, samples)
    teacher = _teacher(config, target, head, samples, manifest["digest"])
    objective = DraftHeadObjective(head, target.model, teacher, settings)
    trainer = ModuleTrainer(objective, settings.train, training.run_of(config, target, samples, "init", DRAFT_WEIGHTS))
    finished = trainer.fit()

    if trainer.is_world_process_zero():
        save_config(config)
        lengths = [len(sample.prompt_ids) + len(sample.answer_ids) for sample in samples]
        described = training.length_summary("tokens of a sample", lengths)
        basics = training.basics_of(config, target, manifest, trainer.trained(), described)
        card = head.card(basics, trainer.metrics)
        curves = draft_head_figure(trainer.trained().log)
        head.save(Path(config.out), basics.provenance, card, {"training.png": curves})
        print(training.ending(trainer, config, "head"))
    training.require_finished(finished, config, trainer)
    return next_command(config, f"bench speculate draft.head={quote(config.out)} draft.layers=null")


def _new_draft_head(config: TrainDraftHead, target: Target, samples: Sequence[TrainingSample]) -> DraftHead:
    if config.init is not None:
        return _named_draft_head(config.init, target.model).float().train()
    settings = config.draft_head
    vocabulary_size = target.model.config.get_text_config().vocab_size
    training_samples, _ = hold_out(samples, settings.train.held_out, "draft_head.train")
    vocabulary = frequent_tokens(training_samples.samples, settings.vocabulary, target.end_tokens, vocabulary_size)
    return new_draft_head(target.model, vocabulary, settings.max_tokens)


def _named_draft_head(name: str, model: PreTrainedModel | None = None) -> DraftHead:
    try:
        return DraftHead.from_pretrained(name, model=model)
    except UserError as error:
        raise error.reworded(f"init={name}: {error}") from None


def _teacher(
    config: TrainDraftHead, target: Target, head: DraftHead, samples: Sequence[TrainingSample], digest: str
) -> Teacher:
    layers = head.layers_of(target.model)
    run_model = RunModel(target.model, layers)
    if config.features is None:
        return run_model

    folder = Path(config.features)
    max_tokens = config.draft_head.max_tokens
    settings = {
        "model": target.name,
        "layers": list(layers),
        "dtype": str(target.model.dtype),
        "max_tokens": max_tokens,
    }
    texts = [(sample.prompt_ids + sample.answer_ids)[:max_tokens] for sample in samples]
    write_states(folder, run_model, texts, MadeWith(replace(target.identity, data=digest), settings))
    return StoredStates(folder)


def retrieval(config: TrainRetrievalHead) -> str:
    """Prune, distil, then write the head, its card and the training curves; returns the command that tries it."""
    settings = config.retrieval_head
    training.check_inputs(config, "retrieval_head.train", settings.train)
    initial = None if config.head is None else _initial(config.head, config)
    target = training_target(config)
    samples, manifest = training.read_samples(config, target)
    samples = truncated(samples, settings.max_tokens)
    set_seed(settings.train.seed)
    longest = max(len(sample.prompt_ids) + len(sample.answer_ids) for sample in samples)
    head, origin = _first_head(config, initial, target, longest)
    objective = RetrievalObjective(head, target.model, settings)
    run = training.run_of(config, target, samples, "head", WEIGHTS, DRAFT_WEIGHTS)
    trainer = ModuleTrainer(objective, settings.train, run)
    finished = trainer.fit()

    if trainer.is_world_process_zero():
        save_config(config)
        described = {
            **origin,
            "groups of layers": head.config.groups,
            "longest sample (tokens)": longest,
            "tokens of a sample that are distilled": settings.queries,
            "temperature": settings.temperature,
            "answers' share of the loss": settings.answers,
        }
        loss = "KL at that temperature, nats"
        basics = training.basics_of(config, target, manifest, trainer.trained(), described, loss)
        _write(config, trainer, basics, longest)
    training.require_finished(finished, config, trainer)
    return next_command(config, f"bench hits retrieval={quote(config.out)} out=runs/hits")


def _first_head(
    config: TrainRetrievalHead, initial: RetrievalHead | DraftHead | None, target: Target, longest: int
) -> tuple[RetrievalHead, dict[str, str]]:
    """The head that is distilled, and where it is from, for the card."""
    settings = config.retrieval_head
    require_layers_for(settings.groups, target.model)
    if initial is None:
        print("head= is not set: the retrieval head starts from random projections")
        head = RetrievalHead.untrained(target.model, settings.features, longest, settings.groups)
        return head, {"pruned from": "nothing, it began with random projections"}

    assert config.head is not None
    if isinstance(initial, DraftHead):
        head = RetrievalHead.from_draft(initial, settings.features).float()
        summary = pruning(head, initial)
        print(summary)
        origin = {"pruned from": published_name(config.head), "pruning": summary}
    else:
        head = initial.float().requires_grad_()
        origin = {"distilled further from": published_name(config.head)}
    try:
        head = head.grouped(settings.groups)
        head.check_model(target.model)
    except UserError as error:
        raise error.reworded(f"head={config.head}: {error}") from None
    return head.to(target.model.device), origin


def _initial(name: str, config: TrainRetrievalHead) -> RetrievalHead | DraftHead:
    """The head that `head=` names, read before the base model."""
    folder = fetch(name)
    try:
        if has_draft_head(folder):
            return DraftHead.load(folder)
        head = RetrievalHead.load(folder)
        features = head.config.features
        if features != config.retrieval_head.features:
            raise UserError(
                f"it was distilled with features {features}; give retrieval_head.features={features}",
                field="retrieval_head.features",
                code="conflict",
            )
        return head
    except UserError as error:
        raise error.reworded(f"head={name}: {error}") from None


def _write(
    config: TrainRetrievalHead, trainer: ModuleTrainer[RetrievalObjective], basics: CardBasics, longest: int
) -> None:
    out = Path(config.out)
    objective = trainer.objective
    head = RetrievalHead(objective.head.config.trained_on(longest, objective.head.layers_of(objective.model)))
    head.load_state_dict(objective.weights())

    if not config.head:
        first_head = "random"
    elif "pruning" in basics.provenance.training:
        first_head = "pruned only"
    else:
        first_head = "before"
    measurements = trainer.measurements() or [{}]
    measured = comparison(measurements[0], measurements[-1], first_head)
    card = head.card(basics, measured)
    curves = retrieval_figure(trainer.trained().log)
    head.to(torch.bfloat16).save(out, basics.provenance, card, {"training.png": curves})
    print(f"retrieval head ({head.config.features}) after step {trainer.state.global_step} in {out}\n{measured}")
