"""Settings of the optimiser, shared by all trainers. Nothing heavy is imported: configurations read this file."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

from typing_extensions import override

from keepsight.errors import UserError
from keepsight.files import read_bytes

PRECISIONS = ("no", "bf16", "fp16")
TRACKERS = ("tensorboard", "trackio", "wandb")
_FREE = ("checkpoints", "flops", "gradient_checkpointing")


@dataclass
class TrainSettings:
    """Optimisation: Adam, linear warmup, cosine decay to a minimum, gradient clipping (arXiv 2603.10899, table 16).

    Attributes:
        steps: Optimiser steps; 0 for `epochs` passes over the data.
        epochs: Passes over the data when `steps` is 0.
        batch_size: Samples per device and forward pass.
        samples_per_step: Samples per optimiser step, all devices together: each accumulates gradients until they are
            reached. 0 for one batch of each device.
        learning_rate: Peak learning rate.
        warmup: Share of the steps in which the learning rate rises to its peak.
        min_learning_rate: Final learning rate of the cosine schedule, as a share of the peak.
        clip: Maximum gradient norm.
        precision: Mixed precision: `no`, `bf16` or `fp16`.
        seed: Random seed for initialisation and data order.
        held_out: Number of samples held out to be measured, never trained on.
        measure_every: Steps between measurements on the held-out samples.
        save_every: Steps between checkpoints.
        checkpoints: Newest checkpoints that are kept.
        budget: KV entries per head at which recall or hit rate is measured.
        report_to: Experiment trackers: tensorboard, trackio, wandb.
        flops: Peak of a device in 1e12 operations a second, of which trackers show the share that is reached (`mfu`).
            By default the bfloat16 peak of a GPU that keepsight knows; trackers show none for others.
        group_by_length: Batch samples of similar length, which saves padding and, where several processes wait for one
            another, time. By default with several processes alone.
        replays: Uses of each reading of the target; above 1 the readings are kept, see the recipe's `replay`.
        tf32: Whether GPUs multiply float32 matrices in TensorFloat-32, faster and rounded to 10 bits; by default what
            torch chooses.
    """

    steps: int = 0
    epochs: float = 1.0
    batch_size: int = 1
    samples_per_step: int = 0
    learning_rate: float = 1e-3
    warmup: float = 0.03
    min_learning_rate: float = 0.1
    clip: float = 1.0
    precision: str = "no"
    seed: int = 0
    held_out: int = 16
    measure_every: int = 100
    save_every: int = 100
    checkpoints: int = 2
    budget: int = 64
    report_to: list[str] = field(default_factory=lambda: ["tensorboard"])
    flops: float = 0.0
    group_by_length: bool | None = None
    replays: int = 1
    tf32: bool | None = None

    def check(self, key: str) -> None:
        """Refuse settings that no training can run with; `key` is their name in a recipe.

        Raises:
            UserError: a value is out of range.
        """
        counts = ("batch_size", "measure_every", "save_every", "checkpoints", "budget", "replays")
        least = dict.fromkeys(counts, 1)
        require_at_least(self, key, {**least, "steps": 0, "held_out": 0, "samples_per_step": 0})
        require_within(self, key, learning_rate=(0, 100), epochs=(0, 1e6), clip=(0, 1e9), above=True)
        require_within(self, key, warmup=(0, 1), min_learning_rate=(0, 1), seed=(0, 2**32 - 1), flops=(0, 1e6))
        if self.precision not in PRECISIONS:
            raise UserError(f"{key}.precision={self.precision} is unknown; choose one of {', '.join(PRECISIONS)}")
        for tracker in self.report_to:
            if tracker not in TRACKERS:
                raise UserError(f"{key}.report_to names {tracker!r}; choose from {', '.join(TRACKERS)}, or [] for none")
            if find_spec(tracker) is None:
                raise UserError(f"{key}.report_to: {tracker} is not installed; run `pip install {tracker}`")

    def deciding(self) -> dict[str, Any]:
        """The settings that decide what is learned; the others may change when a training is resumed."""
        return {name: value for name, value in asdict(self).items() if name not in _FREE}

    def accumulation(self, processes: int, key: str) -> int:
        """Gradient accumulation steps of each process.

        Raises:
            UserError: `samples_per_step` cannot be divided into batches of all of them; `key` as for `check`.
        """
        together = self.batch_size * processes
        if self.samples_per_step % together:
            raise UserError(
                f"{key}.samples_per_step={self.samples_per_step} does not divide into {key}.batch_size="
                f"{self.batch_size} samples of {processes} processes: choose a multiple of {together}"
            )
        return max(1, self.samples_per_step // together)


@dataclass
class LookaheadTrainSettings(TrainSettings):
    """Optimisation of a lookahead module.

    Attributes:
        far: Share of the loss that is a KL divergence over the far entries alone: without the first 4 and the last 32,
            which hold most of the mass and are learned at once. 0 is the paper's loss.
        cuts: Places in an answer from which one reading of the target is used: a module that is to look ahead from the
            end of the prompt also learns to look ahead from behind parts of the answer. They are spread evenly over the
            answer, the first before it; 1 for that one alone, up to 64.
        gradient_checkpointing: Run each layer of the pass with gradients twice and keep nothing for them between: long
            prompts take less memory, and steps a little more time.
    """

    far: float = 0.5
    cuts: int = 1
    gradient_checkpointing: bool = False

    @override
    def check(self, key: str) -> None:
        super().check(key)
        if not 0 <= self.far <= 1:
            raise UserError(f"{key}.far={self.far} must be between 0 and 1")
        require_within(self, key, cuts=(1, 64))


@dataclass
class ReplaySettings:
    """Where the target's readings are kept in a training with `replays` above 1.

    Attributes:
        memory: Memory that they may take per process, such as 4GiB, those of held-out samples included; more of it
            mixes more samples.
        dir: Folder on a fast disk that holds them in place of memory.
        dtype: KV entries are kept in `int8`, which changes a loss by half a percent at most, or in `bfloat16`, which
            changes nothing where the target is in bfloat16.
    """

    memory: str = "4GiB"
    dir: str | None = None
    dtype: str = "int8"

    def check(self) -> None:
        """Refuse settings that no training can run with.

        Raises:
            UserError: a value is out of range.
        """
        read_bytes(self.memory)
        if self.dtype not in (known := ("int8", "bfloat16")):
            raise UserError(f"replay.dtype={self.dtype} is unknown; choose one of {', '.join(known)}")


def require_at_least(settings: object, key: str, least: Mapping[str, int]) -> None:
    """Check fields of the settings that a recipe calls `key` against their lowest allowed values.

    Raises:
        UserError: a value is lower.
    """
    for name, lowest in least.items():
        if (value := getattr(settings, name)) < lowest:
            raise UserError(f"{key}.{name}={value} must be at least {lowest}")


def require_within(settings: object, key: str, *, above: bool = False, **bounds: tuple[float, float]) -> None:
    """Check fields of the settings that a recipe calls `key` against their lowest and highest allowed values.

    Args:
        settings: What holds the fields.
        key: Its name in a recipe.
        above: Whether the lowest value itself is not allowed.
        bounds: By field.

    Raises:
        UserError: a value lies outside, or is no number.
    """
    for name, (lowest, highest) in bounds.items():
        value = getattr(settings, name)
        if not lowest <= value <= highest or (above and value == lowest):
            raise UserError(f"{key}.{name}={value} must be {'above' if above else 'from'} {lowest} and up to {highest}")
