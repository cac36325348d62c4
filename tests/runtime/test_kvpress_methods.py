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

LENGTHS = 43, 30
LAG, SINKS = 8, 4
REDUCE = Reduce()


def slow_lag_scores(keys: Tensor, values: Tensor) -> list[float]:
    """The scores of one head's entries, keys and values [n, d]."""
    length, dimensions = keys.shape
    partitions = (length - SINKS) // LAG
    scores = [1 + position / length for position in range(length)]
    if partitions < 2:
        return scores
    for partition in range(partitions - 1):
        first = SINKS + partition * LAG
        unlike = [0.0] * LAG
        for states in (keys, values):
            deviations = []
            for position in range(first, first + LAG):
                scaled = []
                for channel in range(dimensions):
                    following = [float(states[later, channel]) for later in range(first + LAG, first + 2 * LAG)]
                    low, high = min(following), max(following)
                    scaled.append((float(states[position, channel]) - low) / (high - low))
                mean = sum(scaled) / dimensions
                deviations.append(math.sqrt(sum((number - mean) ** 2 for number in scaled) / (dimensions - 1)))
            total = sum(math.exp(deviation) for deviation in deviations)
            unlike = [sofar + math.exp(deviation) / total for sofar, deviation in zip(unlike, deviations, strict=True)]
        for place, number in enumerate(unlike):
            scores[first + place] = sum(other < number for other in unlike) / LAG
    return scores


def test_lag_scores_are_those_of_the_definition() -> None:
    model, (ids, mask) = tiny_model(), prompt_ids(*LENGTHS)
    state = prefill(model, ids, mask)
    scores = LagRelative(LAG, SINKS)(model, state, REDUCE)
    for layer_scores, (keys, values, _) in zip(scores, state.entries(), strict=True):
        for row, length in enumerate(LENGTHS):
            for head in range(keys.shape[1]):
                expected = slow_lag_scores(keys[row, head, -length:], values[row, head, -length:])
                assert_close(layer_scores[row, head, -length:], torch.tensor(expected))


def test_lagkv_keeps_sinks_the_end_and_the_same_share_of_each_partition() -> None:
    model, (ids, mask) = tiny_model(), prompt_ids(SINKS + 5 * LAG)
    state = LagKV(SINKS + LAG + 4 * 3, observer=LagRelative(LAG)).start(model, ids, mask)
    assert state.counts().unique().tolist() == [SINKS + LAG + 12]
    whole = prefill(model, ids, mask)
    for layer, kept in zip(whole.entries(), state.entries(), strict=True):
        for head in range(layer.keys.shape[1]):
            stays = [bool((kept.keys[0, head] == key).all(dim=-1).any()) for key in layer.keys[0, head]]
            assert all(stays[:SINKS]) and all(stays[-LAG:])
            shares = [sum(stays[SINKS + part * LAG : SINKS + (part + 1) * LAG]) for part in range(4)]
            assert shares == [3, 3, 3, 3]


@pytest.fixture(scope="module")
def filters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filters")
    config = tiny_model().config
    shape = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    directions = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    save_file({"q_filters": directions}, folder / "model.safetensors")
    return folder


def test_q_filters_score_keys_by_their_projection(filters: Path) -> None:
    model, (ids, mask) = tiny_model(), prompt_ids(*LENGTHS)
    method: Any = make_method("qfilters", 12, Resources(scorer=filters))
    assert method.observer.digest == FilteredKeys(QueryDirections.from_pretrained(filters)).digest
    state = prefill(model, ids, mask)
    scores = method.observer(model, state, REDUCE)
    for index, (layer_scores, (keys, _, _)) in enumerate(zip(scores, state.entries(), strict=True)):
        for row, length in enumerate(LENGTHS):
            for head in range(keys.shape[1]):
                direction = method.observer.filters.directions[index, head]
                for place in (-length, -length // 2, -1):
                    product = sum(float(a) * float(b) for a, b in zip(keys[row, head, place], direction, strict=True))
                    assert_close(layer_scores[row, head, place], torch.tensor(-product))
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
