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
from keepsight.models.distributed import divided, gathered
from keepsight.models.lookahead import Lookahead
from keepsight.runtime.allocate import Global, HeadSizes, Uniform
from keepsight.runtime.attention import Softmax, grouped_attention, later, run
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import Reduce, select_top, top_mask
from keepsight.runtime.layer import LayerEntries
from keepsight.runtime.observe import Observer, ViewedLayer, as_observed, look_back
from keepsight.runtime.state import State, full_layers, prefill
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
        embeddings, active = self.lookahead.observers(len(state.tokens)), self.lookahead.active
        with active(), recomputed(model, self.checkpoints, active):
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
            raise UserError(f"{model.config.model_type} caches latents: training for eviction needs keys and values")
        model.requires_grad_(False).eval()
        for budget in settings.budgets:
            if not method.sinks + method.window:
                allocate.check(budget)
        shared = allocate if isinstance(allocate, Global) else Global(weights=None)
        self.floor = shared.floor if shared is allocate else None
        replace(settings, freeze_module=lookahead is None).check_selection(self.floor)
        self.model, self.settings = model, settings
        if lookahead:
            method = replace(method, observer=TokensInTraining(lookahead, settings.gradient_checkpointing))
        self.method, self._weights = method, weights_per_token(model)
        shape = len(full_attention_layers(model.config)), cached_kv_heads(model)
        start = torch.ones(shape) if shared.weights is None else torch.tensor(shared.weights)
        if start.shape != shape:
            raise UserError(f"head weights have shape {[*start.shape]}, this model's is {[*shape]}: use its own")
        self.log_weights = nn.Parameter(start.log().to(model.device))
        self.lookahead = lookahead

    @override
    def decisive(self) -> dict[str, Any]:
        return {
            "finetune.freeze_module": self.lookahead is None,
            "finetune.budgets": self.settings.budgets,
            "finetune.temperature": self.settings.temperature,
            "finetune.uniform_share": self.settings.uniform_share,
            "finetune.unseen": self.settings.unseen or None,  # earlier versions had no such setting
            "selection": "uniform" if self.floor is None else "shared",
            "finetune.head_weights_rate": self.settings.weights_rate,
        }

    @override
    def parameter_groups(self, settings: TrainSettings) -> list[dict[str, Any]]:
        module = [each for each in self.trained_parameters() if each is not self.log_weights]
        weights = {"params": [self.log_weights], "lr": self.settings.weights_rate}
        return [{"params": module, "lr": settings.learning_rate}, weights] if module else [weights]

    @override
    def weights(self) -> dict[str, Tensor]:
        module = module_weights(self.lookahead) if self.lookahead else {}
        return {_WEIGHTS: self.log_weights.detach().cpu()} | module

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
        (rows, prompt), answer = batch.prompt_ids.shape, batch.answer_ids.shape[1] - 1
        return rows * pass_flops(self.model, self._weights, prompt + answer) if batch.turn == 0 else 0.0

    def module_flops(self, batch: Batch) -> float:
        """Operations of the soft tokens and of the answer with gates, with their gradients."""
        rows, prompt = batch.prompt_ids.shape
        observing = 2 * pass_flops(self.model, self._weights, self.method.observer.positions(), prompt)
        answering = 2 * pass_flops(self.model, self._weights, batch.answer_ids.shape[1] - 1, prompt)
        return rows * ((observing if self.lookahead else 0.0) + answering)

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
        gates = [_hard_gates(real) for real in state.select_all()]
        read = outputs if self.buffer is None else self.buffer.rounded(outputs)  # as the steps read it
        return replace(outputs, answers=[self._hidden(read, _with_three_tokens(batch), gates)])

    @override
    def kept_tokens(self, batch: Batch) -> int:
        return batch.prompt_ids.numel()

    def importance(self, outputs: TeacherOutputs, batch: Batch) -> list[Tensor]:
        """For each layer, the importance [B, K, N] float32 of a prompt's entries; -inf for padding."""
        if self.lookahead is None:
            return outputs.importance
        ids, lengths = batch.prompt_ids, torch.tensor(batch.prompt_lengths(), device=batch.prompt_ids.device)
        cache = outputs.cache(self.model, ids.shape[1])
        answers = text_lengths(batch, 0) - lengths
        state = State(cache, torch.empty(len(ids), 0), ids, lengths, batch_offset=answers)
        for layer in state.layers:
            layer.token_mask = batch.prompt_mask
        scores = self.method.observer(self.model, state, self.method.reduce)
        return [self.method.layer_importance(*pair) for pair in zip(scores, state.layers, strict=True)]

    @override
    def loss_of(self, outputs: TeacherOutputs, batch: Batch) -> Tensor:
        batch, budgets = _with_three_tokens(batch), self.settings.budgets
        longer = [budget for budget in budgets if budget < batch.prompt_ids.shape[1]]
        budget = random.Random(self._seed_of(batch)).choice(longer or budgets)
        importance = torch.stack([each.to(self.log_weights.device) for each in self.importance(outputs, batch)])
        floor = self._floor_of(batch)
        gates = soft_gates(importance, self.log_weights, budget, floor, self.settings.temperature)
        with torch.no_grad():
            full = self._log_probabilities(*outputs.answers)
        gated = self._log_probabilities(self._hidden(outputs, batch, gates))
        nats = functional.kl_div(gated, full, reduction="none", log_target=True).sum(dim=-1)
        # Without eviction the loss is 0. The model runs anyway: processes may share it, and must fill DeepSpeed's
        # gradient buckets in the same order.
        loss = _answer_means(nats, batch).mean() * bool(longer)
        return loss + 0 * self.log_weights.sum() if floor is None else loss  # DDP awaits a gradient of every parameter

    def _floor_of(self, batch: Batch) -> float | None:
        """The floor of a batch's selection, None for a uniform one: drawn at random, the same in a resumed training."""
        coin = random.Random(f"{self.settings.train.seed}:{self._seed_of(batch)}:uniform")
        return None if coin.random() < self.settings.uniform_share else self.floor

    def _seed_of(self, batch: Batch) -> str:
        """A seed for what is drawn for a batch; it differs from turn to turn and from epoch to epoch."""
        return f"{[*batch.indices]}:{batch.turn}" + (f":{self.epoch}" if self.epoch else "")

    @override
    def measure(self, batches: Iterable[dict[str, Any]], budget: int) -> dict[str, Any]:
        floors = {"": self.floor} | ({"_uniform": None} if self.settings.uniform_share else {})
        batches = [*batches]
        with self.measuring(), gathered(self):
            by_batch = divided(lambda values: self.excess_nll(Batch(**values), [*floors.values()]), batches)
        measured = {
            f"eval_excess_nll{name}_at_{budget}": fmean(each for batch in by_batch for each in batch[budget][place])
            for place, name in enumerate(floors)
            for budget in self.settings.budgets
        }
        if odd := [name for name, value in measured.items() if not math.isfinite(value)]:
            raise FloatingPointError(f"{odd[0]} is {measured[odd[0]]}")
        by_sample = list[float]()
        for batch in by_batch:
            at_budgets = [batch[each][0] for each in self.settings.budgets]
            by_sample += [fmean(values) for values in zip(*at_budgets, strict=True)]
        indices = [index for values in batches for index in values["indices"]]
        return measured | {"eval_by_sample": by_sample, "eval_samples": indices}

    def excess_nll(self, batch: Batch, floors: Sequence[float | None]) -> dict[int, list[list[float]]]:
        """For each budget and floor, how much evicting increases the cross-entropy of each sample's answer, in nats.

        The answer's first token, which follows the whole prompt, is left out. 0 if the prompt is within the budget, or
        the answer has one token.
        """
        outputs, batch = self.teacher_outputs(batch), _with_three_tokens(batch)
        importance = self.importance(outputs, batch)
        full = self._cross_entropy(batch, *outputs.answers)

        def excess(budget: int, floor: float | None) -> list[float]:
            kept = selected(importance, self.head_weights(), budget, floor)
            hidden = self._hidden(outputs, batch, [*map(_hard_gates, kept)])
            return (self._cross_entropy(batch, hidden) - full).tolist()

        return {budget: [excess(budget, floor) for floor in floors] for budget in self.settings.budgets}

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
        pairs = zip(full_layers(cache), gates, strict=True)
        layers = [GatedLayer(each.keys, each.values, gate.to(each.keys.device)) for each, gate in pairs]
        ids, seen = batch.answer_ids[:, :-1], None
        if batch.prompt_mask is not None and len(layers) < len(cache.layers):  # in the others the gates hide padding
            seen = functional.pad(batch.prompt_mask, (0, ids.shape[1]), value=True)
        first = torch.tensor(batch.prompt_lengths(), device=ids.device)
        positions = first[:, None] + torch.arange(ids.shape[1], device=ids.device)
        gated, decoder = as_observed(cache, layers), decoder_of(self.model)
        with recomputed(self.model, self.settings.gradient_checkpointing):
            output = run(
                decoder,
                gated,
                input_ids=ids,
                position_ids=positions,
                attention_mask=seen,
                rope_lengths=text_lengths(batch, 0),
            )
        hidden: Tensor = output.last_hidden_state
        return hidden


