"""keepsight fit: a lookahead module for a model in one command: data, training, evaluation, model card.

    keepsight fit HuggingFaceTB/SmolLM2-135M-Instruct out=runs/smollm2
    keepsight fit recipe=llama3.1-8b mixture=paper limit=20000 max_new_tokens=512 out=runs/llama8b
    accelerate launch -m keepsight fit recipe=llama3.1-8b out=runs/llama8b

Give recipe= where there is one for the model: it has the training's settings. `out` gets data/, adapter/ and eval/; the
adapter's card shows the results of the evaluation, and `keepsight push DIR/adapter user/name` publishes it. A run that
was stopped resumes in the stage it was in when the same command is run again.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepsight.commands import data, train
from keepsight.commands import eval as evaluation
from keepsight.commands.config import Recipe, at_least_one
from keepsight.data_gen.server import ServerSettings
from keepsight.files import require_writable, write_text
from keepsight.models.card import with_evaluation
from keepsight.models.hub import CARD
from keepsight.models.processes import launched

POSITIONAL = ("model.id",)


@dataclass
class Config(Recipe):
    """Keys of `keepsight fit`.

    Attributes:
        out: Folder for the data, the adapter and the evaluation.
        mixture: Name of a file in recipes/mixtures/, or a path to your own YAML file.
        limit: Number of samples.
        max_new_tokens: Longest answer of the data in tokens.
        backend: Who answers; see `keepsight data`.
        server: The server of backend=server.
        title: Title of the model card.
        base: Hub id of the target for the card, where model.id is a folder.
        tasks: Tasks of the evaluation.
        lengths: Prompt lengths of generated tasks in tokens.
        methods: Methods that are compared.
        budgets: KV budgets.
        tests: Samples per task and length.
    """

    out: str = "???"
    mixture: str = "offline"
    limit: int = 1000
    max_new_tokens: int = 128
    backend: str = "transformers"
    server: ServerSettings = field(default_factory=ServerSettings)
    title: str = "keepsight lookahead adapter"
    base: str | None = None
    tasks: list[str] = field(default_factory=lambda: ["niah"])
    lengths: list[int] = field(default_factory=lambda: [1024])
    methods: list[Any] = field(default_factory=lambda: ["full", "oracle", "lookaheadkv", "snapkv", "streamingllm"])
    budgets: list[Any] = field(default_factory=lambda: [64, 128])
    tests: int = 10


def run(config: Config) -> None:
    """Run the stages and print how long each took."""
    at_least_one(config, "limit", "max_new_tokens", "tests", "tasks", "lengths", "methods", "budgets")
    require_writable(out := Path(config.out))
    recipe: dict[str, Any] = {key: getattr(config, key) for key in ("model", "lookahead", "train", "replay")}
    answers = data.Config(
        **recipe,
        out=str(out / "data"),
        mixture=config.mixture,
        limit=config.limit,
        max_new_tokens=config.max_new_tokens,
        backend=config.backend,
        server=config.server,
    )
    training = train.Config(
        **recipe, data=str(out / "data"), out=str(out / "adapter"), title=config.title, base=config.base
    )
    tests = evaluation.Config(
        **recipe,
        adapter=str(out / "adapter"),
        tasks=config.tasks,
        lengths=config.lengths,
        methods=config.methods,
        budgets=config.budgets,
        samples=config.tests,
        out=str(out / "eval"),
    )
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
        launched().wait_for_everyone()
        seconds[name] = time.perf_counter() - start
    if is_main:
        _complete_card(out)
        seconds["together"] = sum(seconds.values())
        print("\n" + "\n".join(f"{name:<11} {each:6.0f} s" for name, each in seconds.items()))


def _complete_card(out: Path) -> None:
    """Put what the evaluation found onto the adapter's card, and its picture beside it."""
    card, evaluated = out / "adapter" / CARD, out / "eval"
    table = (evaluated / "tables" / "overall.md").read_text(encoding="utf-8")
    shutil.copyfile(evaluated / "plots" / "overview.png", out / "adapter" / "evaluation.png")
    write_text(card, with_evaluation(card.read_text(encoding="utf-8"), table))
