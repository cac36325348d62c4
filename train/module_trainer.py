"""The transformers Trainer for a small module beside a frozen target: its weights alone are saved, and measured."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.files import text_digest, whole_lines, write_text
from keepsight.train.dataset import GroupedByLength, SampleDataset, collate, split
from keepsight.train.resume import StopOnInterrupt, check_same_settings, last_checkpoint, state_of
from keepsight.train.settings import TrainSettings

PRECISIONS = ("no", "bf16", "fp16")


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
        label_names=[],
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        use_cpu=not torch.accelerator.is_available(),  # else processes on CPUs would not find one another
    )


class ModuleTrainer(Trainer, ABC):
    """Saves the module alone, measures it on held-out samples, and stops at the first loss that is not a number.

    Args:
        model: Batch, as `collate` makes it but for `indices`, in; `{"loss": scalar}` out.
        settings: Optimisation.
        work: Folder for checkpoints, logs and measurements.
        samples: Training and held-out ones together.

    Attributes:
        weights_file: Name of the module's weights in a checkpoint.
        settings_key: Where recipes have the settings.
        metrics: The latest measurement's numbers.

    Raises:
        UserError: a setting is out of range, or more samples are to be held out than there are.
    """

    weights_file: ClassVar[str]
    settings_key: ClassVar[str] = "train"

    def __init__(self, model: nn.Module, settings: TrainSettings, work: Path, samples: list[Any]) -> None:
        check(settings, self.settings_key)
        train, held_out = split(samples, settings.held_out, self.settings_key)
        super().__init__(
            model=model,
            args=training_arguments(settings, work),
            data_collator=collate,
            train_dataset=train,
            eval_dataset=held_out,
        )
        self.model_accepts_loss_kwargs = False
        self.settings, self.work, self.samples = settings, work, len(samples)
        self.data_digest = text_digest(repr([(sample.prompt_ids, sample.answer_ids) for sample in samples]))
        self.metrics: dict[str, float] = {}
        self._indices: list[int] = []

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """The module's own tensors, as they are saved."""

    @abstractmethod
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Take up what `weights` gave."""

    @abstractmethod
    def measure(self) -> dict[str, Any]:
        """How the module fares on `held_out_batches`: numbers to log, and lists that are kept beside them.

        Raises:
            FloatingPointError: a value is NaN or infinite.
        """

    def held_out_batches(self) -> Iterator[dict[str, Any]]:
        """The held-out samples as `collate` makes batches, on the model's device."""
        loader = DataLoader(self.eval_dataset, self.args.per_device_train_batch_size, collate_fn=collate)  # type: ignore[arg-type]
        return (self._prepare_inputs(batch) for batch in loader)

    def measurements(self) -> list[dict[str, Any]]:
        """What was measured so far: rows with `step`, the numbers and the lists."""
        return whole_lines(self.work / "fidelity.jsonl")

    def log_rows(self) -> list[dict[str, Any]]:
        """The logged losses, then the measurements."""
        return [row for row in self.state.log_history if "loss" in row] + self.measurements()

    def restore(self, checkpoint: Path) -> None:
        """Take up the weights and the log of a finished training, and measure them."""
        self._load_from_checkpoint(str(checkpoint))
        self.state = state_of(checkpoint)
        self.evaluate()

    @override
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if not self.settings.group_by_length:
            return super()._get_train_sampler(train_dataset)
        samples: SampleDataset = self.train_dataset  # type: ignore[assignment]
        return GroupedByLength(samples, self.settings.batch_size * self.settings.accumulation, self.settings.seed)

    @override
    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self._indices = inputs.pop("indices")
        output = model(**inputs)
        if not torch.isfinite(output["loss"]):
            raise self._no_number(f"the loss is {output['loss'].item()} at step {self.state.global_step + 1}")
        return (output["loss"], output) if return_outputs else output["loss"]

    @override
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        if not self.settings.held_out:
            return {}
        try:
            measured = self.measure()
        except FloatingPointError as error:
            raise self._no_number(f"{error} after step {self.state.global_step}") from None
        self.metrics = {name: value for name, value in measured.items() if not isinstance(value, list)}
        self.log(dict(self.metrics))
        if self.is_world_process_zero():
            self._keep({"step": self.state.global_step, **measured})
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, self.metrics)
        return self.metrics

    def _keep(self, row: dict[str, Any]) -> None:
        """Add a measurement; those of this step or later ones are of a run that was stopped, and are made again."""
        rows = [each for each in self.measurements() if each["step"] < row["step"]]
        write_text(self.work / "fidelity.jsonl", "".join(json.dumps(each) + "\n" for each in [*rows, row]))

    def _no_number(self, what: str) -> UserError:
        """What to say of a value that is NaN or infinite: a checkpoint of the step it follows holds what led to it."""
        good = last_checkpoint(self.work, before=self.state.global_step) or "none, there is no checkpoint yet"
        return UserError(
            f"{what} on samples {self._indices}; the last good checkpoint: {good}; "
            f"lower {self.settings_key}.learning_rate and train again under another out="
        )

    @override
    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        if self.args.should_save:
            folder = Path(output_dir or self.work)
            folder.mkdir(parents=True, exist_ok=True)
            state = self.weights()
            if broken := [name for name, value in state.items() if not torch.isfinite(value).all()]:
                raise self._no_number(f"weight {broken[0]!r} is not finite after step {self.state.global_step}")
            save_file(state, folder / self.weights_file)

    @override
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        path = Path(resume_from_checkpoint) / self.weights_file
        try:
            weights = load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{path}: cannot be read ({error}); delete this checkpoint's folder, and the training goes on from the "
                "one before"
            ) from None
        self.load_weights(weights)


def check(settings: TrainSettings, key: str) -> None:
    """Refuse settings that no training can run with.

    Raises:
        UserError: one is out of range; `key` is where the recipe has them.
    """
    least = dict.fromkeys(("batch_size", "accumulation", "measure_every", "save_every", "budget"), 1)
    for name, lowest in {**least, "steps": 0, "held_out": 0}.items():
        if getattr(settings, name) < lowest:
            raise UserError(f"{key}.{name}={getattr(settings, name)} must be at least {lowest}")
    if settings.precision not in PRECISIONS:
        raise UserError(f"{key}.precision={settings.precision} is unknown; choose one of {', '.join(PRECISIONS)}")


def run(trainer: ModuleTrainer, shape: dict[str, Any]) -> bool:
    """Train, going on from the last checkpoint in the trainer's folder when there is one.

    Args:
        trainer: With its settings, model and data.
        shape: What else must be as it was when the training began, by the names that recipes have for it.

    Returns:
        Whether the training ran to its end (False after Ctrl-C).

    Raises:
        UserError: other settings than the checkpoint's, or a loss that is not a number.
    """
    trainer.work.mkdir(parents=True, exist_ok=True)
    data = {"data.samples": trainer.samples, "data.digest": trainer.data_digest}
    same = asdict(trainer.settings) | shape | data
    check_same_settings(trainer.work / "settings.json", same, trainer.settings_key)
    stopper = StopOnInterrupt()
    trainer.add_callback(stopper)
    with stopper.watching():
        _go_on(trainer, last_checkpoint(trainer.work))
    return trainer.state.global_step >= trainer.state.max_steps


def _go_on(trainer: ModuleTrainer, checkpoint: Path | None) -> None:
    if checkpoint is None:
        trainer.train()
        return
    print(f"going on from {checkpoint}")
    state = state_of(checkpoint)
    if state.global_step < state.max_steps:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    else:
        trainer.restore(checkpoint)  # the Trainer would take one step more
