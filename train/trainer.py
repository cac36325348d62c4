"""The trainer of a small module beside a frozen base model, on transformers' Trainer."""

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Generic, TypeVar

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerState, TrainingArguments
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.utils import is_torch_tf32_available
from typing_extensions import override

from keepsight.data_gen.store import TrainingSample
from keepsight.errors import UserError
from keepsight.files import append_lines, one_writer, read_bytes, whole_lines, write_lines
from keepsight.models.artifacts import check_names_and_shapes, read_tensors
from keepsight.models.decoder import is_on_several_devices
from keepsight.models.distributed import check_builds
from keepsight.models.identity import Identity, MadeWith
from keepsight.models.transformers_internals import use_one_gpu
from keepsight.train.checkpoints import (
    NewIntervals,
    StopAfterMinutes,
    StopOnInterrupt,
    check_same_settings,
    check_seal,
    last_checkpoint,
    sealing,
)
from keepsight.train.dataset import (
    Batch,
    GroupedByLength,
    PartlySplitSamples,
    PromptDigests,
    SampleDataset,
    UnseenQuestions,
    collate,
    held_out_text,
    hold_out,
    prompt_digests,
    samples_digest,
)
from keepsight.train.distributed import float32_trainables, gather_weights, launcher_of, leave_to_fsdp
from keepsight.train.objective import Objective, ReplayedObjective
from keepsight.train.replay import ReplayBuffer, ReplaySampler
from keepsight.train.settings import ReplaySettings, TrainSettings
from keepsight.train.tracking import Throughput, TrainingProgress, log_lists

logger = logging.getLogger("keepsight")
ObjectiveT = TypeVar("ObjectiveT", bound=Objective)
MEASUREMENTS = "fidelity.jsonl"


@dataclass(frozen=True)
class TrainingRun:
    """The folder and the samples of a training.

    Attributes:
        work: Folder for checkpoints, logs and measurements.
        samples: Training and held-out ones.
        identity: The base model, which must be the same when the training is resumed.
        start: Further values that must be the same, by recipe key.
        replay: How teacher outputs are kept, where the settings' `replays` is above 1.
        trained: Digests of the prompts that earlier stages trained on; None where they are not known.
        unseen: Selects the samples that are split before the question; None for none.
    """

    work: Path
    samples: Sequence[TrainingSample]
    identity: Identity = Identity()
    start: Mapping[str, Any] = field(default_factory=dict)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    trained: PromptDigests | None = frozenset()
    unseen: UnseenQuestions | None = None


@dataclass(frozen=True)
class Trained:
    """The result of a training, for cards, tables and plots.

    Attributes:
        settings: Its training settings.
        steps: Optimiser steps taken.
        samples: Number of samples, held-out ones included.
        samples_per_step: Samples per optimiser step, all processes added.
        log: Rows with `step` and `loss`, then the measurements: rows with `step`, numbers and lists.
        metrics: Numbers of the latest measurement, by name; empty where nothing was measured.
        held_out: What a card says of the held-out samples.
        prompts: All prompts of this and earlier stages; None where those are not known.
    """

    settings: TrainSettings
    steps: int
    samples: int
    samples_per_step: int
    log: list[dict[str, Any]] = field(default_factory=list)
    metrics: Mapping[str, float] = field(default_factory=dict)
    held_out: str = ""
    prompts: PromptDigests | None = None

    @property
    def losses(self) -> list[float]:
        """The logged losses."""
        return [row["loss"] for row in self.log if "loss" in row]


