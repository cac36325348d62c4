"""SpeCache: a copy in 1 or 2 bits to read, the full cache on the CPU, and a guessed token that fetches ahead.

Song et al., ICML 2025, section 3.3. A decoding step reads two tokens: the one that has been written, whose logits give
the next, and a guess of the next one, whose attention says which entries that one will need. Those are fetched in full
precision while the model goes on, and stand in for the packed ones in the next step. A step that is interrupted leaves
the cache as it was before it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import CausalLMOutputWithPast
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.runtime.attention import OwnAttention
from keepsight.runtime.cache import LayerEntries
from keepsight.runtime.decode import decode
from keepsight.runtime.evict import CacheMethod
from keepsight.runtime.methods.kivi import check_sizes
from keepsight.runtime.offload import Fetch, FullEntries, Traffic, require_memory
from keepsight.runtime.prefill import context_of
from keepsight.runtime.quantization import Quantizer
from keepsight.runtime.quantized_cache import (
    PackedEntries,
    PackedLayer,
    attend_packed,
    pack_state,
    prefill_packed,
    require_full_attention,
    require_unpadded,
)
from keepsight.runtime.state import State

_REDUCTIONS = ("max", "mean")


@dataclass(frozen=True)
class SpeCache(CacheMethod):
    """Reads packed entries, and the `topk` that matter most in full precision.

    Attributes:
        bits: Of each number of the packed copy: 1, 2 or 4.
        group: Numbers that share a zero point and a scale; it must divide the head dimension.
        residual: A multiple of the group: values of the last so many tokens, and keys of fewer, stay as they are.
        topk: Entries a KV head that are fetched; all packed ones where there are fewer. 0 fetches nothing.
        heads: Reduction of attention over the query heads of a KV head: `max` or `mean`.
        speculative: Fetch ahead with a guessed token. Otherwise fetch what a token's own attention asks for, and attend
            again: exact, and waiting for every fetch (the paper's table 4).
        one_bit: Levels under 1 bit; see `keepsight.runtime.quantization.Quantizer`.

    Raises:
        UserError: a value is not offered; one line names it.
    """

    bits: int = 2
    group: int = 32
    residual: int = 64
    topk: int = 64
    heads: str = "max"
    speculative: bool = True
    one_bit: str = "middles"

    def __post_init__(self) -> None:
        check_sizes(self.quantizer, self.residual)
        if type(self.topk) is not int or self.topk < 0:
            raise UserError(f"SpeCache: topk {self.topk!r} must be a whole number of entries a KV head")
        if self.heads not in _REDUCTIONS:
            raise UserError(f"SpeCache: heads {self.heads!r} is unknown; choose one of {', '.join(_REDUCTIONS)}")

    @property
    def quantizer(self) -> Quantizer:
        """Bits and groups."""
        return Quantizer(self.bits, self.group, self.one_bit)

    def reader(self, model: PreTrainedModel) -> PreTrainedModel:
        """What `read`, `decode` and `score_answer` are called with in the model's place."""
        return cast(PreTrainedModel, PairReader(model)) if self.speculative and self.topk else model

    @override
    def start(
        self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None = None, *, chunk: int | None = None
    ) -> State:
        self._require(model, input_ids)
        require_unpadded(mask)
        return prefill_packed(model, input_ids, chunk, self._packer())

    @override
    def compress(self, model: PreTrainedModel, state: State) -> State:
        self._require(model, state.tokens)
        return pack_state(state, self._packer())

    @override
    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Tensor:
        mask, pad = model_kwargs.get("attention_mask"), generation_config.pad_token_id
        self.check(input_ids.shape[1], context_of(model))
        return decode(
            self.reader(model),
            self.start(model, input_ids, mask, chunk=generation_config.prefill_chunk_size),
            stopping_criteria,
            pad_token=0 if pad is None else int(pad),
            prompt_ids=input_ids,
            logits_processor=logits_processor,
            do_sample=bool(generation_config.do_sample),
            streamer=streamer,
        ).ids

    def _require(self, model: PreTrainedModel, tokens: Tensor) -> None:
        require_full_attention(model)
        config = model.config.get_text_config()
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = config.num_hidden_layers, config.num_key_value_heads, width, model.dtype.itemsize
        require_memory(*tokens.shape, *shape)

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
        full = FullEntries.offload(*(each[:, :, : held.packed_length] for each in (keys, values)), self.traffic)
        return SpeCacheLayer(held, seen, full, self.method)


class _Ahead(NamedTuple):
    """What a step leaves for the next one.

    Attributes:
        guess: [B, 1] int64, of the token after the next.
        fetch: What the next token reads in full precision; None for nothing.
    """

    guess: Tensor
    fetch: Fetch | None


class SpeCacheLayer(PackedLayer):
    """Packed entries, and behind them the same ones in full precision on the CPU.

    By itself it fetches what each token's own attention asks for; `PairReader` makes it fetch ahead.

    Args:
        held: Its entries on the device.
        seen: Logical length.
        full: In full precision, those whose keys are packed.
        method: Its options.
        ahead: What the last step of a `PairReader` has left.
    """

    def __init__(
        self, held: PackedEntries, seen: int, full: FullEntries, method: SpeCache, ahead: _Ahead | None = None
    ) -> None:
        super().__init__(held, seen)
        self.full, self.method, self.ahead = full, method, ahead

    @property
    @override
    def bytes(self) -> int:
        """Bytes on the device: packed and recent entries, and the slots with their indices."""
        batch, kv_heads, _, width = self.keys.shape
        slots = batch * kv_heads * min(self.method.topk, self.full.length)
        return self.held.bytes + slots * (2 * width * self.keys.element_size() + 8)

    @override
    def attend(self, query: Tensor, scaling: float) -> Tensor:
        output, attention = attend_packed(query, self.held, scaling)
        fetch = self.begin_fetch(attention)
        return output if fetch is None else attend_packed(query, self.held, scaling, fetch.wait())[0]

    def begin_fetch(self, attention: Tensor) -> Fetch | None:
        """Fetch the entries that get the most of attention [B, K, H / K, n]; None for no entries."""
        count = min(self.method.topk, attention.shape[3])
        if not count:
            return None
        reduced = attention.amax(dim=2) if self.method.heads == "max" else attention.mean(dim=2)
        return self.full.fetch(reduced.topk(count, dim=-1).indices)

    @override
    def settle(self) -> None:
        before, held = self.held, self.held.settled()
        if held.packed_length > before.packed_length:  # the recent keys were packed; their values are the latest ones
            values = before.recent_values[:, :, -before.recent_keys.shape[2] :]
            self.full = self.full.append(before.recent_keys, values)
        self.hold(held)

    @override
    def entries(self) -> LayerEntries:
        raise UserError("a SpeCache state cannot be joined with others or evicted from; answer from it alone")

    @override
    def share(self) -> "SpeCacheLayer":
        return SpeCacheLayer(self.held, self.seen, self.full, self.method)


class PairReader:
    """A model that reads each token of a SpeCache state together with a guess of the next one.

    Args:
        model: The target.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self.config = model, model.config

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: Cache,
        logits_to_keep: int = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Append tokens to a cache.

        Args:
            input_ids: [B, q] int64.
            position_ids: [B, q] int64.
            past_key_values: Of SpeCache layers.
            logits_to_keep: Of how many last tokens; 0 for all.
            options: What else `read` gives a model; for a packed state it says nothing.
        """
        logits = []
        for token, position in zip(input_ids.split(1, dim=1), position_ids.split(1, dim=1), strict=True):
            layers = cast("list[SpeCacheLayer]", past_key_values.layers)
            if layers[0].ahead is None:  # the step on packed entries alone, from which the first guess comes
                _, layers = self._step(token, position, layers, 0)
            assert layers[0].ahead is not None
            pair = torch.cat([token, layers[0].ahead.guess], dim=1)
            after, layers = self._step(pair, position, layers, 1)
            past_key_values.layers[:] = layers  # all layers at once: an interrupted step has changed none
            logits.append(after)
        return CausalLMOutputWithPast(logits=cast(Any, torch.cat(logits[-logits_to_keep:], dim=1)))

    def _step(
        self, tokens: Tensor, position: Tensor, layers: "list[SpeCacheLayer]", accepted: int
    ) -> tuple[Tensor, "list[SpeCacheLayer]"]:
        """Logits [B, 1, V] of the first token of [B, q], and the layers after the first `accepted` tokens."""
        trials: list[Any] = [_TrialLayer(layer, accepted) for layer in layers]
        positions = position + torch.arange(tokens.shape[1], device=tokens.device)
        output = self._model(
            input_ids=tokens, position_ids=positions, past_key_values=Cache(layers=trials), use_cache=True
        )
        guess = output.logits[:, -1:].argmax(dim=-1)
        return output.logits[:, :1], [trial.after(guess) for trial in trials]


class _TrialLayer(SpeCacheLayer, OwnAttention):
    """A layer during a step: it keeps apart what the step would add.

    Args:
        layer: As it was before; it stays so.
        accepted: How many of the step's tokens are to stay.
    """

    def __init__(self, layer: SpeCacheLayer, accepted: int) -> None:
        super().__init__(layer.held, layer.seen, layer.full, layer.method, layer.ahead)
        self._accepted, self._next = accepted, layer.share()
        self._fetch: Fetch | None = None

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        self._next.add(*(each[:, :, : self._accepted] for each in (key_states, value_states)))
        self._next.settle()
        self.hold(self.held.with_recent(key_states, value_states))
        return self, value_states

    @override
    def attend(self, query: Tensor, scaling: float) -> Tensor:
        fetch = self.ahead.fetch if self.ahead is not None else None
        slots = fetch.wait() if fetch is not None else None
        watched = self._next.held.packed_length  # with those that are packed at the end of this step
        output, attention = attend_packed(query, self.held, scaling, slots, watched)
        self._fetch = self._next.begin_fetch(attention)
        return output

    def after(self, guess: Tensor) -> SpeCacheLayer:
        """The layer after the step."""
        self._next.ahead = _Ahead(guess, self._fetch)
        return self._next
