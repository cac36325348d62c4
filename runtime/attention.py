"""Attention to cache layers that transformers does not know, and the recording of queries and keys.

While a pass of `run` is under way, the model's configuration names one registered attention function. What a pass needs
(its cache, its recorder) travels with the pass as keyword arguments, which models hand on to their attention: passes of
other threads, and transformers' own `generate`, bring none, and get the implementation that was loaded, unchanged.

Shapes: B batch, H query heads, K KV heads (query head h reads KV head h // (H / K)), q queries, S keys, d head
dimension. Queries are grouped by KV head: [B, K, (H / K) x q, d], the rows of a query head side by side.

In latent attention (MLA of DeepSeek-V2 and V3) a layer's keys and values come from one latent c per token that all
heads share: k_nope = W_uk c and v = W_uv c with each head's own rows of `kv_b_proj`; a part with RoPE, shared by all
heads too, completes the key. transformers caches c and that part, and expands all of them at every step. A cache entry
is then a latent that all heads share, so it is kept or evicted for all of them; `Expansion` expands only what is read.
"""

import copy
import functools
import sys
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.models.decoder import RESTARTS
from keepsight.models.transformers_internals import DummyLayer, attention_of_config, set_attention_of_config
from keepsight.runtime.decision_channels import decisions_left_out, holds_decisions, without_decisions
from keepsight.runtime.distance_bias import (
    CHANNELS,
    DistanceBias,
    bank_of,
    has_distance_bias,
    log_scaling,
    relative_states,
    with_positions,
)
from keepsight.runtime.indexer import masks_of_layers, selected
from keepsight.runtime.matmul_attention import attend_by_products, is_faster
from keepsight.runtime.rope_length import counted_lengths


class Reader(Protocol):
    """A model, or a wrapper of one for caches that need more than a forward pass: it appends tokens to a cache."""

    @property
    def config(self) -> Any:
        """The model's configuration."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Append tokens to a cache; arguments and result are those of a model."""
        ...


