"""Memory plan: the number of layers whose entries must be in CPU memory, by length, for a device's memory.

SpeContext (arXiv 2512.00722), section 6.2, equations 6 and 7 and algorithm 1, with corrections. On the device are the
weights, with a margin for activations; the retrieval head's keys; the entries of the layers there; and slots for
fetched entries of every other layer.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.files import size_text
from keepsight.models.decoder import cached_kv_heads, full_attention_layers, has_latents, head_width
from keepsight.runtime.layer import GROWTH, ROOM


@dataclass(frozen=True)
class MemoryPlan:
    """Device memory of a model, its retrieval head and its requests.

    Lengths are entries per layer and KV head, summed over all requests, stored padding included.

    Attributes:
        limit: Bytes of device memory.
        weights: Bytes of the base model's weights.
        head: Bytes of the retrieval head's weights.
        layers: Number of the base model's layers with full attention; others keep little, which is not counted.
        kv_heads: KV heads per layer.
        head_dim: Dimensions of a key, and of a value.
        requests: Rows in a batch.
        budget: Slots per request, layer on the CPU, and KV head.
        head_keys: Bytes per token of the retrieval head's keys; it stores no values.
        item: Bytes per number.
        room: Spare tokens per request, beyond those stored, of a layer on the device and of the head.
        growth: Further spare tokens, as a share of those stored.
        groups: Groups of layers for which the retrieval head selects; the slots of each hold entries of their own.
        share: Factor on the weights that leaves space for activations.

    Raises:
        UserError: the weights alone exceed the limit; the arithmetic is shown.
    """

    limit: int
    weights: int
    head: int
    layers: int
    kv_heads: int
    head_dim: int
    requests: int
    budget: int
    head_keys: int
    item: int = 2
    room: int = 0
    growth: float = 0.0
    groups: int = 1
    share: float = 1.3

    def __post_init__(self) -> None:
        if self.weights_held > self.limit:
            raise UserError(
                f"a memory limit of {size_text(self.limit)} is below the weights alone: {self.share} x "
                f"({size_text(self.weights)} base model + {size_text(self.head)} retrieval head) = "
                f"{size_text(self.weights_held)}; raise the limit or take a smaller model",
                field="limit",
                code="memory",
            )

    @property
    def weights_held(self) -> int:
        """Bytes of weights and activations."""
        return math.ceil(self.share * (self.weights + self.head))

    @property
    def entry(self) -> int:
        """Bytes of one token's key and value in all KV heads of one layer."""
        return 2 * self.kv_heads * self.head_dim * self.item

    @property
    def slots(self) -> int:
        """Bytes of one layer's slots, the newest token's included."""
        return self.requests * (self.budget + 1) * self.entry

    def memory(self, length: int, layers_on_cpu: int) -> int:
        """Bytes on the device for a length and a number of layers on the CPU (equation 7)."""
        return self._fixed_bytes(layers_on_cpu) + math.ceil(length * self._bytes_per_token(layers_on_cpu))

    def _fixed_bytes(self, layers_on_cpu: int) -> int:
        """Bytes that do not grow. The slots of a group's layers hold the same entries, and share one list of these."""
        room = self.requests * self.room * self._stored_per_token(layers_on_cpu)
        groups_on_device = (self.layers - layers_on_cpu) * self.groups // self.layers
        lists = self.groups - groups_on_device
        indices = lists * 8 * self.requests * self.kv_heads * self.budget
        return self.weights_held + room + indices + layers_on_cpu * self.slots

    def _stored_per_token(self, layers_on_cpu: int) -> int:
        """Bytes of a token in the layers on the device and in the retrieval head."""
        return (self.layers - layers_on_cpu) * self.entry + self.head_keys

    def _bytes_per_token(self, layers_on_cpu: int) -> float:
        """Bytes of a token, with its share of the spare memory that grows with the tokens."""
        return (1 + self.growth) * self._stored_per_token(layers_on_cpu)

    @cached_property
    def thresholds(self) -> tuple[int, ...]:
        """The greatest length that fits with at most 0, 1, ..., all layers on the CPU (algorithm 1); ascending.

        A layer with fewer entries than slots is better left on the device: its threshold is then that of fewer layers
        on the CPU.
        """
        lengths = []
        for on_cpu in range(self.layers + 1):
            free = self.limit - self._fixed_bytes(on_cpu)
            length = int(free // max(self._bytes_per_token(on_cpu), 1))
            lengths.append(max(length, 0))
        return tuple(accumulate(lengths, max))

    def layers_on_cpu(self, length: int) -> int:
        """The fewest layers on the CPU with which a length fits.

        Raises:
            UserError: it does not fit even with all of them on the CPU; the arithmetic is shown.
        """
        if length > self.thresholds[-1]:
            needed, on_cpu = self.least(length)
            raise UserError(
                f"{length} tokens in {self.requests} requests do not fit into {size_text(self.limit)}: the least is "
                f"{size_text(needed)} with {on_cpu} of {self.layers} layers on the CPU, {size_text(self.weights_held)} "
                f"of it weights and activations, {size_text(on_cpu * self.slots)} slots; raise the limit, lower the "
                "budget, or give fewer or shorter requests",
                field="limit",
                code="memory",
            )
        return bisect_left(self.thresholds, length)

    def least(self, length: int) -> tuple[int, int]:
        """The fewest bytes in which a length fits, and the number of layers on the CPU then."""
        return min((self.memory(length, on_cpu), on_cpu) for on_cpu in range(self.layers + 1))

    def paper_thresholds(self, group: int) -> tuple[int, ...]:
        """Tokens per request for 0, 1, ..., all layers on the CPU, as the paper counts them, with one error corrected.

        2 bytes per number; a layer's worth of memory for the retrieval head, values included; scratch for keys and
        values repeated for all query heads, `group` (the paper's alpha) per KV head. Algorithm 1, line 3 lacks the
        factor 4 of the slots that equation 7 has. Unlike `thresholds` they descend where slots outgrow the entries.
        """
        entry = 4 * self.requests * self.kv_heads * self.head_dim
        free = self.limit - self.weights_held
        thresholds = []
        for on_cpu in range(self.layers + 1):
            slots = entry * on_cpu * self.budget
            bytes_per_token = entry * (self.layers + 1 + group - on_cpu)
            thresholds.append((free - slots) // bytes_per_token)
        return tuple(thresholds)


def plan_for(
    model: PreTrainedModel,
    *,
    limit: int,
    requests: int,
    budget: int,
    head: int = 0,
    head_keys: int = 0,
    groups: int = 1,
) -> MemoryPlan:
    """The plan for a model under SpeContext, whose weights may be on the meta device; see `MemoryPlan`.

    Raises:
        UserError: the weights alone exceed the limit, or the model's attention is latent.
    """
    config = model.config.get_text_config()
    if has_latents(model):
        raise UserError(
            f"memory cannot be planned for {config.model_type}, whose attention is latent; give no limit",
            field="limit",
            code="model",
        )
    return MemoryPlan(
        limit=limit,
        weights=sum(parameter.nbytes for parameter in model.parameters()),
        head=head,
        layers=len(full_attention_layers(config)),
        kv_heads=cached_kv_heads(model),
        head_dim=head_width(config),
        requests=requests,
        budget=budget,
        head_keys=head_keys,
        item=model.dtype.itemsize,
        room=ROOM,
        growth=GROWTH,
        groups=groups,
    )
