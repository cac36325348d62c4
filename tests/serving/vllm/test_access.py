"""The routes of vLLM's own application, those of its development mode among them: none passes without the key."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from keepsight.serving.vllm.access import METHODS, PATHS
from tests.serving.vllm.stock import stock_target

KEY = "secret"
TASKS = ("generate", "embed", "classify", "token_embed", "transcription", "realtime", "render")


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """vLLM's application with every router that it has, around which nothing is started."""
    folder = tmp_path_factory.mktemp("model")
    stock_target(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv("KEEPSIGHT_ROOT", str(folder / "prefixes"))
        patch.setenv("KEEPSIGHT_MODEL", str(folder))
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        flags = ["--api-key", KEY, "--enable-tokenizer-info-endpoint"]
        flags += ["--middleware", "keepsight.serving.vllm.middleware.Prefixes"]
        yield build_app(make_arg_parser(FlexibleArgumentParser()).parse_args(flags), TASKS)


def routes_of(application: Any) -> list[tuple[str, str]]:
    """Method and path of each route; mounts, and routes of WebSockets, stand with GET."""
    found = set[tuple[str, str]]()
    waiting = [*application.routes]
    while waiting:
        route = waiting.pop()
        waiting += getattr(getattr(route, "original_router", None), "routes", [])
        if hasattr(route, "path"):
            found |= {(method, route.path) for method in getattr(route, "methods", None) or ("GET",)}
    return sorted(found)


def statuses(application: Any, routes: list[tuple[str, str]], **headers: str) -> dict[tuple[str, str], int]:
    """The status with which each route replies."""

    async def ask() -> dict[tuple[str, str], int]:
        transport = httpx.ASGITransport(application, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return {route: (await client.request(*route, headers=headers)).status_code for route in routes}

    return asyncio.run(ask())


def test_no_route_of_vllm_passes_without_the_key(application):
    routes = routes_of(application)
    assert {("POST", path) for path in (*PATHS, "/invocations", "/scale_elastic_ep", "/collective_rpc")} <= {*routes}
    asked = [route for route in routes if route != ("GET", "/health")]
    for headers in ({}, {"authorization": "Bearer other"}):
        assert {*statuses(application, asked, **headers).values()} == {401}


def test_with_the_key_only_listed_routes_pass(application):
    listed = {(method, path) for method, paths in METHODS.items() for path in paths}
    closed = [route for route in routes_of(application) if route not in listed]
    assert len(closed) > 20
    assert {*statuses(application, closed, authorization=f"Bearer {KEY}").values()} == {404}


def test_the_listed_paths_are_vllms(application):
    """A path of the list that vLLM renamed would be closed without a word."""
    paths = {path for _, path in routes_of(application)}
    assert {path for listed in METHODS.values() for path in listed} <= paths
