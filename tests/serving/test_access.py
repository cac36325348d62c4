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

KEY = "secret"
WITH_KEY = {"authorization": f"Bearer {KEY}"}
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
HEALTH = {("GET", "/health"), ("HEAD", "/health")}
ALL = [*(("POST", path) for path in (*PATHS, *TOKENIZER_PATHS)), *(("GET", path) for path in STATUS_PATHS)]
PAGE = "http://ui.example"


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


@pytest.fixture
def engine(rewriter: Rewriter) -> Engine:
    locked = Engine(KEY)
    locked.app.add_middleware(Prefixes, rewriter=rewriter)
    return locked


def replies_to(engine: Engine, *requests: tuple[str, str], **headers: str) -> list[httpx.Response]:
    """The replies to requests that are sent one after another, each with the same body."""
    headers = {"content-type": "application/json"} | headers

    async def send() -> list[httpx.Response]:
        transport = httpx.ASGITransport(engine.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            replies = []
            for method, path in requests:
                replies.append(await client.request(method, path, headers=headers, content=b"{}"))
            return replies

    return asyncio.run(send())


def reply_to(engine: Engine, method: str, path: str, **headers: str) -> httpx.Response:
    (reply,) = replies_to(engine, (method, path), **headers)
    return reply


def statuses_of(engine: Engine, *requests: tuple[str, str], **headers: str) -> set[int]:
    """All statuses of the replies to requests."""
    return {reply.status_code for reply in replies_to(engine, *requests, **headers)}


def routes_without(status: int, routes: list[tuple[str, str]], replies: list[httpx.Response]) -> set[tuple[str, str]]:
    """The routes whose replies have another status."""
    others = set()
    for route, reply in zip(routes, replies, strict=True):
        if reply.status_code != status:
            others.add(route)
    return others


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer secre"}, {"authorization": KEY}, {"authorization": f"Basic {KEY}"}]
)
def test_without_the_key_no_route_is_reached_but_health(engine: Engine, headers):
    routes = sorted(engine.routes())
    replies = replies_to(engine, *routes, **headers)
    assert routes_without(401, routes, replies) == HEALTH
    assert {*engine.reached} == HEALTH
    assert replies[0].headers["www-authenticate"] == "Bearer"
    assert replies[0].json()["error"]["code"] == 401


def test_with_the_key_only_listed_routes_are_reached(engine: Engine):
    routes = sorted(engine.routes())
    replies = replies_to(engine, *routes, **WITH_KEY)
    assert {*engine.reached} == OPEN
    assert routes_without(404, routes, replies) == OPEN
    closed = replies[routes.index(("POST", "/invocations"))]
    assert PATHS[0] in closed.json()["error"]["message"]


