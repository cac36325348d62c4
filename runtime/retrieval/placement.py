"""Placement: which layers' entries are in CPU memory, no more than a memory limit requires.

SpeContext (arXiv 2512.00722), section 6.2, algorithm 2: while an answer grows, layers move to the CPU one at a time,
the last one first, each before the step for which it no longer fits.
"""

from dataclasses import dataclass
from typing import Any

import torch

from keepsight.errors import UserError
from keepsight.runtime.attention import is_bounded
from keepsight.runtime.offload import Traffic
from keepsight.runtime.retrieval.arrangement import Arrangement
from keepsight.runtime.retrieval.elastic import ElasticLayer
from keepsight.runtime.retrieval.memory_plan import MemoryPlan
from keepsight.runtime.sparse_read.cache import SelectedLayer


@dataclass(frozen=True)
class Placement:
    """Which layers are on the CPU at which length.

    Attributes:
        budget: Slots per KV head and row of each layer on the CPU.
        device: The model's device.
        least: Number of last layers that are on the CPU at any length.
        plan: The plan that moves further layers; None without a memory limit.
    """

    budget: int
    device: torch.device
    least: int = 0
    plan: MemoryPlan | None = None

    def on_cpu(self, rows: int, length: int) -> int:
        """Number of layers on the CPU when each of `rows` rows has `length` entries, padding included.

        Raises:
            UserError: they do not fit at all.
        """
        return max(self.least, self.plan.layers_on_cpu(rows * length) if self.plan is not None else 0)

    def place(self, layers: list[Any], length: int) -> None:
        """Move layers with full attention to the CPU, in place in their list, before a step.

        Args:
            layers: Layers of a cache, on the device or on the CPU.
            length: Entries per row after the step.

        Raises:
            UserError: they do not fit with all layers on the CPU either, or a layer selects for itself.
        """
        places = [index for index, layer in enumerate(layers) if not is_bounded(layer)]
        moving = self.on_cpu(len(layers[places[0]].keys), length) if places else 0
        for index in reversed(places[max(len(places) - moving, 0) :]):
            if not isinstance(layers[index], ElasticLayer):
                layers[index] = self._moved(layers[index], next(iter(elastic_layers(layers)), None))

    def _moved(self, layer: SelectedLayer, other: ElasticLayer | None) -> ElasticLayer:
        """The layer on the CPU, with the same entries in its slots as another one."""
        if layer.selector is not None:
            raise UserError("a layer that reads its own keys to select has to have them on the device; offload none")
        if other is not None:
            return ElasticLayer.from_layer(layer, other.slots.arrangement, other.full.traffic)
        batch, kv_heads, _, _ = layer.keys.shape
        return ElasticLayer.from_layer(layer, Arrangement.empty(batch, kv_heads, self.budget, self.device), Traffic())


def elastic_layers(layers: list[Any]) -> list[ElasticLayer]:
    """The layers whose entries are in CPU memory."""
    return [layer for layer in layers if isinstance(layer, ElasticLayer)]
