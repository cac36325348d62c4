"""Fixtures of the tests of our own server."""

from pathlib import Path

import pytest

from keepsight.models.targets import Target, load_target
from tests.tiny import save_tiny_target


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    target = load_target(str(save_tiny_target(Path(tmp_path_factory.mktemp("served")))), device="cpu")
    target.model.generation_config.eos_token_id = [500]  # rarely said
    return target
