"""The two-pass objective: what the answer attends to (no gradients), and what the soft tokens predict (gradients).

One pass over prompt and answer, adapter off, gives the target importance and the prompt's cache. A second pass of n
soft tokens over that cache, adapter on, gives the prediction. Because nothing after a prompt changes the prompt's
entries, loss and gradients equal those of one pass over all of it (LookaheadKV, section 3, equation 3), at about the
price of an inference prefill.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from keepsight.models.lookahead import Lookahead
from keepsight.runtime.attention import record_attention
from keepsight.runtime.observe import AttentionRecorder, join_masks, observe
from keepsight.runtime.prefill import positions_of


@dataclass(frozen=True)
class Batch:
    """Prompts padded on the left, answers padded on the right.

    Attributes:
        prompt_ids: [B, N] int64.
        prompt_mask: [B, N] bool, or None when no prompt is padded.
        answer_ids: [B, T] int64.
        answer_mask: [B, T] bool, or None when no answer is padded.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor | None
    answer_ids: Tensor
    answer_mask: Tensor | None


@torch.no_grad()
def target_importance(model: PreTrainedModel, batch: Batch) -> tuple[Cache, list[Tensor]]:
    """One pass over prompt and answer with the adapter off.

    Returns:
        A cache whose first N entries are the prompt's, and for each layer the mean attention of the answer's tokens
        to the prompt, [B, H, N] float32.
    """
    record_attention(model)
    ids = torch.cat([batch.prompt_ids, batch.answer_ids], dim=1)
    rows, length = batch.answer_ids.shape[1], batch.prompt_ids.shape[1]
    mask = join_masks(batch.prompt_mask, batch.answer_mask, len(ids), length, rows, ids.device)
    recorder = AttentionRecorder(rows, key_mask=mask, query_mask=batch.answer_mask)
    cache = DynamicCache()
    model.base_model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions_of(mask, ids.shape[1], ids.device),
        past_key_values=cache,
        use_cache=True,
        recorder=recorder,
    )
    return cache, recorder.layers()


def importance_divergence(target: list[Tensor], predicted: list[Tensor]) -> Tensor:
    """KL(target || predicted) of importance normalised over the prompt, averaged over layers, rows and query heads.

    Args:
        target: For each of L layers, [B, H, N] float32, 0 at padding.
        predicted: The same shapes; gradients flow through it.

    Returns:
        A scalar in nats (LookaheadKV, equation 3).
    """
    return torch.stack([_divergence(*pair).mean() for pair in zip(target, predicted, strict=True)]).mean()


def _divergence(target: Tensor, predicted: Tensor) -> Tensor:
    tiny = torch.finfo(torch.float32).tiny
    expected = target / target.sum(dim=-1, keepdim=True).clamp(min=tiny)
    log_ratio = expected.clamp(min=tiny).log() - predicted.clamp(min=tiny).log()
    log_mass = predicted.sum(dim=-1).clamp(min=tiny).log()
    return (expected * log_ratio).sum(dim=-1) + log_mass


class LookaheadObjective(nn.Module):
    """The module that trainers wrap: batch in, loss out. Keeps the lookahead's LoRA on between calls, as trainers need.

    Attributes:
        lookahead: The module in training.
    """

    def __init__(self, lookahead: Lookahead) -> None:
        super().__init__()
        self.lookahead = lookahead
        lookahead.switch(True)

    def forward(
        self,
        prompt_ids: Tensor,
        answer_ids: Tensor,
        prompt_mask: Tensor | None = None,
        answer_mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The loss of a batch, `{"loss": scalar}`; see `Batch` for the shapes."""
        target, predicted = self.importances(Batch(prompt_ids, prompt_mask, answer_ids, answer_mask))
        return {"loss": importance_divergence(target, predicted)}

    def importances(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """Target and predicted importance, for each layer [B, H, N] float32; gradients flow through the second."""
        lookahead = self.lookahead
        with lookahead.active(False):
            cache, target = target_importance(lookahead.model, batch)
        length = batch.prompt_ids.shape[1]
        embeddings = lookahead.observers(len(batch.prompt_ids))
        return target, observe(lookahead.model, cache, batch.prompt_mask, embeddings, prompt_length=length)
