"""Paths of all kinds as out=: what is no plain file or folder is refused and stays, and nothing lies beside `out`."""

import os
import socket
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

import torch

from keepsight.errors import UserError
from keepsight.eval.report.tables import Column, Table
from keepsight.files import append_lines, atomic_folder, one_writer, require_writable, write_csv, write_json, write_text
from keepsight.models.card import Provenance
from keepsight.models.lookahead import LookaheadAdapter
from keepsight.runtime.saved import save_state
from keepsight.runtime.state import prefill
from tests.commands.commands import last_of_each_key
from tests.faults.child import run
from tests.faults.texts import Verdict, hostile, judged
from tests.faults.world import COMPARE, DATA, EVAL, INSPECT, REPORT, TRAIN, Scene, World
from tests.tiny import prompt_ids, tiny_model

_SCENES = (DATA, TRAIN, EVAL, INSPECT, REPORT, COMPARE)
_NODE = "special.safetensors"
_COMMANDS_IN = 0.12
"""Share of the trials that run a command; the others call a writer in this process."""


def _make_device(path: Path) -> None:
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))


def _make_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path may have 107 bytes
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)
    os.chdir(here)


_SPECIAL: dict[str, Callable[[Path], None]] = {"pipe": os.mkfifo, "socket": _make_socket}
if os.geteuid() == 0:
    _SPECIAL["device"] = _make_device


def paths(world: World, rng: Random, count: int) -> Iterator[Verdict]:
    """A command or a writer, and a path that is special, below something special, a link to it, or oddly named."""
    writers = _writers(world)
    for number in range(count):
        here = world.folder.with_name("paths") / str(number)
        here.mkdir(parents=True)
        kind = rng.choice([*_SPECIAL])
        name = _name(rng)
        _SPECIAL[kind](here / _NODE)
        (here / "link").symlink_to(here / _NODE)
        out = here / rng.choice((_NODE, _NODE, "link", f"new/{name}", name))
        if rng.random() < _COMMANDS_IN:
            scene = rng.choice(_SCENES)
            yield judged((scene.name, kind, str(out)), partial(_command, world, scene, here, out))
        else:
            writer = rng.choice([*writers])
            yield judged((writer, kind, str(out)), partial(_writer, writers[writer], here, out))


def _name(rng: Random) -> str:
    """A name of one part."""
    letters = [letter for letter in hostile(rng, 2) if letter not in "/\x00="]
    return "".join(letters)[:60].strip(" .") or "name"


def _command(world: World, scene: Scene, here: Path, out: Path) -> str:
    before = _tree(here)
    world_before = _tree(world.folder)
    arguments = [argument for argument in scene.arguments if not argument.startswith("out=")]
    outcome = run(last_of_each_key([*arguments, f"out={out}"]), world.folder)
    assert not outcome.fault, f"{outcome.fault}: {outcome.errors[-500:]}"
    _check(here, out, before, outcome.code == 0, outcome.errors[-300:])
    changed = sorted(_tree(world.folder) ^ world_before)
    assert not changed, f"written to: {changed[:5]}"
    return "right" if outcome.code == 0 else "one line"


def _writer(write: Callable[[Path], object], here: Path, out: Path) -> str:
    before = _tree(here)
    refusal = ""
    try:
        write(out)
    except (UserError, OSError) as error:  # the command line makes one line of both
        refusal = str(error)
    _check(here, out, before, not refusal, refusal)
    return "one line" if refusal else "right"


def _check(here: Path, out: Path, before: set[str], is_done: bool, message: str) -> None:
    now = _tree(here)
    assert before <= now, f"gone or changed: {sorted(before - now)}; {message}"
    if out.name in (_NODE, "link"):
        assert not is_done, f"accepted; new: {sorted(now - before)}; {message}"
        assert now == before, f"new: {sorted(now - before)}; {message}"
        return
    top_of_out = out.relative_to(here).parts[0]
    beside: list[str] = []
    for entry in now - before:
        _, _, path = entry.partition(" ")
        if path.partition("/")[0] != top_of_out:
            beside.append(entry)
    assert not beside, f"beside out: {beside}; {message}"
    assert not is_done or out.exists(), "nothing was written"
    unfinished = [entry for entry in now if ".unfinished-" in entry or entry.endswith("/.lock")]
    assert not unfinished, f"left: {unfinished}"


def _tree(folder: Path) -> set[str]:
    """What lies in a folder, with its kind and number, so that a replaced node is another."""
    entries: set[str] = set()
    for path in folder.rglob("*"):
        status = path.lstat()
        entries.add(f"{stat.S_IFMT(status.st_mode)}:{status.st_ino} {path.relative_to(folder)}")
    return entries


def _writers(world: World) -> dict[str, Callable[[Path], object]]:
    """Everything of the package that writes to a path that it is given."""
    adapter = LookaheadAdapter.load(world.folder / "adapter")
    table = Table("t", "c", [Column("a", "A")], [{"a": 1}])
    with torch.no_grad():
        model = tiny_model()
        state = prefill(model, prompt_ids(20)[0])

    def in_folder(path: Path) -> None:
        with atomic_folder(path) as unfinished:
            (unfinished / "a").touch()

    def locked(path: Path) -> None:
        with one_writer(path):
            write_json(path / "a", {})

    def with_lines(path: Path) -> None:
        require_writable(path, folder=False)
        append_lines(path, [{"a": 1}])

    return {
        "adapter": lambda path: adapter.save(path, Provenance("ada/x")),
        "state": lambda path: save_state(state, path, model=model),
        "table": table.save,
        "text": lambda path: write_text(path, "text"),
        "json": lambda path: write_json(path, {"a": 1}),
        "csv": lambda path: write_csv(path, ["a"], [{"a": 1}]),
        "lines": with_lines,
        "folder": in_folder,
        "lock": locked,
    }
