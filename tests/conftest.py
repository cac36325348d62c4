"""Tests under ATEN_CPU_CAPABILITY, which takes kernels of older processors, and of kernels without a GPU."""

import os
import shutil

if os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):
    # torch's bfloat16 attention asks oneDNN what the processor can do, and fails where the two disagree.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
