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

LENGTH = 61
WINDOW = 8
OPTIONS: dict[str, Any] = {"window": WINDOW, "chunk": 5, "cut": 2}


def slow_kept(scores: list[float], budget: int, length: int, cut: int) -> set[int]:
    """Chunk after chunk in the order of their means, as long as there is budget."""
    chunks = split(len(scores), length)
    means = [mean_score(scores, chunk) for chunk in chunks]
    evenness = [slow_evenness([scores[entry] for entry in chunk]) for chunk in chunks]
    kept: set[int] = set()
    for index in sorted(range(len(chunks)), key=lambda index: -means[index]):
        count = min(len(chunks[index]), budget - len(kept))
        uneven = evenness[index] < statistics.median_low(evenness)
        if uneven and means[index] >= statistics.median_low(means):
            count = min(count, cut)
        kept |= best(scores, chunks[index], count)
    evicted = {*range(len(scores))} - kept
    return kept | best(scores, sorted(evicted), budget - len(kept))


def split(entries: int, length: int) -> list[list[int]]:
    """The entries of each chunk."""
    return [list(range(start, min(start + length, entries))) for start in range(0, entries, length)]


def mean_score(scores: list[float], chunk: list[int]) -> float:
    return sum(scores[entry] for entry in chunk) / len(chunk)


def best(scores: list[float], entries: list[int], count: int) -> set[int]:
    """Of these entries the ones with the highest scores, earlier ones first among equals."""
    ranking = sorted(entries, key=lambda entry: -scores[entry])
    return set(ranking[:count])


def slow_evenness(scores: list[float]) -> float:
    """The entropy of a chunk's scores, from 0 to 1: that of equal scores."""
    if len(scores) == 1:
        return 0.0
    lowest = min(0.0, *scores)
    total = sum(score - lowest for score in scores) + 1e-8
    entropy = 0.0
    for score in scores:
        share = (score - lowest) / total
        entropy -= share * math.log(share + 1e-8)
    return min(max(entropy / math.log(len(scores)), 0.0), 1.0)


def slow_whole_chunks(scores: list[list[float]], budget: int, length: int) -> set[int]:
    """Whole chunks by the mean, over their entries, of the heads' summed scores; of the last one its best entries."""
    summed: list[float] = [sum(head_scores) for head_scores in zip(*scores, strict=True)]
    chunks = split(len(summed), length)
    kept: set[int] = set()
    while chunks and len(kept) < budget:
        best_chunk = max(chunks, key=lambda chunk: mean_score(summed, chunk))
        chunks.remove(best_chunk)
        kept |= best(summed, best_chunk, budget - len(kept))
    return kept


def assert_kept(selected: torch.Tensor, expected: set[int]) -> None:
    """That both heads of a layer keep the same entries; [2, N] bool."""
    for head_selected in selected:
        assert set(head_selected.nonzero()[:, 0].tolist()) == expected


@pytest.mark.parametrize("budget", [12, 24, 30, 47])
def test_whole_chunks_stay_alike_in_all_heads_of_a_layer(budget: int) -> None:
    model = tiny_model()
    ids, mask = prompt_ids(LENGTH, 50)
    method = ChunkKV(budget, window=WINDOW, sinks=2, chunk=5)
    state = prefill(model, ids, mask, needs=method.needs())
    importance = method.importance(model, state)
    sinks = 2
    for layer_importance, selected in zip(importance, method.select(state, importance), strict=True):
        for row, length in enumerate((LENGTH, 50)):
            padding = LENGTH - length
            first_free = padding + sinks
            scores = layer_importance[row, :, first_free : LENGTH - WINDOW].double().tolist()
            chunks = slow_whole_chunks(scores, budget - WINDOW - sinks, 5)
            expected = {*range(padding, first_free), *range(LENGTH - WINDOW, LENGTH)}
            expected |= {first_free + entry for entry in chunks}
            assert len(expected) == budget
            assert_kept(selected[row], expected)


@pytest.mark.parametrize("signed", [False, True])
def test_chunks_are_kept_whole_or_cut(signed: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    cases_with_cuts = 0
    for entries in (1, 7, 23, 40, 61):
        scores = torch.rand(entries, generator=generator, dtype=torch.float64) ** 6
        if signed:
            scores = scores - 0.1
        for budget in {1, entries // 3, entries // 2, entries}:
            kept = {*chunks_kept(scores, budget, 5, 2).nonzero()[:, 0].tolist()}
            assert kept == slow_kept(scores.tolist(), budget, 5, 2), (entries, budget)
            assert len(kept) == budget
            kept_without_cuts = slow_kept(scores.tolist(), budget, 5, cut=5)
            cases_with_cuts += kept != kept_without_cuts
    assert cases_with_cuts > 2, "the gate changes something"


def test_all_heads_of_a_layer_keep_the_chunks_of_their_summed_scores() -> None:
    model = tiny_model()
    ids, mask = prompt_ids(LENGTH, 48)
    method = EntropyGatedChunkKV(24, **OPTIONS)
    state = prefill(model, ids, mask, needs=method.needs())
    importance = method.importance(model, state)
    for layer_importance, selected in zip(importance, method.select(state, importance), strict=True):
        for row, length in enumerate((LENGTH, 48)):
            padding = LENGTH - length
            scores = layer_importance[row, :, padding : LENGTH - WINDOW].double().sum(dim=0).tolist()
            expected = {padding + entry for entry in slow_kept(scores, 24 - WINDOW, 5, 2)}
            expected |= {*range(LENGTH - WINDOW, LENGTH)}
            assert_kept(selected[row], expected)
    batch = method.compress_state(model, state)
    alone = method.start(model, ids[1:, LENGTH - 48 :])
    for layer, batch_layer in zip(alone.entries(), batch.entries(), strict=True):
        assert_close(layer.keys, batch_layer.keys[1:])


def test_options_that_do_not_fit_are_refused() -> None:
    wrong_options: list[tuple[str, Any, Code]] = [
        ("cut", 5, "range"),
        ("allocate", "adakv", "conflict"),
        ("during_prefill", True, "conflict"),
    ]
    for field, value, code in wrong_options:
        with refused(field, code):
            EntropyGatedChunkKV(24, **OPTIONS | {field: value})
