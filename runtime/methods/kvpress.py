"""Presses of kvpress as methods, and methods as presses (github.com/NVIDIA/kvpress, 0.5.5).

kvpress 0.5.5 takes transformers below 5.3 and keepsight 5.18 or later: a press has to come from a newer kvpress,
or be your own class with the same interface: `compression_ratio` and
`score(module, hidden_states, keys, values, attentions, kwargs) -> [B, KV heads, entries]`.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.models.decoder import attention_of, full_attention_layers
from keepsight.runtime.allocate import Adaptive, Uniform
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import NO_POOL, Pool, Reduce
from keepsight.runtime.methods.geometry import KeyDiff
from keepsight.runtime.methods.positions import KeyNorm, StreamingLLM
from keepsight.runtime.methods.window import TOVA, SnapKV
from keepsight.runtime.observe import Observer
from keepsight.runtime.state import State

_TAKEN: dict[str, Callable[[float, Any], Evict]] = {
    "KnormPress": lambda budget, press: KeyNorm(budget),
    "KeyDiffPress": lambda budget, press: KeyDiff(budget),
    "TOVAPress": lambda budget, press: TOVA(budget),
    "StreamingLLMPress": lambda budget, press: StreamingLLM(budget, sinks=press.n_sink),
    "SnapKVPress": lambda budget, press: SnapKV(budget, window=press.window_size, pool=Pool("avg", press.kernel_size)),
}
"""Presses that are methods here, with the same scores."""
_MADE: dict[type[Evict], tuple[str, Callable[[Any], dict[str, Any]]]] = {
    KeyNorm: ("KnormPress", lambda method: {}),
    KeyDiff: ("KeyDiffPress", lambda method: {}),
    TOVA: ("TOVAPress", lambda method: {}),
    StreamingLLM: ("StreamingLLMPress", lambda method: {"n_sink": method.sinks}),
    SnapKV: ("SnapKVPress", lambda method: {"window_size": method.window, "kernel_size": method.pool.kernel}),
}


@dataclass(frozen=True)
class PressScores(Observer):
    """The scores of a press that reads keys (after RoPE) and values alone.

    Attributes:
        press: An object with kvpress's `score`.
    """

    press: Any

    @override
    def __call__(self, model: PreTrainedModel, state: State, reduce: Reduce) -> list[Tensor]:
        places, scores = full_attention_layers(model.config), list[Tensor]()
        for place, (keys, values, _) in zip(places, state.entries(), strict=True):
            try:
                scored = self.press.score(attention_of(model, place), None, keys, values, None, {})
            except (AttributeError, KeyError, TypeError) as error:
                raise UserError(
                    f"{type(self.press).__name__} cannot score from keys and values alone ({error}); presses that read "
                    "hidden states or attention run in kvpress: docs/kvpress_results.py measures them there"
                ) from error
            scores.append(scored.float())
        return scores


def from_kvpress(press: Any) -> Evict:
    """The method that keeps what a press keeps, but for rounding: kvpress rounds the number of entries down.

    The press is one whose method is here too (Knorm, KeyDiff, TOVA, StreamingLLM, SnapKV), any other whose `score`
    reads keys and values alone, or an `AdaKVPress` of one of these; a `UserError` if its interface is another one.
    """
    if (inner := getattr(press, "press", None)) is not None:
        if type(press).__name__ != "AdaKVPress":
            raise UserError(f"{type(press).__name__}: of the presses that wrap another only AdaKVPress is understood")
        return replace(from_kvpress(inner), allocate=Adaptive(press.alpha_safeguard, blend=False))
    ratio = getattr(press, "compression_ratio", None)
    if ratio is None or not callable(getattr(press, "score", None)):
        raise UserError(f"{type(press).__name__} has no compression_ratio and score(), as kvpress's presses have")
    kind: Any = Evict  # as_options adds compression_ratio
    general: Evict = kind(compression_ratio=float(ratio), observer=PressScores(press), pool=NO_POOL)
    named = _TAKEN.get(type(press).__name__) if type(press).__module__.partition(".")[0] == "kvpress" else None
    return named(general.budget, press) if named else general


def to_kvpress(method: Evict) -> Any:
    """The press that keeps what a method keeps: of `KeyNorm`, `KeyDiff`, `TOVA`, `StreamingLLM` and `SnapKV`.

    `allocate=Adaptive(floor, blend=False)` becomes an `AdaKVPress`; SnapKV needs `pool=Pool("avg", 5)`. A `UserError`
    if kvpress is not installed, or has no such press.
    """
    name = type(method).__name__
    if type(method) not in _MADE:
        known = ", ".join(kind.__name__ for kind in _MADE)
        raise UserError(f"{name}: kvpress has no press of the same scores; it has {known}")
    if not isinstance(method.budget, float):
        raise UserError(f"{name}: presses take a share of the prompt; pass compression_ratio= instead of budget=")
    press_name, fields_of = _MADE[type(method)]
    if type(method) is SnapKV and method.pool.kind != "avg":
        raise UserError(f'{name}: kvpress pools by the average; give pool=Pool("avg", {method.pool.kernel})')
    options = fields_of(method)
    again = _TAKEN[press_name](method.budget, SimpleNamespace(**options))
    sharing = method.allocate if isinstance(method.allocate, Adaptive) else None
    shares = sharing is not None and not sharing.blend and not sharing.normalize
    if again != replace(method, allocate=Uniform() if shares else method.allocate):
        raise UserError(f"{method!r}: {press_name} knows only the options of {again!r}")
    try:
        kvpress: Any = importlib.import_module("kvpress")
    except ImportError as error:
        raise UserError(f"kvpress cannot be imported ({error}); version 0.5.5 takes transformers below 5.3") from error
    press = getattr(kvpress, press_name)(compression_ratio=1.0 - method.budget, **options)
    return kvpress.AdaKVPress(press, alpha_safeguard=sharing.floor) if sharing else press