class Softmax(NamedTuple):
    """How a layer turns dot products into attention weights.

    Attributes:
        scaling: Factor of the dot products.
        softcap: Logits are squashed by tanh to between -softcap and softcap (Gemma 2); None for none.
        sinks: [H], for each query head a logit that takes its share of the weights and has no value (GPT-OSS); None
            for none.
        bias: Adds to the logits what the distance of query and key is worth (Inkling): both then have further channels,
            which take no part in the product. None for none.
    """

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None
    bias: DistanceBias | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the weights are a softmax of the scaled products alone."""
        return self.softcap is None and self.sinks is None and self.bias is None

    def logits(self, grouped: Tensor, keys: Tensor) -> Tensor:
        """Queries [..., r, d] and keys [..., S, d] -> [..., r, S] float32.

        16-bit queries and keys are multiplied in float32: in float16 products overflow where an attention kernel's do
        not, in bfloat16 they are off by 2%. With gradients bfloat16 stays: autograd would store float32 keys.
        """
        if self.bias is not None:
            width = keys.shape[-1] - CHANNELS
            without_bias = self._replace(bias=None)
            return without_bias.logits(grouped[..., :width], keys[..., :width]) + self.bias(grouped, keys)
        if keys.dtype == torch.float16 or (keys.dtype == torch.bfloat16 and not torch.is_grad_enabled()):
            grouped = grouped.float()
            keys = keys.float()
        scaled = grouped * self.scaling

        if keys.is_cpu and keys.element_size() == 2 and not keys.is_contiguous():
            # Head by head: for all heads at once oneDNN makes a transposed copy of non-contiguous keys, which is far
            # slower.
            head_products = []
            for head_rows, head_keys in zip(scaled.flatten(0, -3), keys.flatten(0, -3), strict=True):
                head_products.append(head_rows @ head_keys.t())
            products = torch.stack(head_products).view(*scaled.shape[:-1], keys.shape[-2])
        else:
            products = scaled @ keys.mT
        return self.capped(products.float())

    def capped(self, logits: Tensor) -> Tensor:
        """Scaled dot products -> logits."""
        if self.softcap is None:
            return logits
        return (logits / self.softcap).tanh() * self.softcap

    def of_head(self, index: int, kv_heads: int) -> "Softmax":
        """The softmax of the query heads of one KV head."""
        if self.sinks is None:
            return self
        return self._replace(sinks=self.sinks.view(kv_heads, -1)[index])

    def sinks_of(self, kv_heads: int, rows: int) -> Tensor | None:
        """[K, (H / K) x q, 1] float32: the sink of each grouped row; None for none."""
        if self.sinks is None:
            return None
        return self.sinks.float().view(kv_heads, -1).repeat_interleave(rows, dim=1)[..., None]

    def normalised(self, logits: Tensor, grouped: Tensor | None = None) -> Tensor:
        """The weights of grouped logits [B, K, H / K, q, S], masked ones very low or -inf; may overwrite `logits`.

        `grouped` are their queries, [B, K, (H / K) x q, d], which may have sinks of their own.
        """
        if self.bias is not None and self.bias.has_sinks:
            assert grouped is not None
            sinks = self.bias.sinks(grouped).reshape(*logits.shape[:-1], 1)
            return torch.cat([logits, sinks], dim=-1).softmax(dim=-1)[..., :-1]
        if self.sinks is None:
            # In place: a second tensor of this size would be allocated and freed in each layer, which is slow on a CPU.
            if logits.is_cpu and not torch.is_grad_enabled():
                return torch.softmax(logits, dim=-1, out=logits)
            return logits.softmax(dim=-1)

        sinks = self.sinks.float().view(1, logits.shape[1], -1, 1, 1).expand(*logits.shape[:-1], 1)
        return torch.cat([logits, sinks], dim=-1).softmax(dim=-1)[..., :-1]


RecordLayer = Callable[[int, Tensor, Tensor, Softmax, Tensor | None, Any], None]
"""Called in every layer with attention, with the layer's index, its queries [B, H, q, d], all keys they may see
[B, K, S, d] (both after RoPE; of a ragged layer the new ones alone), its softmax, the keys' padding [B, K, S] bool
(False for padding) where it differs by head, else None, and the mask that the model made, in the form of the
implementation that was loaded. The queries are those of the last q of the S positions. Queries and keys have further
channels where the softmax has a bias."""


class OwnAttention(ABC):
    """A cache layer that computes the attention itself, from the new keys and values as they are.

    Attributes:
        can_be_shared: Whether `attend` changes nothing, so that several decoder layers can attend to the entries.
    """

    can_be_shared = False

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        """See transformers' `CacheLayerMixin`; by default nothing is appended before `attend`."""
        return key_states, value_states

    def update_indexer(self, index_keys: Tensor) -> Tensor:
        """The indexer's keys [B, q, D] of the new tokens as they are: the layer itself reads all entries."""
        return index_keys

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """Queries [B, H, q, d], keys and values [B, K, q, d] of q new tokens, after RoPE -> [B, q, H, d]."""


class SharedEntries(DummyLayer):
    """The place in a cache of a decoder layer that reads the entries of an earlier one, `owner`, and has none."""

    def __init__(self, owner: int) -> None:
        super().__init__()
        self.owner = owner


def is_bounded(layer: Any) -> bool:
    """Whether a cache layer is bounded: it has a sliding window, or a recurrent state in place of entries, or none."""
    return not isinstance(layer, DynamicLayer) or bool(layer.is_sliding)


def recurrent_of(layer: Any) -> LinearAttentionLayer | None:
    """The recurrent state that a cache layer keeps beside its entries; None for none."""
    recurrent: LinearAttentionLayer | None = getattr(layer, "recurrent", None)
    return recurrent


_NAME = "keepsight:"
_PLAIN = ("sdpa", "eager", "flex_attention")
"""Implementations that do not look up their own name in the configuration while they run."""
_FEW_TOKENS = 64
"""Passes of at most so many tokens, such as decoding steps, attend without cuDNN."""
_ROWS_AT_ONCE = 128
"""Queries whose logits are made at once where there is no kernel for them."""
_LOCK = threading.Lock()
_PASS_COUNTS: Counter[int] = Counter()
"""How many passes are under way, by the id of the model's text configuration."""


class _ThreadPasses(threading.local):
    """The passes under way in a thread, by the id of the model's text configuration: `recorder` and `entries`."""

    def __init__(self) -> None:
        self.passes: dict[int, tuple[Any, Any]] = {}


