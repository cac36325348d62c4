"""The servers that real clients ask, each started once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from keepsight.models.targets import Target
from tests.clients.served import VLLM_BUDGET, Served, python_of
from tests.serving.loopback import serving
from tests.serving.vllm.stock import free_port, process, stock_target


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("clients")) / "model"


@pytest.fixture(scope="session")
def target(folder: Path) -> Target:
    return stock_target(folder)


@pytest.fixture(scope="session")
def own(target: Target) -> Iterator[Served]:
    with serving(target, rows=16) as (url, engine):
        yield Served(url, target, engine)


@pytest.fixture(scope="session")
def beside_vllm(target: Target, folder: Path) -> Iterator[Served]:
    python = python_of("VLLM_VENV", ".venv-vllm", "make setup-vllm")
    port = free_port()
    command = [python, "-m", "keepsight", "serve", f"model.id={folder}", "model.device=cpu", "model.dtype=float32"]
    command += ["method=snapkv", f"budget={VLLM_BUDGET}", "options={window: 8}", "vllm=true", f"port={port}"]
    command += ["name=tiny", "max_new_tokens=2000", "max_bytes=65536"]
    command += ["vllm_options={kv_cache_memory_bytes: 134217728}"]
    environment = {
        "KEEPSIGHT_API_KEY": "any",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    with process(f"http://127.0.0.1:{port}", folder.parent / "serve.log", *command, **environment) as server:
        yield Served(server.url, target)
