"""What evicting costs the target's answer, as a loss: learned from is the answer itself, not what it attends to.

Importance says which of a head's entries the answer looks at, not how much it loses without them. So the target reads
its own answer again and sees the prompt through gates, a soft form of the selection under one budget for the heads of
all layers; the loss is how far what it says next then is from what it says with all entries.
"""

import random
from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from typing_extensions import Self, override

from keepsight.errors import UserError
from keepsight.models.decoder import cached_kv_heads, full_attention_layers, has_latents, require_full_attention
from keepsight.runtime.allocate import Global, HeadSizes
from keepsight.runtime.attention import run
from keepsight.runtime.importance import select_top
from keepsight.runtime.observe import GatedLayer, as_observed
from keepsight.runtime.state import entries
from keepsight.train.dataset import Batch
from keepsight.train.eviction.gates import soft_gates
from keepsight.train.objective import ReplayedObjective
from keepsight.train.replay import Reading
from keepsight.train.stored_cache import restored


class EvictionObjective(ReplayedObjective):
    """The loss of a selection under one budget; the target is frozen.

    Args:
        target: The model.
        allocate: What divides the budget: its floor counts, and its weights are those to begin with.
        budgets: Entries per layer and KV head on average; which of them a loss is of depends on samples and turn.
        temperature: Of the gates, in nats.

    Attributes:
        log_weights: [L, K] float32, logarithms of the weights by which the importance of a KV head's entries is
            multiplied before heads are compared.

    Raises:
        UserError: no layer has full attention, those that have cache latents, or a budget can leave a head without
            entries.
    """

    def __init__(self, target: PreTrainedModel, allocate: Global, budgets: list[int], temperature: float) -> None:
        super().__init__()
        require_full_attention(target)
        if has_latents(target):
            raise UserError(
                f"{target.config.model_type} caches latents: heads that share a budget need keys and values"
            )
        target.requires_grad_(False)
        for budget in budgets:
            allocate.check(budget, 0)
        self.target, self.floor = target, allocate.floor
        self.budgets, self.temperature = budgets, temperature
        layers = len(full_attention_layers(target.config))
        shape = layers, cached_kv_heads(target)
        start = torch.ones(shape) if allocate.weights is None else torch.tensor(allocate.weights)
        if start.shape != shape:
            raise UserError(f"weights of heads have shape {[*start.shape]}, this model's is {[*shape]}")
        self.log_weights = nn.Parameter(start.log().to(target.device))

    @abstractmethod
    def importance(self, reading: Reading, batch: Batch) -> list[Tensor]:
        """For each layer, the importance [B, K, N] float32 of a prompt's entries, not negative; -inf for padding.

        Gradients flow to what makes it, where that learns.
        """

    @override
    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.target.eval()
        return self

    def weights(self) -> Tensor:
        """[L, K] float32: the weights, with a geometric mean of 1; a common factor selects nothing else."""
        logarithms = self.log_weights.detach().cpu()
        return (logarithms - logarithms.mean()).exp()

    @override
    def kept_tokens(self, batch: Batch) -> int:
        return batch.prompt_ids.numel()

    @override
    def loss_of(self, reading: Reading, batch: Batch) -> Tensor:
        longer = [budget for budget in self.budgets if budget < batch.prompt_ids.shape[1]]
        if not longer or batch.answer_ids.shape[1] < 2:
            return self._zero()  # nothing is evicted, or no token is read after what is
        budget = random.Random(f"{[*batch.indices]}:{batch.turn}").choice(longer)
        importance = torch.stack([each.to(self.log_weights.device) for each in self.importance(reading, batch)])
        real = ~torch.isneginf(importance)
        scores = importance.clamp(min=torch.finfo(torch.float32).tiny).log() + self.log_weights[:, None, :, None]
        gates = soft_gates(scores, real, budget, self.floor, self.temperature)
        with torch.no_grad():
            full = self._log_probabilities(reading, batch, _shown(real))
        gated = self._log_probabilities(reading, batch, gates)
        nats = functional.kl_div(gated, full, reduction="none", log_target=True).sum(dim=-1)
        return _mean_of_answer(nats, batch).mean()

    def excess_nll(self, batch: Batch) -> dict[int, list[float]]:
        """For each budget, what evicting with the weights adds to the cross-entropy of each sample's answer, in nats.

        Of an answer's tokens after the first, which follows the whole prompt. 0 where a prompt is within the budget, or
        an answer has one token.
        """
        if batch.answer_ids.shape[1] < 2:
            return {budget: [0.0] * len(batch.answer_ids) for budget in self.budgets}
        reading = self.reading(batch)
        importance = self.importance(reading, batch)
        full = self._cross_entropy(reading, batch, [_shown(~torch.isneginf(each)) for each in importance])
        excess = {}
        for budget in self.budgets:
            gates = self._hard_gates(importance, budget)
            excess[budget] = (self._cross_entropy(reading, batch, gates) - full).tolist()
        return excess

    def _zero(self) -> Tensor:
        """A loss whose gradients are 0; processes that train together expect one of every parameter."""
        device = self.log_weights.device
        return torch.stack([each.sum().to(device) for each in self.parameters() if each.requires_grad]).sum() * 0

    def _hard_gates(self, importance: list[Tensor], budget: int) -> list[Tensor]:
        """The selection itself: 0 for what stays, very low for the rest."""
        real = np.array([(~torch.isneginf(each)).sum(dim=-1).tolist() for each in importance])
        allocate = Global(self.floor, tuple(map(tuple, self.weights().tolist())))
        counts = allocate(HeadSizes.of(real, 0), [budget] * real.shape[1], importance)
        chosen = select_top(importance, counts)
        return [*map(_shown, chosen)]

    def _cross_entropy(self, reading: Reading, batch: Batch, gates: Tensor | list[Tensor]) -> Tensor:
        """[B] nats: that of an answer's tokens but the first."""
        said = self._log_probabilities(reading, batch, gates)
        nats = functional.nll_loss(said.transpose(1, 2), batch.answer_ids[:, 1:], reduction="none")
        return _mean_of_answer(nats, batch)

    def _log_probabilities(self, reading: Reading, batch: Batch, gates: Tensor | list[Tensor]) -> Tensor:
        """[B, T - 1, V] float32: of an answer's tokens but the first, each after the prompt seen through gates."""
        cache = restored(reading, self.target, batch.prompt_ids.shape[1])
        held = zip(entries(cache), gates, strict=True)
        layers = [GatedLayer(each.keys, each.values, gate.to(each.keys.device)) for each, gate in held]
        logits = self._read_answer(batch, as_observed(cache, layers), len(layers) < len(cache.layers))
        return logits.float().log_softmax(dim=-1)

    def _read_answer(self, batch: Batch, cache: Cache, has_bounded: bool) -> Tensor:
        """Logits [B, T - 1, V] of an answer's tokens but the first."""
        ids = batch.answer_ids[:, :-1]
        first = torch.tensor(batch.prompt_lengths(), device=ids.device)
        mask = batch.prompt_mask if has_bounded else None  # the gates hide padding in the others
        seen = None if mask is None else functional.pad(mask, (0, ids.shape[1]), value=True)
        positions = first[:, None] + torch.arange(ids.shape[1], device=ids.device)
        output = run(self.target, cache, input_ids=ids, position_ids=positions, attention_mask=seen)
        return output.logits


def _mean_of_answer(nats: Tensor, batch: Batch) -> Tensor:
    """[B]: the mean of [B, T - 1] over the real tokens."""
    real = torch.ones_like(nats) if batch.answer_mask is None else batch.answer_mask[:, 1:]
    return (nats * real).sum(dim=1) / real.sum(dim=1).clamp(min=1)


def _shown(chosen: Tensor) -> Tensor:
    """Logarithms of the gates that show the chosen entries alone."""
    return torch.zeros_like(chosen, dtype=torch.float32).masked_fill_(~chosen, torch.finfo(torch.float32).min)
