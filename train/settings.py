"""Settings of every training. Nothing heavy is imported: configurations read this file."""

import math
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import TypeAdapter, ValidationError

from keepsight.errors import Positive, Share, UserError, Whole, code_of, reason_of
from keepsight.files import read_bytes

PRECISIONS = ("no", "bf16", "fp16")
TRACKERS = ("tensorboard", "trackio", "wandb")
LARGEST_BUDGET = 1 << 24
SHARPEST = 1e-3
"""The lowest temperature of a soft selection, in nats: gradients of sharper ones are 0 almost everywhere."""
MAY_CHANGE = ("checkpoints", "flops", "gradient_checkpointing", "measure_every", "minutes", "report_to", "save_every")
"""Fields that do not decide what is learned: they may differ when a training is resumed."""

PositiveFloat = Annotated[float, Gt(0), Lt(float("inf"))]


def check_ranges(settings: object, key: str) -> None:
    """Check the fields of a dataclass against the bounds in their type annotations; `key` is its name in a recipe.

    Raises:
        UserError: a value is out of range.
    """
    try:
        TypeAdapter(type(settings)).validate_python(vars(settings))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        message = f"{key}.{name}={getattr(settings, name)} {reason_of(error)}"
        raise UserError(message, field=f"{key}.{name}", code=code_of(error)) from None


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise a UserError unless the value of a key is one of the choices."""
    if value not in choices:
        raise UserError(f"{name}={value} is unknown; choose one of {', '.join(choices)}", field=name, code="unknown")


@dataclass
class TrainSettings:
    """Optimisation: Adam, linear warmup, cosine decay to a minimum, gradient clipping (arXiv 2603.10899, table 16).

    Attributes:
        steps: Optimiser steps; 0 for `epochs` passes over the data.
        epochs: Passes over the data when `steps` is 0.
        minutes: Minutes after which a training ends with a checkpoint, at the end of a step; the same command goes on,
            for as many minutes. 0 for no limit. The learning rate follows `steps` or `epochs` all the same.
        batch_size: Samples per device and forward pass.
        samples_per_step: Samples per optimiser step over all devices, with gradient accumulation; 0 for one batch per
            device.
        learning_rate: Peak learning rate.
        warmup: Warmup steps: a whole number of steps, or a share of all steps below 1.
        min_learning_rate: Final learning rate of the cosine schedule, as a share of the peak.
        clip: Maximum gradient norm.
        precision: Mixed precision: `no`, `bf16` or `fp16`.
        seed: Random seed for initialisation and data order.
        held_out: Number of samples for validation, which are not trained on.
        measure_every: Steps between measurements on the held-out samples.
        save_every: Steps between checkpoints.
        checkpoints: Number of newest checkpoints to keep.
        budget: KV entries per head at which recall or hit rate is measured.
        report_to: Experiment trackers: tensorboard, trackio, wandb.
        flops: Peak of a device in TFLOP/s, for the model FLOPs utilisation (`mfu`) that trackers show; by default the
            bfloat16 peak of known GPUs.
        group_by_length: Batch samples of similar length to save padding; by default only with several processes.
        replays: Training steps on each sample's teacher outputs; above 1 the outputs are stored, see `replay`.
        tf32: Use TensorFloat-32 for float32 matrix products on GPUs: faster, with 10 bits of mantissa. torch's setting
            by default.
    """

    steps: Whole = 0
    epochs: Annotated[float, Gt(0), Le(1e6)] = 1.0
    minutes: Annotated[float, Ge(0), Le(1e6)] = 0.0
    batch_size: Positive = 1
    samples_per_step: Whole = 0
    learning_rate: Annotated[float, Gt(0), Le(100)] = 1e-3
    warmup: int | float = 0.03
    min_learning_rate: Share = 0.1
    clip: Annotated[float, Gt(0), Le(1e9)] = 1.0
    precision: str = "no"
    seed: Annotated[int, Ge(0), Lt(2**32)] = 0
    held_out: Whole = 16
    measure_every: Positive = 100
    save_every: Positive = 100
    checkpoints: Positive = 2
    budget: Positive = 64
    report_to: list[str] = field(default_factory=lambda: ["tensorboard"])
    flops: Annotated[float, Ge(0), Le(1e6)] = 0.0
    group_by_length: bool | None = None
    replays: Positive = 1
    tf32: bool | None = None

    def check(self, key: str) -> None:
        """Raise a UserError for a value that is out of range; `key` names the settings in a recipe."""
        check_ranges(self, key)
        if not 0 <= self.warmup < (1 if isinstance(self.warmup, float) else math.inf):
            raise UserError(
                f"{key}.warmup={self.warmup} must be a whole number of steps, or a share of them below 1",
                field=f"{key}.warmup",
                code="range",
            )
        check_choice(f"{key}.precision", self.precision, PRECISIONS)
        for tracker in self.report_to:
            if tracker not in TRACKERS:
                raise UserError(
                    f"{key}.report_to names {tracker!r}; choose from {', '.join(TRACKERS)}, or [] for none",
                    field=f"{key}.report_to",
                    code="unknown",
                )
            if find_spec(tracker) is None:
                raise UserError(
                    f"{key}.report_to: {tracker} is not installed; run `pip install {tracker}`",
                    field=f"{key}.report_to",
                    code="missing",
                )

    def decisive(self) -> dict[str, Any]:
        """The settings that decide what is learned, and so must be the same when a training is resumed."""
        return {name: value for name, value in asdict(self).items() if name not in MAY_CHANGE}

    def accumulation(self, processes: int, key: str) -> int:
        """Gradient accumulation steps of each process.

        Raises:
            UserError: `samples_per_step` is not a multiple of the samples in a batch of every process.
        """
        at_once = self.batch_size * processes
        if self.samples_per_step % at_once:
            raise UserError(
                f"{key}.samples_per_step={self.samples_per_step} does not divide into {key}.batch_size="
                f"{self.batch_size} samples of {processes} processes: choose a multiple of {at_once}",
                field=f"{key}.samples_per_step",
                code="range",
            )
        return max(1, self.samples_per_step // at_once)


@dataclass
class LookaheadTrainSettings(TrainSettings):
    """Optimisation of a lookahead module.

    Attributes:
        far: Share of the loss computed over distant entries alone, without the first 4 and the last 32, which receive
            most of the attention and are learned quickly. 0 is the paper's loss.
        cuts: Number of evenly spaced positions in an answer, the first before it, from which the module learns to
            predict what the rest attends to. One pass of the base model serves all.
        unseen: Share of the samples that are split before their question: the module sees the text before it and learns
            what question and answer attend to. Above 0, held-out samples are measured both ways.
        gradient_checkpointing: Recompute activations in the backward pass: less memory for long prompts, slightly
            slower steps.
    """

    far: Share = 0.5
    cuts: Annotated[int, Ge(1), Le(64)] = 1
    unseen: Share = 0.0
    gradient_checkpointing: bool = False


@dataclass
class ReplaySettings:
    """Where teacher outputs are kept in a training with `replays` above 1.

    Attributes:
        memory: Memory for them per process, such as 4GiB, held-out samples included. With more memory, more samples are
            shuffled at a time.
        dir: Folder on a fast disk to store them in, instead of memory.
        dtype: Stores KV entries in `int8`, which changes a loss by at most half a percent, or in `bfloat16`, which is
            exact if the base model is in bfloat16.
    """

    memory: str = "4GiB"
    dir: str | None = None
    dtype: str = "int8"

    def check(self) -> None:
        """Raise a UserError for a value that is out of range."""
        read_bytes(self.memory)
        check_choice("replay.dtype", self.dtype, ("int8", "bfloat16"))


@dataclass
class DraftHeadSettings:
    """Shape and training of an EAGLE-3 draft head.

    Attributes:
        vocabulary: Size of the draft vocabulary: the most frequent tokens of the training data's answers.
        unroll: Steps for which the head is unrolled over its own features in training (training-time test).
        decay: Weight of an unrolled step's loss relative to the previous step.
        loss_on: Tokens that the head learns to predict: `answers`, or `all`, prompts as well. Prompts are never
            drafted, but where answers are few or short a head learns more from the prompts' tokens too; a step then
            takes longer.
        max_tokens: Longest sample in tokens; longer ones are truncated at the end.
        train: Optimisation.
    """

    vocabulary: Positive = 32000
    unroll: Annotated[int, Ge(1), Le(64)] = 7
    decay: Annotated[float, Gt(0), Le(1)] = 0.8
    loss_on: str = "answers"
    max_tokens: Annotated[int, Ge(3)] = 4096
    train: TrainSettings = field(default_factory=lambda: TrainSettings(learning_rate=1e-4, clip=0.5))

    def check(self) -> None:
        """Raise a UserError for a value that is out of range."""
        check_ranges(self, "draft_head")
        check_choice("draft_head.loss_on", self.loss_on, ("answers", "all"))
        self.train.check("draft_head.train")


@dataclass
class RetrievalHeadSettings:
    """Variant and distillation of a retrieval head.

    Attributes:
        features: Inputs of the head besides token embeddings: `previous-step`, the base model's features of the
            previous token, or `none`.
        groups: Groups of neighbouring layers of the base model, each with its own queries and keys in the head. 1 as in
            SpeContext: the same entries in all layers.
        queries: Number of a sample's last tokens whose attention is distilled.
        temperature: Temperature of the distillation loss. Above 1, entries beyond the few with the largest attention
            weights are learned too.
        answers: Share of the loss over the answers' tokens alone, half of it over distant entries.
        max_tokens: Longest sample in tokens; longer ones are truncated at the end.
        train: Optimisation; `train.budget` adds a budget at which the hit rate is measured.
    """

    features: str = "previous-step"
    groups: Positive = 1
    queries: Positive = 128
    temperature: PositiveFloat = 2.0
    answers: Share = 0.67
    max_tokens: Annotated[int, Ge(2)] = 4096
    train: TrainSettings = field(default_factory=TrainSettings)

    def check(self) -> None:
        """Raise a UserError for a value that is out of range."""
        check_ranges(self, "retrieval_head")
        check_choice("retrieval_head.features", self.features, ("previous-step", "none"))
        self.train.check("retrieval_head.train")


@dataclass
class FinetuneSettings:
    """Training of a lookahead module and its head weights on the KL divergence that evicting with them causes.

    Attributes:
        freeze_module: Train the head weights alone.
        budgets: KV budgets: average entries per layer and KV head. Each training step uses one of them; all are
            measured.
        temperature: Temperature of the soft selection in nats: lower is closer to hard selection, with less smooth
            gradients.
        uniform_share: Probability that a batch uses a selection with the same number of entries in every head. Above 0,
            the module is trained for both `selection=shared` and `selection=uniform`.
        unseen: Share of the samples that are split before their question: eviction comes before the question, and the
            loss is over question and answer. Above 0, held-out samples are measured both ways.
        gradient_checkpointing: Recompute activations in the backward pass: less memory for long prompts, slower steps.
        head_weights_rate: Peak learning rate of the head weights; by default 0.015, or 0.06 if the module is frozen.
        train: Optimisation; `train.learning_rate` is the module's.
    """

    freeze_module: bool = False
    budgets: Annotated[list[Annotated[int, Ge(1), Le(LARGEST_BUDGET)]], MinLen(1)] = field(
        default_factory=lambda: [64, 128, 256]
    )
    temperature: Annotated[float, Ge(SHARPEST), Le(1e6)] = 0.5
    uniform_share: Share = 0.0
    unseen: Share = 0.0
    gradient_checkpointing: bool = False
    head_weights_rate: Annotated[float, Gt(0), Le(100)] | None = None
    train: TrainSettings = field(
        default_factory=lambda: TrainSettings(
            learning_rate=5e-4, min_learning_rate=0.05, samples_per_step=4, replays=6, measure_every=50
        )
    )

    @property
    def weights_rate(self) -> float:
        """Peak learning rate of the head weights."""
        return self.head_weights_rate or (0.06 if self.freeze_module else 0.015)

    def check(self) -> None:
        """Raise a UserError for a value that is out of range."""
        check_ranges(self, "finetune")
        self.train.check("finetune.train")

    def check_selection(self, floor: float | None) -> None:
        """Raise a UserError if nothing is left to train for a selection; without a floor it is uniform."""
        if self.freeze_module and (floor is None or self.uniform_share):
            raise UserError(
                "finetune.freeze_module=true: a uniform selection has no head weights to train",
                field="finetune.freeze_module",
                code="conflict",
            )
        if floor is None and self.uniform_share:
            raise UserError(
                "finetune.uniform_share: the module's own selection is uniform; use 0, or selection=shared",
                field="finetune.uniform_share",
                code="conflict",
            )


@dataclass
class FreshSettings:
    """New prompts with which `keepsight fit` goes on with the eviction stage.

    Attributes:
        limit: Number of new prompts; 0 leaves out both stages.
        mixture: Mixture of the new prompts; by default NAME-fresh, where NAME is `mixture=`, or else `mixture=` itself.
            The seed is another one, but rows of files may come again.
        max_new_tokens: Longest answer to a new prompt, in tokens.
        steps: Number of training steps, in place of finetune.train.steps.
    """

    limit: Whole = 0
    mixture: str | None = None
    max_new_tokens: Positive = 128
    steps: Positive = 240

    def check(self) -> None:
        """Raise a UserError for a value that is out of range."""
        check_ranges(self, "fresh")
