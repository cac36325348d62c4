"""The importance objective of a lookahead module (LookaheadKV, arXiv 2603.10899, section 3.2, equation 4).

A first pass, over prompt and answer without adapter and gradients, gives the target importance and the prompt's cache.
A second, of n soft tokens over that cache with adapter and gradients, gives the prediction. Nothing after a prompt
changes the prompt's KV entries, so loss and gradients equal those of one pass over everything, at about the cost of one
inference prefill. The first pass's outputs can be used for several steps (`keepsight.train.replay`).

A cut after an answer's c-th token makes a training pair of prompt + answer[:c] and answer[c:]. One first pass serves
all cuts of a sample. They are spread evenly over the answer, the first before it, so that replays and resumed trainings
use the same ones.
"""

from collections.abc import Iterable, Sequence
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
from keepsight.runtime.attention import RecordLayer, Softmax, run
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
        indices: [B, M] int64: the entries' indices among the tokens of prompt and answer; None for the first M.
        row_weights: [R] float32: each row's weight in the loss; None for equal weights.
    """

    length: int
    mask: Tensor | None
    queries: Tensor | None
    indices: Tensor | None = None
    row_weights: Tensor | None = None

    @classmethod
    def of_batch(cls, batch: Batch, count: int) -> "Cuts":
        """The cuts of a batch, `count` of each sample."""
        prompt_length = batch.prompt_ids.shape[1]
        device = batch.prompt_ids.device
        if count == 1:
            return cls(prompt_length, batch.prompt_mask, batch.answer_mask)

        length = 0
        cut_rows = []
        weights: list[float] = []
        for sample_prompt, sample_answer in zip(batch.prompt_lengths(), batch.answer_lengths(), strict=True):
            cuts = cut_positions(sample_answer, count)
            missing = count - len(cuts)
            cut_rows.append(cuts + [cuts[-1]] * missing)
            weights += [1 / len(cuts) / len(batch.prompt_ids)] * len(cuts) + [0.0] * missing
            length = max(length, sample_prompt + cuts[-1])
        cut_after = torch.tensor(cut_rows, device=device)

        indices = torch.arange(length, device=device) + (prompt_length - length + cut_after[:, -1:])
        padding = prompt_length - torch.tensor(batch.prompt_lengths(), device=device)
        is_real = indices >= padding[:, None]
        precedes_cut = indices[:, None] < prompt_length + cut_after[..., None]
        mask = is_real[:, None] & precedes_cut

        queries = torch.arange(batch.answer_ids.shape[1], device=device) >= cut_after[..., None]
        if batch.answer_mask is not None:
            queries = queries & batch.answer_mask[:, None]
        row_weights = torch.tensor(weights, device=device)
        return cls(length, mask.flatten(0, 1), queries, indices.clamp(min=0), row_weights)

    def crop(self, cache: Cache, tokens: int) -> None:
        """Crop a cache of so many tokens to the last cut."""
        if self.indices is None:
            cache.crop(self.length - tokens)
            return
        indices_on = on_each(self.indices[:, None, :, None])
        for layer in full_layers(cache):
            layer.keys = layer.keys.take_along_dim(indices_on(layer.keys.device), dim=2)
            layer.values = layer.values.take_along_dim(indices_on(layer.values.device), dim=2)

    def row_importance(self, attention: list[Tensor]) -> list[Tensor]:
        """For each layer [R, H, M], from the mean attention of the answers' tokens: [B, H, N], or [B, K, H, N + T]."""
        if self.indices is None or self.mask is None:
            return attention
        indices_on = on_each(self.indices[:, None, None])
        mask_on = on_each(self.mask[:, None])
        layers = []
        for layer in attention:
            importance = layer.take_along_dim(indices_on(layer.device), dim=-1).flatten(0, 1)
            layers.append(importance * mask_on(layer.device))
        return layers


