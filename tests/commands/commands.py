"""Running commands as a user types them, and a tiny target and adapter to run them with."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from markupsafe import Markup
from matplotlib.figure import Figure

from keepsight.commands import cli
from keepsight.commands.config import COMMANDS
from keepsight.commands.config_shared import UsesModel
from keepsight.data_gen.store import TrainingSample, finished_manifest, finished_samples
from keepsight.errors import Code
from keepsight.eval.report.figures import FORMATS, Plot
from keepsight.models.card import Provenance
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.models.targets import load_target
from tests.refused import require_refusal
from tests.tiny import save_tiny_target

WITH_MODEL = [name for name, (schema, _) in COMMANDS.items() if issubclass(schema, UsesModel)]
DATA = ["limit=6", "shard_size=2", "max_new_tokens=4", "mixture=mixture.yaml", "out=data"]
NEEDLES = ["tasks=[niah_single]", "lengths=[320]", "samples=3", "budgets=[40,0.25]", "max_new_tokens=6"]


_PLOTS = ("overview", "tradeoffs", "scores", "excess_nll")
_TABLES = ("overall", "by_task", "differences", "costs")
RUN_FILES = {
    *(
        "config.yaml",
        "report.html",
        "results.jsonl",
        "settings.json",
        "summary.csv",
        "kept/SAMPLE.json",
        "samples/SAMPLE.html",
    ),
    *(f"plots/{name}.{kind}" for name in _PLOTS for kind in FORMATS),
    *(f"tables/{name}.{kind}" for name in _TABLES for kind in ("md", "tex", "csv")),
}
"""What `keepsight eval` leaves, as `files_of_run` names it."""


def last_of_each_key(arguments: Sequence[str]) -> list[str]:
    """The arguments without those whose key a later one gives again, which commands refuse."""
    last = {argument.partition("=")[0]: place for place, argument in enumerate(arguments)}
    return [each for place, each in enumerate(arguments) if "=" not in each or last[each.partition("=")[0]] == place]


def samples_of(folder: Path) -> list[TrainingSample]:
    """The samples of a finished data folder."""
    return [*finished_samples(folder, finished_manifest(folder))]


_DRAWING = ((Plot, "figure", Plot.figure), (Plot, "drawings", Plot.drawings), (Figure, "savefig", Figure.savefig))


def draw_nothing(patch: pytest.MonkeyPatch) -> None:
    """Plots are empty: drawing took most of a command's time, and has tests in tests/eval/report and tests/train."""
    (*_, save) = _DRAWING[-1]
    patch.setattr(Plot, "figure", lambda _: Figure(figsize=(1, 1)))
    patch.setattr(Plot, "drawings", lambda plot: [Markup("<svg></svg>")] * len(plot.panels))
    patch.setattr(Figure, "savefig", lambda _, *to, **given: save(Figure(figsize=(1, 1)), *to, **given))


def draw(patch: pytest.MonkeyPatch) -> None:
    """Plots are drawn as for users."""
    for each in _DRAWING:
        patch.setattr(*each)


class CommandLine:
    """Runs `keepsight ...` in this process; the last value of a key counts."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self.capture = capture

    def __call__(self, *arguments: str) -> str:
        """What a command that succeeds prints."""
        code, printed, errors = self._run(*arguments)
        assert (code, _complaints(errors)) == (0, []), errors
        return printed

    def fails(self, *arguments: str) -> str:
        """The one line that a command complains with."""
        code, _, errors = self._run(*arguments)
        assert code == 2 and "Traceback" not in errors, errors
        (line,) = _complaints(errors)
        assert errors.rstrip("\n").endswith(line)
        return line.removeprefix("keepsight: error: ")

    def refuses(self, field: str, code: Code, *arguments: str) -> str:
        """The one line that a command complains with, about this key or file and with this code of `UserError`."""
        errors: list[BaseException | None] = []
        fail = cli._fail

        def recorded(message: str) -> int:
            errors.append(sys.exc_info()[1])
            return fail(message)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cli, "_fail", recorded)
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
    module = Lookahead(load_target(str(folder / "tiny"), device="cpu").model, LookaheadSettings(tokens=4, rank=2))
    module.adapter().save(folder / "adapter", Provenance("tiny"), "---\nlicense: apache-2.0\n---\n# Card\n")


def files_of_run(folder: Path) -> set[str]:
    """The files of an evaluation, those about single samples under one name; depth is drawn for needles alone."""
    names = {re.sub(r"[0-9a-f]{16}", "SAMPLE", name) for name in tree(folder)}
    return {name for name in names if not name.startswith("plots/depth.")}


def tree(folder: Path) -> list[str]:
    """Every file under a folder, hidden ones too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
