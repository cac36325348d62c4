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
    for head, head_columns in enumerate(columns):
        for row in range(length):
            band_start = max(64 * (row // 64) - band, 0)
            visible[head, row, band_start : row + 1] = True
            visible[head, row, [column for column in head_columns if column <= row]] = True
    return visible


def random_attention(length, count, seed=0, batch=1, dtype=torch.float32):
    """Queries of 4 heads, keys and values of 2 KV heads, and the columns that each KV head sees, ascending."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, 4, length, 16, generator=generator).to(dtype)
    key = torch.randn(batch, 2, length, 16, generator=generator).to(dtype)
    value = torch.randn(batch, 2, length, 16, generator=generator).to(dtype)
    columns = torch.stack([torch.randperm(length, generator=generator)[:count] for _ in range(2 * batch)])
    return query, key, value, columns.sort(dim=-1).values.view(batch, 2, count)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("compute", [attention.attend_by_blocks, attention.attend_by_flex], ids=["blocks", "flex"])
@pytest.mark.parametrize(("length", "count", "band"), [(320, 5, 128), (50, 8, 64), (449, 100, 64)])
def test_attention_equals_dense_attention_under_the_mask(compute, length, count, band):
    query, key, value, columns = random_attention(length, count, batch=2)
    scaling = Softmax(0.25) if compute is attention.attend_by_blocks else 0.25
    output = compute(query, key, value, columns, band, scaling)
    assert output.shape == (2, length, 4, 16)
    assert output.is_contiguous()
    for row in range(2):
        visible = closed_form(length, band, columns[row].tolist()).repeat_interleave(2, dim=0)
        keys = key[row].repeat_interleave(2, dim=0)
        values = value[row].repeat_interleave(2, dim=0)
        logits = query[row] @ keys.transpose(1, 2) * 0.25
        expected = logits.masked_fill(~visible, -torch.inf).softmax(-1) @ values
        assert_close(output[row].transpose(0, 1), expected)


def attention_by_column_and_slash(query, key, length):
    """Attention of the last 64 of a prompt's queries [S, d] of a head, by column and by diagonal of keys [S, d]."""
    by_column = [0.0] * length
    by_slash = [0.0] * length
    for row in range(length - 64, length):
        weights = (key[: row + 1] @ query[row] / query.shape[1] ** 0.5).softmax(0)
        for column, weight in enumerate(weights.tolist()):
            by_column[column] += weight
            by_slash[row - column] += weight
    return by_column, by_slash


def vertical_slash(query, key, length, vertical, slash):
    """Which keys each query sees, [H, S, S] bool, by the attention of the last 64 of a prompt's queries [H, S, d]."""
    heads, total, _ = query.shape
    group = heads // len(key)
    visible = torch.zeros(heads, total, total, dtype=torch.bool)
    for head in range(heads):
        by_column, by_slash = attention_by_column_and_slash(query[head], key[head // group], length)
        columns = sorted(range(length), key=lambda column: (column >= 30, -by_column[column]))[:vertical]
        slashes = sorted(range(length), key=lambda distance: (distance >= 100, -by_slash[distance]))[:slash]
        for start in range(0, total, 64):
            seen = set(columns)
            for distance in slashes:
                seen.update(range(start - distance, start + 64 - distance))
            for row in range(start, min(start + 64, total)):
                visible[head, row, [position for position in seen if 0 <= position <= row]] = True
    return visible


def reference(model, ids, draft, capacity, window, vertical=64, band=64, slash=None):
    """One dense pass under the mask, in which each layer's scores choose its columns (facts 2.3 and 3).

    Returns what each layer and KV head keeps of the prompt, the keys of each layer, and the logits of token N - 1.
    """
    length = ids.shape[1]
    total = length + draft.shape[1]
    candidates = length - window
    rows = range(candidates, total)
    window_positions = set(range(candidates, length))
    kept_by_layer = {}

    def see(layer, query, key):
        queries = [query[:, row] for row in rows]
        causal = [range(row + 1) for row in rows]
        importance = pooled(observed(queries, causal, key, candidates, "max", "max"))
        selected = best(importance, capacity - window)
        kept_by_layer[layer] = [sorted(head | window_positions) for head in selected]
        if slash is not None:
            return vertical_slash(query, key, length, vertical, slash)
        return closed_form(total, band, best(importance, min(vertical, candidates)))

    layers, logits = run_dense(model, torch.cat([ids, draft], dim=1), see)
    kept = [kept_by_layer[layer] for layer in sorted(kept_by_layer)]
    return kept, [keys for _, keys in layers], logits[length - 1]


def assert_kept_keys(state, kept, keys):
    """Each layer and KV head of a state has the keys [K, S, d] of the reference's pass that it should keep."""
    for layer, entries in enumerate(state.entries()):
        for head in range(2):
            assert_close(entries.keys[0, head], keys[layer][head, kept[layer][head]])


@pytest.mark.parametrize(("family", "length"), [*zip(FAMILIES, [130, 185], strict=True)])
def test_the_pass_equals_the_reference(family, length):
    """Prompts of 130 and 185 tokens and 7 more: not multiples of 64."""
    model = tiny_model(family, eos_token_id=None)
    ids = prompt_ids(length)[0]
    method = SpecKV.with_draft(DRAFT, 40, 7, window=9, sparse=SPARSE)
    draft = ModelDrafter(DRAFT, 7).write(model, ids).ids
    assert draft.shape == (1, 7)
    kept, keys, logits = reference(model, ids, draft, 40, 9)
    state = method.start(model, ids)
    assert_close(state.logits[0], logits)
    assert state.lengths.tolist() == [length]
    assert state.cache.get_seq_length() == length
    assert_kept_keys(state, kept, keys)
    dense = SpecKV.with_draft(DRAFT, 40, 7, window=9).start(model, ids)
    assert not torch.allclose(dense.logits, state.logits, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pass_under_vertical_slash_equals_the_reference(family):
    """A prompt of 333 tokens: of 106 diagonals and 36 columns 6 each are found by attention."""
    model = tiny_model(family, eos_token_id=None, max_position_embeddings=512)
    ids = prompt_ids(333)[0]
    method = SpecKV.with_draft(DRAFT, 40, 7, window=9, sparse=MInference(36, 106))
    draft = ModelDrafter(DRAFT, 7).write(model, ids).ids
    kept, keys, logits = reference(model, ids, draft, 40, 9, 36, slash=106)
    state = method.start(model, ids)
    assert_close(state.logits[0], logits)
    assert_kept_keys(state, kept, keys)
    for sparse in (None, SparsePrefill(36, 64)):
        other = SpecKV.with_draft(DRAFT, 40, 7, window=9, sparse=sparse).start(model, ids)
        assert not torch.allclose(other.logits, state.logits, atol=1e-3)


def test_exactly_vertical_plus_band_is_dense():
    """128 tokens of prompt and draft are read as without `sparse`; 129 are not, and equal the reference."""
    model = tiny_model(eos_token_id=None)
    sparse = SpecKV.with_draft(DRAFT, 40, 7, window=9, sparse=SPARSE)
    dense = SpecKV.with_draft(DRAFT, 40, 7, window=9)
    assert sparse.shares_prefill(121)
    ids = prompt_ids(121)[0]
    sparse_entries = sparse.start(model, ids).entries()
    for layer, expected in zip(sparse_entries, dense.start(model, ids).entries(), strict=True):
        assert torch.equal(layer.keys, expected.keys)

    assert not sparse.shares_prefill(122)
    ids = prompt_ids(122)[0]
    draft = ModelDrafter(DRAFT, 7).write(model, ids).ids
    kept, keys, _ = reference(model, ids, draft, 40, 9)
    assert_kept_keys(sparse.start(model, ids), kept, keys)


@pytest.mark.parametrize("sparse", [SPARSE, MInference(36, 106)], ids=["band", "slashes"])
def test_batches_equal_single_prompts(sparse):
    """Two prompts of one length, of which the first one's draft ends early."""
    model = tiny_model()
    ids = torch.cat([prompt_ids(150, seed=seed)[0] for seed in (1, 2)])
    drafter = ModelDrafter(DRAFT, 7)
    early_draft = drafter.write(model, ids[:1]).ids[0].tolist()
    full_draft = drafter.write(model, ids[1:]).ids[0].tolist()
    end = next(token for token in early_draft if token not in full_draft)
    DRAFT.of(model).generation_config.eos_token_id = end
    assert drafter.write(model, ids).mask is not None

    answer = prompt_ids(4, 4, seed=3)[0]
    method: Any = SpecKV.with_draft(DRAFT, 40, 7, window=9, sparse=sparse)
    nll, _ = score_answer(model, method.start(model, ids), answer)
    for row in range(2):
        nll_alone, _ = score_answer(model, method.start(model, ids[row : row + 1]), answer[row : row + 1])
        assert_close(nll[row : row + 1], nll_alone)


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
def test_bad_values_are_refused(make, field, code):
    with refused(field, code):
        make()


def test_chunks_and_padding_are_refused():
    model = tiny_model()
    ids, mask = prompt_ids(150, 140)
    method = SpecKV.with_draft(DRAFT, 40, 7, window=9, sparse=SPARSE)
    with refused("sparse", "conflict"):
        method.start(model, ids[:1], chunk=32)
    with refused("sparse", "conflict"):
        method.start(model, ids, mask)
    short, short_mask = prompt_ids(100, 90)
    assert method.start(model, short, short_mask, chunk=32).lengths.tolist() == [100, 90]