_THREAD = _ThreadPasses()


class _ProcessSetting:
    """A setting of the whole process, made when the first of the passes that need it begins and undone after the last.

    Re-entrant, and safe in several threads.

    Args:
        setting: Makes the context in which it holds.
    """

    def __init__(self, setting: Callable[[], AbstractContextManager[Any]]) -> None:
        self._setting = setting
        self._under_way = 0
        self._context: AbstractContextManager[Any] = nullcontext()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within the block the setting holds."""
        with _LOCK:
            if not self._under_way:
                self._context = self._setting()
                self._context.__enter__()
            self._under_way += 1
        try:
            yield
        finally:
            with _LOCK:
                self._under_way -= 1
                if not self._under_way:
                    self._context.__exit__(None, None, None)


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Within the block, `scaled_dot_product_attention` does not choose cuDNN.

    On a Hopper GPU torch (2.11 to 2.13 with cuDNN 9.15 or later) chooses it first, and it compiles a plan for each new
    shape. The shape changes at every step of a growing cache.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


_EAGER = _ProcessSetting(lambda: torch.compiler.set_stance("force_eager"))
_NO_CUDNN = _ProcessSetting(_without_cudnn)


class OpenCache(Cache):
    """Cache layers as a model reads and extends them: what it asks of a recurrent state goes to the layer's own.

    Attributes:
        updated: The layer whose entries were read last; None before the first.
        positions: [B or 1, q] int64, those of the tokens that are read, where attention has a bias of the distance;
            None elsewhere.
        query_offset: How many tokens the model was last told were read before, padding among them.
    """

    updated: int | None = None
    positions: Tensor | None = None
    query_offset: int = 0

    @override
    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.updated = layer_idx
        if self.positions is not None and not is_bounded(self.layers[layer_idx]):
            key_states = with_positions(key_states, self.positions)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @override
    def get_query_offset(self, layer_idx: int = 0) -> Any:
        self.query_offset = super().get_query_offset(layer_idx)
        return self.query_offset

    @property
    def _states(self) -> Cache:
        """The recurrent states. No layer is held on to: eviction while reading replaces the one that was read."""
        return Cache(layers=[recurrent_of(layer) or layer for layer in self.layers])

    @override
    def get_conv_state(self, *args: Any, **kwargs: Any) -> Tensor | None:
        return self._states.get_conv_state(*args, **kwargs)

    @override
    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._states.update_conv_state(*args, **kwargs)

    @override
    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor | None:
        return self._states.get_recurrent_state(*args, **kwargs)

    @override
    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._states.update_recurrent_state(*args, **kwargs)

    @override
    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        layer: Any = self.layers[layer_idx]
        index_keys: Tensor = layer.update_indexer(indexer_key_states)
        return index_keys

    @override
    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        return self._states.has_previous_state(*args, **kwargs)


class StateCache(Cache):
    """The cache of a state: `run` opens it to a model, and every other model call is refused before it appends.

    A plain call would attend to all entries alike, and cut the ids by the number of tokens seen: wrong where heads hold
    different numbers of entries, a prompt was shortened, or entries have a form of their own.
    """

    def opened(self) -> Cache:
        """The same layers as a model reads and extends them."""
        return OpenCache(layers=self.layers)

    def refuse(self, *args: object, **kwargs: object) -> Any:
        """Stands in place of what reads or changes entries."""
        raise UserError(
            "past_key_values: a plain model call would misread or change a cache of keepsight; call "
            "model.generate(..., custom_generate=method) or keepsight.generate(model, ids, method, "
            "past_key_values=...)",
            field="past_key_values",
            code="state",
        )

    get_mask_sizes = update = update_conv_state = update_recurrent_state = update_indexer = refuse
    reset = reorder_cache = batch_repeat_interleave = batch_select_indices = early_initialization = refuse


def run(
    model: Reader,
    cache: Cache,
    *,
    recorder: RecordLayer | None = None,
    rope_lengths: Tensor | None = None,
    **inputs: Any,
) -> Any:
    """Run a model on new tokens, append them to a cache, and return its output; `inputs` are arguments of the model.

    `rope_lengths` [B] int64 are the lengths of the texts that the tokens belong to, where the model's RoPE depends on
    it; by default the largest position of all rows plus 1.

    Raises:
        UserError: the model is being trained with gradient checkpointing.
    """
    uncompiled: Any = getattr(model, "_orig_mod", model)
    if getattr(uncompiled, "training", False):
        for module in uncompiled.modules():
            if getattr(module, "gradient_checkpointing", False):
                raise UserError(
                    "gradient checkpointing drops the cache of a model in training mode; call model.eval() first",
                    field="gradient_checkpointing",
                    code="conflict",
                )
    if isinstance(cache, StateCache) and isinstance(uncompiled, nn.Module):  # readers open it themselves
        cache = cache.opened()
    if isinstance(cache, OpenCache) and has_distance_bias(model.config):
        cache.positions = _positions_in(inputs, cache)
    kind = model.config.model_type
    if kind in RESTARTS and _tokens_in(inputs) > 1 and cache.get_seq_length() > 0:
        raise UserError(
            f"the recurrent layers of {kind} in transformers read several tokens at once at the start alone; take "
            "snapkv or another method that observes with the prompt's own tokens, and no prefill_chunk_size",
            field="model",
            code="model",
        )
    if any(isinstance(layer, SharedEntries) for layer in cache.layers):
        if recorder is not None:
            recorder = _OncePerEntries(recorder, cache)
        _ask_for_all_queries(inputs, recorder is not None)
    few_tokens = _tokens_in(inputs) <= _FEW_TOKENS
    with (
        recording(model),
        _uncompiled(),
        _NO_CUDNN.held() if few_tokens else nullcontext(),
        counted_lengths(uncompiled, rope_lengths),
        decisions_left_out(uncompiled) if isinstance(uncompiled, nn.Module) else nullcontext(),
        masks_of_layers(uncompiled, cache),
        relative_states(uncompiled),
        _pass_under_way(model.config.get_text_config(decoder=True), recorder, cache),
    ):
        output = uncompiled(past_key_values=cache, use_cache=True, entries=cache, recorder=recorder, **inputs)
    _drop_logits(output, inputs)
    return output


@contextmanager
def _pass_under_way(config: Any, recorder: RecordLayer | None, entries: Cache) -> Iterator[None]:
    """Within the block, attention finds the recorder and the entries of this pass in the thread.

    Models that pass no keywords on to their attention need it (StableLM, Nemotron).
    """
    passes = _THREAD.passes
    before = passes.get(id(config))
    passes[id(config)] = recorder, entries
    try:
        yield
    finally:
        del passes[id(config)]
        if before is not None:
            passes[id(config)] = before


def passes_to_resume() -> AbstractContextManager[None]:
    """A context that restores the passes now under way in this thread, for a recomputation."""
    under_way = dict(_THREAD.passes)

    @contextmanager
    def restored() -> Iterator[None]:
        before = dict(_THREAD.passes)
        _THREAD.passes.update(under_way)
        try:
            yield
        finally:
            _THREAD.passes.clear()
            _THREAD.passes.update(before)

    return restored()


class _OncePerEntries:
    """Calls a recorder once for each set of entries, when the last of the decoder layers that read it attends.

    Its queries are those of all these layers, as further query heads of each KV head: what reduces scores over the
    query heads of a KV head reduces them over the layers too.
    """

    def __init__(self, recorder: RecordLayer, cache: Cache) -> None:
        self._recorder = recorder
        self._cache = cache
        self._queries: dict[int, list[Tensor]] = {}

    def __call__(
        self, index: int, query: Tensor, key: Tensor, softmax: Softmax, real: Tensor | None, mask: Any
    ) -> None:
        queries = self._queries.setdefault(index, [])
        queries.append(query)
        if len(queries) == getattr(self._cache.layers[index], "readers", 1):
            merged = heads_of_layers(queries, key.shape[1])
            self._recorder(index, merged, key, softmax, real, mask)
            queries.clear()


def heads_of_layers(parts: Sequence[Tensor], kv_heads: int) -> Tensor:
    """Tensors [B, H, ...] of R layers that read the same entries -> [B, R x H, ...], side by side by KV head."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.unflatten(1, (kv_heads, -1)) for part in parts], dim=2).flatten(1, 2)


