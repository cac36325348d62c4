"""Running commands as a user types them, and a tiny target and adapter to run them with."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup
from matplotlib.figure import Figure

from keepsight.commands import cli
from keepsight.commands.config import COMMANDS
from keepsight.commands.config_shared import UsesModel
from keepsight.data_gen.store import TrainingSample, finished_manifest, finished_samples
from keepsight.errors import Code
from keepsight.eval.report.figures import FORMATS, Plot
from keepsight.files import read_jsonl
from keepsight.models.card import Provenance
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.models.targets import load_target
from tests.refused import require_refusal
from tests.tiny import save_tiny_target

COMMANDS_WITH_MODEL = [name for name, (schema, _) in COMMANDS.items() if issubclass(schema, UsesModel)]
DATA = ["limit=6", "shard_size=2", "max_new_tokens=4", "mixture=mixture.yaml", "out=data"]
NEEDLES = ["tasks=[niah_single]", "lengths=[320]", "samples=3", "budgets=[40,0.25]", "max_new_tokens=6"]

_PLOT_FILES = {
    f"plots/{plot}.{suffix}" for plot in ("overview", "tradeoffs", "scores", "excess_nll") for suffix in FORMATS
}
_TABLE_FILES = {
    f"tables/{table}.{suffix}"
    for table in ("overall", "by_task", "differences", "costs")
    for suffix in ("md", "tex", "csv")
}
_OTHER_FILES = {
    "config.yaml",
    "report.html",
    "results.jsonl",
    "settings.json",
    "summary.csv",
    "kept/SAMPLE.json",
    "samples/SAMPLE.html",
}
RUN_FILES = _PLOT_FILES | _TABLE_FILES | _OTHER_FILES
"""What `keepsight eval` leaves, as `files_of_run` names it."""


def key_of(argument: str) -> str:
    """`budget` of `budget=40`."""
    return argument.partition("=")[0]


def last_of_each_key(arguments: Sequence[str]) -> list[str]:
    """The arguments without those whose key a later one sets again, which commands refuse."""
    last_position = {key_of(argument): position for position, argument in enumerate(arguments)}
    last_arguments: list[str] = []
    for position, argument in enumerate(arguments):
        if "=" not in argument or last_position[key_of(argument)] == position:
            last_arguments.append(argument)
    return last_arguments


def samples_of(folder: Path) -> list[TrainingSample]:
    """The samples of a finished data folder."""
    return [*finished_samples(folder, finished_manifest(folder))]


def results_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of an evaluation."""
    return [*read_jsonl(folder / "results.jsonl")]


_FIGURE = Plot.figure
_DRAWINGS = Plot.drawings
_SAVEFIG = Figure.savefig


def draw_nothing(patch: pytest.MonkeyPatch) -> None:
    """Leave plots empty: drawing took most of a command's time, and has tests in tests/eval/report and tests/train."""

    def save_empty_figure(_: Figure, *file: Any, **options: Any) -> Any:
        return _SAVEFIG(Figure(figsize=(1, 1)), *file, **options)

    patch.setattr(Plot, "figure", lambda _: Figure(figsize=(1, 1)))
    patch.setattr(Plot, "drawings", lambda plot: [Markup("<svg></svg>")] * len(plot.panels))
    patch.setattr(Figure, "savefig", save_empty_figure)


def draw(patch: pytest.MonkeyPatch) -> None:
    """Draw plots as for users."""
    patch.setattr(Plot, "figure", _FIGURE)
    patch.setattr(Plot, "drawings", _DRAWINGS)
    patch.setattr(Figure, "savefig", _SAVEFIG)


class CommandLine:
    """Runs `keepsight ...` in this process; the last value of a key counts."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self.capture = capture

    def __call__(self, *arguments: str) -> str:
        """What a command that succeeds prints."""
        code, printed, errors = self._run(*arguments)
        assert code == 0, errors
        assert _complaints(errors) == [], errors
        return printed

    def fails(self, *arguments: str) -> str:
        """The one line that a command complains with."""
        code, _, errors = self._run(*arguments)
        assert code == 2, errors
        assert "Traceback" not in errors
        (line,) = _complaints(errors)
        assert errors.rstrip("\n").endswith(line)
        return line.removeprefix("keepsight: error: ")

    def refuses(self, field: str, code: Code, *arguments: str) -> str:
        """The one line that a command complains with, about this key or file and with this code of `UserError`."""
        errors: list[BaseException | None] = []
        fail = cli._fail

        def record_error_and_fail(message: str) -> int:
            errors.append(sys.exc_info()[1])
            return fail(message)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cli, "_fail", record_error_and_fail)
            line = self.fails(*arguments)
        require_refusal(errors[0], field, code)
        return line

    def _run(self, *arguments: str) -> tuple[int, str, str]:
        self.capture.readouterr()
        code = cli.main(last_of_each_key(arguments))
        printed, errors = self.capture.readouterr()
        return code, printed, errors


def _complaints(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if "error" in line.lower()]


def save_target_and_adapter(folder: Path) -> None:
    """`tiny` and `adapter` in the folder, named as a user in that folder would name them."""
    save_tiny_target(folder / "tiny")
    target = load_target(str(folder / "tiny"), device="cpu")
    module = Lookahead(target.model, LookaheadSettings(tokens=4, rank=2))
    module.adapter().save(folder / "adapter", Provenance("tiny"), "---\nlicense: apache-2.0\n---\n# Card\n")


def files_of_run(folder: Path) -> set[str]:
    """The files of an evaluation, those about single samples under one name; depth is drawn for needles alone."""
    names: set[str] = set()
    for name in tree(folder):
        if not name.startswith("plots/depth."):
            names.add(re.sub(r"[0-9a-f]{16}", "SAMPLE", name))
    return names


def tree(folder: Path) -> list[str]:
    """Every file under a folder, hidden ones too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
