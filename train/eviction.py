"""The eviction objective: train a lookahead module and its head weights on the loss that eviction causes in answers.

Importance says which of a head's entries the answer attends to, not how much the answer suffers without them. So the
model reads its own answer again with a gate on each prompt entry, a soft form of the selection: with one budget for the
heads of all layers, or with the same number of entries in each head (uniform). The loss is the KL divergence of the
next-token distributions with gates from those with all entries. Gradients flow through gates and importance to the head
weights, the soft tokens and the LoRA.
"""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.models.decoder import (
    cached_kv_heads,
    decoder_of,
    full_attention_layers,
    has_latents,
    logits_of,
    require_full_attention,
)
from keepsight.models.distributed import map_over_processes, whole_weights
from keepsight.models.lookahead import Lookahead
from keepsight.runtime.allocate import Global, HeadSizes, Uniform
from keepsight.runtime.attention import Softmax, grouped_attention, later, run
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import Reduce, select_top, top_mask
from keepsight.runtime.layer import LayerEntries
from keepsight.runtime.observe import Observer, ViewedLayer, as_observed, look_back
from keepsight.runtime.state import State, full_layers, has_bounded, prefill
from keepsight.train.dataset import Batch
from keepsight.train.distributed import gather_for_gradients
from keepsight.train.importance import load_module_weights, module_weights, text_lengths
from keepsight.train.objective import ReplayedObjective, recomputed
from keepsight.train.replay import TeacherOutputs
from keepsight.train.settings import SHARPEST, FinetuneSettings, TrainSettings
from keepsight.train.tracking import pass_flops, weights_per_token

_HALVINGS = 40
"""Bisections for a threshold."""
_WEIGHTS = "log_weights"


@dataclass(frozen=True, eq=False)
class TokensInTraining(Observer):
    """The soft tokens of a module in training as an observer with gradients; activations may be recomputed."""

    lookahead: Lookahead
    checkpoints: bool = False
    signed = False

    @override
    def __call__(self, model: PreTrainedModel, state: State, reduce: Reduce) -> list[Tensor]:
        embeddings = self.lookahead.observers(len(state.tokens))
        with self.lookahead.active(), recomputed(model, self.checkpoints, self.lookahead.active):
            scores = look_back(model, state, embeddings, reduce=reduce, stops=False)  # hooks gather a sharded model
        gather_for_gradients(model, scores)
        return scores

    @override
    def positions(self) -> int:
        return self.lookahead.settings.tokens