class ModuleTrainer(Trainer, Generic[ObjectiveT]):
    """Trains a module, saves it alone, measures it on held-out samples, and stops at a loss that is NaN or infinite.

    Attributes:
        objective: The module in training and its base model.
        settings: Its optimisation.
        work: Folder for checkpoints and measurements.
        metrics: Numbers of the latest measurement, by name.

    Raises:
        UserError: a setting is out of range or does not fit the launcher, or there are too few samples.
    """

    objective: ObjectiveT

    def __init__(self, objective: ObjectiveT, settings: TrainSettings, run: TrainingRun) -> None:
        key = objective.settings_key
        settings.check(key)
        arguments = training_arguments(settings, run.work, key)
        if arguments.n_gpu > 1 and not is_on_several_devices(objective):
            print(
                f"this training uses one of {arguments.n_gpu} GPUs; to use all, begin the command with "
                f"`accelerate launch --multi_gpu --num_processes {arguments.n_gpu}` in place of `python`"
            )
        use_one_gpu(arguments)
        if settings.group_by_length is None:
            settings = replace(settings, group_by_length=arguments.world_size > 1)

        samples, held_out_samples = hold_out(run.samples, settings.held_out, key, run.trained)
        round_size = settings.batch_size * arguments.world_size
        if settings.replays > 1 and len(samples) < round_size:
            raise UserError(
                f"{key}.batch_size={settings.batch_size}: {len(samples)} training samples are fewer than the "
                f"{round_size} of one batch in every process; use more data, smaller batches or fewer processes",
                field=f"{key}.batch_size",
                code="range",
            )
        training_samples = samples
        unseen_samples: list[TrainingSample] = []
        if run.unseen:
            training_samples = SampleDataset(PartlySplitSamples(samples.samples, run.unseen))
            unseen_samples = run.unseen.split_held_out(held_out_samples.samples)

        super().__init__(
            model=objective,
            args=arguments,
            data_collator=collate,
            train_dataset=training_samples,
            eval_dataset=held_out_samples,
        )
        self.model_accepts_loss_kwargs = False
        self.objective = objective
        self.settings = settings
        self.work = run.work
        self.metrics: dict[str, float] = {}
        self._key = key
        self._training_samples = training_samples
        self._held_out_samples = held_out_samples
        self._unseen_samples = SampleDataset(unseen_samples)
        self._sample_count = len(run.samples)
        self._batch_indices: list[int] = []  # numbers of the samples in the latest batch
        self._replay = run.replay if settings.replays > 1 else None
        self._replayed_held_out_batches = 0
        self._check_launcher()
        leave_to_fsdp(objective)
        if self._replay is not None:
            self._check_replay(self._replay)

        repeated = len(run.samples) - len(samples) - len(held_out_samples)
        identity = replace(run.identity, data=samples_digest(run.samples))
        self._made_with = MadeWith(identity, self._decisive_settings(run, repeated))
        self._trained_prompts = None if run.trained is None else run.trained | prompt_digests(samples.samples)
        self._held_out_digest = samples_digest(held_out_samples.samples)
        self._held_out_text, is_new = held_out_text(held_out_samples.samples, run.trained)
        if not is_new and self.is_world_process_zero():
            logger.warning("held-out samples: %s; their fidelity may be too high", self._held_out_text)
        self.callback_handler.callbacks.insert(0, Throughput(objective, settings))  # before callbacks that send logs

    def _decisive_settings(self, run: TrainingRun, repeated: int) -> dict[str, Any]:
        """What must be the same when the training is resumed, by recipe key; `repeated` samples are left out."""
        values = {f"{self._key}.{name}": value for name, value in self.settings.decisive().items()}
        values |= self.objective.decisive()
        values |= run.start
        values["data.samples"] = len(run.samples)
        values["data.repeated"] = repeated
        values["launch.processes"] = self.args.world_size
        if self._replay is not None:
            values["replay.memory"] = self._replay.memory
            values["replay.dtype"] = self._replay.dtype
        return values

    def _check_launcher(self) -> None:
        fsdp2 = "use recipes/accelerate/fsdp2.yaml with model.device_map=fsdp2"
        if self.is_fsdp_enabled:
            raise UserError(
                f"the launcher's FSDP would shard the trained module; {fsdp2}",
                field="model.device_map",
                code="conflict",
            )
        if self.args.world_size > 1 and is_on_several_devices(self.objective):
            raise UserError(
                f"model.device_map=auto is for one process; for several {fsdp2}",
                field="model.device_map",
                code="conflict",
            )
        launcher = launcher_of(self.accelerator, self.objective)
        supported = ("ddp", *self.objective.launchers)
        if launcher not in supported:
            advice = " or ".join(f"recipes/accelerate/{name}.yaml" for name in supported)
            if "fsdp2" not in supported:
                advice += ", or one process with model.device_map=auto for large models"
            raise UserError(
                f"{self._key}: this training does not support {launcher}; use {advice}",
                field=self._key,
                code="conflict",
            )

    def _check_replay(self, replay: ReplaySettings) -> None:
        setting = f"{self._key}.replays={self.settings.replays}"
        if not isinstance(self.objective, ReplayedObjective):
            raise UserError(
                f"{setting}: this training keeps no teacher outputs, use 1", field="replays", code="conflict"
            )
        replay.check()
        if launcher_of(self.accelerator, self.objective) in ("zero3", "fsdp2"):
            raise UserError(
                f"{setting}: with ZeRO-3 or FSDP2 all processes run the base model at the same time, so that none can "
                "reuse its outputs; use 1, or recipes/accelerate/zero2.yaml",
                field="replays",
                code="conflict",
            )

    @property
    def samples_per_step(self) -> int:
        """Samples per optimiser step, all processes added."""
        return self.settings.batch_size * self.args.gradient_accumulation_steps * self.args.world_size

    def fit(self) -> bool:
        """Train, resuming from the last checkpoint in `work` if there is one; then gather the module's weights.

        Returns:
            Whether the training ran to its end, or for its `minutes` (False after Ctrl-C or SIGTERM).

        Raises:
            UserError: other settings or data than the checkpoint's, a checkpoint that is damaged or cannot be written,
                another process that trains in `work`, or a loss that is NaN or infinite.
        """
        time_limit = StopAfterMinutes(self.settings.minutes)
        if self.settings.minutes:
            self.add_callback(time_limit)
        stopper = StopOnInterrupt()
        self.add_callback(stopper)
        self.add_callback(NewIntervals())
        self.remove_callback(PrinterCallback)  # `TrainingProgress` stands for transformers' bar and lines
        self.add_callback(TrainingProgress())
        with one_writer(self.work) if self.is_world_process_zero() else nullcontext():
            if self.is_world_process_zero():
                check_same_settings(self.work, self._made_with)
            with stopper.watching(), self._replaying():
                self._resume(last_checkpoint(self.work))
        gather_weights(self.objective)
        is_at_end = self.state.global_step >= self.state.max_steps
        if time_limit.has_stopped and not is_at_end and self.is_world_process_zero():
            steps = f"step {self.state.global_step} of {self.state.max_steps}"
            print(f"stopped at {steps}, after {self._key}.minutes={self.settings.minutes}; the same command goes on")
        return is_at_end or time_limit.has_stopped

    @contextmanager
    def _replaying(self) -> Iterator[None]:
        """Within the block teacher outputs are kept, if each is used several times."""
        if self._replay is None or not isinstance(self.objective, ReplayedObjective):
            yield
            return
        with ReplayBuffer(self._replay, self.args.process_index) as buffer:
            self.objective.buffer = buffer
            yield
        self.objective.buffer = None

    def _resume(self, checkpoint: Path | None) -> None:
        """Train from a checkpoint to the end, or from the beginning where there is none."""
        if checkpoint is not None:
            check_seal(checkpoint)
        if self.is_world_process_zero():
            (self.work / MEASUREMENTS).unlink(missing_ok=True)
            measurements = whole_lines(checkpoint / MEASUREMENTS) if checkpoint else []
            if measurements:
                append_lines(self.work / MEASUREMENTS, measurements)
                self.metrics = scalar_values(measurements[-1])
        self.args.eval_on_start = checkpoint is None
        if checkpoint is None:
            self.train()
            return

        print(f"resuming from {checkpoint}")
        state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        if state.global_step >= state.max_steps:  # the Trainer would take one more step
            self._load_from_checkpoint(str(checkpoint))
            self.state = state
            return
        try:
            self.train(resume_from_checkpoint=str(checkpoint))
        except UnpicklingError as error:  # all are read with `weights_only`
            reason = str(error).partition("\n")[0][:200]
            raise UserError(
                f"{checkpoint}: a file does not load safely ({reason}); delete this folder",
                field="checkpoint",
                code="file",
            ) from None

    def held_out_batches(self, unseen: bool = False) -> Iterator[dict[str, Any]]:
        """The held-out samples in batches made by `collate`, on the model's device; if `unseen`, the split ones."""
        batch_size = self.args.per_device_train_batch_size
        samples = self._held_out_samples
        number = 0
        if unseen:
            samples = self._unseen_samples
            number = math.ceil(len(self._held_out_samples) / batch_size)
        for batch in DataLoader(samples, batch_size, collate_fn=collate):
            is_replayed = number < self._replayed_held_out_batches
            yield self._prepare_inputs({**batch, "last": not is_replayed})
            number += 1

    def measurements(self) -> list[dict[str, Any]]:
        """All measurements so far: rows with `step`, `held_out` (the digest of the samples), numbers and lists."""
        return whole_lines(self.work / MEASUREMENTS)

    def trained(self) -> Trained:
        """The result of the training."""
        losses = [row for row in self.state.log_history if "loss" in row]
        return Trained(
            settings=self.settings,
            steps=self.state.global_step,
            samples=self._sample_count,
            samples_per_step=self.samples_per_step,
            log=losses + self.measurements(),
            metrics=self.metrics,
            held_out=self._held_out_text,
            prompts=self._trained_prompts,
        )

    def not_finite(self, what: str) -> UserError:
        """The error for a value that is NaN or infinite; a checkpoint of its own step does not count as good."""
        checkpoint = last_checkpoint(self.work, before=self.state.global_step) or "none, there is no checkpoint yet"
        return UserError(
            f"{what} on samples {self._batch_indices}; the last good checkpoint: {checkpoint}; "
            f"lower {self._key}.learning_rate and train again with another out=",
            field="loss",
            code="data",
        )

    @override
    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, model)
            groups = self.objective.parameter_groups(self.settings)
            self.optimizer = optimizer_class(groups, weight_decay=self.args.weight_decay, **options)
        return self.optimizer

    @override
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self._replay is not None:
            return self._replay_sampler(self._replay)
        if not self.settings.group_by_length:
            return super()._get_train_sampler(train_dataset)
        return GroupedByLength(self._training_samples, self.samples_per_step, self.settings.seed)

    def _replay_sampler(self, replay: ReplaySettings) -> ReplaySampler:
        """The sampler for replays; outputs for held-out samples take at most half of the memory, training the rest."""
        assert isinstance(self.objective, ReplayedObjective)
        lengths = self._training_samples.lengths()
        longest_sample = self._training_samples[lengths.index(max(lengths))]
        longest_batch: Any = self._prepare_inputs(collate([longest_sample]))
        token_bytes = self.objective.token_bytes(Batch(**longest_batch))
        memory = read_bytes(replay.memory)

        batch_size = self.args.per_device_train_batch_size
        held_out_bytes = 0
        self._replayed_held_out_batches = 0
        for batch_lengths in self._held_out_batch_lengths(batch_size):
            batch_bytes = math.ceil(token_bytes * len(batch_lengths) * max(batch_lengths))
            if held_out_bytes + batch_bytes > memory // 2:
                break
            held_out_bytes += batch_bytes
            self._replayed_held_out_batches += 1
        return ReplaySampler(lengths, token_bytes, memory - held_out_bytes, self.settings, self.args.world_size)

    def _held_out_batch_lengths(self, batch_size: int) -> Iterator[list[int]]:
        """Lengths in tokens of the samples of each held-out batch, the split ones last."""
        for samples in (self._held_out_samples, self._unseen_samples):
            lengths = samples.lengths()
            for start in range(0, len(lengths), batch_size):
                yield lengths[start : start + batch_size]

    @override
    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not is_on_several_devices(model):  # parts of a model on several devices stay where they are
            super()._move_model_to_device(model, device)

    @override
    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self._batch_indices = inputs["indices"]
        self.objective.epoch = int(self.state.epoch or 0)
        output = model(**inputs)
        loss = output["loss"]
        if not torch.isfinite(loss):
            raise self.not_finite(f"the loss is {loss.item()} at step {self.state.global_step + 1}")
        return (loss, output) if return_outputs else loss

    @override
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        if not self.settings.held_out:
            return {}
        try:
            with self.accelerator.autocast() if self.objective.measures_autocast else nullcontext():
                measured = self._measure_held_out()
        except FloatingPointError as error:
            raise self.not_finite(f"{error} after step {self.state.global_step}") from None
        self.metrics = scalar_values(measured)
        self.log(dict(self.metrics))
        log_lists(self, measured)
        if self.is_world_process_zero():
            row = {"step": self.state.global_step, "held_out": self._held_out_digest, **measured}
            append_lines(self.work / MEASUREMENTS, [row])
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, self.metrics)
        return self.metrics

    def _measure_held_out(self) -> dict[str, Any]:
        """Numbers and lists of the held-out samples, then, as `eval_unseen_...`, of those that are split."""
        measured = self.objective.measure(self.held_out_batches(), self.settings.budget)
        if len(self._unseen_samples):
            unseen = self.objective.measure(self.held_out_batches(unseen=True), self.settings.budget)
            for name, value in unseen.items():
                measured[name.replace("eval_", "eval_unseen_", 1)] = value
        return measured

    @override
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        with float32_trainables(self.objective):
            state = self.objective.weights()
        if self.args.should_save:
            folder = Path(output_dir or self.work)
            folder.mkdir(parents=True, exist_ok=True)
            for name, value in state.items():
                if not torch.isfinite(value).all():
                    raise self.not_finite(f"weight {name!r} is not finite after step {self.state.global_step}")
            save_file(state, folder / self.objective.weights_file)

    @override
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        checkpoint = self.work / f"checkpoint-{self.state.global_step}"
        with sealing(checkpoint, self.settings.checkpoints, self.is_world_process_zero()):
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
        path = Path(resume_from_checkpoint) / self.objective.weights_file
        saved = read_tensors(path)
        with float32_trainables(self.objective):
            check_names_and_shapes(path, saved, self.objective.weights())
        self.objective.load_weights(saved)


