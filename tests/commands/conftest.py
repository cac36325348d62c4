"""A folder to work in, with what the commands need."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup
from matplotlib.figure import Figure

from keepsight.eval.report.figures import Plot
from keepsight.files import write_lines
from tests.commands.commands import CommandLine, save_target_and_adapter

MIXTURE = """
min_tokens: 100
max_tokens: 400
sources:
  - {kind: local_jsonl, path: rows.jsonl}
  - {kind: key_values}
"""


@pytest.fixture(scope="module", autouse=True)
def blank_plots() -> Iterator[dict[str, Any]]:
    """Plots are empty: drawing took most of a command's time, and has tests in tests/eval/report.

    Gives the methods that draw them for users.
    """
    drawing = {"figure": Plot.figure, "drawings": Plot.drawings}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plot, "figure", lambda _: Figure(figsize=(1, 1)))
        patch.setattr(Plot, "drawings", lambda plot: [Markup("<svg></svg>")] * len(plot.panels))
        patch.setattr("keepsight.files.DPI", 20)
        yield drawing


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny`, `adapter`, `mixture.yaml` and its `rows.jsonl`."""
    folder = tmp_path_factory.mktemp("prepared")
    save_target_and_adapter(folder)
    (folder / "mixture.yaml").write_text(MIXTURE)
    write_lines(folder / "rows.jsonl", [{"prompt": f"Say {number}."} for number in range(9)])
    return folder


@pytest.fixture
def here(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a copy of `prepared` that a test may spoil."""
    folder = Path(shutil.copytree(prepared, tmp_path / "work"))
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def keepsight(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)
