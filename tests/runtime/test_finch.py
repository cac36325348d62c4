"""Finch against a slow loop written from its definition."""

import math
from typing import Any

import pytest
import torch

from keepsight.runtime.importance import Reduce
from keepsight.runtime.methods import Finch
from keepsight.runtime.methods.finch import CountedWindow, best_of_parts
from keepsight.runtime.state import prefill
from tests.close import assert_close
from tests.refused import refused
from tests.tiny import prompt_ids, tiny_model

LENGTH = 47
WINDOW = 6


def slow_scores(queries: Any, keys: Any) -> list[float]:
    """The scores of a head's entries before the question: keys [n, d], queries [G, w, d] of its query heads."""
    length, width = keys.shape
    group, window, _ = queries.shape
    before_window = length - window
    scores = [0.0] * before_window
    total = sum(range(before_window, length))
    for head_queries in queries.double():
        for position, query in enumerate(head_queries, start=before_window):
            visible_keys = keys[: position + 1].double()
            logits = [float(query @ key) / math.sqrt(width) for key in visible_keys]
            weights = [math.exp(logit - max(logits)) for logit in logits]
            for entry in range(before_window):
                share = weights[entry] / sum(weights)
                scores[entry] += position * share / total / group
    return scores


def test_queries_count_by_the_entries_before_them() -> None:
    model = tiny_model()
    ids, mask = prompt_ids(LENGTH, 38)
    method = Finch(20, window=WINDOW)
    state = prefill(model, ids, mask, needs=method.needs())
    scores_by_layer = CountedWindow(WINDOW)(model, state, Reduce())
    for layer, scores in zip(state.layers, scores_by_layer, strict=True):
        assert layer.recorded is not None and layer.recorded.queries is not None
        for row, length in enumerate((LENGTH, 38)):
            for head in range(2):
                queries = layer.recorded.queries[row, head * 2 : head * 2 + 2, -WINDOW:]
                expected = slow_scores(queries, layer.keys[row, head, -length:])
                head_scores = scores[row, head, LENGTH - length : LENGTH - WINDOW]
                assert_close(head_scores, torch.tensor(expected))


def slow_parts(scores: list[float], budget: int, chunk: int) -> set[int]:
    """The best entries of each part; parts that were rounded down most get what remains, the first ones first."""
    parts = [[*range(start, min(start + chunk, len(scores)))] for start in range(0, len(scores), chunk)]
    shares = [budget * len(part) / len(scores) for part in parts]
    counts = [int(share) for share in shares]
    while sum(counts) < budget:
        missing = [round(share - count, 6) for share, count in zip(shares, counts, strict=True)]
        counts[missing.index(max(missing))] += 1
    kept: set[int] = set()
    for part, count in zip(parts, counts, strict=True):
        kept |= {*sorted(part, key=lambda entry: -scores[entry])[:count]}
    return kept


@pytest.mark.parametrize("chunk", [1, 7, 10, 64])
def test_each_part_keeps_its_share(chunk: int) -> None:
    generator = torch.Generator().manual_seed(chunk)
    for entries in (1, 9, 33, 41):
        scores = torch.rand(entries, generator=generator)
        for budget in {1, entries // 3 + 1, entries}:
            kept = {*best_of_parts(scores, budget, chunk).nonzero()[:, 0].tolist()}
            assert len(kept) == budget
            if chunk > 1:
                assert kept == slow_parts(scores.tolist(), budget, chunk), (entries, budget)


@pytest.mark.parametrize("chunk", [0, 9])
def test_heads_keep_the_question_and_the_best_of_each_part_renumbered(chunk: int) -> None:
    model = tiny_model()
    ids, mask = prompt_ids(LENGTH, 38)
    method = Finch(20, window=WINDOW, sinks=2, chunk=chunk)
    state = prefill(model, ids, mask, needs=method.needs())
    importance = method.importance(model, state)
    selected = method.select(state, importance)
    sinks = 2
    for layer_importance, layer_mask in zip(importance, selected, strict=True):
        for row, length in enumerate((LENGTH, 38)):
            padding = LENGTH - length
            first_free = padding + sinks
            for head in range(2):
                scores = layer_importance[row, head, first_free : LENGTH - WINDOW].tolist()
                best = slow_parts(scores, 20 - WINDOW - sinks, chunk or len(scores))
                expected = {*range(padding, first_free), *range(LENGTH - WINDOW, LENGTH)}
                expected |= {first_free + entry for entry in best}
                kept = layer_mask[row, head].nonzero()[:, 0].tolist()
                assert {*kept} == expected
    renumbered = method.start(model, ids, mask)
    assert (renumbered.lengths + renumbered.rope_offset).tolist() == [20, 20]
    not_renumbered = Finch(20, window=WINDOW, sinks=2, chunk=chunk, rerotate=False).start(model, ids, mask)
    assert not not_renumbered.rope_offset
    for layer, other_layer in zip(renumbered.layers, not_renumbered.layers, strict=True):
        assert torch.equal(layer.values, other_layer.values)


def test_options_that_do_not_fit_are_refused() -> None:
    with refused("chunk", "range"):
        Finch(20, window=WINDOW, chunk=-1)
    with refused("during_prefill", "conflict"):
        Finch(20, window=WINDOW, during_prefill=True)
