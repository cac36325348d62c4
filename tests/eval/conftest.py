"""A tiny target that all tests of the evaluation share."""

import pytest

from keepsight.models.targets import Target, load_target
from tests.tiny import FAMILY_PARAMS, save_tiny_target


@pytest.fixture(scope="session", params=FAMILY_PARAMS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """With so many end tokens that answers differ in length."""
    folder = save_tiny_target(tmp_path_factory.mktemp("target"), request.param)
    loaded = load_target(str(folder), dtype="float32", device="cpu")
    assert loaded.model.generation_config is not None
    loaded.model.generation_config.eos_token_id = [2, *range(480, 500)]
    return loaded
