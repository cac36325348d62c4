"""The campaign's trials: each does one thing to a run or to a file, and says how the command ended."""

import os
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

from tests.commands.commands import last_of_each_key
from tests.faults import damage
from tests.faults.child import Disturbance, Outcome, Run, run
from tests.faults.inputs import wrong_lines
from tests.faults.texts import Verdict
from tests.faults.world import (
    COMPARE,
    DATA,
    DRAFT_HEAD,
    EVAL,
    FINETUNE,
    FOREIGN,
    HEAD_WEIGHTS,
    INSPECT,
    MAKERS,
    PUSHES,
    REPORT,
    RETRIEVAL_HEAD,
    SOURCES,
    TRAIN,
    Scene,
    World,
    results_of,
)

GOOD = ("identical", "one line", "as it says", "right")
_KILLS_A_TRIAL = 4
_WITHOUT_DIGEST = (".json", ".jsonl", ".partial")
"""JSON that is still well-formed and of the right types says what somebody wrote."""
_OPTIONAL = "keepsight.json"
"""A draft head without it is one of another maker."""


def kills(world: World, rng: Random, count: int) -> Iterator[Verdict]:
    """Kill commands at random points, several times before each may end; then the result must be the same."""
    done = 0
    while done < count:
        scene = rng.choice(MAKERS)
        here = world.folder.with_name("killed")
        world.copy(here, without=scene.out)
        points: list[str] = []
        while len(points) < min(_KILLS_A_TRIAL, count - done):
            disturbance = _moment(world, scene, rng)
            outcome = Run(scene.arguments, here, scene.out, disturbance).wait()
            if outcome.fault:
                yield outcome.fault, f"{scene.name} after {points}: {outcome.errors[-500:]}"
            if not outcome.was_killed:
                break
            points.append(str(disturbance))
        word, description = _end(run(scene.arguments, here), here, scene, world)
        done += len(points)
        for point in points:
            yield word, f"{scene.name}, {point} of {points}: {description}"


def _moment(world: World, scene: Scene, rng: Random) -> Disturbance:
    if rng.random() < 0.5:
        return Disturbance(kill_at=rng.randint(1, world.events[scene.name]))
    return Disturbance(kill_after=rng.uniform(0.05, 1.0) * world.seconds[scene.name])


def full_disks(world: World, rng: Random, count: int) -> Iterator[Verdict]:
    """No file grows beyond a limit; once there is room, the same command ends with the same result."""
    for _ in range(count):
        scene = rng.choice(MAKERS)
        here = world.folder.with_name("full")
        world.copy(here, without=scene.out)
        largest = max(path.stat().st_size for path in (world.folder / scene.out).rglob("*") if path.is_file())
        full = Disturbance(largest_file=rng.randrange(1, largest))
        yield _disturbed(world, scene, here, full)


def removed_folders(world: World, rng: Random, count: int) -> Iterator[Verdict]:
    """The folder that a command writes to goes while it runs, before its result is whole."""
    for _ in range(count):
        scene = rng.choice(MAKERS)
        here = world.folder.with_name("gone")
        world.copy(here, without=scene.out)
        yield _disturbed(world, scene, here, Disturbance(remove_at=rng.randint(1, world.events[scene.name] - 4)))


def _disturbed(world: World, scene: Scene, here: Path, disturbance: Disturbance) -> Verdict:
    what = f"{scene.name}, {disturbance}"
    outcome = Run(scene.arguments, here, scene.out, disturbance).wait()
    if outcome.fault:
        return outcome.fault, f"{what}: {outcome.errors[-500:]}"
    if outcome.code == 2:
        outcome = run(scene.arguments, here)
    word, description = _end(outcome, here, scene, world)
    return word, f"{what}: {description}"


