"""KIVI (arXiv 2402.02750): the whole cache, or what another method keeps of it, in 1, 2 or 4 bits."""

from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.runtime.generate import CacheMethod
from keepsight.runtime.images import Images
from keepsight.runtime.quantized.cache import (
    PackedLayer,
    pack_state,
    prefill_packed,
    require_packable,
    require_unpadded,
)
from keepsight.runtime.quantized.codec import Quantizer
from keepsight.runtime.quantized.entries import PackedEntries
from keepsight.runtime.state import Needs, State


@dataclass(frozen=True)
class PackedMethod(CacheMethod):
    """What methods that pack entries have in common.

    Attributes:
        bits: Bits per number of the packed entries: 1, 2 or 4.
        group: Numbers that share a zero point and a scale; it must divide the head dimension.
        residual: Most recent tokens whose values (and at most whose keys) stay in full precision; a multiple of the
            group.
        one_bit: Levels at 1 bit; see `keepsight.runtime.quantized.codec.Quantizer`.

    Raises:
        UserError: a value is not offered; one line names it.
    """

    bits: int = 2
    group: int = 32
    residual: int = 128
    one_bit: str = field(default="middles", kw_only=True)

    def __post_init__(self) -> None:
        group, residual = self.quantizer.group, self.residual
        if type(residual) is not int or residual < group or residual % group:
            raise UserError(f"residual {residual!r} must be a multiple of the group of {group}, and not below it")

    @property
    def quantizer(self) -> Quantizer:
        """Bits and groups."""
        return Quantizer(self.bits, self.group, self.one_bit)


@dataclass(frozen=True)
class Kivi(PackedMethod):
    """Packs entries in groups; the most recent ones stay in full precision (KIVI, arXiv 2402.02750, section 3.3).

    Attributes:
        inner: Method that decides which of the prompt's entries are packed, the same number in every KV head of a
            layer; all of them by default.
    """

    inner: CacheMethod | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.inner, CacheMethod | None):
            raise UserError(f"inner: {self.inner!r} is no method that evicts; give {{name: NAME, budget: BUDGET}}")
        if isinstance(self.inner, Kivi):
            raise UserError("inner: entries that are packed cannot be packed again; give a method that evicts")
        if self.inner is not None and self.inner.every:
            raise UserError("inner: a method that evicts while decoding cannot be packed; set its every to 0")

    @override
    def needs(self) -> Needs:
        return Needs() if self.inner is None else self.inner.needs()

    @override
    def check(self, length: int, context: int) -> None:
        if self.inner is not None:
            self.inner.check(length, context)

    @override
    def start(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        mask: Tensor | None = None,
        *,
        chunk: int | None = None,
        images: Images | None = None,
    ) -> State:
        require_packable(model)
        require_unpadded(mask)
        if self.inner is not None:
            return pack_state(self.inner.start(model, input_ids, mask, chunk=chunk), self._pack)
        return prefill_packed(model, input_ids, chunk, self._pack)

    @override
    def compress(self, model: PreTrainedModel, state: State) -> State:
        require_packable(model)
        return pack_state(state if self.inner is None else self.inner.compress(model, state), self._pack)

    def _pack(self, keys: Tensor, values: Tensor, seen: int) -> PackedLayer:
        self.quantizer.check_head(keys.shape[3])
        return PackedLayer(PackedEntries.pack(self.quantizer, self.residual, keys, values), seen)
