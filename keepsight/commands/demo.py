"""keepsight demo: data, training and evaluation on a small model, in less than ten minutes on two cores.

    keepsight demo out=runs/demo

The target answers a small mixture of prompts (needles come with their answers), a lookahead module is trained on these
answers, and needle tasks compare it with the full cache, the oracle, SnapKV and StreamingLLM. A demo that was stopped
resumes when it is run again.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from keepsight.commands import fit
from keepsight.commands.config import Recipe


@dataclass
class Config(Recipe):
    """Keys of `keepsight demo`.

    Attributes:
        out: Folder for data, adapter and report.
        samples: Number of training samples.
        steps: Training steps, of one sample each.
        replays: Steps on each reading of the target.
        tests: Needle samples per length.
        lengths: Prompt lengths of the needle tasks in tokens.
    """

    out: str = "runs/demo"
    samples: int = 120
    steps: int = 470
    replays: int = 5
    tests: int = 10
    lengths: list[int] = field(default_factory=lambda: [512, 1024])


def run(config: Config) -> None:
    """Run `keepsight fit` with a short training."""
    steps: dict[str, Any] = {"steps": config.steps, "replays": config.replays, "measure_every": 100, "save_every": 100}
    fit.run(
        fit.Config(
            model=config.model,
            lookahead=config.lookahead,
            train=replace(config.train, samples_per_step=0, held_out=6, **steps),
            out=config.out,
            mixture="demo",
            limit=config.samples,
            max_new_tokens=48,
            tasks=["niah_single"],
            lengths=config.lengths,
            tests=config.tests,
        )
    )
