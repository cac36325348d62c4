"""PyramidKV (arXiv 2406.02069): SnapKV's scores, and budgets that shrink with depth."""

from dataclasses import dataclass

from keepsight.runtime.allocate import Allocation
from keepsight.runtime.methods.snapkv import SnapKV
from keepsight.runtime.allocate import Pyramid


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV in which early layers keep more than late ones (PyramidKV, arXiv 2406.02069, section 4)."""

    allocate: Allocation = Pyramid()
