"""A tiny base model with data, for the tests of the training commands."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from keepsight.models.targets import load_target
from tests.commands.commands import draw_nothing
from tests.tiny import save_tiny_target
from tests.train.runs import write_data


@pytest.fixture(scope="module", autouse=True)
def blank_plots() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        yield


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base model, `target`, and `data` that it answered."""
    folder = tmp_path_factory.mktemp("workspace")
    save_tiny_target(folder / "target")
    write_data(folder / "data", load_target(str(folder / "target"), device="cpu"))
    return folder
