"""SpeCache (arXiv 2503.16163): a low-bit copy stays, the full cache is offloaded, and entries are fetched ahead."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from typing_extensions import Self, override

from keepsight.errors import UserError, Whole
from keepsight.models.decoder import cached_kv_heads, head_width
from keepsight.runtime import registry
from keepsight.runtime.attention import Reader, Softmax, run
from keepsight.runtime.importance import OverHeads, reduce_group, top_indices
from keepsight.runtime.layer import LayerEntries
from keepsight.runtime.offload import Fetch, FullEntries, Traffic, require_memory
from keepsight.runtime.quantized.kernel import attend_packed
from keepsight.runtime.quantized.kivi import PackedLayer, PackedMethod
from keepsight.runtime.quantized.packing import PackedEntries
from keepsight.runtime.readers import TokenReader, TurnReader
from keepsight.runtime.state import record_past, roll_back, with_full_layers


def most_attended(attention: Tensor, topk: int, heads: str) -> Tensor:
    """Attention [B, K, H / K, n] -> indices [B, K, k] int64 of the entries to fetch; see `SpeCache`."""
    reduced = reduce_group(attention.flatten(1, 2), attention.shape[1], heads)
    return top_indices(reduced, min(topk, attention.shape[3]))


class _Prefetched(NamedTuple):
    """Prefetched by a step for the next one: a speculative token, and the entries to read in full precision.

    The token [B, 1] is a prediction of the one after the next; `fetch` is None for no entries.
    """

    token: Tensor
    fetch: Fetch | None


class SpeCacheLayer(PackedLayer):
    """Packed entries, backed by the same ones in full precision on the CPU; for `topk` and `heads` see `SpeCache`.

    It fetches the entries that each token's own attention selects; `SpeculativeReader` makes it fetch ahead. `full`
    holds the entries with packed keys in full precision, `prefetched` the result of that reader's last step; None
    before the first.
    """

    prefetched: _Prefetched | None = None

    def __init__(self, packed: PackedEntries, seen: int, full: FullEntries, topk: int, heads: str) -> None:
        super().__init__(packed, seen)
        self.full = full
        self.topk = topk
        self.heads = heads

    @property
    @override
    def nbytes(self) -> int:
        """Bytes on the device: packed and recent entries, and the slots with their indices."""
        batch, kv_heads, _, width = self.keys.shape
        slots = batch * kv_heads * min(self.topk, self.full.length)
        return self.packed.bytes + slots * (2 * width * self.keys.element_size() + 8)

    @override
    def attend_last(self, query: Tensor, softmax: Softmax) -> Tensor:
        output, attention = attend_packed(query, self.packed, softmax)
        fetch = self.begin_fetch(attention)
        if fetch is None:
            return output
        output, _ = attend_packed(query, self.packed, softmax, fetch.wait())
        return output

    def begin_fetch(self, attention: Tensor) -> Fetch | None:
        """Start to fetch the entries with the most attention [B, K, H / K, n]; None for no entries."""
        indices = most_attended(attention, self.topk, self.heads)
        return self.full.fetch(indices) if indices.shape[2] else None

    @override
    def pack(self) -> None:
        packed = self.packed.packed()
        newly_packed = packed.packed_length - self.packed.packed_length
        if newly_packed > 0:
            keys, values = self.packed.recent()
            self.full = self.full.append(keys[:, :, :newly_packed], values[:, :, :newly_packed])
        self.replace(packed)

    def read_turn(self, keys: Tensor, values: Tensor) -> LayerEntries:
        """Append entries [B, K, q, d] and return all in full precision; see `keepsight.runtime.readers`."""
        self.append(keys, values)
        recent_keys, recent_values = self.packed.recent()
        offloaded_keys, offloaded_values = self.full.read(keys.device).chunk(2, dim=3)
        self.pack()
        self.prefetched = None
        all_keys = torch.cat([offloaded_keys.to(recent_keys.dtype), recent_keys], dim=2)
        all_values = torch.cat([offloaded_values.to(recent_values.dtype), recent_values], dim=2)
        return LayerEntries(all_keys, all_values, None)

    @override
    def entries(self) -> LayerEntries:
        raise UserError(
            "a SpeCache state cannot be joined with others or evicted from; answer from it alone",
            field="state",
            code="state",
        )

    @override
    def share(self) -> Self:
        twin = super().share()
        twin.prefetched = None
        return twin


def specache_layers(cache: Cache) -> list[SpeCacheLayer]:
    """The layers of a SpeCache state's cache."""
    return [layer for layer in cache.layers if isinstance(layer, SpeCacheLayer)]


