"""Packed groups that grow in place: earlier views stay as they were, and nothing is copied while there is room."""

import pytest
import torch

from keepsight.runtime.layer import ROOM
from keepsight.runtime.quantized.packing import Packed, PackedRoom, Quantizer

QUANTIZER = Quantizer(2, 8)


def groups(count: int, seed: int = 0) -> Packed:
    return QUANTIZER.pack_values(torch.randn(1, 2, count, 16, generator=torch.Generator().manual_seed(seed)))


def joined(*parts: Packed) -> Packed:
    return Packed(*(torch.cat(each, dim=2) for each in zip(*parts, strict=True)))


def same(one: Packed, other: Packed) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_appended_groups_follow_in_place() -> None:
    room, held = PackedRoom().append(groups(0), groups(100))
    assert held.codes.untyped_storage().nbytes() == held.codes.numel(), "a prompt takes no more than it needs"
    expected, places = groups(100), []
    for token in range(ROOM + 5):
        room, held = room.append(held, groups(1, token))
        expected = joined(expected, groups(1, token))
        places.append(held.codes.data_ptr())
    assert same(held, expected)
    assert len({*places}) == 2, "moved once when the first token came, and once when the room was full"


@pytest.mark.parametrize("count", [1, ROOM + 1])
def test_views_from_before_stay_valid_and_can_be_appended_to(count: int) -> None:
    room, first = PackedRoom().append(groups(0), groups(10))
    room, first = room.append(first, groups(1))
    before = Packed(*(each.clone() for each in first))
    one_room, one = room.append(first, groups(count, 1))
    other_room, other = room.append(first, groups(2, 2))
    again_room, again = one_room.append(one, groups(1, 3))
    assert same(first, before)
    assert same(one, joined(first, groups(count, 1)))
    assert same(other, joined(first, groups(2, 2)))
    assert same(again, joined(one, groups(1, 3)))
    assert other_room is not one_room and again_room is one_room
