"""Tests on slow or busy machines, under kernels of older processors, and of Triton kernels without a GPU."""

import os
import shutil
from pathlib import Path

import pytest

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # tests/gpu run without it
    pass
else:
    # It fails an example that takes more than 200 ms, and inputs that are slow to draw: on a busy machine, any.
    settings.register_profile("keepsight", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("keepsight")

if os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):
    # torch's bfloat16 attention asks oneDNN what the processor can do, and fails where the two disagree.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported

DEAREST = (
    "test_examples.py",
    "commands/test_typed_commands.py",
    "commands/test_fit_command.py",
    "commands/test_eval_processes.py",
    "commands/test_finetune_command.py",
    "eval/test_question.py",
    "test_package.py",
    "commands/test_eval_command.py",
    "commands/test_plan_command.py",
)
"""Files of a minute and more: they run first, or one process would end long after the other."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the dearest files to the front; the order of the others, and within a file, stays."""
    ranks = {Path(__file__).parent / name: rank for rank, name in enumerate(DEAREST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))