def test_a_server_without_a_key_opens_the_same_routes(rewriter: Rewriter, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    engine = Engine()
    engine.app.add_middleware(Prefixes, rewriter=rewriter)
    replies_to(engine, *engine.routes())
    assert {*engine.reached} == OPEN
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    engine.reached.clear()
    replies_to(engine, *engine.routes())
    assert {*engine.reached} == HEALTH


def test_metrics_are_open_by_option(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(OPEN_METRICS, "1")
    assert reply_to(engine, "GET", "/metrics").status_code == 200
    assert reply_to(engine, "POST", "/metrics").status_code == 401
    monkeypatch.setenv(OPEN_METRICS, "0")
    assert reply_to(engine, "GET", "/metrics").status_code == 401


@pytest.mark.parametrize(
    "path", ["/health/", "//health", "/health%2f..%2fv1/completions", "/v1/completions/", "/HEALTH"]
)
def test_other_spellings_of_a_path_are_closed(engine: Engine, path):
    assert reply_to(engine, "POST", path).status_code == 401
    assert reply_to(engine, "POST", path, **WITH_KEY).status_code == 404
    assert not engine.reached


def test_a_server_that_stops_takes_no_further_request(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """vLLM would reply 200 with an empty answer."""
    stopping = tmp_path / "stopping"
    monkeypatch.setenv(STOPPING, str(stopping))
    others = [*(("POST", path) for path in TOKENIZER_PATHS), ("GET", "/health")]
    answering = [("POST", path) for path in PATHS]
    assert len(others) == 3
    assert len(answering) == 2
    assert statuses_of(engine, *others, *answering, **WITH_KEY) == {200}
    stopping.touch()
    assert statuses_of(engine, *others, **WITH_KEY) == {200}
    assert statuses_of(engine, *answering, **WITH_KEY) == {503}
    reply = reply_to(engine, "POST", PATHS[0], **WITH_KEY)
    assert reply.headers["retry-after"] == "1"
    assert reply.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize("media", ["text/event-stream; charset=utf-8", "application/json"])
@pytest.mark.parametrize("grace, is_complete", [("0.5", False), ("60", True)])
def test_an_answer_that_outlasts_the_grace_ends_with_an_error(
    rewriter: Rewriter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, media, grace, is_complete
):
    """And not in the middle of a chunk; one that ends within it is complete."""
    stopping = tmp_path / "stopping"
    monkeypatch.setenv(STOPPING, str(stopping))
    monkeypatch.setenv(GRACE, grace)
    completed = list[str]()

    async def answer_slowly() -> None:
        stopping.touch()
        await asyncio.sleep(3)
        completed.append("the answer")

    async def stream() -> StreamingResponse:
        async def events() -> AsyncIterator[str]:
            yield "data: one\n\n"
            await answer_slowly()
            yield "data: two\n\n"

        return StreamingResponse(events(), media_type=media)

    async def unstreamed() -> dict[str, str]:
        await answer_slowly()
        return {"data": "two"}

    is_stream = media.startswith("text")
    app = FastAPI()
    app.add_api_route(PATHS[0], stream if is_stream else unstreamed, methods=["POST"])
    app.add_middleware(Prefixes, rewriter=rewriter)
    engine: Any = SimpleNamespace(app=app)
    reply = reply_to(engine, "POST", PATHS[0])
    assert bool(completed) == is_complete
    if not is_stream:
        assert reply.status_code == (200 if is_complete else 503)
        return
    assert reply.status_code == 200
    assert reply.text.startswith("data: one")
    if is_complete:
        assert "data: two" in reply.text
    else:
        assert '"type": "server_error"' in reply.text
        assert "data: [DONE]" in reply.text


def test_a_root_path_does_not_open_other_paths(engine: Engine):
    engine.app.root_path = "/health"
    assert reply_to(engine, "POST", "/health/invocations").status_code == 401
    assert reply_to(engine, "GET", "/health/health").status_code == 200


def test_a_browser_may_ask_first_and_gets_nothing_else(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(ORIGINS, json.dumps([PAGE]))
    preflight = {"origin": PAGE, "access-control-request-method": "POST"}
    assert reply_to(engine, "OPTIONS", PATHS[0], **preflight).headers["access-control-allow-origin"]
    assert reply_to(engine, "OPTIONS", PATHS[0]).status_code == 401
    assert not engine.reached


@pytest.fixture
def unlocked(rewriter: Rewriter, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    engine = Engine()
    engine.app.state.args.allowed_origins = ["*"]  # vLLM's default
    engine.app.add_middleware(Prefixes, rewriter=rewriter)
    return engine


def test_hosts_and_pages_of_others_reach_nothing_of_a_server_without_a_key(unlocked: Engine):
    preflight = {"access-control-request-method": "POST"}
    for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"}):
        replies = replies_to(unlocked, *ALL, ("OPTIONS", PATHS[0]), **headers, **preflight)
        for reply in replies:
            assert reply.status_code == 403
            assert reply.json()["error"]["code"] == 403
            assert "access-control-allow-origin" not in reply.headers
    assert not unlocked.reached
    assert statuses_of(unlocked, *ALL, host="127.0.0.1:8000") == {200}


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_bodies_of_forms_reach_nothing(unlocked: Engine, kind):
    posts = [(method, path) for method, path in ALL if method == "POST"]
    assert statuses_of(unlocked, *posts, **{"content-type": kind}) == {415}
    assert not unlocked.reached


def test_hosts_and_pages_that_the_operator_names(unlocked: Engine):
    unlocked.app.state.args.host = "ships.example"
    unlocked.app.state.args.allowed_origins = [PAGE]
    assert statuses_of(unlocked, *ALL, host="ships.example", origin=PAGE) == {200}


def test_names_of_proxies_and_pages_in_variables(unlocked: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(HOSTS, '["api.example"]')
    monkeypatch.setenv(ORIGINS, '["*"]')
    assert statuses_of(unlocked, *ALL, host="api.example", origin="http://any.example") == {200}
    assert statuses_of(unlocked, *ALL, host="ships.example") == {403}
    monkeypatch.setenv(HOSTS, "api.example")
    with refused(HOSTS, "type"):
        hosts_of({"app": unlocked.app})


def test_a_server_with_a_key_goes_by_any_name(engine: Engine):
    assert statuses_of(engine, *ALL, host="api.example", **WITH_KEY) == {200}


def test_websockets_are_closed(engine: Engine):
    messages = list[str]()

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        messages.append(message["type"])

    headers = [(b"authorization", f"Bearer {KEY}".encode())]
    scope = {"type": "websocket", "path": "/v1/realtime", "headers": headers, "app": engine.app}
    asyncio.run(engine.app(scope, receive, send))
    assert messages == ["websocket.close"]
