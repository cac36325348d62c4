"""The trainer of a small module beside a frozen target: its data, its loss, and its measurements."""

import logging
import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.files import append_lines, one_writer, read_bytes
from keepsight.models.decoder import is_spread
from keepsight.train.arguments import say_idle_gpus, training_arguments
from keepsight.train.checkpointed_trainer import MEASUREMENTS, CheckpointedTrainer, ObjectiveT, numbers
from keepsight.train.dataset import Batch, GroupedByLength, SampleDataset, collate, hold_out, samples_digest
from keepsight.train.distributed import (
    StopTogether,
    leave_to_fsdp,
    make_whole,
    sigterm_as_interrupt,
    target_is_divided,
)
from keepsight.train.objective import ReplayedObjective
from keepsight.train.replay import ReadingBuffer, ReplaySampler
from keepsight.train.resume import StopOnInterrupt, check_same_settings, last_checkpoint
from keepsight.train.run import TrainingRun
from keepsight.train.seen import held_out_text, seen_in
from keepsight.train.settings import ReplaySettings, TrainSettings
from keepsight.train.tracking import Throughput, log_lists
from keepsight.train.trained import Trained

logger = logging.getLogger("keepsight")


class ModuleTrainer(CheckpointedTrainer[ObjectiveT]):
    """Measures the module on held-out samples, and stops at the first loss that is NaN or infinite.

    Args:
        objective: The module in training and its target.
        settings: Optimisation.
        run: Where it is trained, and on what.

    Raises:
        UserError: a setting is out of range, or more samples are to be held out than there are.
    """

    def __init__(self, objective: ObjectiveT, settings: TrainSettings, run: TrainingRun) -> None:
        settings.check(self.settings_key)
        arguments = training_arguments(settings, run.work, self.settings_key)
        if not is_spread(objective):
            say_idle_gpus(arguments.n_gpu)
        arguments._n_gpu = 1  # nn.DataParallel would copy the target to every GPU at each step
        if settings.group_by_length is None:
            settings = replace(settings, group_by_length=arguments.world_size > 1)
        train, held_out = hold_out(run.samples, settings.held_out, self.settings_key, run.seen)
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
        if self.args.world_size > 1 and is_spread(objective):
            raise UserError(
                "model.device_map=auto is for one process; for several take recipes/accelerate/fsdp2.yaml and give "
                "model.device_map=fsdp2"
            )
        leave_to_fsdp(objective)
        self.objective, self.settings, self.work = objective, settings, run.work
        data = {"data.samples": len(run.samples), "data.digest": samples_digest(run.samples)}
        self._fixed = settings.deciding() | {**run.start} | data | {"launch.processes": self.args.world_size}
        self._seen = None if run.seen is None else run.seen | seen_in(train.samples)
        self._sample_count, (self._held_out, is_new) = len(run.samples), held_out_text(held_out.samples, run.seen)
        if not is_new and self.is_world_process_zero():
            logger.warning("held-out samples: %s, so that their fidelity may flatter the module", self._held_out)
        self.callback_handler.callbacks.insert(0, Throughput(objective, settings))  # before what sends the logs
        self.metrics, self._indices = {}, []
        self._replay, self._held_out_kept = run.replay if settings.replays > 1 else None, 0
        if self._replay is not None:
            self._check_replay(self._replay)
            self._fixed |= {"replay.memory": self._replay.memory, "replay.dtype": self._replay.dtype}

    def _check_replay(self, replay: ReplaySettings) -> None:
        """Refuse to keep readings in a training that has none, or whose processes must read together."""
        given = f"{self.settings_key}.replays={self.settings.replays}"
        if not isinstance(self.objective, ReplayedObjective):
            raise UserError(f"{given}: this training keeps no readings, use 1")
        replay.check()
        if target_is_divided(self.accelerator, self.objective):
            raise UserError(
                f"{given}: with ZeRO-3 or FSDP2 all processes read the target at the same time, so that no reading is "
                "kept; use 1, or recipes/accelerate/zero2.yaml"
            )

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
                self.resume(last_checkpoint(self.work))
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

    @abstractmethod
    def measure(self) -> dict[str, Any]:
        """Measure the module on `held_out_batches`: numbers to log, and lists that are only written to fidelity.jsonl.

        Raises:
            FloatingPointError: a value is NaN or infinite.
        """

    def held_out_batches(self) -> Iterator[dict[str, Any]]:
        """The held-out samples in batches made by `collate`, on the model's device; some readings are kept."""
        loader = DataLoader(self.eval_dataset, self.args.per_device_train_batch_size, collate_fn=collate)  # type: ignore[arg-type]
        for number, batch in enumerate(loader):
            yield self._prepare_inputs(batch | {"last": number >= self._held_out_kept})

    def log_rows(self) -> list[dict[str, Any]]:
        """The logged losses, then the measurements."""
        return [row for row in self.state.log_history if "loss" in row] + self.measurements()

    def trained(self) -> Trained:
        """What the training came to."""
        counted = self.state.global_step, self._sample_count, self.samples_per_step
        return Trained(self.settings, *counted, self.log_rows(), self.metrics, self._held_out, self._seen)

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
        """Half of the memory at most keeps readings of held-out samples; training has the rest."""
        lengths, held_out = _lengths(samples), _lengths(cast(SampleDataset, self.eval_dataset))
        longest: Any = self._prepare_inputs(collate([samples[lengths.index(max(lengths))]]))
        token_bytes = cast(ReplayedObjective, self.objective).token_bytes(Batch(**longest))
        memory, size = read_bytes(replay.memory), self.args.per_device_train_batch_size
        batches = [held_out[start : start + size] for start in range(0, len(held_out), size)]
        taken = [0, *accumulate(math.ceil(token_bytes * len(each) * max(each)) for each in batches)]
        self._held_out_kept = bisect_right(taken, memory // 2) - 1
        left = memory - taken[self._held_out_kept]
        return ReplaySampler(lengths, token_bytes, left, self.settings, self.args.world_size)

    @override
    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not is_spread(model):  # parts of a target on several devices stay where they are
            super()._move_model_to_device(model, device)

    @override
    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self._indices = inputs["indices"]
        output = model(**inputs)
        if not torch.isfinite(output["loss"]):
            raise self.not_finite(f"the loss is {output['loss'].item()} at step {self.state.global_step + 1}")
        return (output["loss"], output) if return_outputs else output["loss"]

    @override
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        if not self.settings.held_out:
            return {}
        try:
            measured = self.measure()
        except FloatingPointError as error:
            raise self.not_finite(f"{error} after step {self.state.global_step}") from None
        self.metrics = numbers(measured)
        self.log(dict(self.metrics))
        log_lists(self, measured)
        if self.is_world_process_zero():
            append_lines(self.work / MEASUREMENTS, [{"step": self.state.global_step, **measured}])
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, self.metrics)
        return self.metrics


def _lengths(samples: SampleDataset) -> list[int]:
    return [samples[place]["length"] for place in range(len(samples))]