def _ask_for_all_queries(inputs: dict[str, Any], recorded: bool) -> None:
    """Replace a number of logits to keep by a slice, for which models compute all tokens in every layer.

    Given a number, Gemma 4 computes layers that read the entries of others for the last tokens alone: too few queries
    for a recorder, and under a causal mask that is not given for more than one token, the wrong entries.
    """
    count = inputs.get("logits_to_keep")
    if isinstance(count, int) and count > 0 and (recorded or count > 1):
        length = _tokens_in(inputs)
        inputs["logits_to_keep"] = slice(max(length - count, 0), length)


def _drop_logits(output: Any, inputs: dict[str, Any]) -> None:
    """Drop the logits that were not asked for, which some models (VideoLLaMA 3) compute and return all the same."""
    kept: int | slice = inputs.get("logits_to_keep", 0)
    logits: Tensor | None = getattr(output, "logits", None)
    length = _tokens_in(inputs)
    if kept == 0 or logits is None or logits.shape[1] != length:
        return
    if isinstance(kept, int):
        if kept >= length:
            return
        kept = slice(length - kept, length)
    output.logits = logits[:, kept]


def _tokens_in(inputs: dict[str, Any]) -> int:
    """Number of tokens of a pass, from the arguments of a model."""
    ids: Tensor | None = inputs.get("input_ids")
    if ids is not None:
        return ids.shape[1]
    embeddings: Tensor = inputs["inputs_embeds"]
    return embeddings.shape[1]


