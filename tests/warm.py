"""A Python with the imports that commands need, which take longer than most commands on a tiny model; plots are empty.

Each program that is started with it runs in a fork, with the files, the folder and the environment of whoever started
it; a signal that the starter gets reaches the program. As a module it is the process that is forked: python -m
tests.warm DESCRIPTOR.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_COMMANDS = ("train", "train_heads", "finetune", "fit", "data", "eval")
IMPORTED = [
    *(f"keepsight.commands.{name}" for name in _COMMANDS),
    "accelerate.commands.accelerate_cli",
    "torch.distributed.run",
    "tests.train.runs",
]
if find_spec("deepspeed"):
    IMPORTED.append("deepspeed")  # accelerate does, in every training
_STARTER = """#!/bin/sh
case "$1" in
    -m | -u | [!-]*) exec {python} -IS {client} {address} "$@" ;;
    *) exec {python} "$@" ;;
esac
"""


@cache
def warm_python() -> dict[str, str]:
    """The environment in which launchers start their processes with it; PYTHON_EXEC is its path."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
    }
    if sys.platform != "linux":  # where a process with these imports cannot be forked: each starts anew
        return {**environment, "PYTHON_EXEC": sys.executable}
    folder = _keep(tempfile.TemporaryDirectory()).name
    address = f"{folder}/door"
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen(16)
        command = [sys.executable, "-m", "tests.warm", str(door.fileno())]
        options: dict[str, Any] = {"cwd": ROOT, "env": environment, "pass_fds": [door.fileno()]}
        _keep(subprocess.Popen(command, stdin=subprocess.PIPE, **options))  # ends when its standard input does
    client = Path(__file__).with_name("warm_client.py")
    starter = Path(folder, "python")
    starter.write_text(
        _STARTER.format(
            python=shlex.quote(sys.executable), client=shlex.quote(str(client)), address=shlex.quote(address)
        )
    )
    starter.chmod(0o755)
    return {**environment, "PYTHON_EXEC": str(starter)}


_KEPT: list[Any] = []


def _keep(resource: Any) -> Any:
    """For as long as this process runs."""
    _KEPT.append(resource)
    return resource


def _serve(door: socket.socket) -> list[str] | None:
    """Fork for everybody who asks; returns the program and its arguments in the fork that runs it, else None."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([door, sys.stdin], [], [])
        if sys.stdin in ready:
            return None
        asker, _ = door.accept()
        if not os.fork():
            door.close()
            return _attend(asker)
        asker.close()


def _attend(asker: socket.socket) -> list[str]:
    """Fork once more, pass on signals and tell the asker how the program ended; the program's process returns."""
    size, files, _, _ = socket.recv_fds(asker, 8, 3)
    request = json.loads(asker.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if not pid:
        asker.close()
        return _become(files, **request)
    for file in files:
        os.close(file)
    threading.Thread(target=_pass_on, args=(asker, pid), daemon=True).start()
    _, wait_status = os.waitpid(pid, 0)
    status = os.waitstatus_to_exitcode(wait_status)
    with suppress(BrokenPipeError):
        asker.sendall(str(status).encode())
    os._exit(0)


def _pass_on(asker: socket.socket, pid: int) -> None:
    """Signals, one byte each; where the asker is gone, so is the program."""
    while number := asker.recv(1):
        os.kill(pid, number[0])
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _become(files: list[int], command: list[str], folder: str, environment: dict[str, str]) -> list[str]:
    """Take the asker's files, environment and folder; returns the program and its arguments."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.executable = environment.get("PYTHON_EXEC", sys.executable)
    is_unbuffered = command[0] == "-u"
    return command[1:] if is_unbuffered else command


def _run(command: list[str]) -> int:
    """The exit status of a script or of `-m` and a module."""
    try:
        _as_python_does(command)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _as_python_does(command: list[str]) -> None:
    if command[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(command[0]))
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    from pytest import MonkeyPatch

    from tests.commands.commands import draw_nothing

    listening = socket.socket(fileno=int(sys.argv[1]))
    for module in IMPORTED:
        importlib.import_module(module)
    draw_nothing(MonkeyPatch())
    gc.freeze()  # what is here stays, and forks share its memory
    program = _serve(listening)
    if program is not None:
        status = _run(program)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(status)  # taking the imports apart takes seconds
