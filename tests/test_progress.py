"""Progress on a terminal and in a log."""

import io
import sys
import time

import pytest

from keepsight import progress


class Terminal(io.StringIO):
    """A standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


def shown_by(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a loop over three items leaves on the standard error."""
    monkeypatch.setattr(sys, "stderr", stream)
    for _ in progress.progress_bar(range(3), name="answers", unit="sample"):
        time.sleep(0.02)
    return stream.getvalue()


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\r" in shown_by(Terminal(), monkeypatch)


def test_a_log_has_nothing_of_a_short_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown_by(io.StringIO(), monkeypatch) == ""


def test_a_log_has_lines_of_a_long_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SECONDS_OF_LOG", 0.01)
    text = shown_by(io.StringIO(), monkeypatch)
    lines = text.splitlines()
    assert lines[-1].startswith("answers: 3 of 3 after ")
    assert "\r" not in text
    assert all(line.startswith("answers: ") for line in lines)


def test_a_hidden_bar_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    list(progress.progress_bar(range(3), name="answers", unit="sample", shown=False))
    assert stream.getvalue() == ""
