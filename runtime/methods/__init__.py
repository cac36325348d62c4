"""Every method by name. A method is one frozen dataclass; adding a row here makes it known to all commands."""

import difflib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from keepsight.errors import UserError
from keepsight.runtime.evict import Evict, FullCache, Method
from keepsight.runtime.methods.lookaheadkv import LookaheadKV
from keepsight.runtime.methods.oracle import Oracle
from keepsight.runtime.methods.parts import allocation, build, pooling, reduction
from keepsight.runtime.methods.snapkv import PromptWindow, SnapKV
from keepsight.runtime.methods.streamingllm import Recency, StreamingLLM
from keepsight.runtime.observe import Observer

METHODS: dict[str, type[Method]] = {
    "full": FullCache,
    "streamingllm": StreamingLLM,
    "snapkv": SnapKV,
    "lookaheadkv": LookaheadKV,
    "oracle": Oracle,
    "evict": Evict,
}
OBSERVERS: dict[str, type[Observer]] = {
    "recency": Recency,
    "prompt_window": PromptWindow,
}

__all__ = ["METHODS", "OBSERVERS", "FullCache", "LookaheadKV", "Oracle", "SnapKV", "StreamingLLM", "make_method"]


def make_method(name: str, budget: int | float | None, adapter: str | Path | None = None, **options: Any) -> Method:
    """A method by its name in `METHODS`.

    Args:
        name: Such as `snapkv`; `evict` for a composition whose observer is among the options.
        budget: Entries per layer and KV head, or a ratio; unused by `full`.
        adapter: Folder or Hub id, for the methods that need one.
        options: Other fields of the method; parts as names or mappings, see `keepsight.runtime.methods.parts`.

    Raises:
        UserError: an unknown name or option, a value out of range, or a missing adapter.
    """
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"method {name!r} is unknown; choose one of {', '.join(METHODS)}{hint}")
    kind = METHODS[name]
    if kind is FullCache:
        return FullCache()
    if budget is None:
        raise UserError(f"method {name!r} needs a budget, in entries per layer and KV head")
    known = {field.name: field for field in fields(kind) if field.name != "budget"}  # type: ignore[arg-type]
    if unknown := sorted(set(options) - set(known)):
        raise UserError(f"method {name!r} has no option {unknown[0]!r}; it takes {', '.join(known)}")
    defaults = {key: field.default for key, field in known.items()}
    readers: dict[str, Callable[[Any, Any], Any]] = {
        "observer": lambda value, default: build(OBSERVERS, "observer", value, default),
        "reduce": reduction,
        "pool": pooling,
        "allocate": allocation,
    }
    parts = {
        key: readers[key](value, defaults[key]) if key in readers and isinstance(value, str | dict) else value
        for key, value in options.items()
    }
    if kind is LookaheadKV:
        if adapter is None:
            raise UserError(f"method {name!r} needs adapter=FOLDER_OR_HUB_ID; train one with train_lookahead.py")
        return LookaheadKV.from_pretrained(adapter, budget, **parts)
    if kind is Evict and "observer" not in parts:
        raise UserError(f"method {name!r} needs an observer: one of {', '.join(OBSERVERS)}")
    make: Callable[..., Method] = kind
    return make(budget, **parts)