def _positions_in(inputs: dict[str, Any], cache: Cache) -> Tensor:
    """Positions [B or 1, q] int64 of the tokens of a pass, from the arguments of a model."""
    positions: Tensor | None = inputs.get("position_ids")
    if positions is not None:
        return positions
    tokens: Tensor = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
    return cache.get_seq_length() + torch.arange(tokens.shape[1], device=tokens.device)[None]


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Within the block, code that `torch.compile` compiled runs uncompiled: compiled graphs know nothing of recorders.

    That holds for modules, their `forward`, and parts of them. Re-entrant, and safe in several threads.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; importing it takes seconds
        yield
        return
    with _EAGER.held():
        yield


@contextmanager
def recording(model: Reader) -> Iterator[None]:
    """Within the block, models take `entries` (the cache whose layers attend) and `recorder` as keywords.

    Re-entrant, and safe in several threads: the name of the implementation that was loaded is put back when the last
    pass ends, and a pass without these keywords attends by that implementation in the meantime.
    """
    config: Any = model.config.get_text_config(decoder=True)
    with _LOCK:
        if not _PASS_COUNTS[id(config)]:
            set_attention_of_config(config, _registered(attention_of_config(config)))
        _PASS_COUNTS[id(config)] += 1
    try:
        yield
    finally:
        with _LOCK:
            _PASS_COUNTS[id(config)] -= 1
            if not _PASS_COUNTS[id(config)]:
                del _PASS_COUNTS[id(config)]
                set_attention_of_config(config, attention_of_config(config).removeprefix(_NAME))


@functools.cache
def _registered(loaded: str) -> str:
    """The name under which the function that delegates to an implementation is registered."""
    AttentionInterface.register(_NAME + loaded, functools.partial(_attention, loaded))
    if loaded in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(_NAME + loaded, ALL_MASK_ATTENTION_FUNCTIONS[loaded])
    return _NAME + loaded


