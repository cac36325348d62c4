"""Allocations: the published schedules, and what holds for every allocation on any importance."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from keepsight.runtime.allocate import Adaptive, Global, Pyramid, Uniform, blended, pyramid_schedule
from keepsight.runtime.importance import top_mask
from tests.refused import refused
from tests.runtime.dense import best_of
from tests.runtime.scoring import divide

ALL = [
    Uniform(),
    Pyramid(beta=3),
    Adaptive(),
    Adaptive(blend=False),
    Adaptive(normalize=True),
    Adaptive(floor=0.5, blend=False, normalize=True),
    Global(),
]


def _importance(layers, rows, heads, entries, seed, *, real=None, protected=0, levels=None):
    """Random importance; `real` [layers, rows, heads] are padded on the left, the last `protected` always kept."""
    generator = torch.Generator().manual_seed(seed)
    importance = []
    for layer in range(layers):
        values = torch.rand(rows, heads, entries, generator=generator) ** 4
        if levels is not None:
            values = (values * levels).round()
        if protected:
            values[..., -protected:] = torch.inf
        if real is not None:
            first = entries - real[layer]
            values.masked_fill_(torch.arange(entries) < first[..., None], -torch.inf)
        importance.append(values)
    return importance


@st.composite
def prompts(draw, ragged=False):
    """Random importance of a batch of prompts, or of evicted caches, and a budget."""
    layers = draw(st.integers(1, 5))
    rows = draw(st.integers(1, 3))
    heads = draw(st.integers(1, 4))
    protected = draw(st.integers(0, 4))
    entries = draw(st.integers(protected + 2, 40))
    budget = draw(st.integers(protected + 1, entries))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    shape = (layers, rows, heads) if ragged else (1, rows, 1)
    real = torch.randint(1, entries + 1, shape, generator=generator).expand(layers, rows, heads)
    importance = _importance(
        layers,
        rows,
        heads,
        entries,
        draw(st.integers(0, 999)),
        real=real,
        protected=protected,
        levels=draw(st.sampled_from([None, 1, 5])),
    )
    return importance, budget


@pytest.mark.parametrize("allocate", ALL, ids=repr)
@settings(max_examples=50)
@given(cache=prompts(ragged=True))
def test_totals_are_exact_protected_entries_stay_and_short_heads_leave_their_share_to_others(allocate, cache):
    importance, budget = cache
    scores = torch.stack(importance)
    layers, rows, heads, _ = scores.shape
    is_padding = scores == -torch.inf
    is_protected = scores == torch.inf
    real = (~is_padding).sum(-1)
    protected = is_protected.sum(-1)

    counts = torch.stack(divide(allocate, importance, budget))
    assert counts.shape == (layers, rows, heads)
    assert bool((counts <= real).all())
    assert bool((counts >= protected).all())
    for row in range(rows):
        expected_total = min(layers * heads * budget, int(real[:, row].sum()))
        assert int(counts[:, row].sum()) == expected_total

    masks = []
    for layer_scores, layer_counts in zip(importance, counts, strict=True):
        masks.append(top_mask(layer_scores, layer_counts.numpy()))
    kept = torch.stack(masks)
    assert torch.equal(kept.sum(-1), counts)
    assert bool(kept[is_protected].all())
    assert not bool(kept[is_padding].any())


@pytest.mark.parametrize("allocate", ALL, ids=repr)
@settings(max_examples=30)
@given(prompt=prompts())
def test_a_row_gets_what_it_would_alone(allocate, prompt):
    importance, budget = prompt
    batch_counts = torch.stack(divide(allocate, importance, budget))
    for row in range(batch_counts.shape[1]):
        real = (importance[0][row, 0] != -torch.inf).sum()
        row_importance = [layer[row : row + 1, :, -real:] for layer in importance]
        row_counts = torch.stack(divide(allocate, row_importance, budget))
        assert torch.equal(batch_counts[:, row], row_counts[:, 0])


# PyramidKV: check vector 5 of KVCache-Factory's schedule.


@pytest.mark.parametrize(
    ("budget", "window", "first", "second", "last", "total"),
    [(256, 32, 437, 424, 34, 7536), (2048, 8, 3978, 3853, 103, 65296)],
)
def test_pyramid_schedule_as_published(budget, window, first, second, last, total):
    caps = pyramid_schedule(budget - window, 10**6, 32)
    assert caps[:2] == [first, second]
    assert caps[-1] == last
    assert sum(caps) == total


@pytest.mark.parametrize(("budget", "window"), [(256, 32), (2048, 8), (64, 32)])
def test_pyramid_is_the_published_schedule_without_its_surplus(budget, window):
    free = budget - window
    layers = 32
    real = np.full((layers, 2), 3 * budget)
    counts = torch.from_numpy(Pyramid()._divide(real, np.full_like(real, window), budget))
    assert int(counts.sum()) == layers * 2 * budget
    assert torch.equal(counts[:, 0], counts[:, 1])
    published = torch.tensor(pyramid_schedule(free, 3 * budget - window, layers)) + window
    assert int(counts[0, 0]) == int(published[0])
    assert bool((counts[:, 0] <= published).all())
    assert bool((counts[1:] <= counts[:-1]).all())
    # What remains is the straight line from 2 B - B // beta down to B // beta.
    line = torch.linspace(2 * free - free // 20, free // 20, layers) + window
    assert float((counts[:, 0] - line).abs().max()) <= 1


# AdaKV: check vector 6.


def _with_top(counts, share):
    """[K, 3 * share]: of the best K * share entries of all heads, `counts` lie in each head."""
    heads = len(counts)
    entries = 3 * share
    importance = torch.linspace(0.4, 0.1, heads * entries).view(heads, entries)
    for head, count in enumerate(counts):
        importance[head, :count] += 0.5 + 0.01 * head
    return importance[None]


def test_adaptive_rounding_as_published():
    assert blended(np.array([17, 7, 0]), 8, 0.2).tolist() == [15, 7, 1]
    importance = _with_top([17, 7, 0], 8)
    assert divide(Adaptive(floor=0.0), [importance], 8)[0].tolist() == [[17, 7, 0]]
    assert divide(Adaptive(), [importance], 8)[0].tolist() == [[15, 7, 2]]


@given(prompt=prompts(), floor=st.sampled_from([0.0, 0.2, 0.5, 1.0]))
def test_hard_floor_equals_its_definition(prompt, floor):
    """kvpress: the best int(n * alpha) of each head are moved to the top, then the best K * n of the layer stay."""
    importance, budget = prompt
    layer = importance[0]
    counts = divide(Adaptive(floor=floor, blend=False), [layer], budget)[0]
    heads = layer.shape[1]
    for row, row_scores in enumerate(layer.tolist()):
        rankings = [_ranked(scores) for scores in row_scores]
        total = min(heads * budget, sum(map(len, rankings)))
        guaranteed = int(total // heads * floor)
        safe = set()
        candidates = []
        for head, ranking in enumerate(rankings):
            for rank, entry in enumerate(ranking):
                score = row_scores[head][entry]
                if rank < guaranteed or score == torch.inf:
                    safe.add((head, entry))
                else:
                    candidates.append((-score, head, entry))
        assume(len(safe) <= total)
        kept = safe | {(head, entry) for _, head, entry in sorted(candidates)[: total - len(safe)]}
        kept_by_head = Counter(head for head, _ in kept)
        assert counts[row].tolist() == [kept_by_head[head] for head in range(heads)]


def _ranked(scores):
    """The indices of a head's entries, best first, without padding."""
    real = sum(score != -torch.inf for score in scores)
    return best_of(scores, real)


