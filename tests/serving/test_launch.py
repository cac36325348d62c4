"""vLLM's server as a child: it ends with its parent, and by itself without a fatal error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SERVER_THAT_ENDS = "print('served')"
SERVER_THAT_RUNS = "import time; print('served', flush=True); time.sleep(60)"


def launched(folder: Path, server: str) -> "subprocess.Popen[str]":
    """The launcher with a module that stands for vLLM's server."""
    package = folder / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for parent in (package, package.parent, package.parent.parent):
        (parent / "__init__.py").touch()
    (package / "api_server.py").write_text(server)
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-m", "keepsight.serving.vllm.launch"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        start_new_session=True,
    )


def test_a_server_that_ends_while_its_parent_runs(tmp_path: Path) -> None:
    with launched(tmp_path, SERVER_THAT_ENDS) as child:
        code = child.wait(60)
        assert child.stdout is not None
        assert child.stderr is not None
        assert code == 0
        assert child.stdout.read() == "served\n"
        assert child.stderr.read() == ""


@pytest.mark.parametrize("text", ["", "bytes that nobody reads"])
def test_a_server_ends_with_its_parent(tmp_path: Path, text: str) -> None:
    with launched(tmp_path, SERVER_THAT_RUNS) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == "served\n"
        child.stdin.write(text)
        child.stdin.close()
        assert child.wait(30) == -15
        assert "Fatal" not in child.stderr.read()
