"""What a killed build of DeepSpeed's extensions leaves is named, and a build that goes on is left alone."""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepsight.models import distributed
from keepsight.models.distributed import check_builds, launched
from tests.refused import refused


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock of ten minutes ago, in the folder of an extension."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    path = tmp_path / "deepspeed_shm_comm" / "lock"
    path.parent.mkdir()
    path.touch()
    ten_minutes_ago = time.time() - 600
    os.utime(path, (ten_minutes_ago, ten_minutes_ago))
    return path


def test_a_lock_that_nobody_holds_is_named(lock: Path) -> None:
    for function in (check_builds, launched):
        with refused("lock", "file") as caught:
            function()
        assert str(caught.value).startswith(f"{lock}: ")
    lock.unlink()
    check_builds()


def test_a_build_that_goes_on_is_waited_for(lock: Path) -> None:
    """ninja works in the folder of what it builds."""
    builder = subprocess.Popen([sys.executable, "-c", "input()"], cwd=lock.parent, stdin=subprocess.PIPE)
    try:
        check_builds()
    finally:
        builder.communicate(b"\n")
    with refused("lock", "file"):
        check_builds()


@pytest.mark.parametrize(("processes", "shares"), [(1, [5]), (2, [3, 3]), (4, [2, 2, 2, 2])])
def test_each_process_does_its_share_and_all_get_everything_in_order(
    monkeypatch: pytest.MonkeyPatch, processes: int, shares: list[int]
) -> None:
    """The processes take turns: first each works, then each gathers what all have made."""
    items = [1, 2, 3, 4, 5]
    items_of_process: list[list[int]] = [[] for _ in range(processes)]

    def map_in_process(index: int, function: Callable[[int], None], gathered: list[int]) -> list[Any]:
        launch = SimpleNamespace(num_processes=processes, process_index=index)
        monkeypatch.setattr(distributed, "launched", lambda: launch)
        monkeypatch.setattr(distributed, "gather_object", lambda _: gathered)
        return distributed.map_over_processes(function, items)

    for index in range(processes):
        map_in_process(index, items_of_process[index].append, [0] * 100)
    assert [len(share) for share in items_of_process] == shares
    items_done = [*itertools.chain(*items_of_process)]
    assert {*items_done} == {*items}
    results = [10 * item for item in items_done]
    for index in range(processes):
        assert map_in_process(index, lambda _: None, results) == [10, 20, 30, 40, 50]
