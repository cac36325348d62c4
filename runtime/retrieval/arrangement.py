"""Which entries the slots of a layer hold, and what changes from one step's selection to the next.

SpeContext (arXiv 2512.00722), section 5.4: what consecutive steps both select stays in its slot. Slots are unordered:
keys are stored after RoPE.
"""

import weakref
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from keepsight.errors import UserError
from keepsight.runtime.offload import flat_rows
from keepsight.runtime.sparse_read.cache import Selection
from keepsight.runtime.streams import FromDevice

_NONE, _STAYS = -1, -2


class Moves(NamedTuple):
    """What a change copies.

    Attributes:
        entries: [n] int64 on the CPU: flat indices into the entries [S, B, K] of a layer.
        slots: [n] int64 on the CPU: flat indices into slots [B, K, budget].
        reused: Number of entries that stay in their slots.
    """

    entries: Tensor
    slots: Tensor
    reused: int


class Change:
    """The change from what the slots hold to what a step selects, the same for all layers.

    Args:
        after: What the slots hold after it.
        arriving: [B, K, budget] int64: the entry to be copied into each slot, -1 where none is held, -2 where it stays.
    """

    def __init__(self, after: "Arrangement", arriving: Tensor) -> None:
        self.after, self._arriving = after, FromDevice(arriving)

    @cached_property
    def moves(self) -> Moves:
        """What it copies; for the fetching thread, because it waits for the device."""
        arriving = self._arriving.get()
        slots = (arriving.flatten() >= 0).nonzero()[:, 0]
        return Moves(flat_rows(arriving).flatten()[slots], slots, int((arriving == _STAYS).sum()))


class Arrangement:
    """Which entry each slot of a layer holds; immutable, and shared by the layers that hold the same.

    Args:
        held: [B, K, budget] int64, -1 for none.
    """

    def __init__(self, held: Tensor) -> None:
        self.held = held
        self._asked: Selection | None = None
        self._answered: weakref.ref[Change] | None = None  # an old state would keep all later ones alive

    @classmethod
    def empty(cls, batch: int, kv_heads: int, budget: int, device: torch.device) -> "Arrangement":
        """Empty slots."""
        return cls(torch.full((batch, kv_heads, budget), _NONE, device=device))

    def to(self, chosen: Selection, length: int) -> Change:
        """The change to what a step selects among `length` entries, which the first slots then hold.

        It is computed once for all layers of a step, as long as one of them keeps it.

        Raises:
            UserError: more is selected than there are slots.
        """
        known = self._answered() if self._answered is not None and self._asked is chosen else None
        if known is None:
            known = self._change(chosen, length)
            self._asked, self._answered = chosen, weakref.ref(known)
        return known

    def cropped(self, length: int) -> "Arrangement":
        """The arrangement without entries from `length` on: other tokens will take their places."""
        gone = self.held >= length
        return Arrangement(self.held.masked_fill(gone, _NONE)) if bool(gone.any()) else self

    def _change(self, chosen: Selection, length: int) -> Change:
        now, budget = chosen.indices, self.held.shape[2]
        if now.shape[2] > budget:
            raise UserError(f"{now.shape[2]} entries are selected, and a layer on the CPU has slots for {budget}")
        if chosen.real is not None:
            now = now.masked_fill(~chosen.real, _NONE)
        held = self.held[:, :, : now.shape[2]]
        stays = _is_among(held, now, length)
        lacking = ~_is_among(now, held, length) & (now != _NONE)
        # Per head, the first lacking entry goes into the first free slot, and so on.
        queue = now.new_full((*now.shape[:2], now.shape[2] + 1), _NONE)
        queue.scatter_(2, torch.where(lacking, lacking.cumsum(dim=2) - 1, now.shape[2]), now)
        queue[:, :, -1] = _NONE
        incoming = queue.gather(2, ((~stays).cumsum(dim=2) - 1).clamp(min=0))
        after = torch.where(stays, held, incoming)
        free = 0, budget - now.shape[2]
        arriving = functional.pad(incoming.masked_fill(stays, _STAYS), free, value=_NONE)
        return Change(Arrangement(functional.pad(after, free, value=_NONE)), arriving)


def _is_among(wanted: Tensor, given: Tensor, length: int) -> Tensor:
    """[B, K, n] bool: which of `wanted` [B, K, n] are among their head's `given` [B, K, m]; -1 never is."""
    marks = torch.zeros(*given.shape[:2], length + 1, dtype=torch.bool, device=given.device)
    marks.scatter_(2, torch.where(given < 0, length, given), True)
    marks[:, :, -1] = False  # where -1 was marked
    return marks.gather(2, torch.where(wanted < 0, length, wanted))
