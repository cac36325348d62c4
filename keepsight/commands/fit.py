"""keepsight fit: a lookahead module for a model in one command: data, training, evaluation, model card.

    keepsight fit HuggingFaceTB/SmolLM2-135M-Instruct out=runs/smollm2
    keepsight fit recipe=llama3.1-8b mixture=paper limit=20000 max_new_tokens=512 out=runs/llama8b
    accelerate launch -m keepsight fit recipe=llama3.1-8b out=runs/llama8b

Give recipe= where there is one for the model: it has the training's settings. `out` gets data/, adapter/ and eval/; the
adapter's card shows the results of the evaluation, and `keepsight push DIR/adapter user/name` publishes it. A run that
was stopped resumes in the stage it was in when the same command is run again.
"""

import gc
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from keepsight.commands import data, train
from keepsight.commands import eval as evaluation
from keepsight.commands.config import Recipe, at_least_one
from keepsight.files import require_writable, write_text
from keepsight.models.card import CARD, with_evaluation
from keepsight.models.distributed import launched

POSITIONAL = ("model.id",)


@dataclass
class Config(data.DataKeys, evaluation.EvalKeys):
    """Keys of `keepsight fit`.

    Attributes:
        out: Folder for the data, the adapter and the evaluation.
        title: Title of the model card.
        base: Hub id of the target for the card, where model.id is a folder.
        tests: Samples per task and length.
    """

    out: str = "???"
    limit: int = 1000
    title: str = "keepsight lookahead adapter"
    base: str | None = None
    tasks: list[str] = field(default_factory=lambda: ["niah"])
    lengths: list[int] = field(default_factory=lambda: [1024])
    tests: int = 10


def run(config: Config) -> None:
    """Run the stages and print how long each took."""
    at_least_one(config, "limit", "max_new_tokens", "tests", "tasks", "lengths", "methods", "budgets")
    require_writable(out := Path(config.out))
    adapter = str(out / "adapter")
    answers = data.Config(**_values(config, data.DataKeys), out=str(out / "data"))
    training = train.Config(
        **_values(config, Recipe), data=answers.out, out=adapter, title=config.title, base=config.base
    )
    compared = _values(replace(config, adapter=adapter), evaluation.EvalKeys)
    tests = evaluation.Config(**compared, samples=config.tests, out=str(out / "eval"))
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
        gc.collect()  # or what is left of a training still holds its target when the evaluation loads another
        launched().wait_for_everyone()
        seconds[name] = time.perf_counter() - start
    if is_main:
        _complete_card(out)
        seconds["together"] = sum(seconds.values())
        print("\n" + "\n".join(f"{name:<11} {each:6.0f} s" for name, each in seconds.items()))


def _values(config: Config, keys: type[Recipe]) -> dict[str, Any]:
    """The values of the keys that a stage shares with this command."""
    return {each.name: getattr(config, each.name) for each in fields(keys)}


def _complete_card(out: Path) -> None:
    """Add the evaluation's table to the adapter's card, and its plot beside it."""
    card, evaluated = out / "adapter" / CARD, out / "eval"
    table = (evaluated / "tables" / "overall.md").read_text(encoding="utf-8")
    shutil.copyfile(evaluated / "plots" / "overview.png", out / "adapter" / "evaluation.png")
    write_text(card, with_evaluation(card.read_text(encoding="utf-8"), table))