def _with_three_tokens(batch: Batch) -> Batch:
    """The batch; shorter answers are padded to three tokens, so that two are read after the eviction.

    For a single token Mamba-2 layers change their state in place, which gradients do not allow.
    """
    answer, mask = batch.answer_ids, batch.answer_mask
    if (missing := 3 - answer.shape[1]) <= 0:
        return batch
    real = torch.ones_like(answer, dtype=torch.bool) if mask is None else mask
    padded, real = (functional.pad(each, (0, missing)) for each in (answer, real))
    return replace(batch, answer_ids=padded, answer_mask=real)


def _answer_means(nats: Tensor, batch: Batch) -> Tensor:
    """[B]: the mean of [B, T - 1] over the real tokens."""
    real = torch.ones_like(nats) if batch.answer_mask is None else batch.answer_mask[:, 1:]
    return (nats * real).sum(dim=1) / real.sum(dim=1).clamp(min=1)


def selected(importance: Sequence[Tensor], weights: Tensor, budget: int, floor: float | None) -> list[Tensor]:
    """For each layer, the entries [B, K, N] bool that an eviction keeps; importance [B, K, N], weights [L, K].

    Without a floor every head keeps the same number of entries.
    """
    layers = [*importance]
    real, always = (
        np.array([each.sum(dim=-1).tolist() for each in masks])
        for masks in ([~torch.isneginf(each) for each in layers], [torch.isposinf(each) for each in layers])
    )
    allocate = Uniform() if floor is None else Global(floor, tuple(map(tuple, weights.tolist())))
    return select_top(layers, allocate(HeadSizes(real, always), [budget] * real.shape[1], layers))


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
        least = torch.finfo(query.dtype).min
        stored = self.gates.clamp(min=least).to(query.dtype)[:, :, None].expand(-1, -1, rows, -1)
        own = torch.zeros(rows, rows, dtype=query.dtype, device=query.device)
        own = own.masked_fill(later(rows, query.device), least)
        mask = torch.cat([stored, own.expand(*stored.shape[:2], -1, -1)], dim=-1)
        keys, values = torch.cat([self.keys, key], dim=-2), torch.cat([self.values, value], dim=-2)
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
        return _hard_gates(torch.stack(selected([*importance], log_weights.detach().exp(), budget, floor)))
    real, guaranteed = ~torch.isneginf(importance), torch.isposinf(importance)
    limits = torch.finfo(importance.dtype)
    scores = importance.clamp(limits.tiny, limits.max).log()
    dims, heads = _HEAD, 1
    if floor is not None:
        dims, heads, scores = _ROW, scores.shape[0] * scores.shape[2], scores + log_weights[:, None, :, None]
        guaranteed |= top_mask(importance.detach(), min(int(budget * floor), importance.shape[-1])) & real
    free = real & ~guaranteed
    wanted = budget * heads - _sum(guaranteed, dims)
    with torch.no_grad():
        threshold = _threshold(scores, free, wanted, temperature, dims)
    opened = torch.sigmoid((scores - threshold) / temperature) * free
    slope = _sum(opened * (1 - opened), dims).detach().clamp(min=1e-6) / temperature
    kept = _sum(opened, dims)
    threshold = threshold + (kept - kept.detach()) / slope  # the value stays; its gradient is the implicit function's
    gates = functional.logsigmoid((scores - threshold) / temperature)
    whole = _sum(free, dims) <= wanted
    return gates.masked_fill((real & ~free) | whole, 0.0).masked_fill(~real, limits.min)


_ROW: tuple[int, ...] = (0, 2, 3)
_HEAD: tuple[int, ...] = (3,)
"""The dimensions of [L, B, K, N] over which entries share a budget."""


def _threshold(scores: Tensor, free: Tensor, wanted: Tensor, temperature: float, dims: tuple[int, ...]) -> Tensor:
    """Where the gates of the free entries that share a budget sum to `wanted`, by bisection; `dims` have length 1."""
    among = scores.masked_fill(~free, torch.nan)
    low = among.nan_to_num(nan=torch.inf).amin(dim=dims, keepdim=True) - 20 * temperature
    high = among.nan_to_num(nan=-torch.inf).amax(dim=dims, keepdim=True) + 20 * temperature
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        over = _sum(torch.sigmoid((scores - middle) / temperature) * free, dims) > wanted
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    return ((low + high) / 2).nan_to_num()  # there is no threshold if no entry is free


def _sum(gates: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Sums over entries that share a budget; `dims` have length 1."""
    return gates.sum(dim=dims, keepdim=True)
