"""AdaKV: SnapKV's scores, and a layer's budget shared among its heads by them."""

from dataclasses import dataclass

from keepsight.runtime.allocate import Adaptive, Allocation
from keepsight.runtime.methods.snapkv import SnapKV


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """SnapKV in which the heads of a layer keep different numbers of entries (AdaKV, section 4)."""

    allocate: Allocation = Adaptive()
