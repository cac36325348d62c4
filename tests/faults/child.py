"""The command line in a child of this process, which has imported everything: a run costs no start and can be killed."""

import importlib
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from keepsight.commands.cli import COMMANDS, main

_LIMIT = 120
"""Seconds after which a run counts as hung."""
_HEAVY = ("transformers.models.llama.modeling_llama", "transformers.trainer", "peft.tuners.lora", "tensorboard")


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        code: Its exit status; minus the signal that killed it.
        errors: What it wrote to stderr.
        seconds: How long it took.
        events: Number of times it touched a file in the watched folder, by name.
    """

    code: int
    errors: str
    seconds: float
    events: int

    @property
    def fault(self) -> str | None:
        """What no run may do; None when it ended well, in one line and exit status 2, or was killed."""
        if "Traceback" in self.errors:
            return "traceback"
        if self.seconds > _LIMIT:
            return "hung"
        said = [line for line in self.errors.splitlines() if line.startswith("keepsight: error: ")]
        if self.code == 2:
            return None if len(said) == 1 and self.errors.rstrip().endswith(said[0]) else "not one line"
        return None if self.code in (0, -signal.SIGKILL) else f"exit status {self.code}"


def preload() -> None:
    """Import what the commands need."""
    for name in (*(f"keepsight.commands.{name}" for name in COMMANDS), *_HEAVY):
        importlib.import_module(name)


def run(
    arguments: Sequence[str],
    folder: Path,
    *,
    watched: str = "",
    kill_at: int = 0,
    kill_after: float = 0.0,
    largest_file: int = 0,
) -> Outcome:
    """Run `keepsight ARGUMENTS` in a folder.

    Args:
        arguments: The command and its keys.
        folder: Working folder.
        watched: Folder in it whose files' events are counted.
        kill_at: Event at which it is killed; 0 for none.
        kill_after: Seconds after which it is killed; 0 for never.
        largest_file: Bytes beyond which no file can grow, as on a full disk; 0 for no limit.
    """
    log, started = folder.parent / f"{folder.name}.log", time.monotonic()
    child = os.fork()
    if child == 0:
        _in_child(lambda: _run(arguments, folder, folder / watched, kill_at, largest_file), log)
    status = _wait(child, started + (kill_after or _LIMIT))
    seconds = time.monotonic() - started
    errors, _, events = log.read_text(encoding="utf-8", errors="replace").partition(_EVENTS)
    log.unlink()
    hung = kill_after == 0 and status == -signal.SIGKILL and seconds > _LIMIT
    return Outcome(status, errors, seconds if hung or not kill_after else 0.0, int(events or 0))


_EVENTS = "\n--- events: "


def _in_child(action: Callable[[], int], log: Path) -> None:
    """Run the action in this process, which it ends."""
    code = 1
    try:
        os.setsid()
        opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(opened, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        code = action()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _run(arguments: Sequence[str], folder: Path, watched: Path, kill_at: int, largest_file: int) -> int:
    os.chdir(folder)
    sys.argv = ["keepsight", *arguments]
    events, prefix = 0, str(watched)

    def count(event: str, values: tuple[object, ...]) -> None:
        nonlocal events
        if event.partition(".")[0] in ("open", "os", "shutil") and values and isinstance(values[0], str | os.PathLike):
            if os.path.abspath(values[0]).startswith(prefix):
                events += 1
                if events == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

    if largest_file:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.addaudithook(count)
    code = main(arguments)
    if not largest_file:
        sys.stderr.write(f"{_EVENTS}{events}")
    return code


def _wait(child: int, until: float) -> int:
    """The exit status of a child, which is killed when it is still there at `until`."""
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        time.sleep(0.01)
