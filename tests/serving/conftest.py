"""Fixtures of the tests of our own server, and of the middleware of vLLM's."""

from pathlib import Path

import pytest

from keepsight.models.targets import Target, load_target
from keepsight.serving.vllm.middleware import Rewriter
from tests.tiny import save_tiny_target, tiny_tokenizer


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    target = load_target(str(save_tiny_target(Path(tmp_path_factory.mktemp("served")))), device="cpu")
    target.model.generation_config.eos_token_id = [500]  # rarely said
    return target


@pytest.fixture(scope="module")
def rewriter(tmp_path_factory: pytest.TempPathFactory) -> Rewriter:
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer().save_pretrained(str(folder))
    return Rewriter(str(folder / "prefixes"), str(folder))
