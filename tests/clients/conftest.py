"""The servers that real clients ask, each started once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from keepsight.models.targets import Target
from tests.clients.served import Served, starting_beside_vllm
from tests.serving.loopback import serving
from tests.serving.vllm.stock import stock_target


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("clients")) / "model"


@pytest.fixture(scope="session")
def target(folder: Path) -> Target:
    return stock_target(folder)


@pytest.fixture(scope="session")
def our_server(target: Target) -> Iterator[Served]:
    with serving(target, rows=16) as (url, engine):
        yield Served(url, target, engine)


@pytest.fixture(scope="session")
def beside_vllm(target: Target, folder: Path) -> Iterator[Served]:
    with starting_beside_vllm(target, folder, folder.parent / "serve.log") as served:
        yield served