class EvictionObjective(ReplayedObjective):
    """The KL divergence that a soft eviction causes; trains the head weights and, unless it is frozen, the module.

    Args:
        model: The base model; frozen.
        method: Decides how entries are scored, with importance of at least 0, and which are always kept. Its allocation
            is not used, and its budget only by observers that depend on it.
        allocate: `Global`, with the floor and the initial head weights, or `Uniform`.
        settings: Each loss uses one of its budgets, chosen by samples and turn.
        lookahead: The module in training, whose soft tokens then score in place of the method's observer.

    Attributes:
        log_weights: [L, K] float32, logarithms of the head weights, by which the importance of a KV head's entries is
            multiplied before heads are compared.

    Raises:
        UserError: no layer has full attention, the layers cache latents, a budget can leave a head without entries, or
            there is nothing to train.
    """

    weights_file = "finetuned.safetensors"
    settings_key = "finetune.train"

    def __init__(
        self,
        model: PreTrainedModel,
        method: Evict,
        allocate: Global | Uniform,
        settings: FinetuneSettings,
        lookahead: Lookahead | None = None,
    ) -> None:
        super().__init__()
        require_full_attention(model)
        if has_latents(model):
            raise UserError(
                f"{model.config.model_type} caches latents: training for eviction needs keys and values",
                field="model",
                code="model",
            )
        model.requires_grad_(False).eval()
        for budget in settings.budgets:
            if not method.sinks + method.window:
                allocate.check(budget)
        self.floor = allocate.floor if isinstance(allocate, Global) else None
        replace(settings, freeze_module=lookahead is None).check_selection(self.floor)
        self.model = model
        self.settings = settings
        if lookahead:
            method = replace(method, observer=TokensInTraining(lookahead, settings.gradient_checkpointing))
        self.method = method
        self._weights = weights_per_token(model)

        shape = (len(full_attention_layers(model.config)), cached_kv_heads(model))
        initial_weights = torch.ones(shape)
        if isinstance(allocate, Global) and allocate.weights is not None:
            initial_weights = torch.tensor(allocate.weights)
        if initial_weights.shape != shape:
            raise UserError(
                f"head weights have shape {list(initial_weights.shape)}, this model's is {list(shape)}: use its own",
                field="head_weights",
                code="model",
            )
        self.log_weights = nn.Parameter(initial_weights.log().to(model.device))
        self.lookahead = lookahead

    @override
    def decisive(self) -> dict[str, Any]:
        return {
            "finetune.freeze_module": self.lookahead is None,
            "finetune.budgets": self.settings.budgets,
            "finetune.temperature": self.settings.temperature,
            "finetune.uniform_share": self.settings.uniform_share,
            "finetune.unseen": self.settings.unseen,
            "selection": "uniform" if self.floor is None else "shared",
            "finetune.head_weights_rate": self.settings.weights_rate,
        }

    @override
    def parameter_groups(self, settings: TrainSettings) -> list[dict[str, Any]]:
        groups = []
        module_parameters = [parameter for parameter in self.trained_parameters() if parameter is not self.log_weights]
        if module_parameters:
            groups.append({"params": module_parameters, "lr": settings.learning_rate})
        groups.append({"params": [self.log_weights], "lr": self.settings.weights_rate})
        return groups

    @override
    def weights(self) -> dict[str, Tensor]:
        weights = {_WEIGHTS: self.log_weights.detach().cpu()}
        if self.lookahead:
            weights |= module_weights(self.lookahead)
        return weights

    @override
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            self.log_weights.copy_(weights.pop(_WEIGHTS))
        if self.lookahead:
            load_module_weights(self.lookahead, weights)

    def head_weights(self) -> Tensor:
        """[L, K] float32, scaled to a geometric mean of 1: a common factor does not change the selection."""
        logarithms = self.log_weights.detach().cpu()
        return (logarithms - logarithms.mean()).exp()

    @override
    def flops(self, batch: Batch) -> float:
        return self.teacher_flops(batch) + self.module_flops(batch)

    def teacher_flops(self, batch: Batch) -> float:
        """Operations of prompt and answer with all entries; 0 if their outputs were stored."""
        if batch.turn > 0:
            return 0.0
        rows, prompt_length = batch.prompt_ids.shape
        answer_length = batch.answer_ids.shape[1] - 1
        return rows * pass_flops(self.model, self._weights, prompt_length + answer_length)

    def module_flops(self, batch: Batch) -> float:
        """Operations of the soft tokens and of the answer with gates, with their gradients."""
        rows, prompt_length = batch.prompt_ids.shape
        answer_length = batch.answer_ids.shape[1] - 1
        row_flops = 2 * pass_flops(self.model, self._weights, answer_length, prompt_length)
        if self.lookahead:
            observers = self.method.observer.positions()
            row_flops += 2 * pass_flops(self.model, self._weights, observers, prompt_length)
        return rows * row_flops

    @override
    @torch.no_grad()
    def run_teacher(self, batch: Batch) -> TeacherOutputs:
        state = prefill(
            self.model,
            batch.prompt_ids,
            batch.prompt_mask,
            needs=self.method.needs(),
            rope_lengths=text_lengths(batch, 0),
        )
        importance = [] if self.lookahead else self.method.importance(self.model, state)
        outputs = TeacherOutputs.of_cache(state.cache, importance)
        gates = [_hard_gates(is_real) for is_real in state.select_all()]
        step_outputs = outputs if self.buffer is None else self.buffer.rounded(outputs)  # as the steps read them
        answer_hidden = self._hidden(step_outputs, _with_three_tokens(batch), gates)
        return replace(outputs, answers=[answer_hidden])

    @override
    def kept_tokens(self, batch: Batch) -> int:
        return batch.prompt_ids.numel()

    def importance(self, outputs: TeacherOutputs, batch: Batch) -> list[Tensor]:
        """For each layer, the importance [B, K, N] float32 of a prompt's entries; -inf for padding."""
        if self.lookahead is None:
            return outputs.importance
        ids = batch.prompt_ids
        lengths = torch.tensor(batch.prompt_lengths(), device=ids.device)
        cache = outputs.cache(self.model, ids.shape[1])
        answer_lengths = text_lengths(batch, 0) - lengths
        state = State(cache, torch.empty(len(ids), 0), ids, lengths, batch_offset=answer_lengths)
        for layer in state.layers:
            layer.token_mask = batch.prompt_mask
        scores = self.method.observer(self.model, state, self.method.reduce)
        importance = []
        for layer_scores, layer in zip(scores, state.layers, strict=True):
            importance.append(self.method.layer_importance(layer_scores, layer))
        return importance

    @override
    def loss_of(self, outputs: TeacherOutputs, batch: Batch) -> Tensor:
        batch = _with_three_tokens(batch)
        evicting_budgets = [budget for budget in self.settings.budgets if budget < batch.prompt_ids.shape[1]]
        budget = random.Random(self._seed_of(batch)).choice(evicting_budgets or self.settings.budgets)
        floor = self._draw_floor(batch)

        device = self.log_weights.device
        importance = torch.stack([layer.to(device) for layer in self.importance(outputs, batch)])
        gates = soft_gates(importance, self.log_weights, budget, floor, self.settings.temperature)
        with torch.no_grad():
            full = self._log_probabilities(*outputs.answers)
        gated = self._log_probabilities(self._hidden(outputs, batch, gates))
        nats = functional.kl_div(gated, full, reduction="none", log_target=True).sum(dim=-1)

        # Without eviction the loss is 0. The model runs anyway: processes may share it, and must fill DeepSpeed's
        # gradient buckets in the same order.
        loss = _answer_means(nats, batch).mean() * bool(evicting_budgets)
        if floor is None:
            loss = loss + 0 * self.log_weights.sum()  # DDP awaits a gradient of every parameter
        return loss

    def _draw_floor(self, batch: Batch) -> float | None:
        """The floor of a batch's selection, None for a uniform one: drawn at random, the same in a resumed training."""
        coin = random.Random(f"{self.settings.train.seed}:{self._seed_of(batch)}:uniform")
        is_uniform = coin.random() < self.settings.uniform_share
        return None if is_uniform else self.floor

    def _seed_of(self, batch: Batch) -> str:
        """A seed for what is drawn for a batch; it differs from turn to turn and from epoch to epoch."""
        seed = f"{list(batch.indices)}:{batch.turn}"
        return f"{seed}:{self.epoch}" if self.epoch else seed

    @override
    def measure(self, batches: Iterable[dict[str, Any]], budget: int) -> dict[str, Any]:
        floors: dict[str, float | None] = {"": self.floor}
        if self.settings.uniform_share:
            floors["_uniform"] = None

        def measure_batch(values: dict[str, Any]) -> dict[int, list[list[float]]]:
            return self.excess_nll(Batch(**values), list(floors.values()))

        all_batches = list(batches)
        with self.measuring(), whole_weights(self):
            measured_batches = map_over_processes(measure_batch, all_batches)
        metrics: dict[str, Any] = {}
        for number, suffix in enumerate(floors):
            for evicted_budget in self.settings.budgets:
                samples: list[float] = []
                for measured in measured_batches:
                    samples += measured[evicted_budget][number]
                name = f"eval_excess_nll{suffix}_at_{evicted_budget}"
                metrics[name] = fmean(samples)
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise FloatingPointError(f"{name} is {value}")

        sample_means: list[float] = []
        for measured in measured_batches:
            samples_at_budgets = [measured[evicted_budget][0] for evicted_budget in self.settings.budgets]
            for excess_at_budgets in zip(*samples_at_budgets, strict=True):
                sample_means.append(fmean(excess_at_budgets))
        indices: list[int] = []
        for batch_values in all_batches:
            indices += batch_values["indices"]
        metrics["eval_by_sample"] = sample_means
        metrics["eval_samples"] = indices
        return metrics

    def excess_nll(self, batch: Batch, floors: Sequence[float | None]) -> dict[int, list[list[float]]]:
        """For each budget and floor, how much evicting increases the cross-entropy of each sample's answer, in nats.

        The answer's first token, which follows the whole prompt, is left out. 0 if the prompt is within the budget, or
        the answer has one token.
        """
        outputs = self.teacher_outputs(batch)
        batch = _with_three_tokens(batch)
        importance = self.importance(outputs, batch)
        full = self._cross_entropy(batch, *outputs.answers)
        by_budget = {}
        for budget in self.settings.budgets:
            by_floor = []
            for floor in floors:
                kept = select_entries(importance, self.head_weights(), budget, floor)
                gates = [_hard_gates(layer_kept) for layer_kept in kept]
                evicted = self._cross_entropy(batch, self._hidden(outputs, batch, gates))
                by_floor.append((evicted - full).tolist())
            by_budget[budget] = by_floor
        return by_budget

    def _cross_entropy(self, batch: Batch, hidden: Tensor) -> Tensor:
        """[B] in nats, from the decoder's outputs: the mean over an answer's tokens but the first."""
        nats = -self._log_probabilities(hidden).gather(-1, batch.answer_ids[:, 1:, None])[..., 0]
        return _answer_means(nats, batch)

    def _log_probabilities(self, hidden: Tensor) -> Tensor:
        """[B, T - 1, V] float32, from the decoder's outputs."""
        logits = logits_of(self.model, hidden.to(self.model.dtype))
        return logits.float().log_softmax(dim=-1).to(self.log_weights.device)

    def _hidden(self, outputs: TeacherOutputs, batch: Batch, gates: Tensor | list[Tensor]) -> Tensor:
        """The decoder's outputs [B, T - 1, hidden] for an answer's tokens but the last, with gates on the prompt."""
        cache = outputs.cache(self.model, batch.prompt_ids.shape[1])
        layers = []
        for layer, gate in zip(full_layers(cache), gates, strict=True):
            layers.append(GatedLayer(layer.keys, layer.values, gate.to(layer.keys.device)))
        ids = batch.answer_ids[:, :-1]
        attention_mask = None
        if batch.prompt_mask is not None and has_bounded(cache):  # in other layers the gates hide padding
            attention_mask = functional.pad(batch.prompt_mask, (0, ids.shape[1]), value=True)
        prompt_lengths = torch.tensor(batch.prompt_lengths(), device=ids.device)
        positions = prompt_lengths[:, None] + torch.arange(ids.shape[1], device=ids.device)
        with recomputed(self.model, self.settings.gradient_checkpointing):
            output = run(
                decoder_of(self.model),
                as_observed(cache, layers),
                input_ids=ids,
                position_ids=positions,
                attention_mask=attention_mask,
                rope_lengths=text_lengths(batch, 0),
            )
        hidden: Tensor = output.last_hidden_state
        return hidden


