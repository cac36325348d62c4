"""Eviction during the prefill: the entries that stay are those of an eviction after it, and only one layer is full."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

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


def real_entries(entries: Any) -> Tensor:
    """Which entries are no padding, [B, K, C] bool."""
    every = entries.keys.new_ones(entries.keys.shape[:3], dtype=torch.bool)
    return every if entries.real is None else entries.real & every


def assert_same(state: State, expected: State) -> None:
    """The same entries in the same order, and the same records of them."""
    for layer, expected_layer in zip(state.entries(), expected.entries(), strict=True):
        assert torch.equal(layer.keys, expected_layer.keys)
        assert torch.equal(layer.values, expected_layer.values)
        assert torch.equal(real_entries(layer), real_entries(expected_layer))
    for name in ("queries", "accumulated"):
        for record, expected_record in zip(recorded(state, name), recorded(expected, name), strict=True):
            assert torch.equal(record, expected_record)
    assert torch.equal(state.logits, expected.logits)
    assert torch.equal(state.tokens, expected.tokens)
    assert torch.equal(state.lengths, expected.lengths)
    assert (state.attention_mask() is None) == (expected.attention_mask() is None)


@pytest.mark.parametrize(("lengths", "chunk"), [((70, 41, 15), 16), ((70,), None), ((12, 9), None)])
@pytest.mark.parametrize("name", METHODS)
def test_the_same_entries_stay(name: str, lengths: tuple[int, ...], chunk: int | None) -> None:
    model = tiny_model()
    method = METHODS[name]
    ids, mask = prompt_ids(*lengths)
    during = method.start(model, ids, mask, chunk=chunk)
    after = replace(method, during_prefill=False).start(model, ids, mask, chunk=chunk)
    assert_same(during, after)

    token = ids[:, -1:]
    during, logits = read(model, during, token)
    after, expected = read(model, after, token)
    assert torch.allclose(logits, expected, atol=1e-5)
    assert_same(replace(during, logits=after.logits), after)


@pytest.mark.parametrize(("family", "name"), grid(["h2o", "adakv"]))
def test_the_same_entries_stay_in_every_family(family: str, name: str) -> None:
    model = family_model(family)
    method = METHODS[name]
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or []
    ids, mask = prompt_ids(70, 41)
    prompt_inputs: tuple[Tensor, Tensor | None] = (ids, mask)
    if any("linear" in kind for kind in layer_types):  # whose recurrent states take no padding
        prompt_inputs = (ids[:1], None)
    during = method.start(model, *prompt_inputs)
    after = replace(method, during_prefill=False).start(model, *prompt_inputs)
    assert_same(during, after)


class Layers:
    """Watches the layers of a cache while a model fills it.

    Attributes:
        bytes: After each layer, the bytes held.
        full: After each layer, how many still have all entries.
        alive: After each layer, how many of those that had all entries still exist.
    """

    def __init__(self, model: Any) -> None:
        self.bytes: list[int] = []
        self.full: list[int] = []
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
        self.full.append(sum(layer.is_initialized and layer.keys.shape[2] == layer.seen for layer in cache.layers))
        self.alive.append(sum(layer() is not None for layer in self._filled))


@pytest.mark.parametrize("during", [None, False])
def test_no_more_than_one_layer_is_full(during: bool | None) -> None:
    model = tiny_model()
    ids = prompt_ids(200)[0]
    watched = Layers(model)
    SnapKV(20, window=6, during_prefill=during).start(model, ids)
    entry_bytes = 2 * 8 * 2 * 4  # KV heads, dimensions, keys and values, bytes
    if during is None:
        assert watched.full == watched.alive == [0, 0, 0]
        assert watched.bytes == [20 * entry_bytes, 40 * entry_bytes, 60 * entry_bytes]
    else:
        assert watched.full == watched.alive == [1, 2, 3]
        assert watched.bytes == [200 * entry_bytes, 400 * entry_bytes, 600 * entry_bytes]


def test_no_more_than_one_layer_is_full_where_there_are_images() -> None:
    model = fresh_model(QWEN)
    watched = Layers(model)
    generate(model, method=SnapKV(20, window=6), max_new_tokens=1, **prompt(QWEN))
    assert watched.full == watched.alive == [0] * 4


def test_an_observer_that_looks_back_evicts_after_the_prefill() -> None:
    observer = DraftObserver(OwnAnswer(6))
    state = Evict(20, observer).start(tiny_model(), prompt_ids(60)[0])
    assert state.counts().unique().tolist() == [20]
    with refused("during_prefill", "conflict"):
        Evict(20, observer, during_prefill=True)


def test_a_budget_that_all_layers_share_is_divided_after_the_prefill() -> None:
    model = tiny_model()
    ids = prompt_ids(60)[0]
    watched = Layers(model)
    SnapKV(20, window=6, allocate=Global()).start(model, ids)
    assert watched.full == [1, 2, 3]
    with refused("during_prefill", "conflict"):
        SnapKV(20, window=6, allocate=Global(), during_prefill=True)
