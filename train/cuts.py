"""Cuts: the places in an answer from which training predicts the rest of it.

Behind the c-th token of an answer, prompt and answer[:c] are a prompt, and answer[c:] is its answer. One pass of the
base model shows what each such answer attends to, so that it gives several training pairs. The cuts of a sample are
spread evenly over its answer, the first before it, and depend on nothing else: replays and resumed trainings use the
same ones.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from keepsight.errors import UserError
from keepsight.models.decoder import FULL, layer_kinds, on_each
from keepsight.runtime.state import full_layers
from keepsight.train.dataset import Batch


@dataclass(frozen=True)
class Cuts:
    """The cuts of a batch of B samples, K of each. A row is a sample at a cut: R = B x K, those of a sample in order.

    An answer of fewer tokens than K has fewer cuts; the rows that it lacks have no weight in the loss.

    Attributes:
        length: M, entries of each sample that are kept: all before its last cut, padded on the left.
        mask: [R, M] bool: which entries precede the cut; None where all do.
        queries: [B, T] or [B, K, T] bool: which of the answer's tokens follow each cut; None where all do.
        places: [B, M] int64: the entries' places among the tokens of prompt and answer; None for the first ones.
        shares: [R] float32: each row's weight in the loss; None for equal weights.
    """

    length: int
    mask: Tensor | None
    queries: Tensor | None
    places: Tensor | None = None
    shares: Tensor | None = None

    @classmethod
    def of(cls, batch: Batch, count: int) -> "Cuts":
        """The cuts of a batch, `count` of each sample."""
        prompt, device = batch.prompt_ids.shape[1], batch.prompt_ids.device
        if count == 1:
            return cls(prompt, batch.prompt_mask, batch.answer_mask)
        by_sample = [spread(length, count) for length in batch.answer_lengths()]
        length = max(own + cuts[-1] for own, cuts in zip(batch.prompt_lengths(), by_sample, strict=True))
        whole = torch.tensor([[*cuts, *cuts[-1:] * (count - len(cuts))] for cuts in by_sample], device=device)
        shares = [(place < len(cuts)) / len(cuts) / len(by_sample) for cuts in by_sample for place in range(count)]
        places = torch.arange(length, device=device) + (prompt - length + whole[:, -1:])
        pads = prompt - torch.tensor(batch.prompt_lengths(), device=device)
        real = (places >= pads[:, None])[:, None] & (places[:, None] < prompt + whole[..., None])
        queries = torch.arange(batch.answer_ids.shape[1], device=device) >= whole[..., None]
        if batch.answer_mask is not None:
            queries = queries & batch.answer_mask[:, None]
        return cls(length, real.flatten(0, 1), queries, places.clamp(min=0), torch.tensor(shares, device=device))

    def crop(self, cache: Cache, read: int) -> None:
        """Drop what follows the last cut from a cache of `read` tokens."""
        if self.places is None:
            cache.crop(self.length - read)
            return
        places = on_each(self.places[:, None, :, None])
        for layer in full_layers(cache):
            tensors = layer.keys, layer.values
            layer.keys, layer.values = (each.take_along_dim(places(each.device), dim=2) for each in tensors)

    def importance(self, recorded: list[Tensor]) -> list[Tensor]:
        """For each layer [R, H, M], from the mean attention of the answers' tokens: [B, H, N], or [B, K, H, N + T]."""
        if self.places is None or self.mask is None:
            return recorded
        places, mask = on_each(self.places[:, None, None]), on_each(self.mask[:, None])
        return [
            layer.take_along_dim(places(layer.device), dim=-1).flatten(0, 1) * mask(layer.device) for layer in recorded
        ]


def spread(length: int, count: int) -> list[int]:
    """The number of an answer's tokens before each cut: `count` cuts, or as many as the answer has tokens."""
    distinct = max(1, min(length, count))
    return [place * length // distinct for place in range(distinct)]


def require_cuts(model: PreTrainedModel, count: int) -> None:
    """Raise a UserError for several cuts of a model in which a layer has a sliding window or a recurrent state."""
    if count > 1 and (odd := sorted({*layer_kinds(model.config)} - {FULL})):
        raise UserError(
            f"train.cuts={count}: {model.config.model_type} has layers of {', '.join(odd)}, which forget what "
            "precedes an earlier cut; use train.cuts=1"
        )
