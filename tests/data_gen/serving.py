"""`transformers serve` on the loopback."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen


@contextmanager
def serving(model: Path, port: int, folder: Path | None = None) -> Iterator["subprocess.Popen[bytes]"]:
    """A server of a model's folder, which is named as from a working directory."""
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(model), "--device", "cpu"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "--dtype", "float32", "--port", str(port)], env=environment, cwd=folder)
    try:
        deadline = time.monotonic() + 180
        while process.poll() is None and time.monotonic() < deadline:
            try:
                urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            except (URLError, OSError):
                time.sleep(0.3)
        yield process
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    """A port of the loopback that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
