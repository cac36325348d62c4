"""PyramidKV: SnapKV's scores, and fewer entries from layer to layer."""

from dataclasses import dataclass

from keepsight.runtime.allocate import Allocation, Pyramid
from keepsight.runtime.methods.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV in which early layers keep more than late ones (PyramidKV, section 4)."""

    allocate: Allocation = Pyramid()
