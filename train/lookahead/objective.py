"""The two-pass objective of a lookahead module (LookaheadKV, arXiv 2603.10899, section 3.2, equation 4).

The first pass, over prompt and answer without adapter and gradients, gives the target importance and the prompt's
cache. The second, of n soft tokens over that cache with adapter and gradients, gives the prediction. Nothing after a
prompt changes the prompt's KV entries, so loss and gradients equal those of one pass over everything, at about the cost
of one inference prefill; and the first pass can be kept for several steps (`keepsight.train.replay`).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from typing_extensions import override

from keepsight.models.decoder import decoder_of, full_attention_layers, on_each, require_full_attention
from keepsight.models.lookahead import Lookahead
from keepsight.runtime.attention import recording, run
from keepsight.runtime.state import empty_cache, has_recurrent, record_past, share
from keepsight.runtime.observe import AttentionRecorder, observe
from keepsight.runtime.state import positions_of
from keepsight.train.dataset import Batch
from keepsight.train.lookahead.cuts import Cuts, require_cuts, spread
from keepsight.train.lookahead.flops import pass_flops, weights_of_a_token
from keepsight.train.lookahead.recompute import recomputed
from keepsight.train.objective import ReplayedObjective
from keepsight.train.replay import Reading
from keepsight.train.stored_cache import restored, stored

Importances = tuple[list[Tensor], list[Tensor]]
"""Target and predicted importance, for each layer [R, H, M] float32, a row for each sample and cut: see `Cuts`."""
_SHOWN = "importance."
SINKS, RECENT = 4, 32
"""First and last entries that are near: they hold most of the mass of an importance."""


@torch.no_grad()
def target_importance(model: PreTrainedModel, batch: Batch, cuts: Cuts | None = None) -> tuple[Cache, list[Tensor]]:
    """The first pass: prompt and answer with the adapter off.

    Returns:
        The prompt's cache, and for each layer with full attention the mean attention of the answer's tokens to the
        prompt, [B, H, N] float32. With several cuts: the cache up to the last one, and for each cut the mean attention
        of what comes after it to what comes before, [R, H, M].
    """
    cuts = cuts or Cuts.of(batch, 1)
    ids, mask = batch.joined()
    rows, inside = batch.answer_ids.shape[1], cuts.places is not None
    recorder = AttentionRecorder(rows, key_mask=mask, query_mask=cuts.queries, own=inside)
    cache, prompt = empty_cache(model), batch.prompt_ids.shape[1]
    positions = positions_of(mask, ids.shape[1], ids.device)

    def read(start: int, end: int, into: Cache, recorder: AttentionRecorder | None = None) -> None:
        seen, here = None if mask is None else mask[:, :end], slice(start, end)
        inputs = {"input_ids": ids[:, here], "attention_mask": seen, "position_ids": positions[:, here]}
        run(decoder_of(model), into, recorder=recorder, **inputs)

    if has_recurrent(cache):  # from such a layer the answer cannot be taken back
        read(0, prompt, cache)
        read(prompt, ids.shape[1], share(cache), recorder)
    else:
        record_past(cache)
        read(0, ids.shape[1], cache, recorder)
        cuts.crop(cache, ids.shape[1])
    return cache, cuts.importance(recorder.taken())


def importance_divergence(target: list[Tensor], predicted: list[Tensor], shares: Tensor | None = None) -> Tensor:
    """KL(target || predicted) of importance normalised over the prompt, averaged over layers, rows and query heads.

    Args:
        target: For each of L layers, [R, H, N] float32, 0 at padding; layers may lie on several devices.
        predicted: The same shapes; gradients flow through it.
        shares: [R] float32, the share of each row; None where all have the same.

    Returns:
        A scalar in nats (equation 4), on the first layer's device.
    """
    pairs, device = zip(target, predicted, strict=True), target[0].device
    by_layer = (_divergence(*pair).to(device) for pair in pairs)
    weighted = (each.mean() if shares is None else (each.mean(dim=1) * shares).sum() for each in by_layer)
    return torch.stack([*weighted]).mean()


def far_divergence(
    target: list[Tensor], predicted: list[Tensor], mask: Tensor | None, shares: Tensor | None = None
) -> Tensor:
    """`importance_divergence` over the far entries alone: neither a row's first `SINKS` nor the last `RECENT`.

    The near ones hold most of the mass and are learned at once; what decides at a small budget is the order of the
    rest. 0 for a row without far entries.

    Args:
        target: For each of L layers, [R, H, N] float32.
        predicted: The same shapes; gradients flow through it.
        mask: [R, N] bool, False for padding on either side; None when nothing is padded.
        shares: See `importance_divergence`.
    """
    length = target[0].shape[-1] - RECENT
    if length <= SINKS:
        return predicted[0].sum() * 0
    if mask is None:
        true, guess = ([each[..., SINKS:length] for each in layers] for layers in (target, predicted))
        return importance_divergence(true, guess, shares)
    before = mask.cumsum(dim=1)
    far = on_each(((before > SINKS) & (before <= before[:, -1:] - RECENT))[:, None, :length])
    true, guess = ([each[..., :length] * far(each.device) for each in layers] for layers in (target, predicted))
    return importance_divergence(true, guess, shares)


def _divergence(target: Tensor, predicted: Tensor) -> Tensor:
    """KL(target || predicted) [B, H] of importance [B, H, N], 0 where the target has none."""
    tiny = torch.finfo(torch.float32).tiny
    expected = target / target.sum(dim=-1, keepdim=True).clamp(min=tiny)
    log_ratio = expected.clamp(min=tiny).log() - predicted.clamp(min=tiny).log()
    log_mass = predicted.sum(dim=-1).clamp(min=tiny).log()
    return ((expected * log_ratio).sum(dim=-1) + log_mass) * (expected.sum(dim=-1) > 0)


class LookaheadObjective(ReplayedObjective):
    """The module learns, the target is frozen.

    Attributes:
        lookahead: The module in training.
        far: Share of the loss that is the divergence over the far entries alone; see `far_divergence`.
        recomputes: Whether the layers of the second pass run again for their gradients, and keep nothing till then.

    Args:
        cuts: Cuts of each sample in training; what is measured is always the prompt itself. See `Cuts`.

    Raises:
        UserError: no layer has full attention, or not all of them where there are several cuts.
    """

    def __init__(self, lookahead: Lookahead, far: float = 0.0, recomputes: bool = False, cuts: int = 1) -> None:
        super().__init__()
        require_full_attention(lookahead.model)
        require_cuts(lookahead.model, cuts)
        self.lookahead, self.far, self.recomputes, self._cuts = lookahead, far, recomputes, cuts
        lookahead.model.requires_grad_(False)
        self._weights = weights_of_a_token(lookahead.model)

    @property
    def cuts(self) -> int:
        """Cuts of each sample: those of the training, and 1 while the module is measured."""
        return self._cuts if self.training else 1

    @override
    def flops(self, batch: Batch) -> float:
        return self.flops_of_reading(batch) + self.flops_of_looking(batch)

    def flops_of_reading(self, batch: Batch) -> float:
        """Operations of the first pass; none where its reading was kept."""
        (rows, prompt), answer = batch.prompt_ids.shape, batch.answer_ids.shape[1]
        return rows * pass_flops(self.lookahead.model, self._weights, prompt + answer) if batch.turn == 0 else 0.0

    def flops_of_looking(self, batch: Batch) -> float:
        """Operations of the second pass and its gradients, which flow through it once: the weights have none."""
        (rows, prompt), answer = batch.prompt_ids.shape, batch.answer_ids.shape[1]
        before = prompt + spread(answer, self.cuts)[-1]
        once = pass_flops(self.lookahead.model, self._weights, self.lookahead.settings.tokens, before)
        return rows * self.cuts * 2 * once

    @override
    def read(self, batch: Batch) -> Reading:
        cache, target = target_importance(self.lookahead.model, batch, Cuts.of(batch, self.cuts))
        return {f"{_SHOWN}{place}": each for place, each in enumerate(target)} | stored(cache)

    @override
    def kept_tokens(self, batch: Batch) -> int:
        return len(batch.prompt_ids) * Cuts.of(batch, self.cuts).length  # of the rest of the answer nothing is kept

    @override
    def loss_of(self, reading: Reading, batch: Batch) -> Tensor:
        target, predicted = self.compared(reading, batch)
        cuts = Cuts.of(batch, self.cuts)
        whole = importance_divergence(target, predicted, cuts.shares)
        if not self.far:
            return whole
        return torch.lerp(whole, far_divergence(target, predicted, cuts.mask, cuts.shares), self.far)

    def importances(self, batch: Batch) -> Importances:
        """Target and predicted importance; gradients flow through the prediction."""
        return self.compared(self.reading(batch), batch)

    def compared(self, reading: Reading, batch: Batch) -> Importances:
        """`importances`, given what the target shows of the batch."""
        lookahead, cuts = self.lookahead, Cuts.of(batch, self.cuts)
        cache = restored(reading, lookahead.model, cuts.length)
        embeddings = lookahead.observers(len(batch.prompt_ids) * self.cuts)
        with lookahead.active(), self._recomputing():
            predicted = observe(lookahead.model, cache, cuts.mask, embeddings)
        if torch.is_grad_enabled():
            _make_whole_for_gradients(lookahead.model, predicted)
        return [reading[f"{_SHOWN}{place}"] for place in range(len(predicted))], predicted

    def _recomputing(self) -> AbstractContextManager[None]:
        """Where it is asked for, the layers with full attention keep nothing for gradients within the block."""
        if not (self.recomputes and torch.is_grad_enabled()):
            return nullcontext()
        layers, places = decoder_of(self.lookahead.model).layers, full_attention_layers(self.lookahead.model.config)
        return recomputed([layers[place] for place in places], self._as_observed)

    @contextmanager
    def _as_observed(self) -> Iterator[None]:
        """The model within the block is what it is while it observes."""
        with self.lookahead.active(), recording(decoder_of(self.lookahead.model)):
            yield


def _make_whole_for_gradients(model: PreTrainedModel, predicted: list[Tensor]) -> None:
    """Where FSDP2 divides the layers, gather a layer's weights when the gradient of what it predicts comes.

    FSDP2 itself waits for the gradient of the layer's output, which comes later, and to the last layer never.
    """
    layers = decoder_of(model).layers
    for place, importance in zip(full_attention_layers(model.config), predicted, strict=True):
        if isinstance(layer := layers[place], FSDPModule):
            importance.register_hook(partial(_gather, layer))


def _gather(layer: FSDPModule, gradient: Tensor) -> None:
    layer.unshard()
