"""Progress of long loops: a bar on a terminal; in a log a line every half minute, none of a shorter loop."""

import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from tqdm import tqdm

_SECONDS_OF_LOG = 30
"""Time between two lines in a log."""
_LINE = "{desc}: {n_fmt} of {total_fmt} after {elapsed}, {remaining} left"


class _LogLines:
    """The standard error as a log: each state of a bar is a line of its own."""

    encoding = "utf-8"

    def write(self, text: str) -> None:
        line = text.strip()
        if line:
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        sys.stderr.flush()


def progress_bar(
    items: Iterable[Any] | None = None, *, name: str, unit: str, total: int | None = None, shown: bool = True
) -> Any:
    """A `tqdm` bar on the standard error.

    Args:
        items: What the bar runs over, if it counts by itself.
        name: What is done, at the start of the line.
        unit: What is counted, such as sample.
        total: Number of items, if `items` do not say it.
        shown: False shows nothing, as in all processes of a launch but one.
    """
    options: dict[str, Any] = {"total": total, "desc": name, "unit": unit, "disable": not shown}
    if unit == "B":
        options["unit_scale"] = True
    if not sys.stderr.isatty():
        options["file"] = _LogLines()
        options["bar_format"] = _LINE
        options["delay"] = _SECONDS_OF_LOG
        options["mininterval"] = _SECONDS_OF_LOG
        # Looked at after each item: tqdm's own thread, which adjusts this number, prints lines twice.
        options["miniters"] = 1
    return tqdm(items, **options)


def print_above(line: str, stream: TextIO | None = None) -> None:
    """Print a line above a bar that is shown: to the standard error, or to another stream."""
    tqdm.write(line, file=stream or sys.stderr)


def quiet_libraries() -> None:
    """Keep the bars of libraries out of logs; to be called before these are imported."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
