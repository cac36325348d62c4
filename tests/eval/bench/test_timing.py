"""How often an action is timed."""

import pytest

from keepsight.eval.bench import measure


@pytest.mark.parametrize(("repeats", "least", "runs"), [(3, 0.0, 3), (3, 2.0, 5), (7, 2.0, 7)])
def test_short_actions_are_timed_more_often(
    repeats: int, least: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[object] = []

    def seconds_of(action: object) -> float:
        timed.append(action)
        return 0.4

    monkeypatch.setattr(measure, "seconds_of", seconds_of)
    warm: list[int] = []
    assert measure.median_seconds(lambda: warm.append(1), repeats, least) == 0.4
    assert len(timed) == runs and warm == [1]
