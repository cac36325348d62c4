"""Work divided over the processes of a launch."""

from types import SimpleNamespace
from typing import Any

import pytest

from keepsight.models import distributed


def as_processes(monkeypatch: pytest.MonkeyPatch, count: int, parts: list[int]) -> tuple[list[list[int]], list[Any]]:
    """What each of several processes works on, and what each gets: they take turns, and then all have gathered."""
    done: list[list[int]] = [[] for _ in range(count)]
    results: list[Any] = []

    def as_process(index: int, own: list[int], gathered: list[int]) -> Any:
        monkeypatch.setattr(distributed, "launched", lambda: SimpleNamespace(num_processes=count, process_index=index))
        monkeypatch.setattr(distributed, "gather_object", lambda _: gathered)
        return distributed.divided(lambda part: own.append(part), parts)

    for index in range(count):
        as_process(index, done[index], [0] * 100)
    for index in range(count):
        results.append(as_process(index, [], [10 * part for own in done for part in own]))
    return done, results


@pytest.mark.parametrize(("count", "shares"), [(1, [5]), (2, [3, 3]), (4, [2, 2, 2, 2])])
def test_each_process_does_its_share_and_all_get_everything_in_order(
    monkeypatch: pytest.MonkeyPatch, count: int, shares: list[int]
) -> None:
    done, results = as_processes(monkeypatch, count, [1, 2, 3, 4, 5])
    assert [len(own) for own in done] == shares
    assert {part for own in done for part in own} == {1, 2, 3, 4, 5}
    assert results == [[10, 20, 30, 40, 50]] * count
