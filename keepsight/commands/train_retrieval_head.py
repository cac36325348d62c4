"""keepsight train_retrieval_head: prune a draft head to a retrieval head, and distil attention into it."""

from pathlib import Path

import torch
from transformers import set_seed

from keepsight.commands.config import TrainRetrievalHead as Config
from keepsight.commands.from_recipe import training_target
from keepsight.commands.training import basics_of, check_paths, read_samples, require_finished, run_of
from keepsight.errors import UserError
from keepsight.models.card import CardBasics
from keepsight.models.decoder import require_layers_for
from keepsight.models.draft_head import DraftHead
from keepsight.models.draft_head_files import WEIGHTS as DRAFT_WEIGHTS
from keepsight.models.draft_head_files import load_draft_head
from keepsight.models.hub import fetch
from keepsight.models.pruning import parameters, pruning
from keepsight.models.retrieval_card import comparison, retrieval_card
from keepsight.models.retrieval_head import RetrievalHead
from keepsight.models.retrieval_head_files import FILES, WEIGHTS, load_retrieval_head, save_retrieval_head
from keepsight.models.retrieval_target import check_target
from keepsight.models.targets import Target
from keepsight.models.versions import published_name
from keepsight.train.dataset import cut
from keepsight.train.head_settings import RetrievalHeadSettings
from keepsight.train.retrieval_head.objective import RetrievalObjective
from keepsight.train.retrieval_head.plots import retrieval_figure
from keepsight.train.retrieval_head.trainer import RetrievalTrainer


def run(config: Config) -> None:
    """Prune, distil, then write the head, its card and the training curves."""
    settings = config.retrieval_head
    settings.check()
    check_paths(config)
    target = training_target(config)
    samples, manifest = read_samples(config, target)
    samples = cut(samples, settings.max_tokens)
    set_seed(settings.train.seed)
    longest = max(len(sample.prompt_ids) + len(sample.answer_ids) for sample in samples)
    head, pruned = _first_head(config, target, longest)
    objective = RetrievalObjective(head, target.model, settings.queries, settings.temperature, settings.answers)
    trainer = RetrievalTrainer(objective, settings, run_of(config, target, samples, "head", WEIGHTS, DRAFT_WEIGHTS))
    finished = trainer.fit()
    if trainer.is_world_process_zero():
        described = pruned | {
            "groups of layers": head.config.groups,
            "longest sample (tokens)": longest,
            "tokens of a sample that are distilled": settings.queries,
            "temperature": settings.temperature,
            "share of the loss on answers": settings.answers,
        }
        basics = basics_of(config, target, manifest, trainer.trained(), described, "KL at that temperature, nats")
        _write(config, trainer, basics, longest)
    require_finished(finished, config, trainer)


def _first_head(config: Config, target: Target, longest: int) -> tuple[RetrievalHead, dict[str, str]]:
    """The head that distillation starts from, and what the card says about its origin."""
    settings = config.retrieval_head
    if config.head is None:
        print("no head= is given: the retrieval head starts from random projections")
        head = RetrievalHead.untrained(target.model, settings.features, longest, settings.groups)
        return head, {"pruned from": "nothing, it began with random projections"}
    require_layers_for(settings.groups, target.model)
    folder = fetch(config.head)
    try:
        if any((folder / name).is_file() for name in FILES):
            head, origin = _distilled(folder, settings), {"distilled further from": published_name(config.head)}
        else:
            head, text = _pruned(folder, settings.features)
            origin = {"pruned from": published_name(config.head), "pruning": text}
        check_target(head := head.grouped(settings.groups), target.model)
    except UserError as error:
        raise UserError(f"head={config.head}: {error}") from None
    return head.to(target.model.device), origin


def _distilled(folder: Path, settings: RetrievalHeadSettings) -> RetrievalHead:
    head = load_retrieval_head(folder).float().requires_grad_()
    if (own := head.config.features) != settings.features:
        raise UserError(f"it was distilled with features {own}; give retrieval_head.features={own}")
    return head


def _pruned(folder: Path, features: str) -> tuple[RetrievalHead, str]:
    """A draft head, pruned, and how much of it is gone."""
    draft = load_draft_head(folder)
    head = RetrievalHead.from_draft(draft, features).float()
    assert isinstance(draft, DraftHead)
    share = pruning(head, draft)
    text = (
        f"{share.kept:,} of the draft head's {share.draft:,} parameters stay: {share.gone:.1%} are gone, "
        f"{share.gone_with_embedding:.1%} counted with the embedding, which is the target's"
    )
    print(text)
    return head, text


def _write(config: Config, trainer: RetrievalTrainer, basics: CardBasics, longest: int) -> None:
    out, objective = Path(config.out), trainer.objective
    head = RetrievalHead(objective.head.config.trained_on(longest, objective.head.layers_of(objective.target)))
    head.load_state_dict(trainer.weights())
    first = ("pruned only" if "pruning" in basics.provenance.training else "before") if config.head else "random"
    measured = comparison(*trainer.first_and_last(), first)
    card = retrieval_card(basics, head.config, parameters(head), measured)
    curves = retrieval_figure(trainer.log_rows())
    save_retrieval_head(head.to(torch.bfloat16), out, basics.provenance, card, curves)
    print(f"retrieval head ({head.config.features}) after step {trainer.state.global_step} in {out}\n{measured}")
