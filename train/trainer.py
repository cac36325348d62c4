"""Train a lookahead module with the transformers Trainer underneath."""

import json
import math
import signal
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.train.dataset import SampleDataset, collate
from keepsight.train.measure import Fidelity, measure
from keepsight.train.objective import LookaheadObjective

_WEIGHTS, _TOKENS = "lookahead.safetensors", "tokens"


@dataclass
class TrainSettings:
    """Optimisation of a lookahead module: Adam, cosine with warmup and minimum, clipping (LookaheadKV, table 16).

    Attributes:
        steps: Optimiser steps; 0 for `epochs` passes over the data.
        epochs: Passes over the data when `steps` is 0.
        batch_size: Prompts a device and forward pass.
        accumulation: Forward passes an optimiser step.
        learning_rate: Peak.
        warmup: Share of the steps.
        min_learning_rate: Share of the peak that the cosine ends at.
        clip: Maximum gradient norm.
        precision: `no`, `bf16` or `fp16` mixed precision.
        seed: Of initialisation and order.
        held_out: Samples that are measured and never trained on.
        measure_every: Steps between measurements.
        save_every: Steps between checkpoints.
        budget: Entries a KV head, for recall.
        report_to: Trackers: tensorboard, trackio, wandb.
        group_by_length: Put prompts of similar length into a batch.
    """

    steps: int = 0
    epochs: float = 1.0
    batch_size: int = 1
    accumulation: int = 1
    learning_rate: float = 1e-3
    warmup: float = 0.03
    min_learning_rate: float = 0.1
    clip: float = 1.0
    precision: str = "no"
    seed: int = 0
    held_out: int = 16
    measure_every: int = 100
    save_every: int = 100
    budget: int = 64
    report_to: list[str] = field(default_factory=lambda: ["tensorboard"])
    group_by_length: bool = False


def training_arguments(settings: TrainSettings, work: Path) -> TrainingArguments:
    """The Trainer's arguments for these settings; `work` takes checkpoints and logs."""
    return TrainingArguments(
        output_dir=str(work),
        max_steps=settings.steps or -1,
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.accumulation,
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
        save_total_limit=2,
        logging_steps=10,
        logging_nan_inf_filter=False,
        report_to=settings.report_to,
        remove_unused_columns=False,
        train_sampling_strategy="group_by_length" if settings.group_by_length else "random",
        length_column_name="length",
        label_names=[],
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


class LookaheadTrainer(Trainer):
    """Saves the adapter alone, measures fidelity by layer, and stops at the first loss that is not a number.

    Attributes:
        fidelity: The latest measurement.
    """

    def __init__(
        self,
        objective: LookaheadObjective,
        settings: TrainSettings,
        work: Path,
        train: SampleDataset,
        held_out: SampleDataset,
    ) -> None:
        super().__init__(
            model=objective,
            args=training_arguments(settings, work),
            data_collator=collate,
            train_dataset=train,
            eval_dataset=held_out,
            callbacks=[StopOnInterrupt()],
        )
        self.model_accepts_loss_kwargs = False
        self.settings, self.work = settings, work
        self.fidelity: Fidelity | None = None

    @override
    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        indices = inputs.pop("indices")
        output = model(**inputs)
        if not torch.isfinite(output["loss"]):
            last = get_last_checkpoint(str(self.work))
            raise UserError(
                f"the loss is {output['loss'].item()} at step {self.state.global_step + 1} on samples {indices}; "
                f"lower train.learning_rate and resume from {last or 'the start: there is no checkpoint yet'}"
            )
        return (output["loss"], output) if return_outputs else output["loss"]

    @override
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.fidelity = measure(self._objective(), self._held_out_batches(), self.settings.budget)
        metrics = self.fidelity.metrics()
        self.log(dict(metrics))
        if self.is_world_process_zero():
            row = {"step": self.state.global_step, **metrics, **self.fidelity.by_layer()}
            with (self.work / "fidelity.jsonl").open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _held_out_batches(self) -> Any:
        loader = DataLoader(self.eval_dataset, self.args.per_device_train_batch_size, collate_fn=collate)  # type: ignore[arg-type]
        return (self._prepare_inputs(batch) for batch in loader)

    def _objective(self) -> LookaheadObjective:
        objective = self.accelerator.unwrap_model(self.model)
        return objective

    @override
    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        if self.args.should_save:
            folder = Path(output_dir or self.work)
            folder.mkdir(parents=True, exist_ok=True)
            lookahead = self._objective().lookahead
            save_file(lookahead.lora_state() | {_TOKENS: lookahead.tokens.detach().cpu()}, folder / _WEIGHTS)

    @override
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        lookahead = self._objective().lookahead
        state = load_file(Path(resume_from_checkpoint) / _WEIGHTS)
        tokens = state.pop(_TOKENS).to(lookahead.tokens.device)
        lookahead.load_state(state, tokens)


class StopOnInterrupt(TrainerCallback):
    """The first Ctrl-C finishes the step, saves a checkpoint and ends the training; a second one ends it at once."""

    def __init__(self) -> None:
        self.interrupted = False
        self._before: Any = None

    @override
    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._before = signal.signal(signal.SIGINT, self._interrupt)

    @override
    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        signal.signal(signal.SIGINT, self._before)

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.interrupted:
            control.should_save = control.should_training_stop = True

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True


def split(samples: list[Any], held_out: int) -> tuple[SampleDataset, SampleDataset]:
    """Training samples, and every k-th sample held out, so that all parts of the mixture are measured.

    Raises:
        UserError: too few samples for both.
    """
    if len(samples) <= held_out:
        raise UserError(f"train.held_out={held_out} needs more than the {len(samples)} samples of the data; lower it")
    step = math.ceil(len(samples) / held_out) if held_out else len(samples) + 1
    measured = samples[step - 1 :: step]
    chosen = {sample.index for sample in measured}
    return SampleDataset([sample for sample in samples if sample.index not in chosen]), SampleDataset(measured)


def train(
    objective: LookaheadObjective, settings: TrainSettings, work: Path, samples: list[Any]
) -> tuple[LookaheadTrainer, bool]:
    """Train, going on from the last checkpoint in `work` when there is one.

    Returns:
        The trainer, and whether the training ran to its end (False after Ctrl-C).

    Raises:
        UserError: too few samples, other settings than the checkpoint's, or a loss that is not a number.
    """
    work.mkdir(parents=True, exist_ok=True)
    _check_same_settings(work / "settings.json", asdict(settings))
    trainer = LookaheadTrainer(objective, settings, work, *split(samples, settings.held_out))
    last = get_last_checkpoint(str(work))
    if last:
        print(f"going on from {last}")
    trainer.train(resume_from_checkpoint=last)
    stopper = next(each for each in trainer.callback_handler.callbacks if isinstance(each, StopOnInterrupt))
    return trainer, not stopper.interrupted


def _check_same_settings(path: Path, settings: dict[str, Any]) -> None:
    if path.exists():
        for key, value in json.loads(path.read_text(encoding="utf-8")).items():
            if settings.get(key) != value:
                raise UserError(
                    f"{path}: this training began with train.{key}={value!r}, now it is {settings.get(key)!r}; "
                    "choose another out=, or delete the folder"
                )
    else:
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
