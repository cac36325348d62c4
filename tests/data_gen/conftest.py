"""A tiny target for the tests of answers, and servers that are asked again at once."""

from pathlib import Path

import pytest

from keepsight.models.targets import Target, load_target
from tests.tiny import save_tiny_target


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepsight.endpoint.FIRST_WAIT", 0.0)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.0)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(str(folder), dtype="float32", device="cpu")
