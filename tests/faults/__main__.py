"""The campaign: what happens to the commands when they are killed, and to damaged files and malformed arguments; and to
the package with threads, the user's rows, servers, paths and texts of all kinds.

    python -m tests.faults                       # 200 kills, 600 inputs, 1,000 damaged files, 4,000 of the others
    python -m tests.faults kills=6 inputs=40     # a few; seed=0 draws others; plots=0: empty ones of the commands

Prints how the trials of each kind ended, and every one that ended as none may; the exit status is then 1.
"""

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from threading import RLock
from time import monotonic

_COUNTS = {
    "kills": 200,
    "full_disks": 40,
    "removed_folders": 40,
    "two_writers": 10,
    "damaged_files": 1000,
    "inputs": 600,
    "threads": 200,
    "rows": 700,
    "servers": 300,
    "paths": 300,
    "sinks": 500,
    "rope": 1000,
    "stops": 1000,
    "tokenizers": 1000,
    "pasts": 1000,
    "turns": 1000,
}


def main(arguments: list[str]) -> int:
    """Run the campaign; the arguments are `seed=` and counts by name."""
    values: dict[str, int] = {}
    for argument in arguments:
        name, _, number = argument.partition("=")
        values[name] = int(number)
    is_drawn = values.pop("plots", 1)
    seed = values.pop("seed", 0)
    if unknown := values.keys() - _COUNTS.keys():
        raise SystemExit(f"{min(unknown)}= is unknown; choose from seed, plots, {', '.join(_COUNTS)}")
    counts = dict.fromkeys(_COUNTS, 0) | values if values else _COUNTS

    import torch
    from pytest import MonkeyPatch
    from tqdm import tqdm

    from tests.commands.commands import draw_nothing
    from tests.faults import (
        pasts,
        paths,
        rope,
        rows,
        servers,
        sinks,
        stops,
        threads,
        tokenizers,
        trials,
        turns,
    )
    from tests.faults.child import preload
    from tests.faults.world import World

    tqdm.set_lock(RLock())  # its own is shared with forks, which may be killed while they hold it
    tqdm.monitor_interval = 0  # a fork would lose its thread, which may hold the lock
    modules = (trials, threads, rows, servers, paths, sinks, rope, stops, tokenizers, pasts, turns)
    torch.set_num_threads(1)
    preload()
    bad = 0
    started = monotonic()
    patch = MonkeyPatch()
    if not is_drawn:
        draw_nothing(patch)
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder) / "world")
        campaigns: dict[str, Callable[[World, Random, int], Iterator[trials.Verdict]]] = {
            name: next(getattr(module, name) for module in modules if hasattr(module, name)) for name in counts
        }
        for name, trial in campaigns.items():
            ended = Counter[str]()
            if trial.__module__ != trials.__name__:
                patch.undo()
            ends = trial(world, Random(f"{name} {seed}"), counts[name]) if counts[name] else ()
            progress = tqdm(ends, desc=name, total=counts[name], disable=not counts[name], mininterval=10)
            for word, description in progress:
                ended[word] += 1
                if word not in trials.GOOD:
                    bad += 1
                    print(f"{word}: {description}\n", flush=True)
            words = ", ".join(f"{number} {word}" for word, number in ended.most_common())
            print(f"{name.replace('_', ' '):<16} {ended.total():>5}   {words}", flush=True)
    print(f"{bad} ended as none may; seed {seed}, {monotonic() - started:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    sys.exit(main(sys.argv[1:]))
