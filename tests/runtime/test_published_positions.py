"""StreamingLLM and LaCache as their authors' code: the entries of each layer, and their numbers in the cache."""

import math
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from keepsight.runtime.methods import LaCache, SnapKV, StreamingLLM
from keepsight.runtime.methods.positions import Ladder, PublishedLadder
from keepsight.runtime.state import prefill, read
from tests.refused import refused
from tests.runtime.dense import best_of
from tests.tiny import prompt_ids, tiny_model


def unrotated_keys(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Of each layer, keys [K, N, d] before RoPE."""
    projected: list[torch.Tensor] = []

    def record(module: Any, inputs: Any, output: torch.Tensor) -> None:
        projected.append(output[0])

    hooks = [layer.self_attn.k_proj.register_forward_hook(record) for layer in model.model.layers]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    width = model.config.head_dim
    return [keys.view(len(keys), -1, width).transpose(0, 1) for keys in projected]


def rotated(key: torch.Tensor, position: int, base: float) -> list[float]:
    """One key [d] at a position: dimensions i and i + d / 2 are a pair, turned by position / base^(2i / d)."""
    half = len(key) // 2
    components = [0.0] * len(key)
    for pair in range(half):
        angle = position / base ** (2 * pair / len(key))
        x = float(key[pair])
        y = float(key[pair + half])
        components[pair] = x * math.cos(angle) - y * math.sin(angle)
        components[pair + half] = x * math.sin(angle) + y * math.cos(angle)
    return components


def published(length: int, budget: int, first: int, layer: int, layers: int, span: int, overlap: int) -> list[int]:
    """What LaCache's code keeps of a prompt, entry by entry."""
    ladder = 1 + max(0, math.ceil((layers - span) / (span - overlap)))
    rungs = min(math.ceil(span / (span - overlap)), ladder)
    lost = ladder - rungs
    capacity = budget + lost // 2
    if length <= capacity:
        return list(range(length))
    if not lost:
        return [*range(first), *range(length - budget + first, length)]

    def climb(entries: list[int], ladders: int, size: int, distance: int) -> list[int]:
        """Keep the layer's rungs, so far apart, of so many ladders of this size."""
        climbed = entries[:first]
        begin = first
        for _ in range(ladders):
            lowest = begin + layer % (size - rungs + 1)
            climbed += [entries[lowest + distance * rung] for rung in range(rungs)]
            begin += size
        return climbed + entries[begin:]

    entries = list(range(length))
    most = (capacity - first - layers) // rungs
    if length - most * lost <= capacity:
        return climb(entries, math.ceil((length - capacity) / lost), ladder, 1)
    entries = climb(entries, most, ladder, 1)
    excess = len(entries) - capacity
    distance = math.ceil(excess / (most * lost))
    size = ladder + (distance - 1) * (ladder - 1)
    return climb(entries, math.ceil(excess / (size - rungs)), size, distance)


def within_budget(kept: list[int], length: int, budget: int, first: int) -> list[int]:
    """The newest of what is dropped fills the budget up; what is too much leaves from the oldest on."""
    entries = sorted({*kept})
    dropped = [entry for entry in range(length) if entry not in entries]
    while len(entries) > budget:
        entries.pop(first)
    free = budget - len(entries)
    return sorted(entries + dropped[len(dropped) - free :])


LADDERS = LaCache(16, observer=PublishedLadder(span=1, first=5), rerotate=True)


@pytest.mark.parametrize("method", [StreamingLLM(16, rerotate=True), LADDERS], ids=["streamingllm", "lacache"])
def test_a_token_reads_entries_by_their_position_in_the_cache(method: Any) -> None:
    """The cache holds 16 of 50 entries, at positions 0 to 15, and the token stands at position 16."""
    model = tiny_model("llama")
    ids = prompt_ids(50, seed=4)[0]
    layers = model.config.num_hidden_layers
    base = model.config.rope_parameters["rope_theta"]
    with torch.no_grad():
        values = [layer.values for layer in model(ids).past_key_values.layers]
    cache = DynamicCache()
    for layer, keys in enumerate(unrotated_keys(model, ids)):
        entries = [*range(4), *range(38, 50)]
        if method is LADDERS:
            entries = within_budget(published(50, 16, 5, layer, layers, 1, 0), 50, 16, 5)
        heads = []
        for head in keys:
            heads.append([rotated(head[entry], position, base) for position, entry in enumerate(entries)])
        cache.update(torch.tensor(heads)[None], values[layer][:, :, entries], layer)

    token = torch.tensor([[7]])
    with torch.no_grad():
        expected = model(token, past_key_values=cache, position_ids=torch.tensor([[16]])).logits[:, -1]
    logits = read(model, method.start(model, ids), token)[1][:, -1]
    torch.testing.assert_close(logits, expected.float(), atol=1e-4, rtol=1e-4)


def rungs_of(span: int, overlap: int) -> int:
    """Entries of a ladder that each of six layers keeps, where it keeps fewer than all; else 0."""
    ladder, rungs = Ladder(span, overlap).shape(6)
    return rungs if rungs < ladder else 0


@pytest.mark.parametrize(("span", "overlap"), [(1, 0), (2, 0), (3, 1), (4, 2), (9, 0)])
def test_the_ladders_of_lacaches_code(span: int, overlap: int) -> None:
    """Budgets are met: the newest of what it drops fills them up, and the oldest that it keeps leaves first."""
    layers = 6
    for first in (0, 4, None):
        observer = PublishedLadder(span, overlap, first, 24)
        if first is None and rungs_of(span, overlap) > 1:
            with refused("budget", "range"):
                observer.scores_by_position(40, 0, layers)
            continue
        for length in (25, 40, 61, 200):
            sinks = first if first is not None else min(128, length - layers - 1, 24 - layers - 1)
            for layer in range(layers):
                kept = published(length, 24, sinks, layer, layers, span, overlap)
                expected = within_budget(kept, length, 24, sinks)
                scores = observer.scores_by_position(length, layer, layers).tolist()
                assert sorted(best_of(scores, 24)) == expected, (first, length, layer)


def test_ladders_without_room_are_refused_in_one_line() -> None:
    model = tiny_model("llama")
    ids = prompt_ids(40, seed=1)[0]
    with refused("budget", "missing"):
        PublishedLadder()(model, prefill(model, ids), SnapKV(12, window=4).reduce)
    with refused("budget", "range"):
        LaCache(9, observer=PublishedLadder(span=1, first=8)).start(model, ids)
    with refused("overlap", "range"):
        PublishedLadder(4, 4)
