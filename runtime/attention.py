"""Record a model's queries and keys while it computes attention with the implementation that was loaded.

During `run`, a forward pass, the model's configuration names a recording attention function in place of the
implementation that was loaded; it records, then delegates to that one with every argument that it was given. What a
pass needs travels with it as keywords: passes of other threads bring none, and are delegated unchanged. Only where
the cache's layers hold entries that no implementation knows (different entries by head, packed ones, a few selected
ones) is attention computed here. Nothing of transformers is patched: the function is registered under a name, as
`AttentionInterface` offers, and takes its own arguments from keywords that models pass on.
"""

import copy
import functools
import sys
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from keepsight.errors import UserError
from keepsight.runtime.cache import is_bounded
from keepsight.runtime.cache_layers import KeptLayer
from keepsight.runtime.softmax import Softmax, grouped_attention, visible
from keepsight.runtime.viewed_layers import ViewedLayer


class Reader(Protocol):
    """What appends tokens to a cache: a model, or a wrapper of one for caches that need more than a forward pass."""

    @property
    def config(self) -> Any:
        """The model's configuration."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Append tokens to a cache; arguments and result are those of a model."""
        ...


Recorder = Callable[[int, Tensor, Tensor, Softmax, Tensor | None, Any], None]
"""Called in every layer with full attention, with the layer's index, its queries [B, H, q, d], all keys they may see
[B, K, S, d] (both after RoPE), its softmax, the keys' padding [B, K, S] bool (False for padding) where it differs by
head, else None, and the mask that the model made, in the form of the implementation that was loaded. The queries are
those of the last q of the S positions."""


class OwnAttention(ABC):
    """A cache layer that computes the attention itself, from the new keys and values as they are."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        """See transformers' `CacheLayerMixin`; nothing is appended before `attend`."""
        return key_states, value_states

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """Queries [B, H, q, d], keys and values [B, K, q, d] of q new tokens, after RoPE -> [B, q, H, d]."""


_NAME = "keepsight:"
_PLAIN = ("sdpa", "eager", "flex_attention")
"""Implementations that do not look up their own name in the configuration while they run."""
_LOCK = threading.Lock()
_PASSES: Counter[int] = Counter()
"""How many passes are under way, by the id of the model's text configuration."""


def run(model: Reader, cache: Cache, *, recorder: Recorder | None = None, **inputs: Any) -> Any:
    """A model's output for more tokens, which it appends to a cache; `inputs` are further arguments of the model."""
    with recording(model):
        return model(past_key_values=cache, use_cache=True, entries=cache, recorder=recorder, **inputs)


@contextmanager
def recording(model: Reader) -> Iterator[None]:
    """Within the block, models take `entries` (the cache whose layers attend) and `recorder` as keywords.

    Re-entrant, and safe in several threads: the name of the implementation that was loaded is put back when the last
    pass ends, and a pass without these keywords attends by that implementation in the meantime.
    """
    config: Any = model.config.get_text_config(decoder=True)
    with _LOCK:
        if not _PASSES[id(config)]:
            config._attn_implementation = {"": _registered(config._attn_implementation)}  # not for vision towers
        _PASSES[id(config)] += 1
    try:
        yield
    finally:
        with _LOCK:
            _PASSES[id(config)] -= 1
            if not _PASSES[id(config)]:
                del _PASSES[id(config)]
                config._attn_implementation = {"": str(config._attn_implementation).removeprefix(_NAME)}


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
    recorder: Recorder | None = None,
    entries: Cache | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    if entries is None and recorder is None:  # a pass of transformers' own, such as another thread's
        return _delegate(loaded, module, query, key, value, attention_mask, scaling=scaling, **options)
    index: int = module.layer_idx  # type: ignore[assignment]
    layer = None if entries is None else entries.layers[index]
    softmax = Softmax(
        query.shape[-1] ** -0.5 if scaling is None else scaling, options.get("softcap"), options.get("s_aux")
    )
    if isinstance(layer, OwnAttention):
        return layer.attend(query, key, value, softmax), None
    real = layer.returned if isinstance(layer, KeptLayer | ViewedLayer) else None
    if recorder is not None and not (layer is not None and is_bounded(layer)):
        recorder(index, query, key, softmax, real, attention_mask)
    if real is not None:
        return grouped_attention(query, key, value, visible(query.shape[2], real), softmax), None
    if loaded == "sdpa" and attention_mask is not None and _grouping_helps(query, key, options):
        return grouped_attention(query, key, value, attention_mask, Softmax(softmax.scaling)), None
    return _delegate(loaded, module, query, key, value, attention_mask, scaling=scaling, **options)


def _grouping_helps(query: Tensor, key: Tensor, options: dict[str, Any]) -> bool:
    """Under a mask transformers repeats keys and values for every query head; grouping the queries copies none."""
    few = query.shape[1] * query.shape[2] <= key.shape[2]
    return few and not any(options.get(name) for name in ("dropout", "softcap", "position_bias"))


def _delegate(loaded: str, module: nn.Module, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """What the implementation that was loaded returns."""
    default = _eager_of(type(module)) if loaded == "eager" else _none
    function = ALL_ATTENTION_FUNCTIONS.get_interface(loaded, default)
    return function(module if loaded in _PLAIN else _under_loaded_name(module, loaded), *args, **options)


def _under_loaded_name(module: nn.Module, loaded: str) -> nn.Module:
    """A shallow copy of an attention module whose configuration names the implementation that was loaded."""
    twin = copy.copy(module)
    config: Any = copy.copy(module.config)
    config._attn_implementation = {"": loaded}
    twin.config = config
    return twin


def _eager_of(attention: type[nn.Module]) -> Callable[..., Any]:
    """The eager attention in the file that defines a class: what transformers takes when nothing else was loaded.

    Raises:
        UserError: there is none.
    """
    for kind in attention.__mro__:
        if function := getattr(sys.modules[kind.__module__], "eager_attention_forward", None):
            return function
    raise UserError(
        f"{attention.__name__} has an eager attention that cannot be delegated to; load the model with "
        "attn_implementation='sdpa'"
    )


def _none(*_: Any) -> Any:
    raise AssertionError("the implementation is registered")
