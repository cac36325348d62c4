"""The room behind a layer's entries: used again after a crop, never written to where another layer reads."""

import itertools
import random

import numpy as np
import pytest
import torch

from keepsight.runtime.layer import GROWTH, ROOM, KeptLayer, RaggedLayer
from keepsight.runtime.retrieval.specontext import HeadKeys
from keepsight.runtime.sparse_read.cache import SelectedLayer
from keepsight.runtime.sparse_read.selection import TopPages


def kept(entries: int = 5) -> KeptLayer:
    keys, values = torch.randn(2, 1, 2, entries, 4)
    return KeptLayer(keys, values, entries)


def selected() -> KeptLayer:
    keys, values = torch.randn(2, 1, 2, 5, 4)
    return SelectedLayer(keys, values, 5)


def ragged() -> KeptLayer:
    keys, values = torch.randn(2, 4, 4)
    return RaggedLayer(keys, values, np.array([[3, 1]]), 5)


def head_keys() -> HeadKeys:
    return HeadKeys(torch.randn(1, 2, 5, 4))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("make", [kept, ragged, selected])
def test_copies_of_a_layer_go_their_own_ways(make, seed):
    """Whatever is appended, cropped and shared, each layer holds what plain tensors would."""
    chosen, layers = random.Random(seed), [make()]
    expected = [layers[0].keys.clone()]
    for _ in range(60):
        index = chosen.randrange(len(layers))
        layer, appended = layers[index], expected[index].shape[2]
        what = chosen.choice(["append", "append", "crop", "share"])
        if what == "append":
            new = torch.randn(1, 2, chosen.choice([1, 3, 40]), 4)
            layer._append(new, -new)
            expected[index] = torch.cat([expected[index], new], dim=2)
        elif what == "crop" and (count := chosen.randint(0, min(appended, 4))):
            layer.crop(-count)
            expected[index] = expected[index][:, :, : appended - count]
        elif what == "share" and len(layers) < 6:
            layers.append(layer.share())
            expected.append(expected[index])
        for each, keys in zip(layers, expected, strict=True):
            assert torch.equal(each.keys, keys)
            assert each.values.shape == keys.shape


def test_what_was_forgotten_is_overwritten_without_a_copy():
    layer = kept(100)
    layer.update(*torch.randn(2, 1, 2, 6, 4))
    place = layer.keys.data_ptr()
    for _ in range(30):
        layer.crop(-4)
        layer.update(*torch.randn(2, 1, 2, 5, 4))
    assert layer.keys.data_ptr() == place
    assert layer.get_seq_length() == 136
    copy = layer.share()
    layer.update(*torch.randn(2, 1, 2, 2, 4))
    layer.crop(-2)
    layer.update(*torch.randn(2, 1, 2, 2, 4))
    assert layer.keys.data_ptr() == place  # what the copy holds has not been cropped
    layer.crop(-3)
    layer.update(*torch.randn(2, 1, 2, 1, 4))
    assert layer.keys.data_ptr() != place
    assert copy.keys.shape[2] == 136


@pytest.mark.parametrize("make", [kept, selected, ragged, head_keys])
def test_room_grows_by_a_share_of_what_is_held(make):
    """A long answer moves its cache seldom: 5,000 tokens one by one, where 64 at a time would be 79 moves."""
    layer, places = make(), []
    for _ in range(5000):
        new = torch.zeros(1, 2, 1, 4)
        layer.append(new) if isinstance(layer, HeadKeys) else layer._append(new, new)
        places.append(layer.keys.untyped_storage().data_ptr())
    assert sum(one != other for one, other in itertools.pairwise(places)) <= 45
    row = 2 * 4 * 4
    assert layer.keys.untyped_storage().nbytes() <= (layer.keys.shape[2] * (1 + GROWTH) + ROOM) * row


def test_room_for_quests_pages_grows_by_a_share_of_them() -> None:
    """5,000 pages one by one, where 16 at a time would be 312 moves."""
    pages, places, keys = TopPages(8, page=1), [], torch.randn(1, 2, 5000, 4)
    bounds = keys[:, :, :0]
    for length in range(1, 5001):
        pages.summarise(keys[:, :, :length], None)
        assert pages._bounds is not None
        bounds = pages._bounds[:, :, :length]
        places.append(bounds.data_ptr())
    assert sum(one != other for one, other in itertools.pairwise(places)) <= 80
    assert torch.equal(bounds, torch.cat([keys, keys], dim=3))
