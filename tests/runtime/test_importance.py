"""Importance and selection against written-out definitions."""

import pytest
import torch

from keepsight.runtime.importance import observed_attention, pool, reduce_group, top_entries


def _reference(query, key, scaling, prompt_length, key_mask=None, query_mask=None):
    """One entry at a time, as the definition reads."""
    batch, heads, rows, _ = query.shape
    keys, group = key.shape[2], heads // key.shape[1]
    result = torch.zeros(batch, heads, prompt_length)
    for b in range(batch):
        real_rows = [i for i in range(rows) if query_mask is None or query_mask[b, i]]
        for h in range(heads):
            for i in real_rows:
                seen = [j for j in range(keys - rows + i + 1) if key_mask is None or key_mask[b, j]]
                logits = torch.stack([query[b, h, i] @ key[b, h // group, j] * scaling for j in seen])
                for j, weight in zip(seen, logits.softmax(0), strict=True):
                    if j < prompt_length:
                        result[b, h, j] += weight / len(real_rows)
    return result


def test_observed_attention_equals_its_definition():
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 10, 8)
    key_mask = torch.ones(2, 10, dtype=torch.bool)
    key_mask[1, :4] = False
    query_mask = torch.tensor([[True, True, True], [True, True, False]])
    got = observed_attention(query, key, 0.3, 7, key_mask=key_mask, query_mask=query_mask)
    torch.testing.assert_close(got, _reference(query, key, 0.3, 7, key_mask, query_mask))


def test_many_rows_are_summed_in_blocks():
    torch.manual_seed(0)
    query, key = torch.randn(1, 2, 150, 4), torch.randn(1, 2, 160, 4)
    torch.testing.assert_close(observed_attention(query, key, 0.5, 10), _reference(query, key, 0.5, 10))


def test_group_reduction_and_pooling_do_not_commute():
    heads = torch.tensor([[[0.0, 4.0, 0.0], [4.0, 0.0, 0.0]]])
    group_first = pool(reduce_group(heads, 1), 3)
    assert group_first.tolist() == [[[2.0, 2.0, 2.0]]]
    assert reduce_group(pool(heads, 3), 1).tolist() == [[[4.0, 4.0, 2.0]]]
    assert reduce_group(heads, 1, "max").tolist() == [[[4.0, 4.0, 0.0]]]


def test_average_pooling_divides_by_the_kernel_at_the_edges():
    assert pool(torch.tensor([[[3.0, 3.0, 3.0]]]), 3, "avg").tolist() == [[[2.0, 3.0, 2.0]]]


def test_ties_go_to_the_lowest_index():
    scores = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    assert top_entries(scores, 4).tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert top_entries(scores, 3).tolist() == [[0, 1, 3], [0, 1, 2]]


@pytest.mark.parametrize("budget", [1, 7, 64, 200])
def test_selection_equals_a_stable_sort(budget):
    scores = torch.randint(0, 9, (3, 2, 200), generator=torch.Generator().manual_seed(budget)).float()
    scores[0, 0, :5] = torch.inf
    scores[1, :, 100:150] = -torch.inf
    expected = scores.sort(dim=-1, descending=True, stable=True).indices[..., :budget].sort(dim=-1).values
    assert torch.equal(top_entries(scores, budget), expected)
