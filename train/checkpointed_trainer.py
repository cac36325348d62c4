"""The transformers Trainer whose checkpoints hold a small module alone: what is saved, and how a training goes on."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.files import append_lines, whole_lines, write_lines
from keepsight.models.artifacts import check_names_and_shapes, read_tensors
from keepsight.train.distributed import whole
from keepsight.train.objective import Objective
from keepsight.train.resume import check_seal, last_checkpoint, sealing, state_of
from keepsight.train.settings import TrainSettings

ObjectiveT = TypeVar("ObjectiveT", bound=Objective)

MEASUREMENTS = "fidelity.jsonl"


class CheckpointedTrainer(Trainer, ABC, Generic[ObjectiveT]):
    """Saves and loads the module alone, with the measurements so far; weights that are not finite are not saved.

    Attributes:
        objective: The module in training and its target.
        settings: Optimisation.
        work: Folder for checkpoints and measurements.
        metrics: Numbers of the latest measurement, by name.
        weights_file: Name of the module's weights in a checkpoint.
        settings_key: Name of the settings in a recipe.
    """

    objective: ObjectiveT
    settings: TrainSettings
    work: Path
    metrics: dict[str, float]
    weights_file: ClassVar[str]
    settings_key: ClassVar[str] = "train"
    _indices: list[int]
    """Numbers of the samples in the latest batch."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """The module's own tensors, as they are saved."""

    @abstractmethod
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Load what `weights` returned."""

    def measurements(self) -> list[dict[str, Any]]:
        """All measurements so far: rows with `step`, the numbers and the lists."""
        return whole_lines(self.work / MEASUREMENTS)

    def resume(self, checkpoint: Path | None) -> None:
        """Train from a checkpoint to the end, or from the beginning where there is none.

        Raises:
            UserError: the checkpoint is damaged.
        """
        if checkpoint is not None:
            check_seal(checkpoint)
        if self.is_world_process_zero():
            measured = whole_lines(checkpoint / MEASUREMENTS) if checkpoint else []
            (self.work / MEASUREMENTS).unlink(missing_ok=True)
            append_lines(self.work / MEASUREMENTS, measured) if measured else None
            self.metrics = numbers(measured[-1]) if measured else {}
        self.args.eval_on_start = checkpoint is None
        if checkpoint is None:
            self.train()
            return
        print(f"resuming from {checkpoint}")
        state = state_of(checkpoint)
        if state.global_step < state.max_steps:
            self.train(resume_from_checkpoint=str(checkpoint))
        else:  # the Trainer would take one more step
            self._load_from_checkpoint(str(checkpoint))
            self.state = state

    def not_finite(self, what: str) -> UserError:
        """The error for a value that is NaN or infinite; a checkpoint of its own step is no longer good."""
        good = last_checkpoint(self.work, before=self.state.global_step) or "none, there is no checkpoint yet"
        return UserError(
            f"{what} on samples {self._indices}; the last good checkpoint: {good}; "
            f"lower {self.settings_key}.learning_rate and train again under another out="
        )

    @override
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        with whole(self.objective):
            state = self.weights()
        if self.args.should_save:
            folder = Path(output_dir or self.work)
            folder.mkdir(parents=True, exist_ok=True)
            if broken := [name for name, value in state.items() if not torch.isfinite(value).all()]:
                raise self.not_finite(f"weight {broken[0]!r} is not finite after step {self.state.global_step}")
            save_file(state, folder / self.weights_file)

    @override
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        checkpoint = self.work / f"checkpoint-{self.state.global_step}"
        with sealing(checkpoint, self.settings.checkpoints) if self.is_world_process_zero() else nullcontext():
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            if self.is_world_process_zero():
                write_lines(checkpoint / MEASUREMENTS, self.measurements())
            self.accelerator.wait_for_everyone()

    @override
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_deepspeed_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        engine: Any = self.model_wrapped
        engine.save_checkpoint(output_dir, exclude_frozen_parameters=True)
        scheduler: Any = self.lr_scheduler
        if self.args.should_save and scheduler is not None:
            torch.save(scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    @override
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        path = Path(resume_from_checkpoint) / self.weights_file
        saved = read_tensors(path)
        with whole(self.objective):
            check_names_and_shapes(path, saved, self.weights())
        self.load_weights(saved)


def numbers(measured: Mapping[str, Any]) -> dict[str, float]:
    """A measurement without its lists and its step."""
    return {name: value for name, value in measured.items() if name != "step" and not isinstance(value, list)}
