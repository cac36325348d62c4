"""Q-Filters: keys are scored by their projection on one published direction for each KV head."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import Self, override

from keepsight.errors import UserError
from keepsight.models.decoder import full_attention_layers
from keepsight.models.identity import tensors_digest
from keepsight.models.scorers import published_tensors
from keepsight.runtime import registry
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import NO_POOL, Pool, Reduce
from keepsight.runtime.observe import Observer
from keepsight.runtime.resources import Resources
from keepsight.runtime.state import State

_NAME = "q_filters"


class QueryDirections:
    """The published Q-Filters of a model: `directions` [L, K, d], one for each KV head of each decoder layer.

    `source` names their file, for messages.
    """

    def __init__(self, source: Path | str, directions: Tensor) -> None:
        if directions.ndim != 3:
            raise UserError(
                f"{source}: {_NAME} has the shape {[*directions.shape]}, expected [layers, KV heads, head size]; name "
                "published Q-Filters",
                field="scorer",
                code="file",
            )
        self.source = source
        self.directions = directions.float()
        self.digest = tensors_digest([(_NAME, directions)])

    @classmethod
    def from_pretrained(cls, reference: str | Path) -> Self:
        """Load them from a file, a folder or the Hub.

        Raises:
            UserError: they cannot be loaded, or the file holds no such tensor.
        """
        file, tensors = published_tensors(str(reference), _NAME)
        if _NAME not in tensors:
            raise UserError(
                f"{reference}: holds no tensor {_NAME}; name published Q-Filters", field="scorer", code="file"
            )
        return cls(file, tensors[_NAME])


@dataclass(frozen=True)
class FilteredKeys(Observer):
    """Minus the product of each key, after RoPE, with its head's Q-Filter (arXiv 2503.02812).

    Attributes:
        filters: The directions that the model's queries lie along.
    """

    filters: QueryDirections
    signed = True

    @property
    def digest(self) -> str:
        """Digest of the filters, by which results are told apart."""
        return self.filters.digest

    @override
    def check_model(self, model: PreTrainedModel) -> None:
        shape = [*self.filters.directions.shape]
        config = model.config.get_text_config()
        expected = [config.num_hidden_layers, config.num_key_value_heads]
        if shape[:2] != expected:
            raise UserError(
                f"{self.filters.source}: Q-Filters of {shape[0]} layers and {shape[1]} KV heads do not fit this model, "
                f"which has {expected[0]} and {expected[1]}; take those of this model",
                field="scorer",
                code="model",
            )

    @override
    def __call__(self, model: PreTrainedModel, state: State, reduce: Reduce) -> list[Tensor]:
        self.check_model(model)
        scores = []
        for index, layer in zip(full_attention_layers(model.config), state.layers, strict=True):
            keys = layer.contents().keys.float()
            direction = self.filters.directions[index].to(keys.device)
            scores.append(-(keys * direction[None, :, None]).sum(dim=-1))
        return scores


@registry.method("qfilters", label="Q-Filters")
@dataclass(frozen=True)
class QFilters(Evict):
    """Keeps the keys that lie along the queries' main direction, as published filters say (arXiv 2503.02812).

    As kvpress has it, without sinks or window.
    """

    section = "weights"
    cost = "scores in the prefill; published weights"
    pool: Pool = NO_POOL

    @classmethod
    def from_pretrained(cls, filters: str | Path, budget: int | float, **options: Any) -> Self:
        """The method with published filters: a file, a folder, or `user/name` on the Hub, and further fields.

        Raises:
            UserError: they cannot be loaded, or an option is out of range.
        """
        return cls(budget, FilteredKeys(QueryDirections.from_pretrained(filters)), **options)

    @classmethod
    @override
    def fields_from(cls, resources: Resources, options: dict[str, Any]) -> dict[str, Any]:
        return {"observer": FilteredKeys(resources.scorer_of(QueryDirections))}

    @property
    @override
    def modules(self) -> frozenset[str]:
        return super().modules | {"scorer"}
