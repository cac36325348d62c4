"""ChunkKV and EG-ChunkKV against slow loops written from their definitions."""

import math
import statistics
from typing import Any

import pytest
import torch

from keepsight.errors import Code
from keepsight.runtime.methods import ChunkKV, EntropyGatedChunkKV
from keepsight.runtime.methods.chunkkv import chunks_kept
from keepsight.runtime.state import prefill
from tests.close import assert_close
from tests.refused import refused
from tests.tiny import prompt_ids, tiny_model

LENGTH, WINDOW = 61, 8
OPTIONS: dict[str, Any] = {"window": WINDOW, "chunk": 5, "cut": 2}


def slow_kept(scores: list[float], budget: int, length: int, cut: int) -> set[int]:
    """Chunk after chunk in the order of their means, as long as there is budget."""
    chunks = [list(range(start, min(start + length, len(scores)))) for start in range(0, len(scores), length)]
    means = [sum(scores[entry] for entry in chunk) / len(chunk) for chunk in chunks]
    evenness = []
    for chunk in chunks:
        least = min(0.0, *(scores[entry] for entry in chunk))
        total = sum(scores[entry] - least for entry in chunk) + 1e-8
        entropy = 0.0
        for entry in chunk:
            share = (scores[entry] - least) / total
            entropy -= share * math.log(share + 1e-8)
        evenness.append(0.0 if len(chunk) == 1 else min(max(entropy / math.log(len(chunk)), 0.0), 1.0))
    kept: set[int] = set()
    for number in sorted(range(len(chunks)), key=lambda number: -means[number]):
        count = min(len(chunks[number]), budget - len(kept))
        uneven = evenness[number] < statistics.median_low(evenness)
        if uneven and means[number] >= statistics.median_low(means):
            count = min(count, cut)
        kept |= {*sorted(chunks[number], key=lambda entry: -scores[entry])[:count]}
    others = sorted({*range(len(scores))} - kept, key=lambda entry: -scores[entry])
    return kept | {*others[: budget - len(kept)]}


def slow_whole_chunks(scores: list[list[float]], budget: int, length: int) -> set[int]:
    """Whole chunks by the mean, over their entries, of the heads' summed scores; of the last one its best entries."""
    summed = [sum(head[entry] for head in scores) for entry in range(len(scores[0]))]
    left = [[*range(start, min(start + length, len(summed)))] for start in range(0, len(summed), length)]
    kept: set[int] = set()
    while left and len(kept) < budget:
        best = left[0]
        for chunk in left[1:]:
            if sum(summed[entry] for entry in chunk) / len(chunk) > sum(summed[entry] for entry in best) / len(best):
                best = chunk
        left.remove(best)
        kept |= {*sorted(best, key=lambda entry: -summed[entry])[: budget - len(kept)]}
    return kept


@pytest.mark.parametrize("budget", [12, 24, 30, 47])
def test_whole_chunks_stay_alike_in_all_heads_of_a_layer(budget: int) -> None:
    model = tiny_model()
    ids, mask = prompt_ids(LENGTH, 50)
    method = ChunkKV(budget, window=WINDOW, sinks=2, chunk=5)
    state = prefill(model, ids, mask, needs=method.needs())
    importance = method.importance(model, state)
    for layer_importance, selected in zip(importance, method.select(state, importance), strict=True):
        for row, length in enumerate((LENGTH, 50)):
            first = LENGTH - length
            scores = layer_importance[row, :, first + 2 : LENGTH - WINDOW].double().tolist()
            chunks = slow_whole_chunks(scores, budget - WINDOW - 2, 5)
            expected = {first, first + 1, *range(LENGTH - WINDOW, LENGTH)} | {first + 2 + entry for entry in chunks}
            assert len(expected) == budget
            for head in range(2):
                assert {*selected[row, head].nonzero()[:, 0].tolist()} == expected


@pytest.mark.parametrize("signed", [False, True])
def test_chunks_are_kept_whole_or_cut(signed: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    cut_or_topped_up = 0
    for entries in (1, 7, 23, 40, 61):
        scores = torch.rand(entries, generator=generator, dtype=torch.float64) ** 6
        if signed:
            scores = scores - 0.1
        for budget in {1, entries // 3, entries // 2, entries}:
            kept = {*chunks_kept(scores, budget, 5, 2).nonzero()[:, 0].tolist()}
            assert kept == slow_kept(scores.tolist(), budget, 5, 2), (entries, budget)
            assert len(kept) == budget
            cut_or_topped_up += kept != slow_kept(scores.tolist(), budget, 5, 5)
    assert cut_or_topped_up > 2, "the gate changes something"


def test_all_heads_of_a_layer_keep_the_chunks_of_their_summed_scores() -> None:
    model = tiny_model()
    ids, mask = prompt_ids(LENGTH, 48)
    method = EntropyGatedChunkKV(24, **OPTIONS)
    state = prefill(model, ids, mask, needs=method.needs())
    importance = method.importance(model, state)
    for layer_importance, selected in zip(importance, method.select(state, importance), strict=True):
        for row, length in enumerate((LENGTH, 48)):
            first = LENGTH - length
            scores = layer_importance[row, :, first : LENGTH - WINDOW].double().sum(dim=0).tolist()
            expected = {first + entry for entry in slow_kept(scores, 24 - WINDOW, 5, 2)}
            expected |= {*range(LENGTH - WINDOW, LENGTH)}
            for head in range(2):
                assert {*selected[row, head].nonzero()[:, 0].tolist()} == expected
    whole = method.compress_state(model, state)
    alone = method.start(model, ids[1:, LENGTH - 48 :])
    for one, other in zip(alone.entries(), whole.entries(), strict=True):
        assert_close(one.keys, other.keys[1:])


def test_what_does_not_fit_is_refused() -> None:
    changes: list[tuple[str, Any, Code]] = [
        ("cut", 5, "range"),
        ("allocate", "adakv", "conflict"),
        ("during_prefill", True, "conflict"),
    ]
    for field, value, code in changes:
        with refused(field, code):
            EntropyGatedChunkKV(24, **OPTIONS | {field: value})
