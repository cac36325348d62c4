"""A lookahead module and the weights of its heads together: what the soft tokens attend to learns from the answer too.

The module was trained to attend to what the answer attends to (LookaheadKV, arXiv 2603.10899, equation 4). Here the
gradient of what evicting costs the answer flows through the gates and the importance to the soft tokens and the LoRA,
so that the module learns to find what the answer needs.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.models.lookahead import Lookahead
from keepsight.runtime.allocate import Global
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import Reduce
from keepsight.runtime.observe import Observer, look_back
from keepsight.runtime.state import State, prefill
from keepsight.train.dataset import Batch
from keepsight.train.eviction.objective import EvictionObjective
from keepsight.train.replay import Reading
from keepsight.train.stored_cache import restored, stored


@dataclass(frozen=True, eq=False)
class InTraining(Observer):
    """The soft tokens of a module that learns; gradients flow to it.

    Attributes:
        lookahead: The module.
    """

    lookahead: Lookahead

    @override
    def __call__(self, model: PreTrainedModel, state: State, reduce: Reduce) -> list[Tensor]:
        with self.lookahead.active():
            return look_back(model, state, self.lookahead.observers(len(state.tokens)), reduce=reduce)

    @override
    def positions(self) -> int:
        return self.lookahead.settings.tokens


class FinetuneObjective(EvictionObjective):
    """Module and weights learn, the target is frozen.

    Args:
        lookahead: The module.
        method: How the attention of its soft tokens becomes importance; observer, budget and allocation are not used.
        allocate: See `EvictionObjective`, as for what follows.
        budgets: Entries per layer and KV head on average.
        temperature: Of the gates, in nats.

    Attributes:
        lookahead: The module in training.
    """

    def __init__(
        self, lookahead: Lookahead, method: Evict, allocate: Global, budgets: list[int], temperature: float
    ) -> None:
        super().__init__(lookahead.model, allocate, budgets, temperature)
        self.lookahead, self.method = lookahead, replace(method, observer=InTraining(lookahead))

    @override
    @torch.no_grad()
    def read(self, batch: Batch) -> Reading:
        state = prefill(self.target, batch.prompt_ids, batch.prompt_mask, needs=self.method.needs())
        return stored(state.cache)

    @override
    def importance(self, reading: Reading, batch: Batch) -> list[Tensor]:
        ids, lengths = batch.prompt_ids, torch.tensor(batch.prompt_lengths(), device=batch.prompt_ids.device)
        cache = restored(reading, self.target, ids.shape[1])
        state = State(cache, torch.empty(len(ids), 0), ids, lengths)
        for layer in state.layers:
            layer.token_mask = batch.prompt_mask
        scores = self.method.observer(self.target, state, self.method.reduce)
        return [self.method.layer_importance(*pair) for pair in zip(scores, state.layers, strict=True)]
