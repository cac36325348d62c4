"""The chunked loss and the attention of unrolled steps against plain computations."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from keepsight.train import draft_ops as module
from keepsight.train.draft_ops import chunked_loss, merged_attention
from tests.close import assert_close

ROWS = [12, 11, 7]


def inputs(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "steps": [draw(rows, 8).to(dtype).requires_grad_() for rows in ROWS],
        "weight": draw(40, 8).requires_grad_(),
        "teacher": draw(13, 40).mul(3).softmax(-1).to(dtype),
        "weights": [draw(rows).abs() * (torch.arange(rows) % 4 != 0) for rows in ROWS],
    }


def plain(steps: list[Tensor], weight: Tensor, teacher: Tensor, weights: list[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for step, counts in zip(steps, weights, strict=True):
        for row in range(len(step)):
            scores = (weight.double() @ step[row].double()).log_softmax(-1)
            total = total - counts[row].double() * (teacher[len(teacher) - len(step) + row].double() @ scores)
    return total


@pytest.mark.parametrize("rows", [1024, 5])
def test_loss_and_gradients_equal_plain_cross_entropy(rows, monkeypatch):
    monkeypatch.setattr(module, "_ROWS", rows)
    given = inputs()
    learned = [*given["steps"], given["weight"]]
    found, expected = chunked_loss(**given), plain(**given)
    assert_close(found.double(), expected, torch.float32)
    for ours, theirs in zip(
        torch.autograd.grad(3 * found, learned), torch.autograd.grad(3 * expected, learned), strict=True
    ):
        assert_close(ours, theirs)


def dense(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """One softmax over the keys of all steps, row by row and key by key allowed or not."""
    rows, group = query.shape[2], query.shape[1] // keys[0].shape[1]
    allowed = torch.zeros(rows, rows * len(keys), dtype=torch.bool)
    for row in range(rows):
        for other in range(rows):
            allowed[row, other] = other <= row
        for step in range(1, len(keys)):
            allowed[row, step * rows + row] = True
    key, value = (torch.cat(each, dim=2).repeat_interleave(group, dim=1) for each in (keys, values))
    scores = (query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])).masked_fill(~allowed, -torch.inf)
    return scores.softmax(dim=-1) @ value


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (2 * torch.randn(*shape, dtype=torch.float64)).to(dtype).requires_grad_()


@pytest.mark.parametrize(
    ("steps", "heads", "kv_heads", "rows"), [(1, 4, 4, 37), (2, 6, 2, 37), (4, 3, 1, 37), (4, 6, 2, 1)]
)
def test_values_and_gradients_equal_dense_attention(steps, heads, kv_heads, rows):
    torch.manual_seed(steps)
    query = drawn(2, heads, rows, 8)
    keys, values = ([drawn(2, kv_heads, rows, 8) for _ in range(steps)] for _ in range(2))
    weight = torch.randn(2, heads, rows, 8, dtype=torch.float64)
    expected, found = dense(query, keys, values), merged_attention(query, keys, values)
    assert_close(found, expected)
    everything = [query, *keys, *values]
    ours, theirs = (torch.autograd.grad((each * weight).sum(), everything) for each in (found, expected))
    assert [each.shape for each in ours] == [each.shape for each in theirs]
    assert_close(torch.cat([each.flatten() for each in ours]), torch.cat([each.flatten() for each in theirs]))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_lower_precision_stays_close(dtype, tolerance):
    torch.manual_seed(0)
    query = drawn(1, 6, 150, 16, dtype=dtype)
    keys, values = ([drawn(1, 2, 150, 16, dtype=dtype) for _ in range(3)] for _ in range(2))
    everything = [query, *keys, *values]
    exact = [each.detach().double().requires_grad_() for each in everything]
    found, expected = merged_attention(query, keys, values), dense(exact[0], exact[1:4], exact[4:])
    assert found.dtype == dtype
    for ours, theirs in [
        (found, expected),
        *zip(
            torch.autograd.grad(found.float().square().sum(), everything),
            torch.autograd.grad(expected.square().sum(), exact),
            strict=True,
        ),
    ]:
        assert (ours.double() - theirs).norm() < tolerance * theirs.norm()
