"""The model's own indexer as the selection: native sparse attention, at the number of entries that methods keep."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import Budget, UserError
from keepsight.models.decoder import INDEXED, layer_kinds
from keepsight.runtime import registry
from keepsight.runtime.generate import Method
from keepsight.runtime.state import State, prefill


@registry.method("own_indexer", label="own indexer")
@dataclass(frozen=True)
class OwnIndexer(Method):
    """Reads, for each token of an answer, the `budget` entries that the model's own indexer ranks first.

    For models with DeepSeek Sparse Attention (DeepSeek-V3.2, GLM-MoE-DSA), to compare it with eviction at equal
    entries. The prompt is read as the model does it, with its `index_topk`; all entries and the indexer's keys stay.

    Attributes:
        budget: Entries that a token reads in each layer, itself included; or a ratio.
    """

    section = "read"
    budget: Budget
    selects_each_step = True

    @override
    def check_model(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config(decoder=True)
        if INDEXED not in layer_kinds(model.config):
            raise UserError(
                f"own_indexer: {config.model_type} has no indexer, which DeepSeek-V3.2 and GLM-MoE-DSA have; load one "
                "of these",
                field="model",
                code="model",
            )
        if isinstance(self.budget, int) and self.budget > config.index_topk:
            raise UserError(
                f"own_indexer: budget {self.budget} is more than the {config.index_topk} entries that the indexer of "
                f"{config.model_type} selects; lower it",
                field="budget",
                code="range",
            )

    @override
    def start(self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None = None, **options: Any) -> State:
        self.check_model(model)
        state = prefill(model, input_ids, mask, needs=self.needs(), **options)
        budgets = set(self.budgets(state))
        if len(budgets) > 1:
            raise UserError(
                f"own_indexer: the ratio {self.budget} is another number for each prompt of this batch; give a budget "
                "in entries, or one prompt at a time",
                field="budget",
                code="range",
            )
        reads = budgets.pop()
        for layer in state.layers:
            layer.reads = reads
        return state
