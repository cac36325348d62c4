"""Checkpoints: sealed with digests, resumed under the same settings only, and written on Ctrl-C."""

import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate.utils import reduce
from safetensors import SafetensorError
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from keepsight.errors import UserError, one_line
from keepsight.files import file_digest, read_json, sync, write_json
from keepsight.models.identity import MadeWith

SETTINGS = "settings.json"
SEAL = "digests.json"
_NAME = re.compile(r"checkpoint-\d{1,18}\Z")


def checkpoints(work: Path) -> dict[int, Path]:
    """The complete checkpoints in `work` by ascending step; folders without a seal, left by killed runs, are not."""
    complete: dict[int, Path] = {}
    for folder in _checkpoint_folders(work):
        if (folder / SEAL).is_file():
            step = int(folder.name.rpartition("-")[2])
            complete[step] = folder
    return dict(sorted(complete.items()))


def _checkpoint_folders(work: Path) -> list[Path]:
    return [path for path in work.glob("checkpoint-*") if _NAME.match(path.name)]


def last_checkpoint(work: Path, before: int | None = None) -> Path | None:
    """The newest complete checkpoint in `work`; with `before`, the newest of an earlier step."""
    newest = None
    for step, folder in checkpoints(work).items():
        if before is None or step < before:
            newest = folder
    return newest


@contextmanager
def sealing(checkpoint: Path, limit: int, is_main: bool = True) -> Iterator[None]:
    """Seal the checkpoint written within the block with digests of its files, then delete all but the `limit` newest.

    transformers' `save_total_limit` would delete the previous checkpoint before the new one is complete. Only the
    process that `is_main` seals and deletes. A `UserError` if the checkpoint cannot be written; the previous one stays.
    """
    try:
        if is_main:
            shutil.rmtree(checkpoint, ignore_errors=True)  # left by a killed run
        yield
        if is_main:
            _seal(checkpoint)
            _delete_older(checkpoint.parent, limit)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch raises RuntimeError
        shutil.rmtree(checkpoint, ignore_errors=True)
        raise UserError(
            f"{checkpoint}: the checkpoint cannot be written ({one_line(error, 200)}); fix this, then "
            "run the same command again to resume from the previous checkpoint",
            field="checkpoint",
            code="file",
        ) from error


def _seal(checkpoint: Path) -> None:
    paths = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    sync(*paths, *{path.parent for path in paths})
    digests = {path.relative_to(checkpoint).as_posix(): file_digest(path) for path in paths}
    write_json(checkpoint / SEAL, digests)


def _delete_older(work: Path, limit: int) -> None:
    newest = list(checkpoints(work).values())[-limit:]
    for folder in _checkpoint_folders(work):
        if folder not in newest:
            shutil.rmtree(folder, ignore_errors=True)


def check_seal(checkpoint: Path) -> None:
    """Compare a checkpoint's files with their digests; a `UserError` if a file is missing or was changed."""
    for name, expected in read_json(checkpoint / SEAL, dict[str, str]).items():
        path = checkpoint / name
        if not path.is_file():
            fault = "missing"
        elif file_digest(path) != expected:
            fault = "changed or cut off"
        else:
            continue
        raise UserError(
            f"{path}: {fault} since it was written; delete this checkpoint's folder to resume from the previous one",
            field="checkpoint",
            code="file",
        )


def check_same_settings(work: Path, made_with: MadeWith) -> None:
    """Write what a new training begins with to `work`, its settings by recipe key; compare it if it is resumed.

    A `UserError` names what differs from the training in `work`. Checkpoints that another program wrote are refused,
    too.
    """
    path = work / SETTINGS
    if last_checkpoint(work) is None:
        other_checkpoints = _checkpoint_folders(work)
        if other_checkpoints and not path.exists():  # they would be deleted as incomplete
            raise UserError(
                f"{other_checkpoints[0]}: not a checkpoint of this training; choose another out=",
                field="out",
                code="conflict",
            )
        write_json(path, asdict(made_with))
        return

    began_with: MadeWith = read_json(path, MadeWith)
    began_with.require(made_with, f"{path}: this training began", "choose another out=, or delete the folder")


class NewIntervals(TrainerCallback):
    """Applies the current intervals of measuring and saving to a resumed training; the Trainer uses the old ones."""

    @override
    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        state.compute_steps(args, state.max_steps)


class StopAfterMinutes(TrainerCallback):
    """Ends a training at the first step that ends after some minutes, with a checkpoint; in all processes alike.

    Args:
        minutes: Minutes since the training began or was resumed.

    Attributes:
        has_stopped: Whether it has ended the training.
    """

    def __init__(self, minutes: float) -> None:
        self.minutes = minutes
        self.has_stopped = False
        self._start = time.monotonic()

    @override
    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._start = time.monotonic()

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        is_over = time.monotonic() - self._start >= 60 * self.minutes
        if _in_any_process(args, is_over):
            self.has_stopped = True
            control.should_save = True
            control.should_training_stop = True


def _in_any_process(args: TrainingArguments, is_so: bool) -> bool:
    """Whether something is so in any process of a training; all call it after the same step."""
    if args.world_size == 1:
        return is_so
    number: Any = reduce(torch.tensor(float(is_so), device=args.device))
    return bool(number.item())


class StopOnInterrupt(TrainerCallback):
    """The first Ctrl-C finishes the step, saves a checkpoint and ends the training; a second one ends it at once.

    The first SIGTERM, which Slurm sends before it ends a job, acts like Ctrl-C. Further ones are ignored: a launcher
    forwards the signal that Slurm has already sent to every process. All processes stop after the same step.
    """

    def __init__(self) -> None:
        self.interrupted = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Catch signals within the block; without effect outside the main thread, which alone receives them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        earlier_sigint = signal.signal(signal.SIGINT, self._interrupt)
        earlier_sigterm = signal.signal(signal.SIGTERM, self._terminate)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, earlier_sigint)
            signal.signal(signal.SIGTERM, earlier_sigterm)

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        stops_here = self.interrupted
        if args.world_size > 1:
            stops_here = stops_here or control.should_training_stop
        if _in_any_process(args, stops_here):
            control.should_save = True
            control.should_training_stop = True
        if control.should_save:  # a checkpoint does not store the mean since the last log entry
            control.should_log = True

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._interrupt(number, frame)