@given(prompt=prompts(ragged=True), floor=st.sampled_from([0.0, 0.2, 0.5, 1.0]), weighted=st.booleans())
def test_sharing_between_all_layers_equals_its_definition(prompt, floor, weighted):
    """The best int(budget * floor) of each head come first, then the best of all heads of all layers, as weighted."""
    importance, budget = prompt
    layers = len(importance)
    rows, heads, _ = importance[0].shape
    weights = tuple(tuple(0.5 ** (layer + 2 * head) for head in range(heads)) for layer in range(layers))
    allocate = Global(floor, weights) if weighted else Global(floor)
    counts = torch.stack(divide(allocate, importance, budget))
    for row in range(rows):
        expected = torch.zeros(layers, heads, dtype=torch.long)
        candidates = []
        for layer, head in itertools.product(range(layers), range(heads)):
            scores = importance[layer][row, head].tolist()
            ranking = _ranked(scores)
            protected = scores.count(torch.inf)
            guaranteed = max(protected, int(budget * floor))
            expected[layer, head] = len(ranking[:guaranteed])
            weight = weights[layer][head] if weighted else 1.0
            candidates += [(-scores[entry] * weight, layer, head, entry) for entry in ranking[guaranteed:]]
        safe = int(expected.sum())
        total = min(layers * heads * budget, safe + len(candidates))
        for _, layer, head, _ in sorted(candidates)[: total - safe]:
            expected[layer, head] += 1
        assert counts[:, row].tolist() == expected.tolist()


def test_ties_go_to_the_first_head():
    equal = [torch.zeros(1, 3, 9)]
    assert divide(Adaptive(floor=0.0), equal, 4)[0].tolist() == [[9, 3, 0]]
    assert divide(Adaptive(floor=0.25, blend=False), equal, 4)[0].tolist() == [[9, 2, 1]]
    counts_of_two_layers = torch.stack(divide(Global(floor=0.25), equal * 2, 4))
    assert counts_of_two_layers[:, 0].tolist() == [[9, 9, 3], [1, 1, 1]]


@pytest.mark.parametrize(
    ("make", "field", "code"),
    [
        (lambda: Pyramid(0), "beta", "range"),
        (lambda: Adaptive(1.5), "floor", "range"),
        (lambda: Pyramid().check(19), "budget", "range"),
        (lambda: Adaptive().check(4), "budget", "range"),
        (lambda: Global(-1), "floor", "range"),
        (lambda: Global(weights=[[1.0], [1.0, 2.0]]), "weights", "type"),  # type: ignore
        (lambda: Global(weights=((float("nan"),),)), "weights", "type"),
        (lambda: Global().check(4), "budget", "range"),
    ],
)
def test_bad_values_are_named(make, field, code):
    with refused(field, code):
        make()
