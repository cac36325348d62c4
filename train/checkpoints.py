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

from safetensors import SafetensorError
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from typing_extensions import override

from keepsight.errors import UserError, require_same
from keepsight.files import file_digest, read_json, sync, write_json

SETTINGS, SEAL = "settings.json", "digests.json"
_NAME = re.compile(r"checkpoint-\d{1,18}\Z")


def checkpoints(work: Path) -> dict[int, Path]:
    """The complete checkpoints in `work` by step, in order; one without a seal is what a kill has left."""
    named = {int(path.name.rpartition("-")[2]): path for path in work.glob("checkpoint-*") if _NAME.match(path.name)}
    return {step: named[step] for step in sorted(named) if (named[step] / SEAL).is_file()}


def last_checkpoint(work: Path, before: int | None = None) -> Path | None:
    """The newest complete checkpoint in `work`; if `before` is given, the newest of an earlier step."""
    return next((path for step, path in reversed(checkpoints(work).items()) if before is None or step < before), None)


@contextmanager
def sealing(checkpoint: Path, kept: int) -> Iterator[None]:
    """Seal the checkpoint written within the block with digests of its files, then delete all but the newest.

    transformers' `save_total_limit` would delete the one before while the new one is not yet whole.

    Args:
        checkpoint: Its folder, among those of the others.
        kept: Checkpoints that stay, at least 1.

    Raises:
        UserError: it cannot be written; the checkpoint before it stays.
    """
    try:
        shutil.rmtree(checkpoint, ignore_errors=True)  # what a kill has left
        yield
        _seal(checkpoint)
        _delete_all_but_newest(checkpoint.parent, kept)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have errors of their own
        shutil.rmtree(checkpoint, ignore_errors=True)
        said = " ".join(str(error).split())[:200]
        raise UserError(
            f"{checkpoint}: the checkpoint cannot be written ({said}); once that is mended, the same command goes on "
            "from the checkpoint before"
        ) from error


def _seal(checkpoint: Path) -> None:
    paths = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    sync(*paths, *{path.parent for path in paths})
    write_json(checkpoint / SEAL, {path.relative_to(checkpoint).as_posix(): file_digest(path) for path in paths})


def _delete_all_but_newest(work: Path, kept: int) -> None:
    newest = [*checkpoints(work).values()][-kept:]
    for other in work.glob("checkpoint-*"):
        if _NAME.match(other.name) and other not in newest:
            shutil.rmtree(other, ignore_errors=True)


def check_seal(checkpoint: Path) -> None:
    """Compare a checkpoint's files with their digests.

    Raises:
        UserError: a file is missing or was changed.
    """
    for name, expected in read_json(checkpoint / SEAL, dict[str, str]).items():
        path = checkpoint / name
        fault = "missing" if not path.is_file() else "changed or cut off" if file_digest(path) != expected else None
        if fault is not None:
            raise UserError(
                f"{path}: {fault} since it was written; delete this checkpoint's folder to resume from the one before"
            )


def state_of(checkpoint: Path) -> TrainerState:
    """The Trainer's state when it wrote a checkpoint."""
    return TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))


def check_same_settings(work: Path, settings: dict[str, Any]) -> None:
    """Write the settings when a training begins; compare them when there is a checkpoint to resume from.

    Args:
        work: Folder of the checkpoints.
        settings: Values by their names in a recipe.

    Raises:
        UserError: the training began with other settings; all that differ are listed.
    """
    path = work / SETTINGS
    if last_checkpoint(work) is None:
        write_json(path, settings)
    else:
        advice = "choose another out=, or delete the folder"
        require_same(f"{path}: this training began", read_json(path, dict[str, Any]), settings, advice)


class StopOnInterrupt(TrainerCallback):
    """The first Ctrl-C finishes the step, saves a checkpoint and ends the training; a second one ends it at once."""

    def __init__(self) -> None:
        self.interrupted = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Catch Ctrl-C within the block; without effect outside the main thread, which alone receives signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.interrupted:
            control.should_save = control.should_training_stop = True
        if control.should_save:  # the mean since the last logged loss is in no checkpoint
            control.should_log = True

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
