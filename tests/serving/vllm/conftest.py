"""The tests here start vLLM's own server; without vLLM they are refused in one line."""

import importlib.util
import os

import pytest

os.environ |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "vllm" in item.path.parts:
            item.add_marker(pytest.mark.vllm)


def pytest_collection_finish(session: pytest.Session) -> None:
    """After other marks have deselected what does not run."""
    wanted = any(item.get_closest_marker("vllm") for item in session.items)
    if wanted and importlib.util.find_spec("vllm") is None:
        pytest.exit("vLLM is not installed here; run `make setup-vllm`, then `make test-vllm`", returncode=2)
