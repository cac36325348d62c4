"""SimLayerKV against a slow loop written from its definition."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from keepsight.errors import Code
from keepsight.runtime.allocate import shortened
from keepsight.runtime.methods import SimLayerKV
from keepsight.runtime.methods.simlayerkv import LazyLayers
from keepsight.runtime.observe import PromptWindow
from keepsight.runtime.state import prefill
from tests.refused import refused
from tests.tiny import prompt_ids, tiny_model

LENGTH = 60
SINKS = 4


def slow_laziness(queries: Tensor, keys: Tensor, recent: int) -> float:
    """The attention of the last token, queries [H, d], to the first and the last of keys [K, n, d], mean over heads."""
    heads, width = queries.shape
    kv_heads, length, _ = keys.shape
    total = 0.0
    for head in range(heads):
        head_keys = keys[head * kv_heads // heads]
        logits = [float(queries[head].double() @ head_keys[entry].double()) / width**0.5 for entry in range(length)]
        weights = np.exp(np.array(logits) - max(logits))
        weights = weights / weights.sum()
        total += weights[:SINKS].sum() + weights[length - recent :].sum()
    return total / heads


def laziness_of_layers(model: Any, ids: Tensor, recent: int) -> list[float]:
    state = prefill(model, ids)
    laziness = []
    for layer in state.layers:
        assert layer.recorded is not None
        assert layer.recorded.queries is not None
        laziness.append(slow_laziness(layer.recorded.queries[0, :, -1], layer.keys[0], recent))
    return laziness


def kept_of_layers(state: Any, full_cache: Any) -> list[list[int]]:
    """Of each layer the entries that all of its heads keep."""
    kept = []
    for layer, full_layer in zip(state.entries(), full_cache.entries(), strict=True):
        kept_of_heads = set()
        for head in range(full_layer.keys.shape[1]):
            keys = layer.keys[0, head]
            if layer.real is not None:
                keys = keys[layer.real[0, min(head, layer.real.shape[1] - 1)]]
            positions = torch.cdist(keys, full_layer.keys[0, head]).argmin(dim=1)
            kept_of_heads.add(tuple(positions.tolist()))
        (kept_of_layer,) = kept_of_heads
        kept.append([*kept_of_layer])
    return kept


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_layers_above_the_threshold_keep_the_ends_alone(seed: int) -> None:
    model = tiny_model(seed=seed)
    ids, _ = prompt_ids(LENGTH, seed=seed)
    laziness = laziness_of_layers(model, ids, 10)
    threshold = sorted(laziness)[1] - 1e-4  # two of three layers are above it
    method = SimLayerKV(1.0, allocate=LazyLayers(10, threshold))
    kept = kept_of_layers(method.start(model, ids), prefill(model, ids))
    for layer, entries in enumerate(kept):
        expected = [*range(LENGTH)]
        if laziness[layer] > threshold:
            expected = [*range(SINKS), *range(LENGTH - 10, LENGTH)]
        assert entries == expected
    nothing_lazy = SimLayerKV(1.0, allocate=LazyLayers(10, 1.0))
    assert nothing_lazy.start(model, ids).counts().unique().tolist() == [LENGTH]


@pytest.mark.parametrize(("budget", "lazy"), [(50, 1), (30, 2), (10, 3)])
def test_as_many_layers_are_lazy_as_the_budget_requires(budget: int, lazy: int) -> None:
    model = tiny_model()
    ids, _ = prompt_ids(LENGTH)
    method = SimLayerKV(budget, allocate=LazyLayers(10))
    state = method.start(model, ids)
    kept = kept_of_layers(state, prefill(model, ids))
    assert sum(map(len, kept)) == 3 * budget

    short = min(SINKS + 10, max(budget // 2, SINKS + 1))
    laziness = laziness_of_layers(model, ids, short - SINKS)
    lazy_layers = sorted(range(3), key=lambda layer: -laziness[layer])[:lazy]
    for layer, entries in enumerate(kept):
        if layer not in lazy_layers:
            assert entries == [*range(LENGTH)]
            continue
        assert len(entries) >= short
        assert entries == [*range(SINKS), *range(LENGTH - len(entries) + SINKS, LENGTH)]


def test_rows_of_a_batch_have_lazy_layers_of_their_own() -> None:
    model = tiny_model()
    ids, mask = prompt_ids(LENGTH, 45)
    for method in (SimLayerKV(25, allocate=LazyLayers(6)), SimLayerKV(0.9, allocate=LazyLayers(6, 0.3))):
        batch = method.start(model, ids, mask).counts()
        for row, length in enumerate((LENGTH, 45)):
            alone = method.start(model, ids[row : row + 1, LENGTH - length :]).counts()
            assert batch[:, row].tolist() == alone[:, 0].tolist()


def test_the_first_units_of_the_order_are_short() -> None:
    real = np.array([[10, 10], [10, 4], [10, 10]])
    short = np.array([[3, 3], [3, 3], [3, 3]])
    order = np.array([1, 2, 0])
    assert shortened(real, short, order, 10).tolist() == [[10, 10], [10, 4], [10, 10]]
    assert shortened(real, short, order, 1).tolist() == [[1, 1], [1, 1], [1, 1]]

    counts = shortened(real, short, order, 8)  # 48 entries: the second unit is short, and the third has to share
    assert counts.sum() == 48
    assert counts[0].tolist() == [10, 10]
    assert (counts[1] >= 3).all()


def test_what_does_not_fit_is_refused() -> None:
    wrong: list[tuple[dict[str, Any], str, Code]] = [
        ({"during_prefill": True}, "during_prefill", "conflict"),
        ({"allocate": {"threshold": 1.5}}, "threshold", "range"),
        ({"allocate": {"recent": 0}}, "recent", "range"),
        ({"observer": PromptWindow(1), "value_norm": 3}, "value_norm", "type"),
    ]
    for options, field, code in wrong:
        with refused(field, code):
            SimLayerKV(20, **options)
