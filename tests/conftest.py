"""Tests under ATEN_CPU_CAPABILITY, which takes kernels of older processors."""

import os

if os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):
    # torch's bfloat16 attention asks oneDNN what the processor can do, and fails where the two disagree.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
