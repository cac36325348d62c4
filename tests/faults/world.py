"""A folder with everything that the commands read and write: a tiny target, data, trained modules, results."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from keepsight.files import write_lines
from tests.faults.child import run
from tests.tiny import save_tiny_target

TINY = ("model.id=tiny", "model.device=cpu", "draft.layers=null", "adapter=null")
_MIXTURE = """
min_tokens: 80
max_tokens: 200
sources:
  - {kind: local_jsonl, path: rows.jsonl}
  - {kind: key_values}
"""
_STEPS = ("steps=4", "save_every=2", "measure_every=2", "held_out=2", "report_to=[]")
_NEEDLES = ("lengths=[300]", "samples=2", "budgets=[40]", "max_new_tokens=4")


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


DATA = Scene(
    "data",
    ("data", *TINY, "limit=8", "shard_size=3", "max_new_tokens=4", "mixture=mixture.yaml", "out=data"),
    "data",
)
TRAIN = Scene(
    "train",
    _train("train", "train", "adapter", "lookahead.tokens=4", "lookahead.rank=2"),
    "adapter",
    ("data/*.json*",),
)
DRAFT_HEAD = Scene(
    "train_draft_head",
    _train(
        "train_draft_head", "draft_head.train", "head", "draft_head.vocabulary=96", "draft_head.unroll=2",
        "features=features",
    ),
    "head",
    ("data/*.json*", "features/*"),
)  # fmt: skip
RETRIEVAL_HEAD = Scene(
    "train_retrieval_head",
    _train("train_retrieval_head", "retrieval_head.train", "retrieval", "head=head", "retrieval_head.queries=8"),
    "retrieval",
    ("data/*.json*", "head/*.json", "head/*.safetensors"),
)
EVAL = Scene(
    "eval",
    ("eval", *TINY[:3], "adapter=adapter", *_NEEDLES, "methods=[lookaheadkv,snapkv]", "out=eval"),
    "eval",
    ("adapter/*.json", "adapter/*.safetensors"),
)
MAKERS = (DATA, TRAIN, DRAFT_HEAD, RETRIEVAL_HEAD, EVAL)
"""In the order in which each has what it reads."""


def make_world(folder: Path) -> Path:
    """Run all of `MAKERS` in a new folder; returns it."""
    folder.mkdir(parents=True)
    save_tiny_target(folder / "tiny")
    (folder / "mixture.yaml").write_text(_MIXTURE)
    write_lines(folder / "rows.jsonl", [{"prompt": f"Say {number}."} for number in range(9)])
    (folder / "text.txt").write_text("A word and another word. " * 30)
    for scene in MAKERS:
        outcome = run(scene.arguments, folder)
        assert outcome.code == 0, f"{scene.name}: {outcome.errors}"
    return folder


def copy_of(world: Path, folder: Path, without: Iterable[str] = ()) -> Path:
    """A copy of the world that a trial may spoil, in place of the one before it."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(world, folder, ignore=lambda at, _: [*without] if Path(at) == world else [])
    return folder
