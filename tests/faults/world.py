"""A folder with everything that the commands read and write: a tiny target, data, trained modules, results."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepsight.files import write_lines
from tests.faults.child import Disturbance, Run, run
from tests.tiny import save_tiny_target

TINY = ("model.id=tiny", "model.device=cpu")
_MIXTURE = """
min_tokens: 80
max_tokens: 200
sources:
  - {kind: local_jsonl, path: rows.jsonl}
  - {kind: key_values}
"""
_STEPS = ("steps=4", "save_every=2", "measure_every=2", "held_out=2", "report_to=[]")
_NEEDLES = ("lengths=300", "samples=2", "budgets=40", "max_new_tokens=4")
_OF_THE_CLOCK = ("seconds", "time", "tokens_per", "date", "rows")
"""Parts of the names of columns that differ from run to run."""


@dataclass(frozen=True)
class Scene:
    """A command of the world.

    Attributes:
        name: For the counts.
        arguments: The command and its keys.
        out: The folder or file that it writes; empty for none.
        reads: Patterns of the files of earlier commands that it reads.
    """

    name: str
    arguments: tuple[str, ...]
    out: str = ""
    reads: tuple[str, ...] = ()


def _train(command: str, key: str, out: str, *more: str) -> tuple[str, ...]:
    return (command, *TINY, "data=data", f"out={out}", *(f"{key}.{step}" for step in _STEPS), *more)


_MODULE = ("*.json", "*.safetensors")
_SHARED = ("lookahead.floor=0.2", "lookahead.sharing=model")
DATA = Scene(
    "data", ("data", *TINY, "limit=8", "shard_size=3", "max_new_tokens=4", "mixture=mixture.yaml", "out=data"), "data"
)
TRAIN = Scene(
    "train",
    _train("train", "train", "adapter", "lookahead.tokens=4", "lookahead.rank=2", *_SHARED),
    "adapter",
    ("data/*.json*", "data/*.arrow"),
)
HEAD_WEIGHTS = Scene(
    "finetune with the module frozen",
    _train(
        *("finetune", "finetune.train", "weighted", "adapter=adapter"),
        *("finetune.budgets=[8]", "finetune.freeze_module=true"),
    ),
    "weighted",
    ("data/*.json*", "data/*.arrow", *(f"adapter/{name}" for name in _MODULE)),
)
FINETUNE = Scene(
    "finetune",
    _train("finetune", "finetune.train", "finetuned", "adapter=weighted", "finetune.budgets=[8]"),
    "finetuned",
    ("data/*.json*", "data/*.arrow", *(f"weighted/{name}" for name in _MODULE)),
)
DRAFT_HEAD = Scene(
    "train_draft_head",
    (
        *_train("train_draft_head", "draft_head.train", "head", "features=features"),
        *("draft_head.vocabulary=96", "draft_head.unroll=2"),
    ),
    "head",
    ("data/*.json*", "features/*.json", "features/*.safetensors"),
)
RETRIEVAL_HEAD = Scene(
    "train_retrieval_head",
    _train("train_retrieval_head", "retrieval_head.train", "retrieval", "head=head", "retrieval_head.queries=8"),
    "retrieval",
    ("data/*.json*", *(f"head/{name}" for name in _MODULE)),
)
EVAL = Scene(
    "eval",
    ("eval", *TINY[:3], "adapter=adapter", *_NEEDLES, "methods=lookaheadkv,snapkv", "out=eval"),
    "eval",
    tuple(f"adapter/{name}" for name in _MODULE),
)
MAKERS = (DATA, TRAIN, HEAD_WEIGHTS, FINETUNE, DRAFT_HEAD, RETRIEVAL_HEAD, EVAL)
"""In the order in which each has what it reads."""
INSPECT = Scene(
    "inspect",
    ("inspect", *TINY[:3], "adapter=adapter", "prompt=@text.txt", "budget=40", "out=page.html"),
    "page.html",
    EVAL.reads,
)
PUSHES = tuple(
    Scene(f"push {folder}", ("push", folder, "ada/x", "--dry-run"), "", tuple(f"{folder}/{name}" for name in _MODULE))
    for folder in ("adapter", "head", "retrieval")
)
_RUN = ("eval/*.json*", "eval/kept/*")
REPORT = Scene("report", ("report", "eval", "out=report"), "report", _RUN)
COMPARE = Scene("compare", ("compare", "eval", "other", "out=compare"), "compare", _RUN)
FOREIGN = Scene("a target", ("inspect", *TINY, "method=snapkv", "compare=tova", *INSPECT.arguments[-3:]), "page.html",
                ("tiny/*", "text.txt"))  # fmt: skip
SOURCES = Scene("sources", DATA.arguments, "data", ("mixture.yaml", "rows.jsonl"))


@dataclass
class World:
    """A folder in which all of `MAKERS` have run.

    Attributes:
        folder: The folder.
        seconds: How long each took, by name.
        events: Number of events in what each writes, by name.
        results: What each wrote; see `results_of`.
    """

    folder: Path
    seconds: dict[str, float] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        save_tiny_target(self.folder / "tiny", num_hidden_layers=7)  # a draft head reads three of them
        (self.folder / "mixture.yaml").write_text(_MIXTURE)
        write_lines(self.folder / "rows.jsonl", [{"prompt": f"Say {number}."} for number in range(9)])
        (self.folder / "text.txt").write_text("A word and another word. " * 30)
        for scene in MAKERS:
            outcome = Run(scene.arguments, self.folder, scene.out).wait()
            assert outcome.code == 0, f"{scene.name}: {outcome.errors}"
            self.seconds[scene.name] = outcome.seconds
            self.events[scene.name] = outcome.events
        shutil.copytree(self.folder / EVAL.out, self.folder / "other")
        for scene in (*MAKERS, INSPECT, REPORT, COMPARE, *PUSHES, FOREIGN, SOURCES):
            if scene not in MAKERS:
                outcome = run(scene.arguments, self.folder)
                assert outcome.code == 0, f"{scene.name}: {outcome.errors}"
            self.results[scene.name] = results_of(self.folder / scene.out) if scene.out else {}

    def copy(self, folder: Path, without: str = "") -> Path:
        """A copy that a trial may spoil, in place of the one before it."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder, folder, ignore=lambda at, _: [without] if Path(at) == self.folder else [])
        return folder

    def half(self, scene: Scene, folder: Path, share: float) -> Path:
        """A copy in which a scene was killed after a share of its events."""
        event = max(1, round(self.events[scene.name] * share))
        while True:
            self.copy(folder, without=scene.out)
            outcome = Run(scene.arguments, folder, scene.out, Disturbance(kill_at=event)).wait()
            if outcome.was_killed:
                return folder
            assert event > 1
            event //= 2  # it had fewer events than the first time


def results_of(out: Path) -> dict[str, Any]:
    """What a command wrote that must be the same whatever happened meanwhile, by file."""
    if out.is_file():
        return {out.name: out.read_bytes()}
    return {path.name: _content(path) for path in _lasting(out)} if out.exists() else {}


def _lasting(out: Path) -> Iterator[Path]:
    for path in sorted(out.iterdir()):
        if path.is_file() and path.suffix in (".json", ".jsonl", ".safetensors", ".csv", ".md", ".png"):
            yield path


def _content(path: Path) -> Any:
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [{key: row[key] for key in row if not _is_of_the_clock(key)} for row in rows]
    return path.read_bytes()


def _is_of_the_clock(key: str) -> bool:
    return any(part in key for part in _OF_THE_CLOCK)
