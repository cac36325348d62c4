"""SpecPC and the SpecKV-PC cascade against slow references written from their definitions."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from keepsight.runtime.allocate import Adaptive
from keepsight.runtime.generate import FullCache
from keepsight.runtime.prompt_compression.specpc import select_tokens
from tests.close import assert_close
from tests.refused import refused
from tests.runtime.drafting.test_draft_methods import published_speckv
from tests.runtime.prompt_compression.prompts import small_cascade, small_specpc, tiny_draft
from tests.tiny import prompt_ids, tiny_model


def slow_pooled(scores, kernel, pooling):
    """Max or mean over the `kernel` scores around each position; scores beyond the ends are 0."""
    length = len(scores)
    before = (kernel - 1) // 2
    pooled = []
    for position in range(length):
        first = position - before
        values = []
        for neighbor in range(first, first + kernel):
            values.append(scores[neighbor] if 0 <= neighbor < length else 0.0)
        pooled.append(max(values) if pooling == "max" else sum(values) / kernel)
    return pooled


def slow_selection(scores, budget, window, kernel, neighbors, pooling):
    """Facts of the published selection, step by step with Python lists."""
    length = len(scores)
    if budget >= length:
        return list(range(length))
    pooled = slow_pooled(scores, kernel, pooling)
    best = sorted(range(length), key=lambda position: (-pooled[position], position))[:budget]
    offsets = [0]
    if neighbors:
        before = (neighbors - 1) // 2
        offsets = sorted(range(-before, neighbors - before), key=lambda offset: (abs(offset), offset))
    order = list(range(length - window, length))
    for position in best:
        for offset in offsets:
            neighbor = min(max(position + offset, 0), length - 1)
            if neighbor not in order:
                order.append(neighbor)
    return sorted(order[:budget])


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(12, [*range(7, 14), 23, *range(36, 40)]), (16, [*range(7, 14), *range(22, 27), *range(36, 40)])],
)
def test_published_check_vectors(budget, expected):
    scores = torch.zeros(40)
    scores[10] = 0.9
    scores[25] = 0.5
    assert select_tokens(scores, budget, 4, 4, 4).tolist() == expected


@pytest.mark.parametrize("seed", range(12))
def test_selection_equals_slow_reference(seed):
    draw = random.Random(seed)
    length = draw.randint(6, 60)
    window = draw.randint(1, 6)
    budget = draw.randint(window, length + 2)
    kernel = draw.randint(1, 9)
    neighbors = draw.randint(0, 9)
    pooling = draw.choice(["max", "avg"])
    # Eighths, for many ties, and for averages without rounding when the kernel is a power of two.
    if pooling == "avg":
        kernel = draw.choice([1, 2, 4, 8])
    scores = [draw.randint(0, 8) / 8 for _ in range(length)]
    kept = select_tokens(torch.tensor(scores), budget, window, kernel, neighbors, pooling).tolist()
    assert kept == slow_selection(scores, budget, window, kernel, neighbors, pooling)


def slow_scores(draft, ids, window, generated, first_layer, reduction):
    """Scores [N] from the full attention maps of transformers' own eager attention."""
    eager = AutoModelForCausalLM.from_config(draft.config, attn_implementation="eager", dtype=draft.dtype)
    eager.load_state_dict(draft.state_dict())
    with torch.no_grad():
        maps = eager.eval()(torch.cat([ids, generated])[None], output_attentions=True).attentions
    length = len(ids)
    scores = torch.zeros(length)
    for layer in maps[first_layer:]:
        for head in layer[0].float():
            for index in range(window + len(generated)):
                weight = index / (window - 1) if index < window else 1.0
                row = weight * head[length - window + index, :length]
                scores = torch.maximum(scores, row) if reduction == "max" else scores + row
    return scores


@pytest.mark.parametrize(("family", "reduction", "lookahead"), [("llama", "sum", 5), ("qwen3", "max", 1)])
def test_specpc_scores_equal_dense_attention(family, reduction, lookahead):
    draft = tiny_draft(family, eos_token_id=None)
    method = small_specpc(draft=draft, lookahead=lookahead, reduction=reduction, first_layer=1)
    ids = prompt_ids(50)[0][0]
    model = tiny_model(family)
    scores, generated = method.draft_scores(model, ids)
    expected = draft.model.generate(ids[None], max_new_tokens=lookahead, do_sample=False)[0, 50:]
    assert torch.equal(generated, expected)
    slow = slow_scores(draft.model, ids, 4, expected[:-1], 1, reduction)
    assert_close(scores, slow)
    torch.set_default_dtype(torch.bfloat16)
    try:
        scores_under_bfloat16, _ = method.draft_scores(model, ids)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_close(scores_under_bfloat16, scores)
    assert method.select(model, ids).tolist() == slow_selection(slow.tolist(), 20, 4, 4, 4, "max")


@pytest.mark.parametrize(("layers", "first"), [(1, 0), (24, 8)])
def test_first_layer_is_8_or_half_of_a_small_draft(layers, first):
    draft = tiny_draft(num_hidden_layers=layers)
    ids = prompt_ids(12)[0][0]
    scores, _ = small_specpc(draft=draft).draft_scores(tiny_model(), ids)
    explicit, _ = small_specpc(draft=draft, first_layer=first).draft_scores(tiny_model(), ids)
    assert_close(scores, explicit)


def test_a_draft_without_the_first_layer_is_refused():
    with refused("first_layer", "range"):
        small_specpc(first_layer=3).draft_scores(tiny_model(), prompt_ids(30)[0][0])


@pytest.mark.parametrize(("prompt_budget", "kept"), [(40, 40), (10, 16)])
def test_cascade_equals_its_definition(prompt_budget, kept):
    """SpecPC's tokens and the draft's own answer; then, per layer and KV head, SpecKV's maxima over both, pooled."""
    model = tiny_model()
    ids = prompt_ids(80)[0]
    draft = tiny_draft(eos_token_id=None)
    method = small_cascade(draft=draft, prompt_budget=prompt_budget, first_layer=1)
    answer = draft.model.generate(ids, max_new_tokens=5, do_sample=False)[0, 80:]
    scores = slow_scores(draft.model, ids[0], 6, answer[:-1], 1, "max")
    short = ids[0, slow_selection(scores.tolist(), kept, 6, 4, 4, "max")]
    selected, last = published_speckv(model, short[None], answer[None], 15, 8)  # without the token that is read again

    state = method.start(model, ids)
    assert state.lengths.tolist() == [len(short)] == [kept]
    assert torch.equal(state.counts(), torch.full((3, 1, 2), 16))
    full_cache = FullCache().start(model, short[None])
    for layer, full_layer, heads in zip(state.entries(), full_cache.entries(), selected, strict=True):
        for head, best in enumerate(heads):
            positions = sorted(best | last | {kept - 1})
            assert_close(layer.keys[0, head], full_layer.keys[0, head, positions])


@pytest.mark.parametrize("budget", [16, 0.2])
def test_cascade_keeps_its_budget_under_other_allocations(budget):
    method = small_cascade(budget=budget, allocate=Adaptive())
    counts = method.start(tiny_model(), prompt_ids(80)[0]).counts()
    assert counts.double().mean() == 16
    assert counts.unique().numel() > 1
