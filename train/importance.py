"""The importance objective of a lookahead module (LookaheadKV, arXiv 2603.10899, section 3.2, equation 4).

A first pass, over prompt and answer without adapter and gradients, gives the target importance and the prompt's cache.
A second, of n soft tokens over that cache with adapter and gradients, gives the prediction. Nothing after a prompt
changes the prompt's KV entries, so loss and gradients equal those of one pass over everything, at about the cost of one
inference prefill. The first pass's outputs can be used for several steps (`keepsight.train.replay`).

A cut after an answer's c-th token makes a training pair of prompt + answer[:c] and answer[c:]. One first pass serves
all cuts of a sample. They are spread evenly over the answer, the first before it, so that replays and resumed trainings
use the same ones.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.models.decoder import (
    FULL,
    cached_kv_heads,
    decoder_of,
    full_attention_layers,
    layer_kinds,
    on_each,
    require_full_attention,
)
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import SELECTION
from keepsight.runtime.attention import Recorder, Softmax, run
from keepsight.runtime.importance import observed_attention
from keepsight.runtime.observe import observe
from keepsight.runtime.state import empty_cache, full_layers, has_recurrent, positions_of, record_past, share
from keepsight.train.dataset import Batch
from keepsight.train.distributed import gather_for_gradients
from keepsight.train.fidelity import Importances, far_divergence, importance_divergence, measure_fidelity
from keepsight.train.objective import ReplayedObjective, recomputed
from keepsight.train.replay import TeacherOutputs
from keepsight.train.tracking import pass_flops, weights_per_token


@dataclass(frozen=True)
class Cuts:
    """The cuts of a batch of B samples, K of each. A row is a sample at a cut: R = B x K, those of a sample in order.

    An answer of fewer tokens than K has fewer cuts; the missing rows have no weight in the loss.

    Attributes:
        length: M, entries of each sample that are kept: all before its last cut, padded on the left.
        mask: [R, M] bool: which entries precede the cut; None where all do.
        queries: [B, T] or [B, K, T] bool: which of the answer's tokens follow each cut; None where all do.
        places: [B, M] int64: the entries' indices among the tokens of prompt and answer; None for the first M.
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
        """Crop a cache of `read` tokens to the last cut."""
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
        return [each.take_along_dim(places(each.device), dim=-1).flatten(0, 1) * mask(each.device) for each in recorded]


