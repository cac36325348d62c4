"""ThinK against a slow loop over channels, and against whole keys with zeros in the channels that it drops."""

from typing import Any

import pytest
import torch
from torch import Tensor

from keepsight import generate
from keepsight.runtime.attention import Softmax
from keepsight.runtime.importance import recorded_queries
from keepsight.runtime.methods import AdaKV, SnapKV, StreamingLLM, ThinK, make_method
from keepsight.runtime.quantized.think import ThinLayer
from keepsight.runtime.state import State, prefill, read
from tests.close import assert_close
from tests.refused import refused
from tests.tiny import prompt_ids, tiny_model

LENGTH = 45
WINDOW = 6
KV_HEADS = 2
WIDTH = 8
TURN = prompt_ids(9, seed=4)[0]


def slow_channels(queries: Tensor, keys: Tensor, dropped: int) -> list[int]:
    """The channels of a KV head that stay: queries [G, w, d] of its query heads, keys [n, d]."""
    width = keys.shape[1]
    scores = []
    for channel in range(width):
        query_squares = [float(query[channel]) ** 2 for query in queries.flatten(0, 1)]
        key_squares = [float(key[channel]) ** 2 for key in keys]
        scores.append(sum(query_squares) / len(query_squares) * sum(key_squares) / len(key_squares))
    ascending = sorted(range(width), key=lambda channel: scores[channel])
    return sorted(ascending[dropped:])


def zeroed(model: Any, state: State, share: float, inner: Any = None) -> State:
    """A state whose older keys have zeros in the channels that a slow loop drops."""
    queries = [recorded_queries(layer, WINDOW).queries for layer in state.layers]
    thinned = state.copy() if inner is None else inner.compress_state(model, state)
    for layer, layer_queries in zip(thinned.layers, queries, strict=True):
        keys = layer.keys.clone()
        for row in range(keys.shape[0]):
            for head in range(KV_HEADS):
                group = layer_queries[row, 2 * head : 2 * head + 2]
                channels = slow_channels(group, keys[row, head], int(WIDTH * share))
                dropped = [channel for channel in range(WIDTH) if channel not in channels]
                keys[row, head, :-WINDOW, dropped] = 0.0
        layer.keys = keys
    return thinned


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("inner", [None, StreamingLLM(20), SnapKV(20, window=8)])
def test_answers_are_those_of_keys_with_zeros(share: float, inner: Any) -> None:
    model = tiny_model()
    ids, _ = prompt_ids(LENGTH, LENGTH)
    method = ThinK(share=share, window=WINDOW, inner=inner)
    full = prefill(model, ids, needs=method.needs())
    expected = zeroed(model, full, share, inner)
    state = method.start(model, ids)
    for layer, expected_layer in zip(state.entries(), expected.entries(), strict=True):
        assert_close(layer.keys, expected_layer.keys)
        assert_close(layer.values, expected_layer.values)

    turn = TURN.expand(2, -1)
    state, logits = read(model, state, turn)
    expected, expected_logits = read(model, expected, turn)
    assert_close(logits, expected_logits)
    _, logits = read(model, state, turn[:, :1])
    _, expected_logits = read(model, expected, turn[:, :1])
    assert_close(logits, expected_logits)


def test_bytes_are_saved() -> None:
    model = tiny_model()
    ids, _ = prompt_ids(LENGTH)
    full = prefill(model, ids)
    state = ThinK(share=0.5, window=WINDOW).start(model, ids)
    key_bytes = WIDTH * 4
    saved_by_head = (LENGTH - WINDOW) * key_bytes // 2
    channel_numbers = 4 * 8
    assert full.kv_bytes - state.kv_bytes == 3 * KV_HEADS * (saved_by_head - channel_numbers)
    assert state.counts().unique().tolist() == [LENGTH]


def test_attention_in_blocks_and_with_sinks() -> None:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    thin_keys = random(1, 2, 5, 4)
    channels = torch.tensor([[[0, 2, 5, 7], [1, 2, 3, 6]]])
    thin_values = random(1, 2, 5, 8)
    window_keys = random(1, 2, 3, 8)
    window_values = random(1, 2, 3, 8)
    layer = ThinLayer(thin_keys, channels, thin_values, window_keys, window_values, 8)
    queries = random(1, 4, 150, 8)
    keys = random(1, 2, 150, 8)
    values = random(1, 2, 150, 8)
    softmax = Softmax(0.3, softcap=5.0, sinks=random(4))
    layer.update(keys, values)
    output = layer.attend(queries, keys, values, softmax)
    entries = layer.entries()
    for head in range(4):
        logits = (queries[0, head] @ entries.keys[0, head // 2].T * 0.3 / 5.0).tanh() * 5.0
        later = torch.ones_like(logits, dtype=torch.bool).triu(9)
        logits.masked_fill_(later, -torch.inf)
        sinks: Any = softmax.sinks
        with_sink = torch.cat([logits, sinks[head].expand(150, 1)], dim=1)
        weights = with_sink.softmax(dim=1)[:, :-1]
        assert_close(output[0, :, head], weights @ entries.values[0, head // 2])


def test_short_prompts_keep_all_channels() -> None:
    model = tiny_model()
    ids, _ = prompt_ids(WINDOW)
    options: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": None}
    answer = generate(model, ids, ThinK(window=WINDOW), **options)
    assert torch.equal(answer, generate(model, ids, **options))
    assert make_method("think", None, share=0.4) == make_method("think", 64, share=0.4) == ThinK(0.4)


def test_what_cannot_be_thinned_is_refused() -> None:
    model = tiny_model()
    ids, mask = prompt_ids(LENGTH, 30)
    with refused("prompt", "conflict"):
        ThinK().start(model, ids, mask)
    with refused("share", "range"):
        ThinK(share=1.5)
    for inner in (SnapKV(20, window=8, every=2), SnapKV(20, window=8, rerotate=True)):
        with refused("inner", "conflict"):
            ThinK(inner=inner)
    with refused("allocate", "conflict"):
        ThinK(inner=AdaKV(20, window=8)).start(model, ids[:1])
    with refused("inner", "type"):
        make_method("think", None, inner=3)
