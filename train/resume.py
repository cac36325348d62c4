"""Stopping and resuming a training: checkpoints, settings that must not change, and Ctrl-C."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.files import read_json, write_json


def last_checkpoint(work: Path, before: int | None = None) -> Path | None:
    """The newest complete checkpoint in `work`; if `before` is given, the newest of an earlier step.

    The Trainer writes its state last, so a checkpoint without one is incomplete: a kill cut it off.
    """
    steps = {int(path.parent.name.rpartition("-")[2]): path.parent for path in work.glob(f"*-*/{TRAINER_STATE_NAME}")}
    return max((pair for pair in steps.items() if before is None or pair[0] < before), default=(0, None))[1]


def state_of(checkpoint: Path) -> TrainerState:
    """The Trainer's state when it wrote a checkpoint."""
    return TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))


def check_same_settings(path: Path, settings: dict[str, Any], key: str = "train") -> None:
    """Write the settings when a training begins; compare them when it is resumed.

    Args:
        path: The file that holds them.
        settings: Values by name; a name without a dot is a field of `key` in the recipe.
        key: See `settings`.

    Raises:
        UserError: the training began with other settings.
    """
    if not path.exists():
        write_json(path, settings)
    for name, value in read_json(path).items():
        if settings.get(name) != value:
            full_name = name if "." in name else f"{key}.{name}"
            raise UserError(
                f"{path}: this training began with {full_name}={value!r}, now it is {settings.get(name)!r}; "
                "choose another out=, or delete the folder"
            )


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

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
