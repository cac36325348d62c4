"""Presses of kvpress as methods, and methods as presses (github.com/NVIDIA/kvpress, 0.5.5).

kvpress 0.5.5 takes transformers below 5.3 and keepsight 5.18 or later: a press has to come from a newer kvpress,
or be your own class with the same interface: `compression_ratio` and
`score(module, hidden_states, keys, values, attentions, kwargs) -> [B, KV heads, entries]`.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True)
class _Counterpart:
    """A method whose scores are those of a press.

    Attributes:
        method: The method.
        press_fields: For each field of the method that the press has too, the name that it has there.
    """

    method: type[Evict]
    press_fields: Mapping[str, str] = field(default_factory=dict)

    def to_method(self, budget: float, press: Any) -> Evict:
        """The method with a press's options."""
        options: dict[str, Any] = {}
        for name, press_name in self.press_fields.items():
            if name == "pool":
                options[name] = Pool("avg", getattr(press, press_name))
            else:
                options[name] = getattr(press, press_name)
        return self.method(budget, **options)

    def press_options(self, method: Any) -> dict[str, Any]:
        """The press's options for a method."""
        options: dict[str, Any] = {}
        for name, press_name in self.press_fields.items():
            value = getattr(method, name)
            options[press_name] = value.kernel if name == "pool" else value
        return options


_COUNTERPARTS = {
    "KnormPress": _Counterpart(KeyNorm),
    "KeyDiffPress": _Counterpart(KeyDiff),
    "TOVAPress": _Counterpart(TOVA),
    "StreamingLLMPress": _Counterpart(StreamingLLM, {"sinks": "n_sink"}),
    "SnapKVPress": _Counterpart(SnapKV, {"window": "window_size", "pool": "kernel_size"}),
}
"""Presses that are methods here, with the same scores."""


@dataclass(frozen=True)
class PressScores(Observer):
    """The scores of a press that reads keys (after RoPE) and values alone.

    Attributes:
        press: An object with kvpress's `score`.
    """

    press: Any

    @override
    def __call__(self, model: PreTrainedModel, state: State, reduce: Reduce) -> list[Tensor]:
        scores = []
        for index, entries in zip(full_attention_layers(model.config), state.entries(), strict=True):
            module = attention_of(model, index)
            try:
                layer_scores = self.press.score(module, None, entries.keys, entries.values, None, {})
            except (AttributeError, KeyError, TypeError) as error:
                raise UserError(
                    f"{type(self.press).__name__} cannot score from keys and values alone ({error}); presses that read "
                    "hidden states or attention run in kvpress: docs/kvpress_results.py measures them there"
                ) from error
            scores.append(layer_scores.float())
        return scores


def from_kvpress(press: Any) -> Evict:
    """The method that keeps what a press keeps, but for rounding: kvpress rounds the number of entries down.

    The press is one whose method is here too (Knorm, KeyDiff, TOVA, StreamingLLM, SnapKV), any other whose `score`
    reads keys and values alone, or an `AdaKVPress` of one of these; a `UserError` if its interface is another one.
    """
    name = type(press).__name__
    wrapped_press = getattr(press, "press", None)
    if wrapped_press is not None:
        if name != "AdaKVPress":
            raise UserError(f"{name}: of the presses that wrap another only AdaKVPress is understood")
        return replace(from_kvpress(wrapped_press), allocate=Adaptive(press.alpha_safeguard, blend=False))

    ratio = getattr(press, "compression_ratio", None)
    if ratio is None or not callable(getattr(press, "score", None)):
        raise UserError(f"{name} has no compression_ratio and score(), as kvpress's presses have")
    kind: Any = Evict  # as_options adds compression_ratio
    method: Evict = kind(compression_ratio=float(ratio), observer=PressScores(press), pool=NO_POOL)
    package = type(press).__module__.partition(".")[0]
    if package == "kvpress" and name in _COUNTERPARTS:
        return _COUNTERPARTS[name].to_method(method.budget, press)
    return method


def to_kvpress(method: Evict) -> Any:
    """The press that keeps what a method keeps: of `KeyNorm`, `KeyDiff`, `TOVA`, `StreamingLLM` and `SnapKV`.

    `allocate=Adaptive(floor, blend=False)` becomes an `AdaKVPress`; SnapKV needs `pool=Pool("avg", 5)`. A `UserError`
    if kvpress is not installed, or has no such press.
    """
    name = type(method).__name__
    press_names = {counterpart.method: press_name for press_name, counterpart in _COUNTERPARTS.items()}
    if type(method) not in press_names:
        methods = ", ".join(kind.__name__ for kind in press_names)
        raise UserError(f"{name}: kvpress has no press of the same scores; it has {methods}")
    if not isinstance(method.budget, float):
        raise UserError(f"{name}: presses take a share of the prompt; pass compression_ratio= instead of budget=")
    if type(method) is SnapKV and method.pool.kind != "avg":
        raise UserError(f'{name}: kvpress pools by the average; give pool=Pool("avg", {method.pool.kernel})')

    press_name = press_names[type(method)]
    counterpart = _COUNTERPARTS[press_name]
    options = counterpart.press_options(method)
    # What the press cannot express is seen by translating it back.
    expressed = counterpart.to_method(method.budget, SimpleNamespace(**options))
    sharing = method.allocate if isinstance(method.allocate, Adaptive) else None
    allocate = method.allocate
    if sharing is not None and not sharing.blend and not sharing.normalize:
        allocate = Uniform()  # the wrapper shares the budget
    if expressed != replace(method, allocate=allocate):
        raise UserError(f"{method!r}: {press_name} knows only the options of {expressed!r}")

    try:
        kvpress: Any = importlib.import_module("kvpress")
    except ImportError as error:
        raise UserError(f"kvpress cannot be imported ({error}); version 0.5.5 takes transformers below 5.3") from error
    press = getattr(kvpress, press_name)(compression_ratio=1.0 - method.budget, **options)
    if sharing is None:
        return press
    return kvpress.AdaKVPress(press, alpha_safeguard=sharing.floor)