def _attention(
    loaded: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    recorder: RecordLayer | None = None,
    entries: Cache | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as transformers asks for it, with what a pass of `run` adds: `recorder` and `entries`."""
    if entries is None and recorder is None:
        recorder, entries = _THREAD.passes.get(id(module.config), (None, None))
    if entries is not None or recorder is not None:
        index, layer = _layer_read(module, entries)
        softmax = _softmax_of(loaded, query, scaling, options)
        if options.get("position_bias") is not None and (layer is None or not is_bounded(layer)):
            query, softmax = _with_bias(module, query, softmax, entries, options)
        _require_same_mask_for_heads(module, attention_mask)
        if holds_decisions(module.config):
            query = without_decisions(query, key.shape[1])
        real: Tensor | None = getattr(layer, "real", None)  # the recorder may crop the layer
        if recorder is not None:
            recorder(index, query, key, softmax, real, attention_mask)

        output = _attention_of_layer(layer, query, key, value, real, attention_mask, softmax, options)
        if output is None and loaded == "sdpa":
            output = _faster_sdpa(module, query, key, value, attention_mask, softmax, options)
        if output is not None:
            return output, None
    return _loaded_attention(loaded, module, query, key, value, attention_mask, scaling, options)


def _softmax_of(loaded: str, query: Tensor, scaling: float | None, options: dict[str, Any]) -> Softmax:
    """The softmax of a layer without a bias, from queries [B, H, q, d] and the `options` of its attention."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap = None if loaded == "sdpa" else options.get("softcap")  # transformers' sdpa leaves it out
    return Softmax(scale, softcap, options.get("s_aux"))


def _require_same_mask_for_heads(module: nn.Module, mask: Any) -> None:
    """Refuse (`UserError`) a mask that differs by head, which scores would not take into account."""
    if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] > 1:
        raise UserError(
            f"{module.config.model_type} has a mask of its own for each head, so that its entries cannot be "  # type: ignore[union-attr]
            "scored; load a model without, such as Llama, Qwen, Mistral or Gemma",
            field="model",
            code="model",
        )


def _attention_of_layer(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    real: Tensor | None,
    mask: Any,
    softmax: Softmax,
    options: dict[str, Any],
) -> Tensor | None:
    """Attention [B, q, H, d] that the loaded implementation cannot compute; None where it can.

    It cannot where a cache layer attends by itself, an indexer selects entries, padding differs by head, or there is a
    bias of the distance. `real` [B, K, S] bool is False for padding that differs by head, else None; `mask` is the one
    that the model made, and `options` are those of the layer's attention.
    """
    if isinstance(layer, OwnAttention):
        return layer.attend(query, key, value, softmax)
    if options.get("indices") is not None:
        selection = selected(options["indices"], mask, key.shape[2], getattr(layer, "reads", None))
        return grouped_attention(query, key, value, selection, softmax)
    if real is not None:
        return grouped_attention(query, key, value, visible(query.shape[2], real), softmax)
    if softmax.bias is not None:
        return _biased_attention(query, key, value, mask, softmax)
    return None


def _faster_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    softmax: Softmax,
    options: dict[str, Any],
) -> Tensor | None:
    """What transformers' sdpa returns, [B, q, H, d], computed faster; None where there is no faster way."""
    if options.get("dropout") or options.get("position_bias") is not None:
        return None
    if softmax.is_plain and is_faster(query, key, value):
        if mask is None and _is_causal(module, options) and query.shape[2] == key.shape[2]:
            return attend_by_products(query, key, value, softmax.scaling)
        if isinstance(mask, Tensor) and mask.dtype == torch.bool:
            return attend_by_products(query, key, value, softmax.scaling, mask)
    # Under a mask transformers repeats keys and values for every query head; grouping the queries copies none.
    has_few_queries = query.shape[1] * query.shape[2] <= key.shape[2]
    if mask is not None and has_few_queries:
        return grouped_attention(query, key, value, mask, Softmax(softmax.scaling))
    return None