def two_writers(world: World, rng: Random, count: int) -> Iterator[Verdict]:
    """Two of the same command at once: one is refused or waits, and the result is the same."""
    for _ in range(count):
        scene = rng.choice(MAKERS)
        here = world.folder.with_name("twice")
        world.copy(here, without=scene.out)
        runs = [Run(scene.arguments, here), Run(scene.arguments, here)]
        outcomes = [started.wait() for started in runs]
        faults = [outcome.fault for outcome in outcomes if outcome.fault]
        if faults or all(outcome.code for outcome in outcomes):
            yield faults[0] if faults else "lost", f"{scene.name} twice: {outcomes[0].errors[-500:]}"
        else:
            yield _end(run(scene.arguments, here), here, scene, world)


def damaged_files(world: World, rng: Random, count: int) -> Iterator[Verdict]:
    """A file that a command reads is damaged; it refuses the file, or ends with the same result."""
    cases = list(islice(_damage_cases(world), count))
    for number in range(count):
        here, scene, patterns = cases[number % len(cases)]
        paths: list[Path] = []
        for pattern in patterns:
            paths += [path for path in sorted(here.glob(pattern)) if path.is_file()]
        work = here.with_name("damaged")
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(here, work)
        path = work / rng.choice(paths).relative_to(here)
        kind = rng.choice(damage.KINDS)
        while not path.stat().st_size or kind(path, rng) is False:
            path = work / rng.choice(paths).relative_to(here)
            kind = rng.choice(damage.KINDS)
        word, description = _end(run(scene.arguments, work), work, scene, world)
        has_no_digest = path.suffix in _WITHOUT_DIGEST or path.name == _OPTIONAL
        is_undetectable = scene in (FOREIGN, SOURCES) or kind in damage.FORGED or has_no_digest
        if word == "other result" and is_undetectable:
            word = "as it says"
        yield word, f"{scene.name}: {path.relative_to(work)} {kind.__name__}: {description}"


def _damage_cases(world: World) -> Iterator[tuple[Path, Scene, tuple[str, ...]]]:
    """A folder, a command to run there, and the files there that are damaged."""
    trained = TRAIN, HEAD_WEIGHTS, FINETUNE, DRAFT_HEAD, RETRIEVAL_HEAD
    for scene in (*trained, INSPECT, REPORT, COMPARE, FOREIGN, SOURCES, *PUSHES):
        folder = world.folder
        if scene.out:
            folder = world.copy(world.folder.with_name(f"for {scene.name}"), without=scene.out)
        yield folder, scene, scene.reads
    yield world.folder, DATA, ("data/*.json*",)
    yield world.folder, EVAL, ("eval/*.json*",)
    yield world.folder, TRAIN, ("adapter/training/**/*", "adapter/*")
    for scene in (DATA, *trained, EVAL):
        share = 0.7 if scene in trained else 0.6
        folder = world.half(scene, world.folder.with_name(f"half {scene.name}"), share)
        yield folder, scene, (f"{scene.out}/**/*",)


def _end(outcome: Outcome, here: Path, scene: Scene, world: World) -> Verdict:
    errors = outcome.errors[-500:]
    if outcome.fault:
        return outcome.fault, errors
    if outcome.code == 2:
        return "one line", errors
    if not scene.out:
        return "other result", errors
    results = results_of(here / scene.out)
    expected = world.results[scene.name]
    differing = sorted(name for name in {**results, **expected} if results.get(name) != expected.get(name))
    if differing:
        return "other result", f"{differing}; {errors}"
    return "identical", errors


def inputs(world: World, rng: Random, count: int) -> Iterator[Verdict]:
    """Each line of arguments ends in one line, and nothing is written."""
    here = world.copy(world.folder.with_name("asked"))
    before = _tree(here)
    for line in wrong_lines(rng, count):
        outcome = run(last_of_each_key(line.split(" ")), here)
        if outcome.fault or outcome.code != 2:
            yield outcome.fault or "accepted", f"{line}: {outcome.errors[-500:]}"
        else:
            now = _tree(here)
            yield ("one line" if now == before else "written to"), f"{line}: {now ^ before}"
            if now != before:
                here = world.copy(here)


def _tree(folder: Path) -> set[str]:
    return {f"{path.relative_to(folder)} {os.stat(path).st_size}" for path in folder.rglob("*") if path.is_file()}
