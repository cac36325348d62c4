"""Eviction during the prefill: the entries that stay are those of an eviction after it, and only one layer is whole."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from keepsight.models.decoder import decoder_of
from keepsight.runtime.allocate import Adaptive, Global
from keepsight.runtime.drafting.observer import DraftObserver
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import generate
from keepsight.runtime.importance import Pool
from keepsight.runtime.methods import H2O, TOVA, AdaKV, KeyNorm, PyramidKV, RandomEntries, SnapKV, StreamingLLM
from keepsight.runtime.methods.drafts import OwnAnswer
from keepsight.runtime.methods.positions import Earliness
from keepsight.runtime.state import State, cache_bytes, read
from tests.families import family_model, fresh_model
from tests.refused import refused
from tests.runtime.family_methods import grid
from tests.runtime.scoring import recorded
from tests.runtime.test_images import QWEN, prompt
from tests.tiny import prompt_ids, tiny_model

METHODS = {
    "snapkv": SnapKV(20, window=6, pool=Pool(kernel=3)),
    "snapkv of a ratio": SnapKV(0.4, window=3),
    "snapkv that evicts again": SnapKV(20, window=6, every=4),
    "h2o": H2O(20, window=6),
    "h2o by head": H2O(20, window=6, allocate=Adaptive()),
    "tova": TOVA(20),
    "key_norm": KeyNorm(20),
    "random": RandomEntries(20),
    "streamingllm": StreamingLLM(20),
    "earliness": StreamingLLM(20, observer=Earliness(), window=4),
    "pyramidkv": PyramidKV(26, window=6),
    "adakv": AdaKV(20, window=6),
    "adakv of kvpress": AdaKV(20, window=6, allocate=Adaptive(blend=False, floor=0.5)),
}


def assert_same(one: State, other: State) -> None:
    """The same entries in the same order, and the same records of them."""
    for ours, theirs in zip(one.entries(), other.entries(), strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
        every = ours.keys.new_ones(ours.keys.shape[:3], dtype=torch.bool)
        mine, yours = (every if each.real is None else each.real & every for each in (ours, theirs))
        assert torch.equal(mine, yours)
    for name in ("queries", "accumulated"):
        for mine, yours in zip(recorded(one, name), recorded(other, name), strict=True):
            assert torch.equal(mine, yours)
    for mine, yours in zip(
        (one.logits, one.tokens, one.lengths), (other.logits, other.tokens, other.lengths), strict=True
    ):
        assert torch.equal(mine, yours)
    assert (one.attention_mask() is None) == (other.attention_mask() is None)


@pytest.mark.parametrize(("lengths", "chunk"), [((70, 41, 15), 16), ((70,), None), ((12, 9), None)])
@pytest.mark.parametrize("name", METHODS)
def test_the_same_entries_stay(name: str, lengths: tuple[int, ...], chunk: int | None) -> None:
    model, method, (ids, mask) = tiny_model(), METHODS[name], prompt_ids(*lengths)
    during = method.start(model, ids, mask, chunk=chunk)
    after = replace(method, during_prefill=False).start(model, ids, mask, chunk=chunk)
    assert_same(during, after)
    token = ids[:, -1:]
    (during, logits), (after, expected) = (read(model, state, token) for state in (during, after))
    assert torch.allclose(logits, expected, atol=1e-5)
    assert_same(replace(during, logits=after.logits), after)


@pytest.mark.parametrize(("family", "name"), grid(["h2o", "adakv"]))
def test_the_same_entries_stay_in_every_family(family: str, name: str) -> None:
    model, method, (ids, mask) = family_model(family), METHODS[name], prompt_ids(70, 41)
    padded = not any("linear" in kind for kind in getattr(model.config.get_text_config(), "layer_types", None) or [])
    given = (ids, mask) if padded else (ids[:1], None)
    assert_same(method.start(model, *given), replace(method, during_prefill=False).start(model, *given))


class Layers:
    """Watches the layers of a cache while a model fills it.

    Attributes:
        bytes: After each layer, the bytes held.
        whole: After each layer, how many are still whole.
        alive: After each layer, how many of those that were whole still exist.
    """

    def __init__(self, model: Any) -> None:
        self.bytes: list[int] = []
        self.whole: list[int] = []
        self.alive: list[int] = []
        self._filled: list[weakref.ref[Any]] = []
        for layer in decoder_of(model).layers:
            layer.register_forward_pre_hook(self._begin, with_kwargs=True)
            layer.register_forward_hook(self._look, with_kwargs=True)

    def _begin(self, module: Any, args: Any, options: dict[str, Any]) -> None:
        self._filled.append(weakref.ref(options["past_key_values"].layers[len(self._filled)]))

    def _look(self, module: Any, args: Any, options: dict[str, Any], output: Any) -> None:
        cache = options["past_key_values"]
        self.bytes.append(cache_bytes(cache))
        self.whole.append(sum(layer.is_initialized and layer.keys.shape[2] == layer.seen for layer in cache.layers))
        self.alive.append(sum(layer() is not None for layer in self._filled))


@pytest.mark.parametrize("during", [None, False])
def test_no_more_than_one_layer_is_whole(during: bool | None) -> None:
    model, ids = tiny_model(), prompt_ids(200)[0]
    watched = Layers(model)
    SnapKV(20, window=6, during_prefill=during).start(model, ids)
    of_entry = 2 * 8 * 2 * 4  # KV heads, dimensions, keys and values, bytes
    if during is None:
        assert watched.whole == watched.alive == [0, 0, 0]
        assert watched.bytes == [20 * of_entry, 40 * of_entry, 60 * of_entry]
    else:
        assert watched.whole == watched.alive == [1, 2, 3]
        assert watched.bytes == [200 * of_entry, 400 * of_entry, 600 * of_entry]


def test_no_more_than_one_layer_is_whole_where_there_are_images() -> None:
    model = fresh_model(QWEN)
    watched = Layers(model)
    generate(model, method=SnapKV(20, window=6), max_new_tokens=1, **prompt(QWEN))
    assert watched.whole == watched.alive == [0] * 4


def test_an_observer_that_looks_back_evicts_after_the_prefill() -> None:
    observer = DraftObserver(OwnAnswer(6))
    model, ids = tiny_model(), prompt_ids(60)[0]
    assert Evict(20, observer).start(model, ids).counts().unique().tolist() == [20]
    with refused("during_prefill", "conflict"):
        Evict(20, observer, during_prefill=True)


def test_a_budget_that_all_layers_share_is_divided_after_the_prefill() -> None:
    model, ids = tiny_model(), prompt_ids(60)[0]
    watched = Layers(model)
    SnapKV(20, window=6, allocate=Global()).start(model, ids)
    assert watched.whole == [1, 2, 3]
    with refused("during_prefill", "conflict"):
        SnapKV(20, window=6, allocate=Global(), during_prefill=True)
