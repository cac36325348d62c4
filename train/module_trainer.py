"""The transformers Trainer for a small module beside a frozen target: only the module is saved and measured."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME
from typing_extensions import override

from keepsight.data_gen.shards import TrainingSample
from keepsight.errors import UserError
from keepsight.files import append_lines, whole_lines, write_lines
from keepsight.locks import one_writer
from keepsight.models.weight_files import check_names_and_shapes, read_tensors
from keepsight.train.arguments import training_arguments
from keepsight.train.dataset import Batch, GroupedByLength, SampleDataset, collate, hold_out, samples_digest
from keepsight.train.distributed import (
    StopTogether,
    leave_to_fsdp,
    make_whole,
    sigterm_as_interrupt,
    target_is_divided,
    whole,
)
from keepsight.train.objective import Objective, ReplayedObjective
from keepsight.train.replay import ReadingBuffer, ReplaySampler
from keepsight.train.resume import (
    StopOnInterrupt,
    check_same_settings,
    check_seal,
    last_checkpoint,
    sealing,
    state_of,
)
from keepsight.train.seen import NOTHING, Seen, held_out_text, seen_in
from keepsight.train.settings import ReplaySettings, TrainSettings
from keepsight.train.tracking import Throughput, log_lists
from keepsight.train.trained import Trained
from keepsight.units import read_bytes

logger = logging.getLogger("keepsight")

ObjectiveT = TypeVar("ObjectiveT", bound=Objective)

MEASUREMENTS = "fidelity.jsonl"


class ModuleTrainer(Trainer, ABC, Generic[ObjectiveT]):
    """Saves the module alone, measures it on held-out samples, and stops at the first loss that is NaN or infinite.

    Args:
        objective: The module in training and its target.
        settings: Optimisation.
        work: Folder for checkpoints, logs and measurements.
        samples: Training and held-out ones together.
        shape: What else must be the same when the training is resumed, by its name in a recipe.
        replay: How readings of the target are kept where `settings.replays` is above 1.
        seen: Prompts that the module was trained on in earlier stages; None where that is not known.

    Attributes:
        weights_file: Name of the module's weights in a checkpoint.
        settings_key: Name of the settings in a recipe.
        sample_count: Number of samples, held-out ones included.
        held_out: What a card says of the held-out samples.
        trained_on: The prompts that the module was trained on, in earlier stages too; None where that is not known.
        metrics: Numbers of the latest measurement, by name.

    Raises:
        UserError: a setting is out of range, or more samples are to be held out than there are.
    """

    objective: ObjectiveT
    weights_file: ClassVar[str]
    settings_key: ClassVar[str] = "train"

    def __init__(
        self,
        objective: ObjectiveT,
        settings: TrainSettings,
        work: Path,
        samples: Sequence[TrainingSample],
        shape: dict[str, Any],
        replay: ReplaySettings | None = None,
        seen: Seen | None = NOTHING,
    ) -> None:
        settings.check(self.settings_key)
        arguments = training_arguments(settings, work, self.settings_key)
        if settings.group_by_length is None:
            settings = replace(settings, group_by_length=arguments.world_size > 1)
        train, held_out = hold_out(samples, settings.held_out, self.settings_key, seen)
        super().__init__(
            model=objective,
            args=arguments,
            data_collator=collate,
            train_dataset=train,
            eval_dataset=held_out,
        )
        self.model_accepts_loss_kwargs = False
        if self.is_fsdp_enabled:
            raise UserError(
                "the launcher's FSDP would divide what is trained; take recipes/accelerate/fsdp2.yaml and give "
                "model.device_map=fsdp2"
            )
        leave_to_fsdp(objective)
        self.objective, self.settings, self.work, self.sample_count = objective, settings, work, len(samples)
        data = {"data.samples": len(samples), "data.digest": samples_digest(samples)}
        self._fixed = settings.deciding() | shape | data | {"launch.processes": self.args.world_size}
        self.trained_on = None if seen is None else seen | seen_in(train.samples)
        self.held_out, is_new = held_out_text(held_out.samples, seen)
        if not is_new and self.is_world_process_zero():
            logger.warning("held-out samples: %s, so that their fidelity may flatter the module", self.held_out)
        self.callback_handler.callbacks.insert(0, Throughput(objective, settings))  # before what sends the logs
        self._indices: list[int] = []
        self.metrics: dict[str, float] = {}
        self._replay = (replay or ReplaySettings()) if settings.replays > 1 else None
        if self._replay is not None:
            if not isinstance(objective, ReplayedObjective):
                raise UserError(
                    f"{self.settings_key}.replays={settings.replays}: this training keeps no readings, use 1"
                )
            self._replay.check()
            if target_is_divided(self.accelerator, objective):
                raise UserError(
                    f"{self.settings_key}.replays={settings.replays}: with ZeRO-3 or FSDP2 all processes read the "
                    "target at the same time, so that no reading is kept; use 1, or recipes/accelerate/zero2.yaml"
                )
            self._fixed |= {"replay.memory": self._replay.memory, "replay.dtype": self._replay.dtype}

    @property
    def samples_per_step(self) -> int:
        """Samples per optimiser step, all processes together."""
        return self.settings.batch_size * self.args.gradient_accumulation_steps * self.args.world_size

    def fit(self) -> bool:
        """Train, resuming from the last checkpoint in `work` if there is one; the module then is whole everywhere.

        Returns:
            Whether the training ran to its end (False after Ctrl-C or SIGTERM).

        Raises:
            UserError: other settings or data than the checkpoint's, a checkpoint that is damaged or cannot be written,
                another process that trains in `work`, or a loss that is NaN or infinite.
        """
        stopper = StopOnInterrupt()
        self.add_callback(stopper)
        self.add_callback(StopTogether())
        with one_writer(self.work) if self.is_world_process_zero() else nullcontext():
            if self.is_world_process_zero():
                check_same_settings(self.work, self._fixed, self.settings_key)
            with stopper.watching(), sigterm_as_interrupt(), self._kept_readings():
                self._resume(last_checkpoint(self.work))
        make_whole(self.objective)
        return self.state.global_step >= self.state.max_steps

    @contextmanager
    def _kept_readings(self) -> Iterator[None]:
        """Within the block readings of the target are kept, if each is used several times."""
        if self._replay is None:
            yield
            return
        with ReadingBuffer(self._replay, self.args.process_index) as buffer:
            self.objective.buffer = buffer  # type: ignore[assignment]
            yield
        self.objective.buffer = None  # type: ignore[assignment]

    def _resume(self, checkpoint: Path | None) -> None:
        if checkpoint is not None:
            check_seal(checkpoint)
        if self.is_world_process_zero():
            measured = whole_lines(checkpoint / MEASUREMENTS) if checkpoint else []
            (self.work / MEASUREMENTS).unlink(missing_ok=True)
            append_lines(self.work / MEASUREMENTS, measured) if measured else None
            self.metrics = _numbers(measured[-1]) if measured else {}
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

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """The module's own tensors, as they are saved."""

    @abstractmethod
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Load what `weights` returned."""

    @abstractmethod
    def measure(self) -> dict[str, Any]:
        """Measure the module on `held_out_batches`: numbers to log, and lists that are only written to fidelity.jsonl.

        Raises:
            FloatingPointError: a value is NaN or infinite.
        """

    def held_out_batches(self) -> Iterator[dict[str, Any]]:
        """The held-out samples in batches made by `collate`, on the model's device; their readings may be kept."""
        loader = DataLoader(self.eval_dataset, self.args.per_device_train_batch_size, collate_fn=collate)  # type: ignore[arg-type]
        return (self._prepare_inputs(batch | {"last": False}) for batch in loader)

    def measurements(self) -> list[dict[str, Any]]:
        """All measurements so far: rows with `step`, the numbers and the lists."""
        return whole_lines(self.work / MEASUREMENTS)

    def log_rows(self) -> list[dict[str, Any]]:
        """The logged losses, then the measurements."""
        return [row for row in self.state.log_history if "loss" in row] + self.measurements()

    def trained(self) -> Trained:
        """What the training came to."""
        counted = self.state.global_step, self.sample_count, self.samples_per_step
        return Trained(self.settings, *counted, self.log_rows(), self.metrics, self.held_out, self.trained_on)

    @override
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        samples: SampleDataset = self.train_dataset  # type: ignore[assignment]
        settings = self.settings
        if self._replay is not None:
            return self._replay_sampler(samples, self._replay)
        if not settings.group_by_length:
            return super()._get_train_sampler(train_dataset)
        return GroupedByLength(samples, self.samples_per_step, settings.seed)

    def _replay_sampler(self, samples: SampleDataset, replay: ReplaySettings) -> ReplaySampler:
        lengths = [samples[place]["length"] for place in range(len(samples))]
        longest: Any = self._prepare_inputs(collate([samples[lengths.index(max(lengths))]]))
        token_bytes = cast(ReplayedObjective, self.objective).token_bytes(Batch(**longest))
        return ReplaySampler(lengths, token_bytes, read_bytes(replay.memory), self.settings, self.args.world_size)

    @override
    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self._indices = inputs["indices"]
        output = model(**inputs)
        if not torch.isfinite(output["loss"]):
            raise self._not_finite(f"the loss is {output['loss'].item()} at step {self.state.global_step + 1}")
        return (output["loss"], output) if return_outputs else output["loss"]

    @override
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        if not self.settings.held_out:
            return {}
        try:
            measured = self.measure()
        except FloatingPointError as error:
            raise self._not_finite(f"{error} after step {self.state.global_step}") from None
        self.metrics = _numbers(measured)
        self.log(dict(self.metrics))
        log_lists(self, measured)
        if self.is_world_process_zero():
            append_lines(self.work / MEASUREMENTS, [{"step": self.state.global_step, **measured}])
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, self.metrics)
        return self.metrics

    def _not_finite(self, what: str) -> UserError:
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
                raise self._not_finite(f"weight {broken[0]!r} is not finite after step {self.state.global_step}")
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


def _numbers(measured: dict[str, Any]) -> dict[str, float]:
    """A measurement without its lists and its step."""
    return {name: value for name, value in measured.items() if name != "step" and not isinstance(value, list)}
