"""vLLM's server as a child: it ends with its parent, and by itself without a fatal error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SERVERS = {"that ends": "print('served')", "that runs": "import time; print('served', flush=True); time.sleep(60)"}


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
    with launched(tmp_path, SERVERS["that ends"]) as child:
        code = child.wait(60)
        assert child.stdout is not None and child.stderr is not None
        assert (code, child.stdout.read(), child.stderr.read()) == (0, "served\n", "")


@pytest.mark.parametrize("sent", ["", "bytes that nobody reads"])
def test_a_server_ends_with_its_parent(tmp_path: Path, sent: str) -> None:
    with launched(tmp_path, SERVERS["that runs"]) as child:
        assert child.stdout is not None and child.stdin is not None and child.stderr is not None
        assert child.stdout.readline() == "served\n"
        child.stdin.write(sent)
        child.stdin.close()
        assert child.wait(30) == -15 and "Fatal" not in child.stderr.read()
