"""What a killed build of DeepSpeed's extensions leaves is named, and a build that goes on is left alone."""

import os
import subprocess
import sys
import time
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
    before = time.time() - 600
    os.utime(path, (before, before))
    return path


def test_a_lock_that_nobody_holds_is_named(lock: Path) -> None:
    for each in (check_builds, launched):
        with refused("lock", "file") as caught:
            each()
        assert str(caught.value).startswith(f"{lock}: ") and "\n" not in str(caught.value)
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


@pytest.mark.parametrize(("count", "shares"), [(1, [5]), (2, [3, 3]), (4, [2, 2, 2, 2])])
def test_each_process_does_its_share_and_all_get_everything_in_order(
    monkeypatch: pytest.MonkeyPatch, count: int, shares: list[int]
) -> None:
    """The processes take turns: first each works, then each gathers what all have made."""
    done: list[list[int]] = [[] for _ in range(count)]

    def as_process(index: int, own: list[int], gathered: list[int]) -> Any:
        monkeypatch.setattr(distributed, "launched", lambda: SimpleNamespace(num_processes=count, process_index=index))
        monkeypatch.setattr(distributed, "gather_object", lambda _: gathered)
        return distributed.map_over_processes(own.append, [1, 2, 3, 4, 5])

    for index in range(count):
        as_process(index, done[index], [0] * 100)
    assert [len(own) for own in done] == shares and {part for own in done for part in own} == {1, 2, 3, 4, 5}
    for index in range(count):
        assert as_process(index, [], [10 * part for own in done for part in own]) == [10, 20, 30, 40, 50]
