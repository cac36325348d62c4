"""Checkpoints: sealed with digests, resumed under the same settings only, and written on Ctrl-C."""

import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate.utils import reduce
from safetensors import SafetensorError
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from keepsight.errors import UserError, one_line, require_same
from keepsight.files import file_digest, read_json, sync, write_json
from keepsight.models.lookahead_settings import SELECTION
from keepsight.train.settings import MAY_CHANGE

SETTINGS, SEAL = "settings.json", "digests.json"
_NAME = re.compile(r"checkpoint-\d{1,18}\Z")


def checkpoints(work: Path) -> dict[int, Path]:
    """The complete checkpoints in `work` by ascending step; folders without a seal, left by killed runs, are not."""
    named = {int(path.name.rpartition("-")[2]): path for path in _folders(work)}
    return {step: named[step] for step in sorted(named) if (named[step] / SEAL).is_file()}


def _folders(work: Path) -> list[Path]:
    return [path for path in work.glob("checkpoint-*") if _NAME.match(path.name)]


def last_checkpoint(work: Path, before: int | None = None) -> Path | None:
    """The newest complete checkpoint in `work`; with `before`, the newest of an earlier step."""
    return next((path for step, path in reversed(checkpoints(work).items()) if before is None or step < before), None)


@contextmanager
def sealing(checkpoint: Path, kept: int, is_main: bool = True) -> Iterator[None]:
    """Seal the checkpoint written within the block with digests of its files, then delete all but the `kept` newest.

    transformers' `save_total_limit` would delete the previous checkpoint before the new one is complete. Only the
    process that `is_main` seals and deletes. A `UserError` if the checkpoint cannot be written; the previous one stays.
    """
    try:
        if is_main:
            shutil.rmtree(checkpoint, ignore_errors=True)  # left by a killed run
        yield
        if is_main:
            _seal(checkpoint, kept)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch raises RuntimeError
        shutil.rmtree(checkpoint, ignore_errors=True)
        raise UserError(
            f"{checkpoint}: the checkpoint cannot be written ({one_line(error, 200)}); fix this, then "
            "run the same command again to resume from the previous checkpoint"
        ) from error


def _seal(checkpoint: Path, kept: int) -> None:
    paths = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    sync(*paths, *{path.parent for path in paths})
    write_json(checkpoint / SEAL, {path.relative_to(checkpoint).as_posix(): file_digest(path) for path in paths})
    newest = [*checkpoints(checkpoint.parent).values()][-kept:]
    for other in {*_folders(checkpoint.parent)} - {*newest}:
        shutil.rmtree(other, ignore_errors=True)


def check_seal(checkpoint: Path) -> None:
    """Compare a checkpoint's files with their digests; a `UserError` if a file is missing or was changed."""
    for name, expected in read_json(checkpoint / SEAL, dict[str, str]).items():
        path = checkpoint / name
        fault = "missing" if not path.is_file() else "changed or cut off" if file_digest(path) != expected else None
        if fault is not None:
            raise UserError(
                f"{path}: {fault} since it was written; delete this checkpoint's folder to resume from the previous one"
            )


def check_same_settings(work: Path, settings: dict[str, Any]) -> None:
    """Write the settings of a new training, by recipe key, to `work`; compare them if it is resumed.

    A `UserError` lists all settings that differ from those of the training in `work`. Checkpoints that another program
    wrote are refused, too.
    """
    path = work / SETTINGS
    if last_checkpoint(work) is None:
        if not path.exists() and (others := _folders(work)):  # they would be deleted as incomplete
            raise UserError(f"{others[0]}: not a checkpoint of this training; choose another out=")
        write_json(path, settings)
    else:
        begun = read_json(path, dict[str, Any])
        # Earlier versions also stored settings that may change: the selection was one of them.
        changeable = {*MAY_CHANGE, *(f"lookahead.{name}" for name in SELECTION)}
        begun = {name: begun[name] for name in begun if not {name, name.rpartition(".")[2]} & changeable}
        advice = "choose another out=, or delete the folder"
        require_same(f"{path}: this training began", begun, settings, advice)


class NewIntervals(TrainerCallback):
    """Applies the current intervals of measuring and saving to a resumed training; the Trainer uses the old ones."""

    @override
    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        state.compute_steps(args, state.max_steps)


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
        before = signal.signal(signal.SIGINT, self._interrupt), signal.signal(signal.SIGTERM, self._terminate)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before[0])
            signal.signal(signal.SIGTERM, before[1])

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        stops = self.interrupted
        if args.world_size > 1:
            summed: Any = reduce(torch.tensor(float(stops or control.should_training_stop), device=args.device))
            stops = bool(summed.item())
        if stops:
            control.should_save = control.should_training_stop = True
        if control.should_save:  # a checkpoint does not store the mean since the last log entry
            control.should_log = True

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._interrupt(number, frame)
