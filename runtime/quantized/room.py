"""Room for packed groups, which grow in place: joining all of them for every token would copy the whole layer."""

from torch import Tensor

from keepsight.runtime.layer import spare
from keepsight.runtime.quantized.codec import Packed


class PackedRoom:
    """Memory to which groups are appended; whoever holds some of them holds a view, which stays valid.

    Only what follows the longest view is written. What is appended to a shorter one moves to a room of its own.
    """

    def __init__(self) -> None:
        self._rows: tuple[Tensor, ...] = ()
        self._filled = 0

    def append(self, held: Packed, new: Packed) -> tuple["PackedRoom", Packed]:
        """Groups of this room and more after them, along dimension 2, and the room that these are in."""
        before, after = held.scale.shape[2], held.scale.shape[2] + new.scale.shape[2]
        fits = bool(self._rows) and before == self._filled and after <= self._rows[0].shape[2]
        room = self if fits else _moved(held, after)
        for rows, part in zip(room._rows, new, strict=True):
            rows[:, :, before:after] = part
        room._filled = after
        return room, Packed(*(rows[:, :, :after] for rows in room._rows))


def _moved(held: Packed, after: int) -> PackedRoom:
    """A new room that begins with `held`, for `after` groups and, where there were some before, a share more."""
    room, before = PackedRoom(), held.scale.shape[2]
    capacity = after + (spare(after) if before else 0)
    room._rows = tuple(part.new_empty(*part.shape[:2], capacity, *part.shape[3:]) for part in held)
    for rows, part in zip(room._rows, held, strict=True):
        rows[:, :, :before] = part
    return room
