"""One process at a time writes to a folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from keepsight.errors import UserError
from keepsight.locks import one_writer

ROOT = Path(__file__).resolve().parents[1]
HOLD = "import sys, time, pathlib; from keepsight.locks import one_writer\n" + (
    "with one_writer(pathlib.Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)"
)


def test_another_process_is_named_and_kept_out_until_it_is_gone(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with (
            pytest.raises(UserError, match=rf"process {other.pid} on .* is writing here; wait for it"),
            one_writer(tmp_path),
        ):
            pass
        other.kill()
    with one_writer(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_goes_meanwhile_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with (
        pytest.raises(UserError, match=r"out: removed while it was being written; run the same command"),
        one_writer(folder),
    ):
        shutil.rmtree(folder)
    assert not folder.exists()


def test_an_error_within_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), one_writer(tmp_path / "out"):
        shutil.rmtree(tmp_path / "out")
        raise KeyboardInterrupt
