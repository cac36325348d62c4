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
from keepsight.runtime.methods.window import SnapKV, StreamingLLM

METHODS: dict[str, type[Method]] = {
    "full": FullCache,
    "streamingllm": StreamingLLM,
    "snapkv": SnapKV,
    "lookaheadkv": LookaheadKV,
    "oracle": Oracle,
}

__all__ = ["METHODS", "FullCache", "LookaheadKV", "Oracle", "SnapKV", "StreamingLLM", "make_method"]


def make_method(name: str, budget: int | float | None, adapter: str | Path | None = None, **options: Any) -> Method:
    """A method by its name in `METHODS`.

    Args:
        name: Such as `snapkv`.
        budget: Entries per layer and KV head, or a ratio; unused by `full`.
        adapter: Folder or Hub id, for the methods that need one.
        options: Other fields of the method.

    Raises:
        UserError: an unknown name or option, a value out of range, or a missing adapter.
    """
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"method {name!r} is unknown; choose one of {', '.join(METHODS)}{hint}")
    kind = METHODS[name]
    if not issubclass(kind, Evict):
        return kind()
    if budget is None:
        raise UserError(f"method {name!r} needs a budget, in entries per layer and KV head")
    known = [field.name for field in fields(kind) if field.name not in ("budget", "observer")]
    if unknown := sorted(set(options) - set(known)):
        raise UserError(f"method {name!r} has no option {unknown[0]!r}; it takes {', '.join(known)}")
    if kind is not LookaheadKV:
        build: Callable[..., Method] = kind
        return build(budget, **options)
    if adapter is None:
        raise UserError(f"method {name!r} needs adapter=FOLDER_OR_HUB_ID; train one with train_lookahead.py")
    return LookaheadKV.from_pretrained(adapter, budget, **options)
