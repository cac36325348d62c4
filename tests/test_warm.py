"""Programs that `tests/warm.py` runs in a fork are told, say and end what they do with a Python of their own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.warm import warm_python

pytestmark = pytest.mark.slow
SHOW = """
import os, signal, sys, time
print(__name__, sys.argv, sys.path[0], os.getcwd(), os.environ["GIVEN"], sys.stdin.read())
"""
ENDS = {
    "at its end": "",
    "with a status": "sys.exit(3)",
    "with a message": "sys.exit('why')",
    "with an error": "raise ValueError('why')",
    "killed": "sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("named", [["shown.py"], ["-m", "shown"]], ids=["script", "module"])
def test_a_program_ends_as_with_a_python_of_its_own(named: list[str], end: str, tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(SHOW + end)
    environment = {**warm_python(), "GIVEN": "a value"}

    def run(python: str) -> "subprocess.CompletedProcess[str]":
        given = [python, *named, "first", "--second=2"]
        return subprocess.run(given, cwd=tmp_path, env=environment, input="typed", capture_output=True, text=True)

    warm, own = run(environment["PYTHON_EXEC"]), run(sys.executable)
    assert (warm.returncode, warm.stdout) == (own.returncode, own.stdout)
    assert warm.stderr.splitlines()[-1:] == own.stderr.splitlines()[-1:]
    assert "first" in warm.stdout and "a value typed" in warm.stdout


def started(tmp_path: Path, program: str) -> "subprocess.Popen[str]":
    (tmp_path / "waits.py").write_text(
        f"import os, signal, sys, time\n{program}\nprint(os.getpid(), flush=True)\ntime.sleep(99)"
    )
    given = [warm_python()["PYTHON_EXEC"], str(tmp_path / "waits.py")]
    return subprocess.Popen(given, env=warm_python(), stdout=subprocess.PIPE, text=True)


def test_a_signal_reaches_the_program(tmp_path: Path) -> None:
    with started(tmp_path, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))") as program:
        assert program.stdout and int(program.stdout.readline()) != os.getpid()
        program.terminate()
        assert program.wait(60) == 7
    with started(tmp_path, "") as program:
        assert program.stdout and program.stdout.readline()
        program.terminate()
        assert program.wait(60) == -signal.SIGTERM


def test_a_program_ends_with_its_starter(tmp_path: Path) -> None:
    with started(tmp_path, "") as program:
        assert program.stdout
        pid = int(program.stdout.readline())
        assert psutil.pid_exists(pid)
        program.kill()
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)
