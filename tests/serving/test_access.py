"""Which requests pass the middleware of vLLM's server: a walk through every route of an application behind it."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import StreamingResponse

from keepsight.serving.vllm.access import (
    GRACE,
    HOSTS,
    METHODS,
    OPEN_METRICS,
    ORIGINS,
    PATHS,
    STATUS_PATHS,
    STOPPING,
    TOKENIZER_PATHS,
    hosts_of,
)
from keepsight.serving.vllm.middleware import Prefixes, Rewriter
from tests.refused import refused
from tests.tiny import tiny_tokenizer

KEY = "secret"
OTHER_PATHS = (
    "/invocations",
    "/generative_scoring",
    "/scale_elastic_ep",
    "/v1/responses",
    "/v1/embeddings",
    "/v2/embed",
    "/v9/of-a-later-version",
    "/collective_rpc",
    "/",
)
OPEN = {(method, path) for method, paths in METHODS.items() for path in paths}


class Engine:
    """Stands for vLLM's application; notes each request that reaches it."""

    def __init__(self, *keys: str) -> None:
        self.reached: list[tuple[str, str]] = []
        self.app = FastAPI()
        self.app.state.args = SimpleNamespace(api_key=[*keys])
        for path in (*PATHS, *TOKENIZER_PATHS, *STATUS_PATHS, *OTHER_PATHS):
            self.app.add_api_route(path, self._reached, methods=["GET", "HEAD", "POST", "PUT", "DELETE"])
        self.app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"])

    async def _reached(self, request: Request) -> dict[str, Any]:
        self.reached.append((request.method, request.url.path))
        return {}

    def routes(self) -> Iterator[tuple[str, str]]:
        """Method and path of each route, those of FastAPI's own pages among them."""
        for route in self.app.routes:
            for method in getattr(route, "methods", None) or ():
                yield method, route.path  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def rewriter(tmp_path_factory: pytest.TempPathFactory) -> Rewriter:
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer().save_pretrained(str(folder))
    return Rewriter(str(folder / "prefixes"), str(folder))


@pytest.fixture
def engine(rewriter: Rewriter) -> Engine:
    locked = Engine(KEY)
    locked.app.add_middleware(Prefixes, rewriter=rewriter)
    return locked


def asked(engine: Engine, *requests: tuple[str, str], **headers: str) -> list[httpx.Response]:
    """The replies to requests that are sent one after another, each with the same body."""

    async def send() -> list[httpx.Response]:
        transport = httpx.ASGITransport(engine.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            headers.setdefault("content-type", "application/json")
            return [await client.request(*each, headers=headers, content=b"{}") for each in requests]

    return asyncio.run(send())


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer secre"}, {"authorization": KEY}, {"authorization": f"Basic {KEY}"}]
)
def test_without_the_key_no_route_is_reached_but_health(engine: Engine, headers):
    routes = sorted(engine.routes())
    replies = asked(engine, *routes, **headers)
    statuses = {route: reply.status_code for route, reply in zip(routes, replies, strict=True)}
    free = {("GET", "/health"), ("HEAD", "/health")}
    assert {route for route, status in statuses.items() if status != 401} == free
    assert {*engine.reached} == free
    assert replies[0].headers["www-authenticate"] == "Bearer" and replies[0].json()["error"]["code"] == 401


def test_with_the_key_only_listed_routes_are_reached(engine: Engine):
    routes = sorted(engine.routes())
    replies = asked(engine, *routes, authorization=f"Bearer {KEY}")
    statuses = {route: reply.status_code for route, reply in zip(routes, replies, strict=True)}
    assert {*engine.reached} == OPEN
    assert {route for route, status in statuses.items() if status != 404} == OPEN
    assert PATHS[0] in replies[routes.index(("POST", "/invocations"))].json()["error"]["message"]


