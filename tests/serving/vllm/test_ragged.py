"""Which caches the ragged backend takes: pages of one head each, side by side in one buffer."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from keepsight.errors import UserError

BLOCKS, HEADS, SIZE, WIDTH = 3, 2, 4, 10


def shared(caches: list[Tensor]) -> Any:
    from keepsight.serving.vllm.ragged import RaggedImpl, shared_by

    names = [f"layer {index}" for index in range(len(caches))]
    modules = {name: SimpleNamespace(impl=object.__new__(RaggedImpl)) for name in names}
    return shared_by(modules, dict(zip(names, caches, strict=True)))


def test_pages_are_those_of_each_layer_block_and_head() -> None:
    buffer = torch.arange(2.0 * BLOCKS * HEADS * SIZE * WIDTH).view(2, BLOCKS, HEADS, SIZE, WIDTH)
    layout = shared([*buffer]).layout
    page = layout.page_ids(torch.tensor([3]), torch.tensor([2]))  # layer 1, head 1 of the request's first block
    assert torch.equal(layout.pages[page[0], 0], buffer[1, 2, 1])


def test_caches_with_other_strides_are_refused() -> None:
    """As vLLM lays them out by default on some GPUs: heads side by side, entries apart."""
    buffer = torch.zeros(2, BLOCKS, SIZE, HEADS, WIDTH)
    with pytest.raises(UserError, match=r"strides .*VLLM_KV_CACHE_LAYOUT=LBHNC"):
        shared([cache.transpose(1, 2) for cache in buffer])
    apart = torch.zeros(2, BLOCKS + 1, HEADS, SIZE, WIDTH)[:, :BLOCKS]
    with pytest.raises(UserError, match="do not lie in one buffer"):
        shared([*apart])
