"""SpeCache (arXiv 2503.16163): a low-bit copy to read, the full cache on the CPU, a guessed token to prefetch."""

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import UserError, require_whole
from keepsight.models.decoder import head_width
from keepsight.runtime.attention import Reader
from keepsight.runtime.images import Images
from keepsight.runtime.importance import Reduce
from keepsight.runtime.methods.kivi import PackedMethod
from keepsight.runtime.offload import FullEntries, Traffic, require_memory
from keepsight.runtime.quantized.cache import pack_state, prefill_packed, require_packable, require_unpadded
from keepsight.runtime.quantized.entries import PackedEntries
from keepsight.runtime.quantized.specache import FetchSelector, PairReader, SpeCacheLayer
from keepsight.runtime.state import State
from keepsight.runtime.turn import TurnReader


@dataclass(frozen=True)
class SpeCache(PackedMethod):
    """Reads packed entries, and the `topk` that matter most in full precision (arXiv 2503.16163, section 3.3).

    Attributes:
        topk: Entries fetched per KV head; all packed ones where there are fewer, none for 0. More than the prompt has
            tokens is refused.
        heads: Reduction of attention over the query heads of a KV head; see `Reduce.heads`.
        speculative: Prefetch with a guessed token. Otherwise fetch what a token's own attention asks for, and attend
            again: exact, but every fetch is waited for (the paper's table 4).
    """

    residual: int = 64
    topk: int = 64
    heads: str = "max"
    speculative: bool = True

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("SpeCache", topk=self.topk)
        Reduce(heads=self.heads)  # refuses what it does not know

    @override
    def check(self, length: int, context: int) -> None:
        if self.topk > length:
            raise UserError(f"SpeCache: topk {self.topk} is above the {length} entries of the cache; lower topk")

    @override
    def reader(self, model: PreTrainedModel) -> Reader:
        return PairReader(model) if self.speculative and self.topk else model

    @override
    def turn_reader(self, model: PreTrainedModel) -> Reader:
        return TurnReader(model)

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
        self._require(model, input_ids)
        require_unpadded(mask)
        return prefill_packed(model, input_ids, chunk, self._packer())

    @override
    def compress(self, model: PreTrainedModel, state: State) -> State:
        self._require(model, state.tokens)
        return pack_state(state, self._packer())

    def _require(self, model: PreTrainedModel, tokens: Tensor) -> None:
        require_packable(model)
        config = model.config.get_text_config()
        rows, length = tokens.shape
        entry = config.num_hidden_layers, config.num_key_value_heads, head_width(config), model.dtype.itemsize
        require_memory(rows, length, *entry)

    def _packer(self) -> "_Packer":
        return _Packer(self, Traffic())


@dataclass(frozen=True)
class _Packer:
    method: SpeCache
    traffic: Traffic

    def __call__(self, keys: Tensor, values: Tensor, seen: int) -> "SpeCacheLayer":
        quantizer = self.method.quantizer
        quantizer.check_head(keys.shape[3])
        held = PackedEntries.pack(quantizer, self.method.residual, keys, values)
        packed = held.packed_length
        full = FullEntries.offload(keys[:, :, :packed], values[:, :, :packed], self.traffic)
        return SpeCacheLayer(held, seen, full, FetchSelector(self.method.topk, self.method.heads))