def cut_positions(length: int, count: int) -> list[int]:
    """The number of an answer's tokens before each cut: `count` cuts, or as many as the answer has tokens."""
    distinct = max(1, min(length, count))
    return [number * length // distinct for number in range(distinct)]


_TOKENS = "tokens"


def text_lengths(batch: Batch, observers: int) -> Tensor:
    """[B] int64: tokens of each prompt with its answer, or with the observers that follow a part of it.

    Where RoPE depends on the length, both passes have that of this text, as if all were read in one pass.
    """
    lengths = []
    for prompt_length, answer_length in zip(batch.prompt_lengths(), batch.answer_lengths(), strict=True):
        lengths.append(prompt_length + answer_length + observers)
    return torch.tensor(lengths, device=batch.prompt_ids.device)


class AnswerAttention:
    """Records the mean attention that an answer's tokens pay, in each layer with full attention.

    Args:
        layers: Indices of these layers.
        answer_length: T, the number of the last queries.
        cuts: Says which of them count; with several cuts, the answer's own entries are recorded too.
        mask: [B, N + T] bool, False for padding; None where nothing is padded.
    """

    def __init__(self, layers: Sequence[int], answer_length: int, cuts: Cuts, mask: Tensor | None) -> None:
        self._layers = layers
        self._answer_length = answer_length
        self._cuts = cuts
        self._mask = mask
        self._attention: dict[int, Tensor] = {}

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, softmax: Softmax, real: Tensor | None, mask: Any
    ) -> None:
        """See `keepsight.runtime.attention.RecordLayer`."""
        if layer not in self._layers:
            return
        entries = key.shape[2]
        if self._cuts.indices is None:
            entries -= self._answer_length
        key_mask = self._mask if real is None else real
        answer_queries = query[:, :, -self._answer_length :]
        self._attention[layer] = observed_attention(
            answer_queries, key, softmax, entries, key_mask=key_mask, query_mask=self._cuts.queries
        )

    def by_layer(self) -> list[Tensor]:
        """For each layer [B, H, N] float32; with several cuts [B, K, H, N + T]."""
        return [self._attention[layer] for layer in sorted(self._attention)]


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
    cuts = cuts or Cuts.of_batch(batch, 1)
    ids, mask = batch.joined()
    prompt_length = batch.prompt_ids.shape[1]
    length = ids.shape[1]
    positions = positions_of(mask, length, ids.device)
    rope_lengths = text_lengths(batch, observers)
    cache = empty_cache(model)
    attention = AnswerAttention(full_attention_layers(model.config), batch.answer_ids.shape[1], cuts, mask)

    def read(start: int, end: int, into: Cache, recorder: RecordLayer | None = None) -> None:
        attention_mask = None if mask is None else mask[:, :end]
        inputs = {"input_ids": ids[:, start:end], "position_ids": positions[:, start:end]}
        run(
            decoder_of(model),
            into,
            recorder=recorder,
            rope_lengths=rope_lengths,
            attention_mask=attention_mask,
            **inputs,
        )

    if has_recurrent(cache):  # a recurrent layer cannot be cropped to the prompt
        read(0, prompt_length, cache)
        read(prompt_length, length, share(cache), attention)
    else:
        record_past(cache)
        read(0, length, cache, attention)
        cuts.crop(cache, length)
    return cache, cuts.row_importance(attention.by_layer())


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
        bounded_kinds = sorted(set(layer_kinds(config)) - {FULL})
        if cuts > 1 and bounded_kinds:
            raise UserError(
                f"train.cuts={cuts}: {config.model_type} has layers of {', '.join(bounded_kinds)}, which cannot go "
                "back to an earlier cut; use train.cuts=1",
                field="train.cuts",
                code="model",
            )
        self.lookahead = lookahead
        self.far = far
        self.checkpoints = checkpoints
        self._cuts = cuts
        lookahead.model.requires_grad_(False).eval()
        self._weights = weights_per_token(lookahead.model)

    @property
    def cuts(self) -> int:
        """Number of cuts of each sample: the training's, or 1 while the module is measured."""
        return self._cuts if self.training else 1

    @override
    def decisive(self) -> dict[str, Any]:
        values = {}
        for name, value in asdict(self.lookahead.settings).items():
            if name not in SELECTION:
                values[f"lookahead.{name}"] = value
        return values

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
            fidelity = measure_fidelity(self.importances, batches, kv_heads, budget)
        return fidelity.metrics()

    @override
    def flops(self, batch: Batch) -> float:
        return self.teacher_flops(batch) + self.module_flops(batch)

    def teacher_flops(self, batch: Batch) -> float:
        """Operations of the first pass; 0 if its outputs were stored."""
        if batch.turn > 0:
            return 0.0
        rows, prompt_length = batch.prompt_ids.shape
        answer_length = batch.answer_ids.shape[1]
        return rows * pass_flops(self.lookahead.model, self._weights, prompt_length + answer_length)

    def module_flops(self, batch: Batch) -> float:
        """Operations of the second pass and its gradients; the frozen weights have none."""
        rows, prompt_length = batch.prompt_ids.shape
        answer_length = batch.answer_ids.shape[1]
        tokens_before = prompt_length + cut_positions(answer_length, self.cuts)[-1]
        tokens = self.lookahead.settings.tokens
        row_pass = pass_flops(self.lookahead.model, self._weights, tokens, tokens_before)
        return rows * self.cuts * 2 * row_pass

    @override
    def run_teacher(self, batch: Batch) -> TeacherOutputs:
        cuts = Cuts.of_batch(batch, self.cuts)
        observers = self.lookahead.settings.tokens
        cache, importance = target_importance(self.lookahead.model, batch, cuts, observers=observers)
        return TeacherOutputs.of_cache(cache, importance)

    @override
    def kept_tokens(self, batch: Batch) -> int:
        cuts = Cuts.of_batch(batch, self.cuts)
        return len(batch.prompt_ids) * cuts.length  # the rest of the answer is not stored

    @override
    def loss_of(self, outputs: TeacherOutputs, batch: Batch) -> Tensor:
        cuts = Cuts.of_batch(batch, self.cuts)
        target, predicted = self.importances_from(outputs, batch)
        loss = importance_divergence(target, predicted, cuts.row_weights)
        if not self.far:
            return loss
        far_loss = far_divergence(target, predicted, cuts.mask, cuts.row_weights)
        return torch.lerp(loss, far_loss, self.far)

    def importances(self, batch: Batch) -> Importances:
        """Target and predicted importance; gradients flow through the prediction."""
        return self.importances_from(self.teacher_outputs(batch), batch)

    def importances_from(self, outputs: TeacherOutputs, batch: Batch) -> Importances:
        """`importances`, from the teacher outputs of the batch."""
        lookahead = self.lookahead
        cuts = Cuts.of_batch(batch, self.cuts)
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
