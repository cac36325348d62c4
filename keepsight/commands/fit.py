"""keepsight fit: data, training, evaluation and model card of a lookahead module in one command."""

import gc
import shutil
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from keepsight.commands import data, train
from keepsight.commands import eval as evaluation
from keepsight.commands.config import Data, DataKeys, Eval, EvalKeys, Train
from keepsight.commands.config import Fit as Config
from keepsight.files import require_writable, write_text
from keepsight.models.card import with_evaluation
from keepsight.models.hub import CARD
from keepsight.models.processes import launched


def run(config: Config) -> None:
    """Run the stages and print how long each took."""
    require_writable(out := Path(config.out))
    adapter = str(out / "adapter")
    answers = Data(**_values(config, DataKeys), out=str(out / "data"))
    training = Train(
        **{key: getattr(config, key) for key in ("model", "lookahead", "train", "replay", "title", "base")},
        data=answers.out,
        out=adapter,
    )
    compared = _values(replace(config, adapter=adapter), EvalKeys)
    tests = Eval(**compared, samples=config.tests, out=str(out / "eval"))
    stages: dict[str, Callable[[], None]] = {
        "answers": lambda: data.run(answers),
        "training": lambda: train.run(training),
        "evaluation": lambda: evaluation.run(tests),
    }
    is_main, seconds = launched().is_main_process, dict[str, float]()
    for name, stage in stages.items():
        if is_main:
            print(f"\n=== {name}", flush=True)
        start = time.perf_counter()
        stage()
        gc.collect()  # frees the training's model before the evaluation loads another
        launched().wait_for_everyone()
        seconds[name] = time.perf_counter() - start
    if is_main:
        _complete_card(out)
        seconds["total"] = sum(seconds.values())
        print("\n" + "\n".join(f"{name:<11} {each:6.0f} s" for name, each in seconds.items()))


def _values(config: Config, keys: type) -> dict[str, Any]:
    """The values of the keys that a stage shares with this command."""
    return {each.name: getattr(config, each.name) for each in fields(keys)}


def _complete_card(out: Path) -> None:
    """Add the evaluation's table to the adapter's card, and its plot beside it."""
    card, evaluated = out / "adapter" / CARD, out / "eval"
    table = (evaluated / "tables" / "overall.md").read_text(encoding="utf-8")
    shutil.copyfile(evaluated / "plots" / "overview.png", out / "adapter" / "evaluation.png")
    write_text(card, with_evaluation(card.read_text(encoding="utf-8"), table))
