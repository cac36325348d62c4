"""The folder of a server: others leave it alone while it runs, and remove it after a crash."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepsight.serving.vllm.folder import PREFIX, server_folder

HOLDS = """
from keepsight.serving.vllm.folder import server_folder
with server_folder() as folder:
    (folder / "prefixes").mkdir()
    (folder / "prefixes" / "0f.safetensors").write_text("a user's document")
    print(folder, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a folder."""
    command = [sys.executable, "-c", HOLDS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def folder_of(server: subprocess.Popen[str]) -> Path:
    assert server.stdout is not None
    return Path(server.stdout.readline().strip())


def test_what_a_crashed_server_left_is_removed_by_the_next(server, temporary: Path) -> None:
    folder = folder_of(server)
    with server_folder() as other:
        assert other != folder
        assert (folder / "prefixes" / "0f.safetensors").exists(), "its server is running"
    assert folder.exists()
    server.send_signal(signal.SIGKILL)
    server.wait()
    assert folder.exists()
    with server_folder() as other:
        assert [*temporary.glob("*")] == [other]
    assert not [*temporary.glob("*")]


def test_what_is_no_servers_folder_stays(temporary: Path) -> None:
    (temporary / "documents").mkdir()
    (temporary / f"{PREFIX}link").symlink_to(temporary / "documents")
    (temporary / f"{PREFIX}file").write_text("not a folder")
    with server_folder():
        assert {path.name for path in temporary.iterdir()} >= {"documents", f"{PREFIX}link", f"{PREFIX}file"}


def test_a_folder_is_private(temporary: Path) -> None:
    with server_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
