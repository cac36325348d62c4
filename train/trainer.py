"""Train a lookahead module with the transformers Trainer underneath."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.files import whole_lines, write_text
from keepsight.train.dataset import GroupedByLength, SampleDataset, collate, split
from keepsight.train.measure import Fidelity, measure
from keepsight.train.objective import LookaheadObjective
from keepsight.train.resume import StopOnInterrupt, check_same_settings, last_checkpoint, state_of

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
        label_names=[],
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        use_cpu=not torch.accelerator.is_available(),  # else processes on CPUs would not find one another
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
        )
        self.model_accepts_loss_kwargs = False
        self.settings, self.work = settings, work
        self.fidelity: Fidelity | None = None
        self._indices: list[int] = []

    def restore(self, checkpoint: Path) -> None:
        """Take up the weights and the log of a finished training, and measure them."""
        self._load_from_checkpoint(str(checkpoint))
        self.state = state_of(checkpoint)
        self.evaluate()

    @override
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if not self.settings.group_by_length:
            return super()._get_train_sampler(train_dataset)
        samples: Any = self.train_dataset
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
            self.fidelity = measure(self._objective(), self._held_out_batches(), self.settings.budget)
        except FloatingPointError as error:
            raise self._no_number(f"{error} after step {self.state.global_step}") from None
        metrics = self.fidelity.metrics()
        self.log(dict(metrics))
        if self.is_world_process_zero():
            self._keep({"step": self.state.global_step, **metrics, **self.fidelity.by_layer()})
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _keep(self, row: dict[str, Any]) -> None:
        """Add a measurement; those of this step or later ones are of a run that was stopped, and are made again."""
        path = self.work / "fidelity.jsonl"
        rows = [each for each in whole_lines(path) if each["step"] < row["step"]]
        write_text(path, "".join(json.dumps(each) + "\n" for each in [*rows, row]))

    def _no_number(self, what: str) -> UserError:
        """What to say of a value that is NaN or infinite: a checkpoint of the step it follows holds what led to it."""
        good = last_checkpoint(self.work, before=self.state.global_step) or "none, there is no checkpoint yet"
        return UserError(
            f"{what} on samples {self._indices}; the last good checkpoint: {good}; "
            "lower train.learning_rate and train again under another out="
        )

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
            state = lookahead.lora_state() | {_TOKENS: lookahead.tokens.detach().cpu()}
            if broken := [name for name, value in state.items() if not torch.isfinite(value).all()]:
                raise self._no_number(f"weight {broken[0]!r} is not finite after step {self.state.global_step}")
            save_file(state, folder / _WEIGHTS)

    @override
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        lookahead = self._objective().lookahead
        state = load_file(Path(resume_from_checkpoint) / _WEIGHTS)
        tokens = state.pop(_TOKENS).to(lookahead.tokens.device)
        lookahead.load_state(state, tokens)


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
    shape = {f"lookahead.{key}": value for key, value in asdict(objective.lookahead.settings).items()}
    check_same_settings(work / "settings.json", asdict(settings) | shape | {"data.samples": len(samples)})
    trainer = LookaheadTrainer(objective, settings, work, *split(samples, settings.held_out))
    stopper = StopOnInterrupt()
    trainer.add_callback(stopper)
    with stopper.watching():
        _go_on(trainer, last_checkpoint(work))
    return trainer, trainer.state.global_step >= trainer.state.max_steps


def _go_on(trainer: LookaheadTrainer, checkpoint: Path | None) -> None:
    if checkpoint is None:
        trainer.train()
        return
    print(f"going on from {checkpoint}")
    state = state_of(checkpoint)
    if state.global_step < state.max_steps:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    else:
        trainer.restore(checkpoint)  # the Trainer would take one step more