class SpeculativeReader(TokenReader):
    """Reads each token of a SpeCache state with a speculative token, a prediction of the next one."""

    @override
    def step(self, token: Tensor, position: Tensor, attention_mask: Tensor | None, cache: Cache) -> Tensor:
        before = cache
        if _speculative_token(before) is None:  # the first comes from a step on packed entries alone
            _, before = self._step(token, position, before, accepted=0)

        tokens = token
        speculative = _speculative_token(before)
        if speculative is not None:
            tokens = torch.cat([token, speculative], dim=1)
        logits, after = self._step(tokens, position, before, accepted=1)
        cache.layers[:] = after.layers  # all layers at once, so that an interrupted step changes none
        return logits

    def _step(self, tokens: Tensor, position: Tensor, cache: Cache, accepted: int) -> tuple[Tensor, Cache]:
        """Logits [B, 1, V] of the first token of [B, q], and the cache after the first `accepted` tokens."""
        trial_layers = [_TrialLayer(layer, accepted) for layer in specache_layers(cache)]
        trial = with_full_layers(cache, trial_layers)
        record_past(trial)
        positions = position + torch.arange(tokens.shape[1], device=tokens.device)
        output = run(self._model, trial, input_ids=tokens, position_ids=positions)

        speculative = output.logits[:, -1:].argmax(dim=-1)
        roll_back(trial, tokens.shape[1] - accepted)
        layers = [layer.after(speculative) for layer in trial_layers]
        return output.logits[:, :1], with_full_layers(trial, layers)


def _speculative_token(cache: Cache) -> Tensor | None:
    """[B, 1] int64, of the last step; None before the first one, and where nothing is packed."""
    layers = specache_layers(cache)
    if not layers or layers[0].prefetched is None:
        return None
    return layers[0].prefetched.token


class _TrialLayer(SpeCacheLayer):
    """A layer during a step; the layer before the step stays unchanged, and only `accepted` tokens are appended."""

    def __init__(self, layer: SpeCacheLayer, accepted: int) -> None:
        super().__init__(layer.packed, layer.seen, layer.full, layer.topk, layer.heads)
        self.prefetched = layer.prefetched
        self._accepted = accepted
        self._next = layer.share()
        self._fetch: Fetch | None = None

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        self._next.append(key[:, :, : self._accepted], value[:, :, : self._accepted])
        self._next.pack()
        self.replace(self.packed.with_recent(key, value))

        fetched = None
        if self.prefetched is not None and self.prefetched.fetch is not None:
            fetched = self.prefetched.fetch.wait()
        scored = self._next.packed.packed_length  # those packed at the end of this step included
        output, attention = attend_packed(query, self.packed, softmax, fetched, scored)
        self._fetch = self._next.begin_fetch(attention)
        return output

    def after(self, speculative: Tensor) -> SpeCacheLayer:
        """The layer after the step, which speculated a token [B, 1] int64."""
        self._next.prefetched = _Prefetched(speculative, self._fetch)
        return self._next


@registry.method("specache")
@dataclass(frozen=True)
class SpeCache(PackedMethod):
    """Reads packed entries, and the `topk` that matter most in full precision (arXiv 2503.16163, section 3.3).

    Attributes:
        topk: Entries fetched per KV head; all packed ones where there are fewer, none for 0. More than the prompt has
            tokens is refused.
        heads: Reduction of attention over the query heads of a KV head; see `Reduce.heads`.
        speculative: Prefetch with a speculative token. Otherwise fetch the entries that a token's own attention
            selects, and attend again: exact, but every fetch is waited for (the paper's table 4).
    """

    residual: int = 64
    topk: Whole = 64
    heads: OverHeads = "max"
    speculative: bool = True

    @override
    def check(self, length: int, context: int) -> None:
        if self.topk > length:
            raise UserError(
                f"SpeCache: topk {self.topk} is above the {length} entries of the cache; lower topk",
                field="topk",
                code="range",
            )

    @override
    def reader(self, model: PreTrainedModel) -> Reader:
        return SpeculativeReader(model) if self.speculative and self.topk else model

    @override
    def turn_reader(self, model: PreTrainedModel) -> Reader:
        return TurnReader(model)

    @override
    def check_prompts(self, model: PreTrainedModel, tokens: Tensor) -> None:
        super().check_prompts(model, tokens)
        config = model.config.get_text_config()
        rows, length = tokens.shape
        require_memory(
            rows,
            length,
            config.num_hidden_layers,
            cached_kv_heads(model),
            head_width(config),
            model.dtype.itemsize,
        )

    @override
    def packed_layer(self, keys: Tensor, values: Tensor, seen: int, traffic: Traffic) -> SpeCacheLayer:
        packed = self.packed_entries(keys, values)
        packed_length = packed.packed_length
        full = FullEntries.offload(keys[:, :, :packed_length], values[:, :, :packed_length], traffic)
        return SpeCacheLayer(packed, seen, full, self.topk, self.heads)
