"""Programs that `tests/warm.py` runs in a fork are told, say and end what they do with a Python of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm import warm_python

pytestmark = pytest.mark.slow
SHOW = """
import os, signal, sys
print(__name__, sys.argv, sys.path[0], os.getcwd(), os.environ["GIVEN"], sys.stdin.read())
"""
ENDS = {
    "with a status": "sys.exit(3)",
    "with an error": "raise ValueError('why')",
    "killed": "sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_program_ends_as_with_a_python_of_its_own(end: str, tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(SHOW + end)
    environment = {**warm_python(), "GIVEN": "a value"}

    def run(python: str) -> "subprocess.CompletedProcess[str]":
        given = [python, "-m", "shown", "first", "--second=2"]
        return subprocess.run(given, cwd=tmp_path, env=environment, input="typed", capture_output=True, text=True)

    warm, own = run(environment["PYTHON_EXEC"]), run(sys.executable)
    assert (warm.returncode, warm.stdout) == (own.returncode, own.stdout)
    assert warm.stderr.splitlines()[-1:] == own.stderr.splitlines()[-1:]
    assert "first" in warm.stdout and "a value typed" in warm.stdout


def test_a_signal_reaches_the_program(tmp_path: Path) -> None:
    program = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print('ready', flush=True); time.sleep(99)"
    (tmp_path / "waits.py").write_text(f"import signal, sys, time\n{program}")
    given = [warm_python()["PYTHON_EXEC"], str(tmp_path / "waits.py")]
    with subprocess.Popen(given, env=warm_python(), stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout and waiting.stdout.readline() == "ready\n"
        waiting.terminate()
        assert waiting.wait(60) == 7
