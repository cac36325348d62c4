"""The two-pass objective of a lookahead module (LookaheadKV, arXiv 2603.10899, section 3, equation 3).

The first pass, over prompt and answer without adapter and gradients, gives the target importance and the prompt's
cache. The second, of n soft tokens over that cache with adapter and gradients, gives the prediction. Nothing after a
prompt changes the prompt's KV entries, so loss and gradients equal those of one pass over everything, at about the cost
of one inference prefill.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from typing_extensions import override

from keepsight.models.decoder import decoder_of
from keepsight.models.lookahead import Lookahead
from keepsight.runtime.attention import run
from keepsight.runtime.cache import record_past
from keepsight.runtime.observe import AttentionRecorder, observe
from keepsight.runtime.prefill import positions_of
from keepsight.train.dataset import Batch
from keepsight.train.objective import Objective


@torch.no_grad()
def target_importance(model: PreTrainedModel, batch: Batch) -> tuple[Cache, list[Tensor]]:
    """The first pass: prompt and answer with the adapter off.

    Returns:
        The prompt's cache, and for each layer with full attention the mean attention of the answer's tokens to the
        prompt, [B, H, N] float32.
    """
    ids, mask = batch.joined()
    recorder = AttentionRecorder(batch.answer_ids.shape[1], key_mask=mask, query_mask=batch.answer_mask)
    cache = DynamicCache(config=model.config)
    record_past(cache)
    positions = positions_of(mask, ids.shape[1], ids.device)
    run(decoder_of(model), cache, recorder=recorder, input_ids=ids, attention_mask=mask, position_ids=positions)
    cache.crop(-batch.answer_ids.shape[1])
    return cache, recorder.layers()


def importance_divergence(target: list[Tensor], predicted: list[Tensor]) -> Tensor:
    """KL(target || predicted) of importance normalised over the prompt, averaged over layers, rows and query heads.

    Args:
        target: For each of L layers, [B, H, N] float32, 0 at padding.
        predicted: The same shapes; gradients flow through it.

    Returns:
        A scalar in nats (equation 3).
    """
    return torch.stack([_divergence(*pair).mean() for pair in zip(target, predicted, strict=True)]).mean()


def _divergence(target: Tensor, predicted: Tensor) -> Tensor:
    tiny = torch.finfo(torch.float32).tiny
    expected = target / target.sum(dim=-1, keepdim=True).clamp(min=tiny)
    log_ratio = expected.clamp(min=tiny).log() - predicted.clamp(min=tiny).log()
    log_mass = predicted.sum(dim=-1).clamp(min=tiny).log()
    return (expected * log_ratio).sum(dim=-1) + log_mass


class LookaheadObjective(Objective):
    """The module learns, the target is frozen.

    Attributes:
        lookahead: The module in training.
    """

    def __init__(self, lookahead: Lookahead) -> None:
        super().__init__()
        self.lookahead = lookahead
        lookahead.model.requires_grad_(False)

    @override
    def loss(self, batch: Batch) -> Tensor:
        return importance_divergence(*self.importances(batch))

    def importances(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """Target and predicted importance, for each layer [B, H, N] float32; gradients flow through the prediction."""
        lookahead = self.lookahead
        cache, target = target_importance(lookahead.model, batch)
        embeddings = lookahead.observers(len(batch.prompt_ids))
        with lookahead.active():
            return target, observe(lookahead.model, cache, batch.prompt_mask, embeddings)
