"""Compactor against slow loops written from its definition, alone, padded, and after an eviction."""

import math

import pytest
import torch
from torch import Tensor

from keepsight import Conversation
from keepsight.runtime.importance import Reduce
from keepsight.runtime.methods import Compactor, SnapKV
from keepsight.runtime.methods.compactor import LeverageAndBlocks, leverage_scores
from keepsight.runtime.state import prefill, read
from tests.close import assert_close
from tests.refused import refused
from tests.tiny import prompt_ids, tiny_model

LENGTH = 45
BLOCK = 9
SINKS = 8
WINDOW = 4
THETA = 10000.0


def slow_unrotated(key: Tensor, position: int) -> list[float]:
    """A key [d] before RoPE, which turned it by its position."""
    width = len(key)
    half = width // 2
    unrotated = [0.0] * width
    for pair in range(half):
        angle = position * THETA ** (-2 * pair / width)
        x = float(key[pair])
        y = float(key[pair + half])
        unrotated[pair] = x * math.cos(angle) + y * math.sin(angle)
        unrotated[pair + half] = y * math.cos(angle) - x * math.sin(angle)
    return unrotated


def slow_leverage(keys: list[list[float]]) -> list[float]:
    """The leverage of each key [n][d], with a ridge of 0.01."""
    matrix = torch.tensor(keys, dtype=torch.float64)
    centred = matrix - matrix.mean(dim=0)
    ridge = 0.01 * torch.eye(centred.shape[1], dtype=torch.float64)
    inverse = torch.linalg.inv(centred.T @ centred + ridge)
    return [float(key @ inverse @ key) for key in centred]


def slow_attention(queries: Tensor, keys: Tensor, values: Tensor) -> list[float]:
    """Of a KV head: attention within blocks, times the norms of values, smoothed over three entries.

    Queries [G, n, d], keys and values [n, d].
    """
    group, length, width = queries.shape
    attention = [0.0] * length
    for head_queries in queries.double():
        for index, query in enumerate(head_queries):
            first = index // BLOCK * BLOCK
            block = range(first, min(first + BLOCK, length))
            powers = [math.exp(float(query @ keys[entry].double()) / math.sqrt(width)) for entry in block]
            for entry, power in zip(block, powers, strict=True):
                attention[entry] += power / sum(powers) / group
    weighted = [share * float(value.norm()) for share, value in zip(attention, values, strict=True)]
    padded = [0.0, *weighted, 0.0]
    return [sum(padded[index : index + 3]) / 3 for index in range(length)]


def standardised(heads: list[list[float]]) -> Tensor:
    """Scores [K][n] of a layer with mean 0 and deviation 1."""
    scores = torch.tensor(heads, dtype=torch.float64)
    return (scores - scores.mean()) / scores.std()


def slow_scores(queries: Tensor, keys: Tensor, values: Tensor, first: int, blend: float) -> Tensor:
    """The scores [K, n] of entries at positions from `first` on: queries [H, n, d], keys and values [K, n, d]."""
    leverage = []
    attention = []
    for head in range(len(keys)):
        unrotated = [slow_unrotated(key, first + index) for index, key in enumerate(keys[head])]
        leverage.append(slow_leverage(unrotated))
        attention.append(slow_attention(queries[2 * head : 2 * head + 2], keys[head], values[head]))
    return blend * standardised(leverage) + standardised(attention)


@pytest.mark.parametrize("blend", [None, 0.3])
def test_scores_are_those_of_the_definition(blend: float | None) -> None:
    model = tiny_model()
    ids, mask = prompt_ids(LENGTH, 33)
    method = Compactor(20, observer=LeverageAndBlocks(BLOCK, blend=blend))
    state = prefill(model, ids, mask, needs=method.needs())
    for layer, scores in zip(state.layers, method.bound_observer(model, state, Reduce()), strict=True):
        assert layer.recorded is not None and layer.recorded.queries is not None
        for row, length in enumerate((LENGTH, 33)):
            scored = slice(LENGTH - length + SINKS, LENGTH - WINDOW)
            expected = slow_scores(
                layer.recorded.queries[row, :, scored],
                layer.keys[row, :, scored],
                layer.values[row, :, scored],
                SINKS,
                1 - 20 / length if blend is None else blend,
            )
            assert_close(scores[row, :, scored], expected.float())


