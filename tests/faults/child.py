"""The command line in a child of this process, which has imported everything: a run costs no start."""

import gc
import importlib
import os
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from keepsight.commands.cli import main
from keepsight.commands.config import COMMANDS

_LIMIT = 300
"""Seconds after which a run counts as hung."""
_HEAVY = ("transformers.models.llama.modeling_llama", "transformers.trainer", "peft.tuners.lora", "tensorboard")
_EVENTS = "\n--- events: "


@dataclass(frozen=True)
class Disturbance:
    """What happens to a run.

    Attributes:
        kill_at: Event in the watched folder at which it is killed; 0 for none. An event is a file that is opened,
            renamed, removed, ...
        remove_at: Event at which the watched folder is removed; 0 for none.
        kill_after: Seconds after which it is killed; 0 for never.
        largest_file: Bytes beyond which no file can grow, as on a full disk; 0 for no limit.
    """

    kill_at: int = 0
    remove_at: int = 0
    kill_after: float = 0.0
    largest_file: int = 0


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        code: Its exit status; minus the signal that killed it.
        errors: What it wrote to stderr.
        seconds: How long it took.
        events: Number of events in the watched folder, of a run that was not killed.
    """

    code: int
    errors: str
    seconds: float
    events: int

    @property
    def was_killed(self) -> bool:
        """Whether a kill ended it."""
        return self.code == -signal.SIGKILL

    @property
    def fault(self) -> str | None:
        """What no run may do; None when it ended well, with one line and exit status 2, or was killed."""
        if "Traceback" in self.errors:
            return "traceback"
        if self.was_killed:
            return "hung" if self.seconds > _LIMIT else None
        if self.code == 2:
            errors = [line for line in self.errors.splitlines() if line.startswith("keepsight: error: ")]
            is_one_line = len(errors) == 1 and self.errors.rstrip().endswith(errors[0])
            return None if is_one_line else "not one line"
        return None if self.code == 0 else f"exit status {self.code}"


def preload() -> None:
    """Import what the commands need."""
    for _, function in COMMANDS.values():
        module, _, _ = function.partition(":")
        importlib.import_module(f"keepsight.commands.{module}")
    for module in _HEAVY:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # or each child copies what it only looks through


@dataclass
class Run:
    """A run of `keepsight ARGUMENTS` in a folder, begun at once.

    Attributes:
        arguments: The command and its keys.
        folder: Working folder.
        watched: File or folder in it whose events are counted.
        disturbance: What happens to it.
    """

    arguments: Sequence[str]
    folder: Path
    watched: str = "."
    disturbance: Disturbance = field(default_factory=Disturbance)

    def __post_init__(self) -> None:
        self._started = time.monotonic()
        self._pipe, errors = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            torch.set_num_threads(1)  # makes anew the pool that a fork loses; loading threads would race for it
            _end_with(self._in_child, errors)
        with suppress(OSError):  # the child does the same: whoever comes first
            os.setpgid(self._child, self._child)
        os.close(errors)
        os.set_blocking(self._pipe, False)

    def wait(self) -> Outcome:
        """How it ended."""
        text = b""
        status: int | None = None
        until = self._started + (self.disturbance.kill_after or _LIMIT)
        while status is None:
            ended_child, wait_status = os.waitpid(self._child, os.WNOHANG)
            if ended_child:
                status = os.waitstatus_to_exitcode(wait_status)
            elif time.monotonic() > until:
                os.killpg(self._child, signal.SIGKILL)
                until = float("inf")
            else:
                time.sleep(0.01)
            text += _waiting_in(self._pipe)
        os.close(self._pipe)
        errors, _, events = text.decode(errors="replace").partition(_EVENTS)
        return Outcome(status, errors, time.monotonic() - self._started, int(events or 0))

    def _in_child(self) -> int:
        os.chdir(self.folder)
        sys.argv = ["keepsight", *self.arguments]
        if limit := self.disturbance.largest_file:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        counter = _Counter(self.folder / self.watched, self.disturbance)
        sys.addaudithook(counter)
        code = main(self.arguments)
        counter.is_off = True
        sys.stderr.write(f"{_EVENTS}{counter.events}")
        return code


def run(arguments: Sequence[str], folder: Path) -> Outcome:
    """An undisturbed run."""
    return Run(arguments, folder).wait()


class _Counter:
    """Counts what happens to files in a folder, and strikes at the chosen event."""

    def __init__(self, folder: Path, disturbance: Disturbance) -> None:
        self.folder = str(folder.absolute())
        self.disturbance = disturbance
        self.events = 0
        self.is_off = False

    def __call__(self, event: str, values: tuple[object, ...]) -> None:
        if self.is_off or event.partition(".")[0] not in ("open", "os") or not values:
            return
        path = values[0]
        if not isinstance(path, str | Path) or not os.path.abspath(str(path)).startswith(self.folder):
            return
        self.events += 1
        if self.events == self.disturbance.kill_at:
            os.killpg(0, signal.SIGKILL)
        if self.events == self.disturbance.remove_at:
            self.is_off = True
            shutil.rmtree(self.folder, ignore_errors=True)


def _end_with(action: Callable[[], int], errors: int) -> None:
    """End this process, a child in a group of its own, with the status that the action returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        tqdm.set_lock(threading.RLock())  # the inherited one is shared, and stays locked when a child is killed in it
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(errors, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        code = action()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _waiting_in(pipe: int) -> bytes:
    """What can be read without waiting."""
    waiting = b""
    while True:
        try:
            received = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return waiting
        if not received:
            return waiting
        waiting += received
