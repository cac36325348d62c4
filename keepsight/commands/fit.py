"""keepsight fit: data, training, evaluation and model card of a lookahead module in one command."""

import gc
import shutil
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from shlex import quote
from typing import Any

from keepsight.commands import data, train
from keepsight.commands import eval as evaluation
from keepsight.commands.config import Data, Eval, Train
from keepsight.commands.config import Fit as Config
from keepsight.commands.config_shared import DataKeys, EvalKeys, UsesMethods
from keepsight.commands.from_recipe import resources_later
from keepsight.commands.variants import variants_of
from keepsight.files import require_writable, write_text
from keepsight.models.artifacts import check_repo_id
from keepsight.models.card import CARD, with_evaluation
from keepsight.models.distributed import launched

_STAND_IN = "shipped:smollm2-135m-lookahead"


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
    compared: dict[str, Any] = _values(config, EvalKeys) | _values(config, UsesMethods) | {"adapter": adapter}
    tests = Eval(**compared, samples=config.tests, out=str(out / "eval"))
    check(answers, training, tests)
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
        print(f"next: keepsight push {quote(adapter)} USER/NAME --dry-run")


def check(answers: Data, training: Train, tests: Eval) -> None:
    """Check every stage's keys before the first begins, with a shipped adapter for the one that is to be trained.

    Raises:
        UserError: a value that a stage would refuse.
    """
    data.check(answers)
    if training.base is not None:
        check_repo_id(training.base)
    evaluation.check(tests)
    variants_of(tests.methods, tests.budgets, tests.bits, resources_later(replace(tests, adapter=_STAND_IN)))


def _values(config: Config, keys: type) -> dict[str, Any]:
    """The values of the keys that a stage shares with this command."""
    return {each.name: getattr(config, each.name) for each in fields(keys) if hasattr(config, each.name)}


def _complete_card(out: Path) -> None:
    """Add the evaluation's table to the adapter's card, and its plot beside it."""
    card, evaluated = out / "adapter" / CARD, out / "eval"
    table = (evaluated / "tables" / "overall.md").read_text(encoding="utf-8")
    shutil.copyfile(evaluated / "plots" / "overview.png", out / "adapter" / "evaluation.png")
    write_text(card, with_evaluation(card.read_text(encoding="utf-8"), table))
