"""What recipes set for the optimisation of any trained module."""

from dataclasses import dataclass, field


@dataclass
class TrainSettings:
    """Optimisation of a module: Adam, cosine with warmup and minimum, clipping (LookaheadKV, table 16).

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