def _loaded_attention(
    loaded: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: float | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Attention by the implementation that was loaded, as without a pass of `run`."""
    if options.get("indices") is not None:  # models fold them into the mask for the implementations that they know
        mask = selected(options.pop("indices"), mask, key.shape[2])
    function = ALL_ATTENTION_FUNCTIONS[loaded] if loaded in ALL_ATTENTION_FUNCTIONS else _eager_of(type(module))
    if loaded not in _PLAIN:
        module = _under_loaded_name(module, loaded)
    return function(module, query, key, value, mask, scaling=scaling, **options)


def _is_causal(module: nn.Module, options: dict[str, Any]) -> bool:
    """Whether attention without a mask is causal, as transformers decides it."""
    asked: bool | None = options.get("is_causal")
    return bool(getattr(module, "is_causal", True)) if asked is None else asked


def _with_bias(
    module: nn.Module, query: Tensor, softmax: Softmax, entries: Cache | None, options: dict[str, Any]
) -> tuple[Tensor, Softmax]:
    """Queries [B, H, q, d] with the channels that the bias of their layer needs, and the softmax that adds it.

    `options` are those of the layer's attention; the model is in a block of `relative_states`.
    """
    bank = bank_of(module)
    if bank is None or not isinstance(entries, OpenCache) or entries.positions is None:
        kind = module.config.model_type  # type: ignore[union-attr]
        raise UserError(
            f"{kind} adds a bias to its attention in a way that is not known, which scores would leave out; load a "
            "model without, such as Llama, Qwen, Mistral or Gemma",
            field="model",
            code="model",
        )
    if bank.is_meta and not query.is_meta:
        raise UserError(
            "the profiles of the bias by distance are offloaded, and attention cannot read them there; load the model "
            "without offloading",
            field="model.device_map",
            code="model",
        )
    sinks: Tensor | None = options.get("sinks")
    states: Tensor = options["position_bias"]
    if "position_ids" not in options:  # Inkling scales by its count of tokens, Inkling 2 by their positions
        counted = entries.query_offset + torch.arange(query.shape[2], device=entries.positions.device)
        factor = log_scaling(module.config, entries.positions) / log_scaling(module.config, counted)
        factor = factor[:, None, :, None].to(query.device)
        query = (query.float() * factor).to(query.dtype)
        states = states.float() * factor
    channels = [with_positions(query, entries.positions), states.to(query.dtype)]
    if sinks is not None:
        channels.append(sinks.to(query.dtype))
    return torch.cat(channels, dim=-1), softmax._replace(bias=DistanceBias(bank, has_sinks=sinks is not None))


def _biased_attention(query: Tensor, key: Tensor, value: Tensor, mask: Any, softmax: Softmax) -> Tensor:
    """`grouped_attention` under the mask that a model made, whatever its form; its logits are made block by block."""
    queries = query.shape[2]
    keys = key.shape[2]
    if mask is not None and not isinstance(mask, Tensor):
        raise UserError(
            "a bias of the distance is not added under flex attention; load the model with attn_implementation='sdpa'",
            field="attn_implementation",
            code="model",
        )
    outputs = []
    for start in range(0, queries, _ROWS_AT_ONCE):
        end = min(start + _ROWS_AT_ONCE, queries)
        visible_keys = keys - (queries - end)  # the block attends to no later key
        if mask is None:
            block_mask = visible(end - start, key.new_ones(1, 1, visible_keys, dtype=torch.bool))
        else:
            block_mask = mask[:, :, start:end, :visible_keys]
        block = query[:, :, start:end]
        outputs.append(
            grouped_attention(block, key[:, :, :visible_keys], value[:, :, :visible_keys], block_mask, softmax)
        )
    return torch.cat(outputs, dim=1)


def _layer_read(module: nn.Module, entries: Cache | None) -> tuple[int, Any]:
    """The index of the cache layer whose entries a module reads, and the layer; None where there is no cache."""
    index = _layer_of(module, entries)
    if entries is None:
        return index, None
    layer: Any = entries.layers[index]
    if isinstance(layer, SharedEntries):
        return layer.owner, entries.layers[layer.owner]
    return index, layer


def _layer_of(module: nn.Module, entries: Cache | None) -> int:
    """The decoder layer in which a module attends.

    A block that attends in several layers (Zamba) has no index of its own. It has just read that layer's entries.
    """
    index: Any = module.layer_idx
    if (index is None or index < 0) and isinstance(entries, OpenCache):
        index = entries.updated
    assert isinstance(index, int), "a block of several layers attends without a cache"
    return index


def _under_loaded_name(module: nn.Module, loaded: str) -> nn.Module:
    """A shallow copy of an attention module whose configuration names the implementation that was loaded."""
    config: Any = copy.copy(module.config)
    set_attention_of_config(config, loaded)
    copied_module = copy.copy(module)
    copied_module.config = config
    return copied_module


def _eager_of(attention: type[nn.Module]) -> Callable[..., Any]:
    """The eager attention in the file that defines a class; transformers uses it where no other was loaded.

    Raises:
        UserError: there is none.
    """
    for base in attention.__mro__:
        function = getattr(sys.modules[base.__module__], "eager_attention_forward", None)
        if function is not None:
            return function
    raise UserError(
        f"{attention.__name__} has an eager attention that cannot be delegated to; load the model with "
        "attn_implementation='sdpa'",
        field="attn_implementation",
        code="model",
    )


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softmax: Softmax) -> Tensor:
    """Attention [B, q, H, d], contiguous, in which the query heads of a KV head are rows of one head.

    So no key or value is repeated: queries are [B, H, q, d], keys and values [B, K, S, d]. The mask [B, 1 or K, q, S]
    is bool (True where a query may look) or added to the logits; None where every query sees every key.
    """
    batch, heads, queries, width = query.shape
    kv_heads = key.shape[1]
    if mask is not None:
        mask = mask[:, :, None].expand(-1, -1, heads // kv_heads, -1, -1).flatten(2, 3)
    output = attend_grouped(query.reshape(batch, kv_heads, -1, width), key, value, mask, softmax)
    by_query = output.reshape(batch, heads, queries, -1).transpose(1, 2)
    return by_query.contiguous()  # GPU kernels choose their own strides


def attend_grouped(grouped: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softmax: Softmax) -> Tensor:
    """`grouped_attention` of grouped queries [B, K, r, d] under a mask [B, 1 or K, r, S] -> [B, K, r, d]."""
    if softmax.is_plain:
        return functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=softmax.scaling)
    logits = softmax.logits(grouped, key)
    if mask is not None and mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)  # not NaN where padding sees nothing
    elif mask is not None:
        logits = logits + mask
    # Only sinks differ between the query heads of a KV head.
    group = 1 if softmax.sinks is None else len(softmax.sinks) // key.shape[1]
    weights = softmax.normalised(logits.unflatten(2, (group, -1)), grouped).flatten(2, 3)
    return weights.to(value.dtype) @ value


def visible(rows: int, real: Tensor) -> Tensor:
    """Causal mask [B, K, q, S] bool of the last q of S positions, which `real` [B, K, S] bool marks."""
    if rows == 1:
        return real[:, :, None]
    keys = real.shape[2]
    positions = torch.arange(keys, device=real.device)
    return real[:, :, None] & (positions <= positions[keys - rows :, None])


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)  # a cached tensor may be used where there are gradients
def later(rows: int, device: torch.device) -> Tensor:
    """[rows, rows] bool: which keys come after each query."""
    return torch.ones(rows, rows, dtype=torch.bool, device=device).triu(1)


# Latent attention


@dataclass(frozen=True)
class Expansion:
    """Expands the latents of a layer to each head's keys and values.

    Attributes:
        weight: [H, nope + v, rank], the rows of `kv_b_proj` by head: those of keys before those of values.
        key_width: nope, the dimensions of a key that come from the latent.
    """

    weight: Tensor
    key_width: int

    @classmethod
    def of(cls, attention: Any) -> "Expansion":
        """The expansion of an attention layer; it shares the weights.

        Raises:
            UserError: `kv_b_proj` is quantized, or no plain matrix.
        """
        projection = attention.kv_b_proj
        weight: Tensor = projection.weight
        if not isinstance(projection, nn.Linear) or projection.bias is not None or weight.dtype.itemsize < 2:
            raise UserError(
                f"kv_b_proj of layer {attention.layer_idx} is a {type(projection).__name__} of {weight.dtype}; latents "
                "are expanded by head with a plain matrix of 16 or 32 bit floats: load the model unquantized",
                field="kv_b_proj",
                code="model",
            )
        rows = attention.qk_nope_head_dim + attention.v_head_dim
        return cls(weight.unflatten(0, (-1, rows)), attention.qk_nope_head_dim)

    def __call__(self, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, H, n, nope + rope] and values [B, H, n, v].

        Args:
            latents: [B, H or 1, n, rank]: of each head, or the same for all.
            rotated: [B, H or 1, n, rope]: the keys' part with RoPE.
        """
        expanded = latents @ self.weight.transpose(1, 2)
        latent_keys, values = expanded.tensor_split([self.key_width], dim=-1)
        keys = torch.cat([latent_keys, rotated.expand(-1, latent_keys.shape[1], -1, -1)], dim=3)
        return keys, values


def expansions(model: PreTrainedModel) -> list[Expansion]:
    """The expansion of each cache layer; a decoder layer may have several."""
    attentions: list[Any] = [module for module in model.modules() if hasattr(module, "kv_b_proj")]
    attentions.sort(key=lambda attention: int(attention.layer_idx))
    return [Expansion.of(attention) for attention in attentions]