def scalar_values(measurement: Mapping[str, Any]) -> dict[str, float]:
    """A measurement without its step, the digest of its samples, and its lists."""
    values = {}
    for name, value in measurement.items():
        if name != "step" and not isinstance(value, list | str):
            values[name] = value
    return values


def training_arguments(settings: TrainSettings, work: Path, key: str = "train") -> TrainingArguments:
    """The Trainer's arguments for these settings; `work` gets checkpoints and logs, `key` names them in a recipe.

    Raises:
        UserError: the samples of a step do not divide into the batches of all processes, no device supports
            TensorFloat-32, or see `check_builds`.
    """
    check_builds()
    if settings.tf32 and not is_torch_tf32_available():
        raise UserError(
            f"{key}.tf32=true needs an Nvidia GPU of the generation Ampere or later; leave it out",
            field=f"{key}.tf32",
            code="model",
        )
    os.environ["ACCELERATE_MIXED_PRECISION"] = settings.precision  # DeepSpeed takes the launcher's, which may differ
    arguments = TrainingArguments(
        output_dir=str(work),
        max_steps=settings.steps or -1,
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        weight_decay=0.0,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": settings.min_learning_rate},
        warmup_steps=settings.warmup,
        max_grad_norm=settings.clip,
        bf16=settings.precision == "bf16",
        fp16=settings.precision == "fp16",
        seed=settings.seed,
        eval_strategy="steps",
        eval_steps=settings.measure_every,
        eval_on_start=True,
        save_steps=settings.save_every,
        logging_steps=10,
        logging_nan_inf_filter=False,
        report_to=settings.report_to,
        disable_tqdm=True,
        tf32=settings.tf32,
        remove_unused_columns=False,
        label_names=[],
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        use_cpu=not torch.accelerator.is_available(),  # else processes on CPUs would not find one another
    )
    arguments.gradient_accumulation_steps = settings.accumulation(arguments.world_size, key)
    return arguments