def test_heads_keep_sinks_the_end_and_the_best() -> None:
    model = tiny_model()
    ids, _ = prompt_ids(LENGTH)
    method = Compactor(20, observer=LeverageAndBlocks(BLOCK))
    state = prefill(model, ids, needs=method.needs())
    scores = method.bound_observer(model, state, Reduce())
    _, selected = method.evict(model, state)
    for layer_scores, mask in zip(scores, selected, strict=True):
        for head in range(2):
            free_scores = layer_scores[0, head, SINKS : LENGTH - WINDOW]
            ranking = free_scores.argsort(descending=True, stable=True) + SINKS
            best = ranking[: 20 - SINKS - WINDOW].tolist()
            expected = {*range(SINKS), *best, *range(LENGTH - WINDOW, LENGTH)}
            assert {*mask[0, head].nonzero()[:, 0].tolist()} == expected


def test_a_projection_to_fewer_dimensions_spreads_leverage_over_them() -> None:
    keys = torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(1))
    unprojected = leverage_scores(keys, 48, 0)
    assert unprojected.sum(dim=1).tolist() == pytest.approx([8.0, 8.0], abs=0.05)
    projected = leverage_scores(keys, 3, 0)
    assert projected.sum(dim=1).tolist() == pytest.approx([3.0, 3.0], abs=0.05)
    assert torch.equal(projected, leverage_scores(keys, 3, 0))
    assert not torch.equal(projected, leverage_scores(keys, 3, 1))
    generator = torch.Generator().manual_seed(0)
    projection = torch.randn(2, 8, 3, generator=generator) / math.sqrt(3)
    expected = [slow_leverage(head_keys) for head_keys in (keys @ projection).tolist()]
    assert_close(projected, torch.tensor(expected))


def test_entries_keep_their_scores_in_further_evictions() -> None:
    model = tiny_model()
    ids, _ = prompt_ids(LENGTH)
    turn = prompt_ids(17, seed=3)[0]
    method = Compactor(24, observer=LeverageAndBlocks(BLOCK, blend=0.4))
    prompt_state = prefill(model, ids, needs=method.needs())
    prompt_scores = method.bound_observer(model, prompt_state, Reduce())
    evicted, selected = method.evict(model, prompt_state)
    after_turn, _ = read(model, evicted, turn)
    turn_scores = method.bound_observer(model, after_turn, Reduce())
    for index, layer in enumerate(after_turn.layers):
        scores = turn_scores[index]
        for head in range(2):
            mask = selected[index][0, head]
            assert_close(scores[0, head, :24], prompt_scores[index][0, head][mask])
        assert layer.recorded is not None and layer.recorded.queries is not None
        scored = slice(24, 24 + 17 - WINDOW)
        expected = slow_scores(
            layer.recorded.queries[0, :, -17:-WINDOW],
            layer.keys[0, :, scored],
            layer.values[0, :, scored],
            LENGTH,
            0.4,
        )
        assert_close(scores[0, :, scored], expected.float())
    evicted_again = method.compress_state(model, after_turn)
    assert evicted_again.counts().unique().tolist() == [24]


def test_a_conversation_goes_on_and_takes_tokens_back() -> None:
    model = tiny_model()
    ids, _ = prompt_ids(30)
    for budget in (20, 400):
        conversation = Conversation(model, Compactor(budget, observer=LeverageAndBlocks(BLOCK)))
        for turn in (ids, prompt_ids(9, seed=1)[0], prompt_ids(9, seed=2)[0]):
            conversation.say(turn, max_new_tokens=4, eos_token_id=None)
        state = conversation.state
        assert state is not None
        assert state.length <= budget + 4
        shorter = state.without_last(6)
        assert shorter.tokens.shape[1] == state.tokens.shape[1] - 6


def test_entries_that_another_method_kept_are_refused() -> None:
    model = tiny_model()
    ids, _ = prompt_ids(LENGTH)
    method = Compactor(20, observer=LeverageAndBlocks(BLOCK))
    needs = method.needs() | SnapKV(30, window=8).needs()
    snapkv = SnapKV(30, window=8)
    full_state = prefill(model, ids, needs=needs)
    kept_by_snapkv = snapkv.compress_state(model, full_state)
    with refused("state", "state"):
        method.compress_state(model, kept_by_snapkv)
    scored_once = Compactor(40, observer=LeverageAndBlocks(BLOCK)).compress_state(model, full_state)
    after_turn = SnapKV(400, window=8).resume(model, scored_once, prompt_ids(9)[0])
    kept_by_both = snapkv.compress_state(model, after_turn)
    with refused("state", "state"):
        method.compress_state(model, kept_by_both)
    unrecorded = prefill(model, ids).unrecorded()
    with refused("window", "state"):
        method.compress_state(model, unrecorded)
    with refused("during_prefill", "conflict"):
        Compactor(20, during_prefill=True)
