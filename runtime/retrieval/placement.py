"""Which layers' entries lie in the CPU's memory: those that have to, so that a limit is never exceeded.

SpeContext (arXiv 2512.00722), section 6.2, algorithm 2: while an answer grows, layers move to the CPU one at a time,
the last one first, each before the step for which it no longer fits.
"""

from dataclasses import dataclass
from typing import Any

import torch

from keepsight.errors import UserError
from keepsight.runtime.offload import Traffic
from keepsight.runtime.retrieval.elastic import Arrangement, ElasticLayer
from keepsight.runtime.retrieval.memory_plan import MemoryPlan
from keepsight.runtime.sparse_read.cache import SelectedLayer


@dataclass(frozen=True)
class Placement:
    """Where layers lie at which length.

    Attributes:
        budget: Slots of each layer on the CPU, row and KV head.
        device: Of the model.
        least: So many layers, the last ones, lie on the CPU at any length.
        plan: How many more have to; None where nothing limits the device.
    """

    budget: int
    device: torch.device
    least: int = 0
    plan: MemoryPlan | None = None

    def on_cpu(self, rows: int, length: int) -> int:
        """How many layers lie on the CPU when each of some rows has `length` entries, padding counted.

        Raises:
            UserError: so much does not fit at all.
        """
        return max(self.least, self.plan.layers_on_cpu(rows * length) if self.plan is not None else 0)

    def place(self, layers: list[Any], length: int) -> None:
        """Move layers to the CPU, in place in their list, before a step.

        Args:
            layers: Those of a cache, on the device or on the CPU.
            length: Entries of each row after the step.

        Raises:
            UserError: so much does not fit with all of them on the CPU either, or a layer chooses by itself.
        """
        resident = len(layers) - self.on_cpu(len(layers[0].keys), length)
        for index in reversed(range(max(resident, 0), len(layers))):
            if not isinstance(layers[index], ElasticLayer):
                layers[index] = self._moved(layers[index], next(iter(elastic_layers(layers)), None))

    def _moved(self, layer: SelectedLayer, other: ElasticLayer | None) -> ElasticLayer:
        """A layer on the CPU that holds in its slots what another one does."""
        if layer.selector is not None:
            raise UserError("a layer that reads its own keys to choose has to have them on the device; offload none")
        if other is not None:
            return ElasticLayer.from_layer(layer, other.slots.arrangement, other.full.traffic)
        batch, kv_heads, _, _ = layer.keys.shape
        return ElasticLayer.from_layer(layer, Arrangement.empty(batch, kv_heads, self.budget, self.device), Traffic())


def elastic_layers(layers: list[Any]) -> list[ElasticLayer]:
    """Those whose entries lie in the CPU's memory."""
    return [layer for layer in layers if isinstance(layer, ElasticLayer)]


def device_bytes(layers: list[Any]) -> int:
    """Bytes that a cache's layers take on the device, room to grow included.

    The retrieval head's keys and the weights come on top of them.
    """
    on_cpu = elastic_layers(layers)
    lists = {id(layer.slots.arrangement): layer.slots.arrangement.held for layer in on_cpu}
    held = [*lists.values(), *(layer.slots.rows for layer in on_cpu)]
    held += [each for layer in layers if not isinstance(layer, ElasticLayer) for each in (layer.keys, layer.values)]
    return sum(each.untyped_storage().nbytes() for each in held)
