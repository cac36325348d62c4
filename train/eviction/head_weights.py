"""Weights of heads alone: one number a KV head is trained, and the observer stays as it is.

The importance of a prompt's entries does not change in training, and is kept with the reading.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.runtime.allocate import Global
from keepsight.runtime.evict import Evict
from keepsight.runtime.state import prefill
from keepsight.train.dataset import Batch
from keepsight.train.eviction.objective import EvictionObjective
from keepsight.train.replay import Reading
from keepsight.train.stored_cache import stored

_IMPORTANCE = "importance."


class HeadWeightsObjective(EvictionObjective):
    """The weights learn; target and observer are frozen.

    Args:
        target: The model.
        method: Scores the prompt, with importance that is not negative; its budget and allocation are not used.
        allocate: See `EvictionObjective`, as for what follows.
        budgets: Entries per layer and KV head on average.
        temperature: Of the gates, in nats.
    """

    def __init__(
        self, target: PreTrainedModel, method: Evict, allocate: Global, budgets: list[int], temperature: float
    ) -> None:
        super().__init__(target, allocate, budgets, temperature)
        self.method = method

    @override
    @torch.no_grad()
    def read(self, batch: Batch) -> Reading:
        state = prefill(self.target, batch.prompt_ids, batch.prompt_mask, needs=self.method.needs())
        importance = self.method.importance(self.target, state)
        return {f"{_IMPORTANCE}{place}": each for place, each in enumerate(importance)} | stored(state.cache)

    @override
    def importance(self, reading: Reading, batch: Batch) -> list[Tensor]:
        return [reading[f"{_IMPORTANCE}{place}"] for place in range(len(self.log_weights))]
