"""AdaKV (arXiv 2407.11550): SnapKV's scores divide each layer's budget among its heads."""

from dataclasses import dataclass

from keepsight.runtime.allocate import Adaptive, Allocation
from keepsight.runtime.methods.snapkv import SnapKV


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """SnapKV whose heads share their layer's budget (AdaKV, arXiv 2407.11550, algorithm 1)."""

    allocate: Allocation = Adaptive()
