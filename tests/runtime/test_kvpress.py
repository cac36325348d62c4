"""Presses as methods and methods as presses, with a stand-in for kvpress, which takes an older transformers."""

import sys
from dataclasses import dataclass, make_dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

from keepsight import AdaKV, KeyNorm, SnapKV, StreamingLLM, from_kvpress, generate, to_kvpress
from keepsight.errors import UserError
from keepsight.runtime.allocate import Adaptive
from keepsight.runtime.importance import Pool
from tests.tiny import prompt_ids, tiny_model

FIELDS: dict[str, list[tuple[str, type, Any]]] = {
    "KnormPress": [],
    "KeyDiffPress": [],
    "TOVAPress": [],
    "StreamingLLMPress": [("n_sink", int, 4)],
    "SnapKVPress": [("window_size", int, 64), ("kernel_size", int, 5)],
}


@dataclass
class LargeKeys:
    """Of one's own: the longest keys stay, KnormPress with another sign."""

    compression_ratio: float

    def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        return (keys if hidden_states is None else hidden_states).norm(dim=-1)


@pytest.fixture
def kvpress(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with kvpress's names and fields."""
    module: Any = ModuleType("kvpress")
    for name, extra in FIELDS.items():
        space = {"__module__": "kvpress.presses", "score": lambda self, *_: None}
        setattr(module, name, make_dataclass(name, [("compression_ratio", float, 0.0), *extra], namespace=space))
    space = {"__module__": "kvpress.presses", "compression_ratio": property(lambda self: self.press.compression_ratio)}
    module.AdaKVPress = make_dataclass("AdaKVPress", [("press", Any), ("alpha_safeguard", float, 0.2)], namespace=space)
    monkeypatch.setitem(sys.modules, "kvpress", module)
    return module


def test_presses_and_methods_are_each_others_inverse(kvpress: Any) -> None:
    pairs = [
        (kvpress.KnormPress(0.75), KeyNorm(0.25)),
        (kvpress.StreamingLLMPress(0.5, n_sink=2), StreamingLLM(0.5, sinks=2)),
        (kvpress.SnapKVPress(0.9, 32, 3), SnapKV(0.1, pool=Pool("avg", 3))),
        (
            kvpress.AdaKVPress(kvpress.SnapKVPress(0.5, 16), 0.1),
            SnapKV(0.5, window=16, pool=Pool("avg", 5), allocate=Adaptive(0.1, blend=False)),
        ),
    ]
    for press, method in pairs:
        assert from_kvpress(press) == method
        assert to_kvpress(method) == press


def test_a_press_of_ones_own_scores_every_layer() -> None:
    model, ids = tiny_model(), prompt_ids(40)[0]
    state = from_kvpress(LargeKeys(0.75)).start(model, ids)
    assert {layer.keys.shape[2] for layer in state.layers} == {10}
    whole = KeyNorm(1.0 - 1e-9).start(model, ids).entries()
    for layer, (keys, _, _) in zip(state.layers, whole, strict=True):
        top = keys.norm(dim=-1).topk(10, dim=-1).indices.sort(dim=-1).values
        assert torch.equal(layer.keys, keys.gather(2, top[..., None].expand(-1, -1, -1, keys.shape[-1])))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda press: to_kvpress(SnapKV(64)), "presses take a share of the prompt"),
        (lambda press: to_kvpress(SnapKV(0.5)), 'kvpress pools by the average; give pool=Pool("avg", 7)'),
        (lambda press: to_kvpress(AdaKV(0.5)), "AdaKV: kvpress has no press of the same scores"),
        (lambda press: to_kvpress(KeyNorm(0.5, sinks=4)), "KnormPress knows only the options of KeyNorm(budget=0.5)"),
        (lambda press: from_kvpress(object()), "object has no compression_ratio and score()"),
    ],
)
def test_what_has_no_counterpart_is_refused(kvpress: Any, make: Any, told: str) -> None:
    with pytest.raises(UserError) as error:
        make(kvpress)
    assert told in str(error.value)


def test_a_press_that_reads_hidden_states_is_refused_where_it_scores() -> None:
    class Hidden(LargeKeys):
        def score(self, module: Any, hidden_states: Any, *_: Any) -> Any:
            return hidden_states.norm(dim=-1)

    with pytest.raises(UserError, match="Hidden cannot score from keys and values alone"):
        generate(tiny_model(), prompt_ids(40)[0], from_kvpress(Hidden(0.5)), max_new_tokens=1)
