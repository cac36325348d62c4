"""keepsight demo: data, training and evaluation on a small model, in about ten minutes on two cores.

    keepsight demo out=runs/demo

The target answers a small mixture of prompts, a lookahead module is trained on the answers, and needle tasks compare it
with the full cache, the oracle, SnapKV and StreamingLLM. A demo that was stopped resumes when it is run again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from keepsight.commands import data, train
from keepsight.commands import eval as evaluation
from keepsight.commands.config import Command, Recipe


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
    samples: int = 100
    steps: int = 470
    replays: int = 5
    tests: int = 10
    lengths: list[int] = field(default_factory=lambda: [512, 1024])


def run(config: Config) -> None:
    """Run the three steps and print how long each took."""
    out = Path(config.out)
    steps: dict[str, Callable[[], None]] = {
        "answers": lambda: data.run(
            _step(data.Config, config, out=out / "data", mixture="demo", limit=config.samples, max_new_tokens=48)
        ),
        "training": lambda: train.run(_step(train.Config, config, data=out / "data", out=out / "adapter")),
        "evaluation": lambda: evaluation.run(
            _step(
                evaluation.Config,
                config,
                adapter=out / "adapter",
                lengths=config.lengths,
                samples=config.tests,
                out=out / "eval",
            )
        ),
    }
    seconds = {}
    for name, step in steps.items():
        print(f"\n=== {name}", flush=True)
        start = time.perf_counter()
        step()
        seconds[name] = time.perf_counter() - start
    print("\n" + "\n".join(f"{name:<11} {each:6.0f} s" for name, each in seconds.items()))
    print(f"{'together':<11} {sum(seconds.values()):6.0f} s")


def _step(command: type[Command], config: Config, **values: Any) -> Command:
    """A command's configuration: the demo's model and module, a short training, and these values."""
    steps: dict[str, Any] = {"steps": config.steps, "replays": config.replays, "measure_every": 100, "save_every": 100}
    training = replace(config.train, samples_per_step=0, held_out=6, **steps)
    plain: dict[str, Any] = {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}
    make: Any = command
    return make(model=config.model, lookahead=config.lookahead, train=training, **plain)
