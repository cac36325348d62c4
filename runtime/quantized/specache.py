"""SpeCache (arXiv 2503.16163): a low-bit cache on the device, the full one on the CPU, and speculative prefetching.

A step reads two tokens: the newest one, whose logits give the next, and a guess of the next one, whose attention selects
the entries that it will need (section 3.3). These are fetched in full precision while the model computes, and replace
the packed ones in the next step. An interrupted step leaves the cache unchanged. A further turn attends to all entries
in full precision, a layer at a time, as the prompt did.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from typing_extensions import override

from keepsight.errors import UserError, require_whole
from keepsight.models.decoder import head_width
from keepsight.runtime.images import Images
from keepsight.runtime.attention import Reader, run
from keepsight.runtime.state import record_past, roll_back, with_full_layers
from keepsight.runtime.layer import LayerEntries
from keepsight.runtime.importance import Reduce, reduce_group
from keepsight.runtime.offload import Fetch, OffloadedEntries, Traffic, require_memory
from keepsight.runtime.quantized.kernel import attend_packed
from keepsight.runtime.quantized.kivi import (
    PackedLayer,
    PackedMethod,
    PackLayer,
    pack_state,
    prefill_packed,
    require_packable,
)
from keepsight.runtime.quantized.packing import PackedEntries
from keepsight.runtime.attention import Softmax
from keepsight.runtime.state import State
from keepsight.runtime.token_reader import TokenReader
from keepsight.runtime.turn import TurnReader


@dataclass(frozen=True)
class SpeCache(PackedMethod):
    """Reads packed entries, and the `topk` that matter most in full precision (arXiv 2503.16163, section 3.3).

    Attributes:
        topk: Entries fetched per KV head; all packed ones where there are fewer, none for 0.
        heads: Reduction of attention over the query heads of a KV head; see `Reduce.heads`.
        speculative: Prefetch with a guessed token. Otherwise each token's own attention selects what is fetched, and it
            attends again: exact, but every fetch is waited for (the paper's table 4).

    Raises:
        UserError: a value is not supported; or, by `check`, `topk` exceeds the prompt.
    """

    residual: int = 64
    topk: int = 64
    heads: str = "max"
    speculative: bool = True

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("SpeCache", topk=self.topk)
        Reduce(heads=self.heads)  # checks it

    @override
    def check(self, length: int, context: int) -> None:
        if self.topk > length:
            raise UserError(f"SpeCache: topk {self.topk} is above the {length} entries of the cache; lower topk")

    @override
    def reader(self, model: PreTrainedModel) -> Reader:
        return SpeculativeReader(model) if self.speculative and self.topk else model

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
        self._require(model, input_ids, mask)
        return prefill_packed(model, input_ids, chunk, self._pack_layer())

    @override
    def compress(self, model: PreTrainedModel, state: State) -> State:
        self._require(model, state.tokens, state.tokens_mask)
        return pack_state(state, self._pack_layer())

    def _require(self, model: PreTrainedModel, tokens: Tensor, mask: Tensor | None) -> None:
        require_packable(model, mask)
        config = model.config.get_text_config()
        entry = config.num_hidden_layers, config.num_key_value_heads, head_width(config), model.dtype.itemsize
        require_memory(*tokens.shape, *entry)

    def _pack_layer(self) -> PackLayer:
        traffic = Traffic()

        def pack(keys: Tensor, values: Tensor, seen: int) -> SpeCacheLayer:
            entries = self.pack(keys, values)
            packed = entries.packed_length
            full = OffloadedEntries.offload(keys[:, :, :packed], values[:, :, :packed], traffic)
            return SpeCacheLayer(entries, seen, full, self.topk, self.heads)

        return pack


class _Ahead(NamedTuple):
    """What a step leaves for the next one.

    Attributes:
        guess: [B, 1] int64, the guess of the token after the next.
        fetch: Entries that the next token reads in full precision; None for none.
    """

    guess: Tensor
    fetch: Fetch | None


class SpeCacheLayer(PackedLayer):
    """Packed entries on the device, backed by the same ones in full precision on the CPU.

    It fetches what each token's own attention selects; a `SpeculativeReader` makes it fetch a step ahead.

    Args:
        packed: The entries on the device.
        seen: Logical length.
        full: The entries with packed keys, in full precision.
        topk: Entries fetched per KV head.
        heads: See `SpeCache.heads`.
        ahead: What the last step of a `SpeculativeReader` left.
    """

    def __init__(
        self,
        packed: PackedEntries,
        seen: int,
        full: OffloadedEntries,
        topk: int,
        heads: str,
        ahead: _Ahead | None = None,
    ) -> None:
        super().__init__(packed, seen)
        self.full, self.topk, self.heads, self.ahead = full, topk, heads, ahead

    @property
    @override
    def bytes(self) -> int:
        """Bytes on the device: packed and recent entries, and fetched ones with their indices."""
        batch, kv_heads, _, width = self.keys.shape
        fetched = batch * kv_heads * min(self.topk, self.full.length)
        return self.packed.bytes + fetched * (2 * width * self.keys.element_size() + 8)

    @override
    def attend_last(self, query: Tensor, softmax: Softmax) -> Tensor:
        output, attention = attend_packed(query, self.packed, softmax)
        fetch = self.start_fetch(attention)
        return output if fetch is None else attend_packed(query, self.packed, softmax, fetch.wait())[0]

    def start_fetch(self, attention: Tensor) -> Fetch | None:
        """Start to fetch the entries with the most attention [B, K, H / K, n]; None for no entries."""
        reduced = reduce_group(attention.flatten(1, 2), attention.shape[1], self.heads)
        indices = reduced.topk(min(self.topk, attention.shape[3]), dim=-1).indices
        return self.full.fetch(indices) if indices.shape[2] else None

    @override
    def pack_overflow(self) -> None:
        before, after = self.packed, self.packed.pack_overflow()
        if count := after.packed_length - before.packed_length:
            keys, values = (each[:, :, :count] for each in before.recent())
            self.full = self.full.append(keys, values)
        self.set_packed(after)

    def read_turn(self, keys: Tensor, values: Tensor) -> LayerEntries:
        """Append entries [B, K, q, d] and return all in full precision; see `keepsight.runtime.turn`."""
        self.append(keys, values)
        packed, recent = self.full.read(keys.device).chunk(2, dim=3), self.packed.recent()
        self.pack_overflow()
        self.ahead = None
        whole = [torch.cat([full.to(new.dtype), new], dim=2) for full, new in zip(packed, recent, strict=True)]
        return LayerEntries(whole[0], whole[1], None)

    @override
    def entries(self) -> LayerEntries:
        raise UserError("a SpeCache state cannot be joined with others or evicted from; answer from it alone")

    @override
    def share(self) -> "SpeCacheLayer":
        return SpeCacheLayer(self.packed, self.seen, self.full, self.topk, self.heads)


def specache_layers(cache: Cache) -> list[SpeCacheLayer]:
    """The layers of a SpeCache state's cache."""
    return [layer for layer in cache.layers if isinstance(layer, SpeCacheLayer)]


class SpeculativeReader(TokenReader):
    """A model that reads each token of a SpeCache state together with a guess of the next one."""

    @override
    def step(self, token: Tensor, position: Tensor, attention_mask: Tensor | None, cache: Cache) -> Tensor:
        before = cache
        if _guess(before) is None:  # the first guess comes from a step on packed entries alone
            _, before = self._step(token, position, before, 0)
        guess = _guess(before)
        pair = token if guess is None else torch.cat([token, guess], dim=1)
        logits, after = self._step(pair, position, before, 1)
        cache.layers[:] = after.layers  # all layers at once, so that an interrupted step changes none
        return logits

    def _step(self, tokens: Tensor, position: Tensor, cache: Cache, accepted: int) -> tuple[Tensor, Cache]:
        """Logits [B, 1, V] of the first token of [B, q], and the cache after the first `accepted` tokens."""
        steps = [_StepLayer(layer, accepted) for layer in specache_layers(cache)]
        trial = with_full_layers(cache, steps)
        record_past(trial)
        positions = position + torch.arange(tokens.shape[1], device=tokens.device)
        output = run(self._model, trial, input_ids=tokens, position_ids=positions)
        guess = output.logits[:, -1:].argmax(dim=-1)
        roll_back(trial, tokens.shape[1] - accepted)
        return output.logits[:, :1], with_full_layers(trial, [each.after(guess) for each in steps])


def _guess(cache: Cache) -> Tensor | None:
    """[B, 1] int64: the last step's guess; None before the first step, and where nothing is packed."""
    ahead = next((layer.ahead for layer in specache_layers(cache)), None)
    return None if ahead is None else ahead.guess


class _StepLayer(SpeCacheLayer):
    """A layer during a step, which leaves the layer before it unchanged; `accepted` of the step's tokens stay."""

    def __init__(self, layer: SpeCacheLayer, accepted: int) -> None:
        super().__init__(layer.packed, layer.seen, layer.full, layer.topk, layer.heads, layer.ahead)
        self._accepted, self._next = accepted, layer.share()
        self._fetch: Fetch | None = None

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        self._next.append(*(each[:, :, : self._accepted] for each in (key, value)))
        self._next.pack_overflow()
        self.set_packed(self.packed.append(key, value))
        fetch = self.ahead.fetch if self.ahead is not None else None
        scored = self._next.packed.packed_length  # those packed at the end of this step included
        output, attention = attend_packed(query, self.packed, softmax, fetch and fetch.wait(), scored)
        self._fetch = self._next.start_fetch(attention)
        return output

    def after(self, guess: Tensor) -> SpeCacheLayer:
        """The layer after the step."""
        self._next.ahead = _Ahead(guess, self._fetch)
        return self._next
