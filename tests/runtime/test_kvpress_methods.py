"""LagKV and Q-Filters: scores against slow loops over entries, alone, padded and after an eviction."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from keepsight import generate
from keepsight.errors import UserError
from keepsight.runtime.importance import Reduce
from keepsight.runtime.methods import LagKV, QFilters, Resources, make_method
from keepsight.runtime.methods.lagkv import LagRelative
from keepsight.runtime.methods.qfilters import FilteredKeys, QueryDirections
from keepsight.runtime.state import prefill
from tests.close import assert_close
from tests.tiny import prompt_ids, tiny_model

LENGTHS = [43, 30]
LAG = 8
SINKS = 4
REDUCE = Reduce()


def slow_lag_scores(keys: Tensor, values: Tensor) -> list[float]:
    """The scores of one head's entries, keys and values [n, d]."""
    length = len(keys)
    partitions = (length - SINKS) // LAG
    scores = [1 + position / length for position in range(length)]
    if partitions < 2:
        return scores
    for partition in range(partitions - 1):
        first = SINKS + partition * LAG
        key_deviation = slow_deviation(keys[first : first + LAG], keys[first + LAG : first + 2 * LAG])
        value_deviation = slow_deviation(values[first : first + LAG], values[first + LAG : first + 2 * LAG])
        deviations = [of_key + of_value for of_key, of_value in zip(key_deviation, value_deviation, strict=True)]
        for position, deviation in enumerate(deviations, start=first):
            lower = sum(other < deviation for other in deviations)
            scores[position] = lower / LAG
    return scores


def slow_deviation(states: Tensor, following: Tensor) -> list[float]:
    """Softmax over a partition's entries of the deviation of their channels, scaled by the partition that follows."""
    deviations = []
    for state in states.tolist():
        scaled = []
        for value, channel in zip(state, following.T.tolist(), strict=True):
            lowest = min(channel)
            scaled.append((value - lowest) / (max(channel) - lowest))
        mean = sum(scaled) / len(scaled)
        variance = sum((value - mean) ** 2 for value in scaled) / (len(scaled) - 1)
        deviations.append(math.sqrt(variance))
    total = sum(math.exp(deviation) for deviation in deviations)
    return [math.exp(deviation) / total for deviation in deviations]


def test_lag_scores_are_those_of_the_definition() -> None:
    model = tiny_model()
    ids, mask = prompt_ids(*LENGTHS)
    state = prefill(model, ids, mask)
    scores = LagRelative(LAG, SINKS)(model, state, REDUCE)
    for layer_scores, (keys, values, _) in zip(scores, state.entries(), strict=True):
        for row, length in enumerate(LENGTHS):
            for head in range(keys.shape[1]):
                expected = slow_lag_scores(keys[row, head, -length:], values[row, head, -length:])
                assert_close(layer_scores[row, head, -length:], torch.tensor(expected))


def test_lagkv_keeps_sinks_the_end_and_the_same_share_of_each_partition() -> None:
    model = tiny_model()
    ids, mask = prompt_ids(SINKS + 5 * LAG)
    budget = SINKS + LAG + 4 * 3
    state = LagKV(budget, observer=LagRelative(LAG)).start(model, ids, mask)
    assert state.counts().unique().tolist() == [budget]
    full_state = prefill(model, ids, mask)
    for full_layer, layer in zip(full_state.entries(), state.entries(), strict=True):
        for full_keys, keys in zip(full_layer.keys[0], layer.keys[0], strict=True):
            kept = (full_keys[:, None] == keys).all(dim=-1).any(dim=-1)
            assert kept[:SINKS].all()
            assert kept[-LAG:].all()
            partitions = kept[SINKS:-LAG].view(4, LAG)
            assert partitions.sum(dim=1).tolist() == [3, 3, 3, 3]


@pytest.fixture(scope="module")
def filters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filters")
    config = tiny_model().config
    shape = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    directions = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    save_file({"q_filters": directions}, folder / "model.safetensors")
    return folder


def test_q_filters_score_keys_by_their_projection(filters: Path) -> None:
    model = tiny_model()
    ids, mask = prompt_ids(*LENGTHS)
    method: Any = make_method("qfilters", 12, Resources(scorer=filters))
    assert method.observer.digest == FilteredKeys(QueryDirections.from_pretrained(filters)).digest
    state = prefill(model, ids, mask)
    scores = method.observer(model, state, REDUCE)
    for index, (layer_scores, (keys, _, _)) in enumerate(zip(scores, state.entries(), strict=True)):
        for row, length in enumerate(LENGTHS):
            for head in range(keys.shape[1]):
                direction = method.observer.filters.directions[index, head]
                for position in (-length, -length // 2, -1):
                    key = keys[row, head, position].tolist()
                    product = sum(a * b for a, b in zip(key, direction.tolist(), strict=True))
                    assert_close(layer_scores[row, head, position], torch.tensor(-product))
    kept = method.start(model, ids, mask)
    assert kept.counts().unique().tolist() == [12]


def test_other_files_and_other_models_are_refused(filters: Path, tmp_path: Path) -> None:
    save_file({"weights": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError) as refused:
        QFilters.from_pretrained(tmp_path, 12)
    assert (refused.value.field, refused.value.code) == ("scorer", "file")
    ids, _ = prompt_ids(20)
    with pytest.raises(UserError) as refused:
        generate(tiny_model(num_hidden_layers=2), ids, QFilters.from_pretrained(filters, 12), max_new_tokens=1)
    assert (refused.value.field, refused.value.code) == ("scorer", "model")