def test_a_server_without_a_key_opens_the_same_routes(rewriter: Rewriter, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    engine = Engine()
    engine.app.add_middleware(Prefixes, rewriter=rewriter)
    asked(engine, *engine.routes())
    assert {*engine.reached} == OPEN
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    engine.reached.clear()
    asked(engine, *engine.routes())
    assert {*engine.reached} == {("GET", "/health"), ("HEAD", "/health")}


def test_metrics_are_open_by_option(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(OPEN_METRICS, "1")
    (reply,) = asked(engine, ("GET", "/metrics"))
    assert reply.status_code == 200
    assert asked(engine, ("POST", "/metrics"))[0].status_code == 401
    monkeypatch.setenv(OPEN_METRICS, "0")
    assert asked(engine, ("GET", "/metrics"))[0].status_code == 401


@pytest.mark.parametrize(
    "path", ["/health/", "//health", "/health%2f..%2fv1/completions", "/v1/completions/", "/HEALTH"]
)
def test_other_spellings_of_a_path_are_closed(engine: Engine, path):
    assert asked(engine, ("POST", path))[0].status_code == 401
    assert asked(engine, ("POST", path), authorization=f"Bearer {KEY}")[0].status_code == 404
    assert not engine.reached


def test_a_server_that_stops_takes_no_further_request(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """vLLM would reply 200 with an empty answer."""
    monkeypatch.setenv(STOPPING, str(tmp_path / "stopping"))
    routes = [("POST", path) for path in TOKENIZER_PATHS] + [("GET", "/health")]
    answering = [("POST", path) for path in PATHS]

    def statuses() -> list[int]:
        replies = asked(engine, *routes, *answering, authorization=f"Bearer {KEY}")
        return [reply.status_code for reply in replies]

    assert statuses() == [200] * 5
    (tmp_path / "stopping").touch()
    assert statuses() == [200] * 3 + [503] * 2
    (reply,) = asked(engine, answering[0], authorization=f"Bearer {KEY}")
    assert reply.headers["retry-after"] == "1" and reply.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize("media", ["text/event-stream; charset=utf-8", "application/json"])
@pytest.mark.parametrize("grace, whole", [("0.5", False), ("60", True)])
def test_an_answer_that_outlasts_the_grace_ends_with_an_error(
    rewriter: Rewriter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, media, grace, whole
):
    """And not in the middle of a chunk; one that ends within it is whole."""
    monkeypatch.setenv(STOPPING, str(tmp_path / "stopping"))
    monkeypatch.setenv(GRACE, grace)
    app, stopped = FastAPI(), list[str]()

    async def answer() -> StreamingResponse:
        async def parts() -> AsyncIterator[str]:
            yield "data: one\n\n"
            (tmp_path / "stopping").touch()
            await asyncio.sleep(3)
            stopped.append("not")
            yield "data: two\n\n"

        return StreamingResponse(parts(), media_type=media)

    async def slow() -> dict[str, str]:
        (tmp_path / "stopping").touch()
        await asyncio.sleep(3)
        stopped.append("not")
        return {"data": "two"}

    is_stream = media.startswith("text")
    app.add_api_route(PATHS[0], answer if is_stream else slow, methods=["POST"])
    app.add_middleware(Prefixes, rewriter=rewriter)
    engine = SimpleNamespace(app=app)
    (reply,) = asked(engine, ("POST", PATHS[0]))  # type: ignore[arg-type]
    assert bool(stopped) == whole
    if is_stream:
        ends = ["data: two"] if whole else ['"type": "server_error"', "data: [DONE]"]
        assert (
            reply.status_code == 200 and reply.text.startswith("data: one") and all(end in reply.text for end in ends)
        )
    else:
        assert reply.status_code == (200 if whole else 503)


def test_a_root_path_does_not_open_other_paths(engine: Engine):
    engine.app.root_path = "/health"
    assert asked(engine, ("POST", "/health/invocations"))[0].status_code == 401
    assert asked(engine, ("GET", "/health/health"))[0].status_code == 200


PAGE = "http://ui.example"


def test_a_browser_may_ask_first_and_gets_nothing_else(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(ORIGINS, json.dumps([PAGE]))
    browser = {"origin": PAGE, "access-control-request-method": "POST"}
    assert asked(engine, ("OPTIONS", PATHS[0]), **browser)[0].headers["access-control-allow-origin"]
    assert asked(engine, ("OPTIONS", PATHS[0]))[0].status_code == 401
    assert not engine.reached


@pytest.fixture
def unlocked(rewriter: Rewriter, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    engine = Engine()
    engine.app.state.args.allowed_origins = ["*"]  # vLLM's default
    engine.app.add_middleware(Prefixes, rewriter=rewriter)
    return engine


ALL = [("POST", path) for path in (*PATHS, *TOKENIZER_PATHS)] + [("GET", path) for path in STATUS_PATHS]


def test_hosts_and_pages_of_others_reach_nothing_of_a_server_without_a_key(unlocked: Engine):
    preflight = {"access-control-request-method": "POST"}
    for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"}):
        replies = asked(unlocked, *ALL, ("OPTIONS", PATHS[0]), **headers, **preflight)
        assert {reply.status_code for reply in replies} == {403}
        assert not any("access-control-allow-origin" in reply.headers for reply in replies)
        assert all(reply.json()["error"]["code"] == 403 for reply in replies)
    assert not unlocked.reached
    assert {reply.status_code for reply in asked(unlocked, *ALL, host="127.0.0.1:8000")} == {200}


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_bodies_of_forms_reach_nothing(unlocked: Engine, kind):
    replies = asked(unlocked, *(route for route in ALL if route[0] == "POST"), **{"content-type": kind})
    assert {reply.status_code for reply in replies} == {415} and not unlocked.reached


def test_hosts_and_pages_that_the_operator_names(unlocked: Engine, monkeypatch: pytest.MonkeyPatch):
    unlocked.app.state.args.host = "ships.example"
    unlocked.app.state.args.allowed_origins = [PAGE]
    headers = {"host": "ships.example", "origin": PAGE}
    assert {reply.status_code for reply in asked(unlocked, *ALL, **headers)} == {200}


def test_names_of_proxies_and_pages_in_variables(unlocked: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(HOSTS, '["api.example"]')
    monkeypatch.setenv(ORIGINS, '["*"]')
    headers = {"host": "api.example", "origin": "http://any.example"}
    assert {reply.status_code for reply in asked(unlocked, *ALL, **headers)} == {200}
    assert {reply.status_code for reply in asked(unlocked, *ALL, host="ships.example")} == {403}
    monkeypatch.setenv(HOSTS, "api.example")
    with refused(HOSTS, "type"):
        hosts_of({"app": unlocked.app})


def test_a_server_with_a_key_goes_by_any_name(engine: Engine):
    headers = {"host": "api.example", "authorization": f"Bearer {KEY}"}
    assert {reply.status_code for reply in asked(engine, *ALL, **headers)} == {200}


def test_websockets_are_closed(engine: Engine):
    said = list[Any]()

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        said.append(message["type"])

    headers = [(b"authorization", f"Bearer {KEY}".encode())]
    scope = {"type": "websocket", "path": "/v1/realtime", "headers": headers, "app": engine.app}
    asyncio.run(engine.app(scope, receive, send))
    assert said == ["websocket.close"]