def _with_three_tokens(batch: Batch) -> Batch:
    """The batch; shorter answers are padded to three tokens, so that two are read after the eviction.

    For a single token Mamba-2 layers change their state in place, which gradients do not allow.
    """
    missing = 3 - batch.answer_ids.shape[1]
    if missing <= 0:
        return batch
    mask = batch.answer_mask
    if mask is None:
        mask = torch.ones_like(batch.answer_ids, dtype=torch.bool)
    padded_ids = functional.pad(batch.answer_ids, (0, missing))
    padded_mask = functional.pad(mask, (0, missing))
    return replace(batch, answer_ids=padded_ids, answer_mask=padded_mask)


def _answer_means(nats: Tensor, batch: Batch) -> Tensor:
    """[B]: the mean of [B, T - 1] over the real tokens."""
    is_real = torch.ones_like(nats) if batch.answer_mask is None else batch.answer_mask[:, 1:]
    return (nats * is_real).sum(dim=1) / is_real.sum(dim=1).clamp(min=1)


def select_entries(importance: Sequence[Tensor], weights: Tensor, budget: int, floor: float | None) -> list[Tensor]:
    """For each layer, the entries [B, K, N] bool that an eviction keeps; importance [B, K, N], weights [L, K].

    Without a floor every head keeps the same number of entries.
    """
    layers = list(importance)
    real_counts = np.array([(~torch.isneginf(layer)).sum(dim=-1).tolist() for layer in layers])
    always_kept_counts = np.array([torch.isposinf(layer).sum(dim=-1).tolist() for layer in layers])
    sizes = HeadSizes(real_counts, always_kept_counts)
    budgets = [budget] * real_counts.shape[1]
    allocate: Uniform | Global = Uniform()
    if floor is not None:
        allocate = Global(floor, tuple(map(tuple, weights.tolist())))
    return select_top(layers, allocate(sizes, budgets, layers))