def spread(length: int, count: int) -> list[int]:
    """The number of an answer's tokens before each cut: `count` cuts, or as many as the answer has tokens."""
    distinct = max(1, min(length, count))
    return [place * length // distinct for place in range(distinct)]


_TOKENS = "tokens"


def text_lengths(batch: Batch, observers: int) -> Tensor:
    """[B] int64: tokens of each prompt with its answer, or with the observers that follow a part of it.

    Where RoPE depends on the length, both passes have that of this text, as if all were read in one pass.
    """
    pairs = zip(batch.prompt_lengths(), batch.answer_lengths(), strict=True)
    lengths = [prompt + answer + observers for prompt, answer in pairs]
    return torch.tensor(lengths, device=batch.prompt_ids.device)


@torch.no_grad()
def target_importance(
    model: PreTrainedModel, batch: Batch, cuts: Cuts | None = None, *, observers: int = 0
) -> tuple[Cache, list[Tensor]]:
    """The first pass: prompt and answer with the adapter off. `observers` is as for `text_lengths`.

    Returns:
        The prompt's cache, and for each layer with full attention the mean attention of the answer's tokens to the
        prompt, [B, H, N] float32. With several cuts: the cache up to the last one, and for each cut the mean attention
        of the tokens after it to those before, [R, H, M].
    """
    cuts = cuts or Cuts.of(batch, 1)
    ids, mask = batch.joined()
    rows, inside = batch.answer_ids.shape[1], cuts.places is not None
    cache, prompt = empty_cache(model), batch.prompt_ids.shape[1]
    positions, rope_lengths = positions_of(mask, ids.shape[1], ids.device), text_lengths(batch, observers)
    recorded, scored = dict[int, Tensor](), full_attention_layers(model.config)

    def record(layer: int, query: Tensor, key: Tensor, softmax: Softmax, real: Tensor | None, _: Any) -> None:
        if layer not in scored:
            return
        length, known = key.shape[2] - (0 if inside else rows), mask if real is None else real
        answer = query[:, :, -rows:]
        recorded[layer] = observed_attention(answer, key, softmax, length, key_mask=known, query_mask=cuts.queries)

    def read(start: int, end: int, into: Cache, recorder: Recorder | None = None) -> None:
        seen, here = None if mask is None else mask[:, :end], slice(start, end)
        inputs = {"input_ids": ids[:, here], "attention_mask": seen, "position_ids": positions[:, here]}
        run(decoder_of(model), into, recorder=recorder, rope_lengths=rope_lengths, **inputs)

    if has_recurrent(cache):  # a recurrent layer cannot be cropped to the prompt
        read(0, prompt, cache)
        read(prompt, ids.shape[1], share(cache), record)
    else:
        record_past(cache)
        read(0, ids.shape[1], cache, record)
        cuts.crop(cache, ids.shape[1])
    return cache, cuts.importance([recorded[layer] for layer in sorted(recorded)])


class ImportanceObjective(ReplayedObjective):
    """The KL divergence of predicted from target importance; the module learns, the base model is frozen.

    Attributes:
        lookahead: The module in training.
        far: Share of the loss that is the divergence over the far entries alone; see `far_divergence`.
        checkpoints: Whether activations of the second pass are recomputed for its gradients.

    Args:
        cuts: Cuts of each sample in training; the module is always measured at the prompt's end. See `Cuts`.

    Raises:
        UserError: no layer has full attention, or with several cuts not all of them.
    """

    weights_file = "lookahead.safetensors"

    def __init__(self, lookahead: Lookahead, far: float = 0.0, checkpoints: bool = False, cuts: int = 1) -> None:
        super().__init__()
        require_full_attention(lookahead.model)
        config = lookahead.model.config
        if cuts > 1 and (odd := sorted({*layer_kinds(config)} - {FULL})):
            raise UserError(
                f"train.cuts={cuts}: {config.model_type} has layers of {', '.join(odd)}, which cannot go back to an "
                "earlier cut; use train.cuts=1"
            )
        self.lookahead, self.far, self.checkpoints, self._cuts = lookahead, far, checkpoints, cuts
        lookahead.model.requires_grad_(False).eval()
        self._weights = weights_per_token(lookahead.model)

    @property
    def cuts(self) -> int:
        """Number of cuts of each sample: the training's, or 1 while the module is measured."""
        return self._cuts if self.training else 1

    @override
    def decisive(self) -> dict[str, Any]:
        shape = asdict(self.lookahead.settings).items()
        return {f"lookahead.{key}": value for key, value in shape if key not in SELECTION}

    @override
    def weights(self) -> dict[str, Tensor]:
        return module_weights(self.lookahead)

    @override
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        load_module_weights(self.lookahead, weights)

    @override
    def measure(self, batches: Iterable[dict[str, Any]], budget: int) -> dict[str, Any]:
        kv_heads = cached_kv_heads(self.lookahead.model)
        with self.measuring():
            (fidelity,) = measure_fidelity(lambda batch: [self.importances(batch)], batches, kv_heads, budget)
        return fidelity.metrics()

    @override
    def flops(self, batch: Batch) -> float:
        return self.teacher_flops(batch) + self.module_flops(batch)

    def teacher_flops(self, batch: Batch) -> float:
        """Operations of the first pass; 0 if its outputs were stored."""
        (rows, prompt), answer = batch.prompt_ids.shape, batch.answer_ids.shape[1]
        return rows * pass_flops(self.lookahead.model, self._weights, prompt + answer) if batch.turn == 0 else 0.0

    def module_flops(self, batch: Batch) -> float:
        """Operations of the second pass and its gradients; the frozen weights have none."""
        (rows, prompt), answer = batch.prompt_ids.shape, batch.answer_ids.shape[1]
        before = prompt + spread(answer, self.cuts)[-1]
        once = pass_flops(self.lookahead.model, self._weights, self.lookahead.settings.tokens, before)
        return rows * self.cuts * 2 * once

    @override
    def run_teacher(self, batch: Batch) -> TeacherOutputs:
        cuts, observers = Cuts.of(batch, self.cuts), self.lookahead.settings.tokens
        return TeacherOutputs.of_cache(*target_importance(self.lookahead.model, batch, cuts, observers=observers))

    @override
    def kept_tokens(self, batch: Batch) -> int:
        return len(batch.prompt_ids) * Cuts.of(batch, self.cuts).length  # the rest of the answer is not stored

    @override
    def loss_of(self, outputs: TeacherOutputs, batch: Batch) -> Tensor:
        target, predicted = self.compared(outputs, batch)
        cuts = Cuts.of(batch, self.cuts)
        whole = importance_divergence(target, predicted, cuts.shares)
        if not self.far:
            return whole
        return torch.lerp(whole, far_divergence(target, predicted, cuts.mask, cuts.shares), self.far)

    def importances(self, batch: Batch) -> Importances:
        """Target and predicted importance; gradients flow through the prediction."""
        return self.compared(self.teacher_outputs(batch), batch)

    def compared(self, outputs: TeacherOutputs, batch: Batch) -> Importances:
        """`importances`, from the teacher outputs of the batch."""
        lookahead, cuts = self.lookahead, Cuts.of(batch, self.cuts)
        cache = outputs.cache(lookahead.model, cuts.length)
        embeddings = lookahead.observers(len(batch.prompt_ids) * self.cuts)
        rope_lengths = text_lengths(batch, lookahead.settings.tokens).repeat_interleave(self.cuts)
        with lookahead.active(), recomputed(lookahead.model, self.checkpoints, lookahead.active):
            predicted = observe(lookahead.model, cache, cuts.mask, embeddings, rope_lengths=rope_lengths)
        gather_for_gradients(lookahead.model, predicted)
        return outputs.importance, predicted


def module_weights(lookahead: Lookahead) -> dict[str, Tensor]:
    """A module's tensors, as a checkpoint holds them."""
    return lookahead.lora_state() | {_TOKENS: lookahead.tokens.detach().cpu()}


def load_module_weights(lookahead: Lookahead, weights: dict[str, Tensor]) -> None:
    """The inverse of `module_weights`."""
    lookahead.load_state(weights, weights.pop(_TOKENS).to(lookahead.tokens.device))
