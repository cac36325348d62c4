"""How close the importance that a method predicts is to the importance that an answer gives to the prompt's entries.

The reference is the attention of the full cache's own answer, mean over its tokens and over the query heads of a KV
head (LookaheadKV, arXiv 2603.10899, section 2). For a draft model that scores tokens (SpecPC, arXiv 2506.08373, section
5.1) the reference is the base model in the draft's role.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from keepsight.errors import UserError
from keepsight.eval.by_head import ByHead, rounded
from keepsight.eval.compress import SharedPrompt, kendall_taus, needs_of_all
from keepsight.models.draft_sources import LayerSubset
from keepsight.models.targets import Target
from keepsight.runtime.drafting.observer import DraftIds
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import Method, decode, stop_after
from keepsight.runtime.importance import top_mask
from keepsight.runtime.prompt_compression.specpc import SpecPC
from keepsight.runtime.state import prefill

_POINTS = 200


@dataclass(frozen=True)
class Predicted:
    """A method's prediction at a budget against the reference, for each layer and KV head.

    Attributes:
        recall: Share of the `budget` most important entries that are among the predicted ones.
        mass: Share of the reference's attention that falls on the `budget` predicted entries.
        cosine: Cosine similarity of scores and reference, before pooling.
        correlation: Pearson's correlation of them.
        tau: Kendall's tau-b of them; 0 where one of them is constant.
        points: Reference and score of some evenly spaced tokens, where tokens are scored for the whole model.
    """

    name: str
    budget: int
    recall: ByHead
    mass: ByHead
    cosine: ByHead
    correlation: ByHead
    tau: ByHead
    points: list[list[float]]


@torch.no_grad()
def predictions(
    target: Target, prompt: Tensor, methods: list[tuple[str, Method]], budgets: list[int], max_new_tokens: int
) -> list[Predicted]:
    """What the methods predict of a prompt [N] int64, at each budget below its length.

    UserError: a method neither evicts nor has a draft model score tokens.
    """
    model = target.model
    ids = prompt[None].to(model.device)
    observing = [method for _, method in methods if isinstance(method, Evict)]
    state = prefill(model, ids, needs=needs_of_all(observing))
    stop = stop_after(max_new_tokens, target.end_tokens)
    answer = decode(model, state.copy(), stop, pad_token=target.end_tokens[0]).ids
    shared = SharedPrompt(model, state, DraftIds(answer), seconds=0.0)
    attention = shared.attention()

    rows = []
    shorter_budgets = [budget for budget in budgets if budget < len(prompt)]
    for name, method in methods:
        points = list[list[float]]()
        if isinstance(method, Evict):
            reference = attention
            scores = shared.scores(method)
            importance = shared.importance(method)
        elif isinstance(method, SpecPC):
            layers = model.config.get_text_config().num_hidden_layers
            by_base_model = replace(method, draft=LayerSubset(tuple(range(layers))))
            scores = method.draft_scores(model, ids[0])[0][None, None]
            reference = by_base_model.draft_scores(model, ids[0])[0][None, None]
            importance = scores
            points = _points(reference[0, 0], scores[0, 0])
        else:
            raise UserError(
                f"methods= names {name!r}, which predicts no importance; name methods that evict, or specpc",
                field="methods",
                code="model",
            )
        likeness = _likeness(scores, reference)
        for budget in shorter_budgets:
            best = top_mask(importance, budget)
            recall = (best & top_mask(reference, budget)).sum(-1) / budget
            mass = (reference * best).sum(-1) / reference.sum(-1)
            rows.append(Predicted(name, budget, recall=rounded(recall), mass=rounded(mass), points=points, **likeness))
    return rows


def _likeness(scores: Tensor, reference: Tensor) -> dict[str, ByHead]:
    """Cosine, Pearson's correlation and Kendall's tau of [L, K, N] float32 each, along the entries."""
    scores_about_mean = scores - scores.mean(dim=-1, keepdim=True)
    reference_about_mean = reference - reference.mean(dim=-1, keepdim=True)
    return {
        "cosine": rounded(functional.cosine_similarity(scores, reference, dim=-1)),
        "correlation": rounded(functional.cosine_similarity(scores_about_mean, reference_about_mean, dim=-1)),
        "tau": rounded(torch.from_numpy(kendall_taus(scores, reference))),
    }


def _points(reference: Tensor, scores: Tensor) -> list[list[float]]:
    """Pairs of numbers of at most `_POINTS` tokens."""
    length = len(scores)
    positions = torch.linspace(0, length - 1, min(length, _POINTS)).round().long().to(scores.device)
    pairs = torch.stack([reference[positions], scores[positions]], dim=1)
    return [[float(f"{value:.4g}") for value in pair] for pair in pairs.tolist()]