def _hard_gates(kept: Tensor) -> Tensor:
    """Logarithms of the gates of a selection: 0 for the entries that are kept, very low for the others."""
    return torch.zeros_like(kept, dtype=torch.float32).masked_fill_(~kept, torch.finfo(torch.float32).min)


class GatedLayer(ViewedLayer):
    """Stored entries whose attention weights are multiplied by gates before they are normalised: a soft selection.

    Keys and values are [B, K, N, d]. `gates` [B, K, N] are logarithms, through which gradients flow: 0 for an entry
    that is kept, very low for one that is evicted and for padding; the model's own mask is ignored. New tokens attend
    to each other causally, without gates, and are not stored.
    """

    def __init__(self, keys: Tensor, values: Tensor, gates: Tensor) -> None:
        super().__init__(LayerEntries(keys, values, None))
        self.gates = gates

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        rows = query.shape[2]
        lowest = torch.finfo(query.dtype).min
        entry_gates = self.gates.clamp(min=lowest).to(query.dtype)[:, :, None].expand(-1, -1, rows, -1)
        is_later = later(rows, query.device)
        new_token_gates = torch.zeros(rows, rows, dtype=query.dtype, device=query.device).masked_fill(is_later, lowest)
        mask = torch.cat([entry_gates, new_token_gates.expand(*entry_gates.shape[:2], -1, -1)], dim=-1)
        keys = torch.cat([self.keys, key], dim=-2)
        values = torch.cat([self.values, value], dim=-2)
        return grouped_attention(query, keys, values, mask, softmax)


