"""SpecKV's sparse prefills against dense attention under their masks in closed form, and the kept set that follows."""

from typing import Any

import pytest
import torch

from keepsight.models.draft_sources import LayerSubset
from keepsight.runtime.attention import Softmax
from keepsight.runtime.drafting import speckv as attention
from keepsight.runtime.drafting.observer import DraftObserver
from keepsight.runtime.drafting.speckv import MInference, ModelDrafter, SparsePrefill, SpecKV
from keepsight.runtime.methods.drafts import PromptEnds
from tests.close import assert_close
from tests.refused import refused
from tests.runtime.dense import best, observed, pooled, run_dense
from tests.runtime.scoring import score_answer
from tests.tiny import FAMILIES, prompt_ids, tiny_model

DRAFT = LayerSubset((0, 2))
SPARSE = SparsePrefill(vertical=64, band=64)


def closed_form(length, band, columns):
    """Which of `length` keys each query sees, [K, N, N] bool: the band, and each KV head's columns."""
    visible = torch.zeros(len(columns), length, length, dtype=torch.bool)
    for head, chosen in enumerate(columns):
        for i in range(length):
            visible[head, i, max(64 * (i // 64) - band, 0) : i + 1] = True
            visible[head, i, [t for t in chosen if t <= i]] = True
    return visible


def random_attention(length, count, seed=0, batch=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(batch, heads, length, 16, generator=generator) for heads in (4, 2, 2))
    columns = torch.stack([torch.randperm(length, generator=generator)[:count] for _ in range(2 * batch)])
    return query.to(dtype), key.to(dtype), value.to(dtype), columns.sort(dim=-1).values.view(batch, 2, count)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("compute", [attention.attend_by_blocks, attention.attend_by_flex], ids=["blocks", "flex"])
@pytest.mark.parametrize(("length", "count", "band"), [(320, 5, 128), (50, 8, 64), (449, 100, 64)])
def test_attention_equals_dense_attention_under_the_mask(compute, length, count, band):
    query, key, value, columns = random_attention(length, count, batch=2)
    output = compute(query, key, value, columns, band, Softmax(0.25) if compute is attention.attend_by_blocks else 0.25)
    assert output.shape == (2, length, 4, 16)
    assert output.is_contiguous()
    for row in range(2):
        visible = closed_form(length, band, columns[row].tolist()).repeat_interleave(2, dim=0)
        weights = query[row] @ key[row].repeat_interleave(2, dim=0).transpose(1, 2) * 0.25
        expected = weights.masked_fill(~visible, -torch.inf).softmax(-1) @ value[row].repeat_interleave(2, dim=0)
        assert_close(output[row].transpose(0, 1), expected)


def vertical_slash(query, key, length, vertical, slash):
    """Which keys each query sees, [H, S, S] bool, by the attention of the last 64 of a prompt's queries [H, S, d]."""
    heads, total, width = query.shape
    visible = torch.zeros(heads, total, total, dtype=torch.bool)
    for head in range(heads):
        own, by_column, by_slash = key[head // (heads // len(key))], [0.0] * length, [0.0] * length
        for row in range(length - 64, length):
            for place, weight in enumerate((own[: row + 1] @ query[head, row] / width**0.5).softmax(0).tolist()):
                by_column[place] += weight
                by_slash[row - place] += weight
        columns = sorted(range(length), key=lambda t: (t >= 30, -by_column[t]))[:vertical]
        slashes = sorted(range(length), key=lambda t: (t >= 100, -by_slash[t]))[:slash]
        for start in range(0, total, 64):
            seen = {t for distance in slashes for t in range(start - distance, start + 64 - distance)} | set(columns)
            for row in range(start, min(start + 64, total)):
                visible[head, row, [t for t in seen if 0 <= t <= row]] = True
    return visible


def reference(model, ids, draft, capacity, window, vertical=64, band=64, slash=None):
    """One dense pass under the mask, in which each layer's scores choose its columns (facts 2.3 and 3).

    Returns what each layer and KV head keeps of the prompt, the keys of each layer, and the logits of token N - 1.
    """
    length, total = ids.shape[1], ids.shape[1] + draft.shape[1]
    candidates, rows, chosen = length - window, range(length - window, total), {}

    def see(layer, query, key):
        importance = pooled(
            observed([query[:, row] for row in rows], [range(row + 1) for row in rows], key, candidates, "max", "max")
        )
        chosen[layer] = best(importance, capacity - window)
        if slash is not None:
            return vertical_slash(query, key, length, vertical, slash)
        return closed_form(total, band, best(importance, min(vertical, candidates)))

    passed, logits = run_dense(model, torch.cat([ids, draft], dim=1), see)
    held = [[sorted(head | set(range(candidates, length))) for head in chosen[layer]] for layer in sorted(chosen)]
    return held, [keys for _, keys in passed], logits[length - 1]


@pytest.mark.parametrize(("family", "length"), [*zip(FAMILIES, [130, 185], strict=True)])
def test_the_pass_equals_the_reference(family, length):
    """Prompts of 130 and 185 tokens and 7 more: not multiples of 64."""
    model = tiny_model(family, eos_token_id=None)
    ids = prompt_ids(length)[0]
    method = SpecKV.with_draft(DRAFT, 40, 7, window=9, sparse=SPARSE)
    draft = ModelDrafter(DRAFT, 7).write(model, ids).ids
    assert draft.shape == (1, 7)
    held, keys, logits = reference(model, ids, draft, 40, 9)
    state = method.start(model, ids)
    assert_close(state.logits[0], logits)
    assert state.lengths.tolist() == [length]
    assert state.cache.get_seq_length() == length
    for layer, each in enumerate(state.entries()):
        for head in range(2):
            assert_close(each.keys[0, head], keys[layer][head, held[layer][head]])
    dense = SpecKV.with_draft(DRAFT, 40, 7, window=9).start(model, ids)
    assert not torch.allclose(dense.logits, state.logits, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pass_under_vertical_slash_equals_the_reference(family):
    """A prompt of 333 tokens: of 106 diagonals and 36 columns 6 each are found by attention."""
    model, ids = tiny_model(family, eos_token_id=None, max_position_embeddings=512), prompt_ids(333)[0]
    method = SpecKV.with_draft(DRAFT, 40, 7, window=9, sparse=MInference(36, 106))
    held, keys, logits = reference(model, ids, ModelDrafter(DRAFT, 7).write(model, ids).ids, 40, 9, 36, slash=106)
    state = method.start(model, ids)
    assert_close(state.logits[0], logits)
    for layer, each in enumerate(state.entries()):
        for head in range(2):
            assert_close(each.keys[0, head], keys[layer][head, held[layer][head]])
    for sparse in (None, SparsePrefill(36, 64)):
        other = SpecKV.with_draft(DRAFT, 40, 7, window=9, sparse=sparse).start(model, ids)
        assert not torch.allclose(other.logits, state.logits, atol=1e-3)


def test_exactly_vertical_plus_band_is_dense():
    """128 tokens of prompt and draft are read as without `sparse`; 129 are not, and equal the reference."""
    model = tiny_model(eos_token_id=None)
    sparse, dense = (SpecKV.with_draft(DRAFT, 40, 7, window=9, sparse=each) for each in (SPARSE, None))
    assert sparse.shares_prefill(121)
    ids = prompt_ids(121)[0]
    states = [method.start(model, ids) for method in (sparse, dense)]
    for ours, theirs in zip(*(state.entries() for state in states), strict=True):
        assert torch.equal(ours.keys, theirs.keys)
    assert not sparse.shares_prefill(122)
    ids = prompt_ids(122)[0]
    held, keys, _ = reference(model, ids, ModelDrafter(DRAFT, 7).write(model, ids).ids, 40, 9)
    for layer, each in enumerate(sparse.start(model, ids).entries()):
        assert_close(each.keys[0, 0], keys[layer][0, held[layer][0]])


@pytest.mark.parametrize("sparse", [SPARSE, MInference(36, 106)], ids=["band", "slashes"])
def test_batches_equal_single_prompts(sparse):
    """Two prompts of one length, of which the first one's draft ends early."""
    model = tiny_model()
    ids = torch.cat([prompt_ids(150, seed=seed)[0] for seed in (1, 2)])
    answers = [ModelDrafter(DRAFT, 7).write(model, ids[row : row + 1]).ids[0].tolist() for row in range(2)]
    ending = next(token for token in answers[0] if token not in answers[1])
    DRAFT.of(model).generation_config.eos_token_id = ending
    draft = ModelDrafter(DRAFT, 7).write(model, ids)
    assert draft.mask is not None
    answer = prompt_ids(4, 4, seed=3)[0]
    method: Any = SpecKV.with_draft(DRAFT, 40, 7, window=9, sparse=sparse)
    together, _ = score_answer(model, method.start(model, ids), answer)
    for row in range(2):
        alone, _ = score_answer(model, method.start(model, ids[row : row + 1]), answer[row : row + 1])
        assert_close(together[row : row + 1], alone)


@pytest.mark.parametrize(
    ("make", "field", "code"),
    [
        (lambda: SparsePrefill(band=100), "band", "range"),
        (lambda: MInference(slash=0), "slash", "range"),
        (lambda: SparsePrefill(vertical=0), "vertical", "range"),
        (lambda: SpecKV.with_draft(DRAFT, 129, sparse=SPARSE), "budget", "range"),
        (lambda: SpecKV(40, DraftObserver(PromptEnds()), sparse=SPARSE), "sparse", "model"),
    ],
)
def test_bad_values_are_named(make, field, code):
    with refused(field, code):
        make()


def test_chunks_and_padding_are_refused():
    model, (ids, mask) = tiny_model(), prompt_ids(150, 140)
    method = SpecKV.with_draft(DRAFT, 40, 7, window=9, sparse=SPARSE)
    with refused("sparse", "conflict"):
        method.start(model, ids[:1], chunk=32)
    with refused("sparse", "conflict"):
        method.start(model, ids, mask)
    short, short_mask = prompt_ids(100, 90)
    assert method.start(model, short, short_mask, chunk=32).lengths.tolist() == [100, 90]
