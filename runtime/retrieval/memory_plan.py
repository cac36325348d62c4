"""How many layers' entries have to lie in the CPU's memory at which length, for a device of so many bytes.

SpeContext (arXiv 2512.00722), section 6.2, equations 6 and 7 and algorithm 1, with corrections. What is held on the
device: the weights with a share on top for activations; the keys of the retrieval head; the entries of the layers that
are there; for every layer on the CPU the slots that its entries are fetched into.
"""

import math
import re
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.runtime.cache import ROOM

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def read_bytes(text: str) -> int:
    """A number of bytes from text such as 24GiB, 24 GB, 1.5GiB or 25769803776.

    Raises:
        UserError: it is not written so, or it is not above 0.
    """
    written = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if written is None or written[2] not in _UNITS or not (size := int(float(written[1]) * _UNITS[written[2]])):
        raise UserError(f"{text!r} is no amount of memory; write it as 24GiB, 24GB or a number of bytes")
    return size


@dataclass(frozen=True)
class MemoryPlan:
    """What a model, its retrieval head and its requests hold on the device.

    Lengths are entries of one layer and KV head, summed over all requests: requests of different lengths count as what
    they are together, and padding that is stored counts too.

    Attributes:
        limit: Bytes of the device.
        weights: Bytes of the target's weights.
        head: Bytes of the retrieval head's weights.
        layers: Of the target.
        kv_heads: Of each layer.
        head_dim: Numbers of a key, and of a value.
        requests: Rows that are decoded together.
        budget: Slots of each request, layer on the CPU, and KV head.
        head_keys: Bytes of the retrieval head's keys, a token; it stores no values.
        item: Bytes of a number.
        scratch: Further bytes a token that attention needs, of one layer at a time: 0 for kernels that know KV heads.
        buffers: Copies of the slots: 1 where entries are fetched into the slots of what left, 2 for double buffering.
        room: Tokens of a request for which a layer on the device, and the head, may have room beyond those they hold.
        share: Factor of the weights that leaves space for activations.

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
    scratch: int = 0
    buffers: int = 1
    room: int = 0
    share: float = 1.3

    def __post_init__(self) -> None:
        if self.weights_held > self.limit:
            raise UserError(
                f"a memory limit of {size_text(self.limit)} is below the weights alone: {self.share} x "
                f"({size_text(self.weights)} target + {size_text(self.head)} retrieval head) = "
                f"{size_text(self.weights_held)}; raise the limit or take a smaller model"
            )

    @property
    def weights_held(self) -> int:
        """Bytes of the weights and of the space for activations."""
        return math.ceil(self.share * (self.weights + self.head))

    @property
    def entry(self) -> int:
        """Bytes of one token's key and value in all KV heads of one layer."""
        return 2 * self.kv_heads * self.head_dim * self.item

    @property
    def slots(self) -> int:
        """Bytes of one layer's slots; the newest token has one of its own."""
        return self.buffers * self.requests * (self.budget + 1) * self.entry

    def memory(self, length: int, layers_on_cpu: int) -> int:
        """Bytes on the device (equation 7).

        Args:
            length: Entries of a layer and KV head, of all requests together.
            layers_on_cpu: Layers whose entries lie in the CPU's memory.
        """
        return self._fixed(layers_on_cpu) + length * self._each(layers_on_cpu)

    def _fixed(self, layers_on_cpu: int) -> int:
        """Bytes that do not grow. The slots of all layers hold the same entries, so there is one list of those."""
        room = self.requests * self.room * ((self.layers - layers_on_cpu) * self.entry + self.head_keys)
        indices = 8 * self.requests * self.kv_heads * self.budget if layers_on_cpu else 0
        return self.weights_held + room + indices + layers_on_cpu * self.slots

    def _each(self, layers_on_cpu: int) -> int:
        """Bytes of a token."""
        return (self.layers - layers_on_cpu) * self.entry + self.head_keys + self.scratch

    @cached_property
    def thresholds(self) -> tuple[int, ...]:
        """The greatest length that fits with at most 0, 1, ..., all layers on the CPU (algorithm 1); never descending.

        A layer that holds fewer entries than it would have slots is better left on the device: then a threshold is that
        of fewer layers on the CPU.
        """
        lengths = []
        for on_cpu in range(self.layers + 1):
            free, each = self.limit - self._fixed(on_cpu), self._each(on_cpu)
            lengths.append(max(free // max(each, 1), 0))
        return tuple(accumulate(lengths, max))

    def layers_on_cpu(self, length: int) -> int:
        """How many layers have to lie in the CPU's memory: no more than needed.

        Raises:
            UserError: the length does not fit with all of them there either; the arithmetic is shown.
        """
        if length > self.thresholds[-1]:
            needed, on_cpu = self.least(length)
            raise UserError(
                f"{length} tokens in {self.requests} requests do not fit into {size_text(self.limit)}: the least is "
                f"{size_text(needed)} with {on_cpu} of {self.layers} layers on the CPU, {size_text(self.weights_held)} "
                f"of it weights and activations, {size_text(on_cpu * self.slots)} slots; raise the limit, lower the "
                "budget, or give fewer or shorter requests"
            )
        return bisect_left(self.thresholds, length)

    def least(self, length: int) -> tuple[int, int]:
        """The fewest bytes in which a length fits, and how many layers lie on the CPU then."""
        return min((self.memory(length, on_cpu), on_cpu) for on_cpu in range(self.layers + 1))

    def paper_thresholds(self, group: int) -> tuple[int, ...]:
        """Tokens a request for 0, 1, ..., all layers on the CPU, as the paper counts, with its one slip mended.

        2 bytes a number; a layer's worth of memory for the retrieval head, values included; scratch for keys and values
        repeated for all query heads. Algorithm 1, line 3 leaves out the factor 4 of the slots, which equation 7 has: it
        would reserve a quarter of what they take. Unlike `thresholds` they descend where slots outgrow the entries.

        Args:
            group: Query heads of a KV head; the paper's alpha.
        """
        row = 4 * self.requests * self.kv_heads * self.head_dim
        free = self.limit - self.weights_held
        return tuple(
            (free - row * on_cpu * self.budget) // (row * (self.layers + 1 + group - on_cpu))
            for on_cpu in range(self.layers + 1)
        )


def plan_for(
    model: PreTrainedModel, *, limit: int, requests: int, budget: int, head: int = 0, head_keys: int = 0
) -> MemoryPlan:
    """The plan of a model whose entries are selected from; its weights may lie on the meta device.

    Args:
        model: The target.
        limit: Bytes of the device.
        requests: Rows that are decoded together.
        budget: Slots of each request, layer on the CPU, and KV head.
        head: Bytes of the retrieval head's weights.
        head_keys: Bytes of the retrieval head's keys, a token.

    Raises:
        UserError: the weights alone exceed the limit, or the target's attention is latent.
    """
    config = model.config.get_text_config()
    if getattr(config, "kv_lora_rank", None):
        raise UserError(f"memory cannot be planned for {config.model_type}, whose attention is latent; give no limit")
    heads = config.num_attention_heads
    return MemoryPlan(
        limit=limit,
        weights=sum(each.numel() * each.element_size() for each in model.parameters()),
        head=head,
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        requests=requests,
        budget=budget,
        head_keys=head_keys,
        item=model.dtype.itemsize,
        room=ROOM,
    )


def size_text(size: int) -> str:
    """Bytes as text."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
