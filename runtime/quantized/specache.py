"""SpeCache (arXiv 2503.16163): a low-bit copy stays, the full cache is offloaded, and entries are fetched ahead."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from typing_extensions import override

from keepsight.errors import UserError, require_whole
from keepsight.models.decoder import head_width
from keepsight.runtime import registry
from keepsight.runtime.attention import Reader, Softmax, run
from keepsight.runtime.images import Images
from keepsight.runtime.importance import Reduce, reduce_group
from keepsight.runtime.layer import LayerEntries
from keepsight.runtime.offload import Fetch, FullEntries, Traffic, require_memory
from keepsight.runtime.quantized.kernel import attend_packed
from keepsight.runtime.quantized.kivi import (
    PackedLayer,
    PackedMethod,
    pack_state,
    prefill_packed,
    require_packable,
    require_unpadded,
)
from keepsight.runtime.quantized.packing import PackedEntries
from keepsight.runtime.readers import TokenReader, TurnReader
from keepsight.runtime.state import State, record_past, roll_back, with_full_layers


@dataclass(frozen=True)
class FetchSelector:
    """Selects the entries to fetch.

    Attributes:
        topk: Entries per KV head; all packed ones where there are fewer.
        heads: Reduction of attention over the query heads of a KV head; see `Reduce.heads`.
    """

    topk: int
    heads: str

    def select(self, attention: Tensor) -> Tensor:
        """Attention [B, K, H / K, n] -> indices [B, K, k] int64 of the entries with the most."""
        reduced = reduce_group(attention.flatten(1, 2), attention.shape[1], self.heads)
        return reduced.topk(min(self.topk, attention.shape[3]), dim=-1).indices


class _Ahead(NamedTuple):
    """What a step leaves for the next one.

    Attributes:
        guess: [B, 1] int64, the guess of the token after the next.
        fetch: Entries that the next token reads in full precision; None for none.
    """

    guess: Tensor
    fetch: Fetch | None


class SpeCacheLayer(PackedLayer):
    """Packed entries, backed by the same ones in full precision on the CPU.

    It fetches what each token's own attention asks for; `PairReader` makes it fetch ahead.

    Args:
        held: The entries on the device.
        seen: Logical length.
        full: The entries with packed keys in full precision.
        selector: Selects what to fetch.
        ahead: What the last step of a `PairReader` left.
    """

    def __init__(
        self, held: PackedEntries, seen: int, full: FullEntries, selector: FetchSelector, ahead: _Ahead | None = None
    ) -> None:
        super().__init__(held, seen)
        self.full, self.selector, self.ahead = full, selector, ahead

    @property
    @override
    def bytes(self) -> int:
        """Bytes on the device: packed and recent entries, and the slots with their indices."""
        batch, kv_heads, _, width = self.keys.shape
        slots = batch * kv_heads * min(self.selector.topk, self.full.length)
        return self.held.bytes + slots * (2 * width * self.keys.element_size() + 8)

    @override
    def look(self, query: Tensor, softmax: Softmax) -> Tensor:
        output, attention = attend_packed(query, self.held, softmax)
        fetch = self.begin_fetch(attention)
        return output if fetch is None else attend_packed(query, self.held, softmax, fetch.wait())[0]

    def begin_fetch(self, attention: Tensor) -> Fetch | None:
        """Start to fetch the entries with the most attention [B, K, H / K, n]; None for no entries."""
        indices = self.selector.select(attention)
        return self.full.fetch(indices) if indices.shape[2] else None

    @override
    def settle(self) -> None:
        before, held = self.held, self.held.settled()
        if packed := held.packed_length - before.packed_length:
            keys, values = (each[:, :, :packed] for each in before.recent())
            self.full = self.full.append(keys, values)
        self.hold(held)

    def read_turn(self, keys: Tensor, values: Tensor) -> LayerEntries:
        """Append entries [B, K, q, d] and return all in full precision; see `keepsight.runtime.readers`."""
        self.add(keys, values)
        recent = self.held.recent()
        packed = self.full.read(keys.device).chunk(2, dim=3)
        self.settle()
        self.ahead = None
        whole = [torch.cat(pair, dim=2) for pair in zip(packed, recent, strict=True)]
        return LayerEntries(whole[0], whole[1], None)

    @override
    def entries(self) -> LayerEntries:
        raise UserError("a SpeCache state cannot be joined with others or evicted from; answer from it alone")

    @override
    def share(self) -> "SpeCacheLayer":
        return SpeCacheLayer(self.held, self.seen, self.full, self.selector)


def specache_layers(cache: Cache) -> list[SpeCacheLayer]:
    """The layers of a SpeCache state's cache."""
    return [layer for layer in cache.layers if isinstance(layer, SpeCacheLayer)]


class PairReader(TokenReader):
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
        trials = [_TrialLayer(layer, accepted) for layer in specache_layers(cache)]
        trial = with_full_layers(cache, trials)
        record_past(trial)
        positions = position + torch.arange(tokens.shape[1], device=tokens.device)
        output = run(self._model, trial, input_ids=tokens, position_ids=positions)
        guess = output.logits[:, -1:].argmax(dim=-1)
        roll_back(trial, tokens.shape[1] - accepted)
        return output.logits[:, :1], with_full_layers(trial, [each.after(guess) for each in trials])


def _guess(cache: Cache) -> Tensor | None:
    """[B, 1] int64: what the last step guessed; None before the first one, and where nothing is packed."""
    ahead = next((layer.ahead for layer in specache_layers(cache)), None)
    return None if ahead is None else ahead.guess


class _TrialLayer(SpeCacheLayer):
    """A layer during a step: it keeps what the step adds apart.

    Args:
        layer: The layer before the step; it stays unchanged.
        accepted: Number of the step's tokens that stay.
    """

    def __init__(self, layer: SpeCacheLayer, accepted: int) -> None:
        super().__init__(layer.held, layer.seen, layer.full, layer.selector, layer.ahead)
        self._accepted, self._next = accepted, layer.share()
        self._fetch: Fetch | None = None

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        self._next.add(*(each[:, :, : self._accepted] for each in (key, value)))
        self._next.settle()
        self.hold(self.held.with_recent(key, value))
        fetch = self.ahead.fetch if self.ahead is not None else None
        fetched = fetch.wait() if fetch is not None else None
        watched = self._next.held.packed_length  # those packed at the end of this step included
        output, attention = attend_packed(query, self.held, softmax, fetched, watched)
        self._fetch = self._next.begin_fetch(attention)
        return output

    def after(self, guess: Tensor) -> SpeCacheLayer:
        """The layer after the step."""
        self._next.ahead = _Ahead(guess, self._fetch)
        return self._next


@registry.method("specache")
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
