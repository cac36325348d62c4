"""The ragged backend on vLLM's Triton attention, whose kernels run in Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from keepsight.errors import UserError
from tests.typed import ROOT


def test_a_step_in_the_interpreter_equals_a_slow_loop() -> None:
    """Of two requests with a prefix and an ordinary one; pages and tokens are written by vLLM's kernel too."""
    assert importlib.util.find_spec("triton") is not None, "vLLM's environment brings Triton: run make setup-vllm"
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    command = [sys.executable, "-m", "tests.serving.vllm.interpreted", str(Path(spec.origin).parent)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "equal"


def test_it_is_registered_where_it_is_named_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import registry

    from keepsight.serving.vllm.ragged import register

    registered = []
    monkeypatch.setattr(registry, "register_backend", lambda backend, path: registered.append((backend.name, path)))
    for value, expected in (
        ("0", []),
        ("1", [("CPU_ATTN", "keepsight.serving.vllm.ragged.RaggedBackend")]),
        ("triton", [("TRITON_ATTN", "keepsight.serving.vllm.ragged_triton.RaggedTritonBackend")]),
    ):
        registered.clear()
        monkeypatch.setenv("KEEPSIGHT_RAGGED", value)
        monkeypatch.delenv("KEEPSIGHT_EVICT", raising=False)
        register()
        assert registered == expected
    monkeypatch.setenv("KEEPSIGHT_EVICT", "1")
    with pytest.raises(UserError, match="CPU backend alone"):
        register()
