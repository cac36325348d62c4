"""A folder to work in, with what the commands need."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepsight.files import write_lines
from tests.commands.commands import CommandLine, draw, draw_nothing, save_target_and_adapter

MIXTURE = """
min_tokens: 100
max_tokens: 400
sources:
  - {kind: local_jsonl, path: rows.jsonl}
  - {kind: key_values}
"""


@pytest.fixture(scope="module", autouse=True)
def blank_plots() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        yield


@pytest.fixture
def drawn(blank_plots: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test, plots are drawn as for users."""
    draw(monkeypatch)


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