def soft_gates(importance: Tensor, log_weights: Tensor, budget: int, floor: float | None, temperature: float) -> Tensor:
    """Logarithms of gates that softly select as many entries as `Global`, or without a floor `Uniform`, allocates.

    An entry's score is the logarithm of its importance, plus its head's log weight if there is a floor. Its gate is
    sigmoid((score - threshold) / temperature), or 1 for the entries that `floor` guarantees a head, as in `Global`.
    The threshold makes the gates of the entries that share a budget (the heads of a row, or without a floor the entries
    of a head) sum to it; gradients include its dependence on the scores. If there are no more real entries than the
    budget, all are kept.

    Args:
        importance: [L, B, K, N] float32, not negative; +inf for entries that are always kept (gates of 1), -inf for
            padding (gates of 0).
        log_weights: [L, K] float32, logarithms of the head weights.
        budget: Entries per layer and KV head on average.
        floor: See `Global`; None for the same number in every head.
        temperature: In nats; lower is closer to a hard selection. Below `SHARPEST` the gates are those of an eviction's
            kept entries, ties included, without gradients.

    Returns:
        [L, B, K, N] float32.
    """
    if temperature < SHARPEST:
        kept = select_entries(list(importance), log_weights.detach().exp(), budget, floor)
        return _hard_gates(torch.stack(kept))

    is_real = ~torch.isneginf(importance)
    is_guaranteed = torch.isposinf(importance)
    limits = torch.finfo(importance.dtype)
    scores = importance.clamp(limits.tiny, limits.max).log()
    if floor is None:
        dims = _HEAD
        heads = 1
    else:
        dims = _ROW
        heads = scores.shape[0] * scores.shape[2]
        scores = scores + log_weights[:, None, :, None]
        floor_entries = min(int(budget * floor), importance.shape[-1])
        is_guaranteed |= top_mask(importance.detach(), floor_entries) & is_real
    is_free = is_real & ~is_guaranteed
    free_budget = budget * heads - _sum(is_guaranteed, dims)

    with torch.no_grad():
        threshold = _threshold(scores, is_free, free_budget, temperature, dims)
    open_gates = torch.sigmoid((scores - threshold) / temperature) * is_free
    slope = _sum(open_gates * (1 - open_gates), dims).detach().clamp(min=1e-6) / temperature
    gate_sum = _sum(open_gates, dims)
    # the threshold's value stays; its gradient is the implicit function's
    threshold = threshold + (gate_sum - gate_sum.detach()) / slope

    gates = functional.logsigmoid((scores - threshold) / temperature)
    fits_budget = _sum(is_free, dims) <= free_budget
    is_open = (is_real & ~is_free) | fits_budget
    return gates.masked_fill(is_open, 0.0).masked_fill(~is_real, limits.min)


_ROW: tuple[int, ...] = (0, 2, 3)
_HEAD: tuple[int, ...] = (3,)
"""The dimensions of [L, B, K, N] over which entries share a budget."""


def _threshold(
    scores: Tensor, is_free: Tensor, free_budget: Tensor, temperature: float, dims: tuple[int, ...]
) -> Tensor:
    """Where the gates of the free entries that share a budget sum to it, by bisection; `dims` have length 1."""
    free_scores = scores.masked_fill(~is_free, torch.nan)
    low = free_scores.nan_to_num(nan=torch.inf).amin(dim=dims, keepdim=True) - 20 * temperature
    high = free_scores.nan_to_num(nan=-torch.inf).amax(dim=dims, keepdim=True) + 20 * temperature
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        gates = torch.sigmoid((scores - middle) / temperature) * is_free
        is_above_budget = _sum(gates, dims) > free_budget
        low = torch.where(is_above_budget, middle, low)
        high = torch.where(is_above_budget, high, middle)
    return ((low + high) / 2).nan_to_num()  # there is no threshold if no entry is free


def _sum(gates: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Sums over entries that share a budget; `dims` have length 1."""
    return gates.sum(dim=dims, keepdim=True)
