"""Headers that let nobody in: keys on every path, names of other hosts, foreign web pages, forms."""

import itertools

import httpx
import pytest

from keepsight.serving.engine import Engine
from keepsight.serving.guard import PROBES
from keepsight.serving.server import Service
from tests.serving.loopback import METHOD, running

ORIGIN = "https://ui.example"
CHAT = "/v1/chat/completions"
REQUEST = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


def service(target, engine: Engine, **options) -> Service:
    limits = {"key": None, "answer_tokens": 20, "max_bytes": 1 << 16}
    return Service(engine, target, name="tiny", **(limits | options))


@pytest.fixture(scope="module")
def served(target):
    with Engine(target.model, METHOD) as engine:
        app = service(target, engine, hosts=["Ships.example"], origins=[ORIGIN]).app()
        with running(app, engine) as (url, _):
            yield url, engine


@pytest.fixture
def url(served):
    return served[0]


@pytest.mark.parametrize("open_metrics", [False, True])
def test_a_key_locks_every_route(target, open_metrics):
    """Whatever routes there are, and those that there are not; every path and every HTTP method with each wrong key."""
    engine = Engine(target.model, METHOD)
    app = service(target, engine, key="secret", open_metrics=open_metrics).app()
    paths = [route.path.replace("{name:path}", "tiny") for route in app.routes]  # type: ignore[attr-defined]
    answering = {CHAT, "/v1/completions", "/tokenize", "/detokenize"}
    assert {*answering, "/v1/models", "/v1/models/tiny", "/version", "/metrics", *PROBES} == {*paths}
    without_route = ["/", "/docs", "/openapi.json", "/v1/responses", "/health/", "//health", "/metrics/x"]
    open_paths = {*PROBES, "/metrics"} if open_metrics else {*PROBES}
    wrong_keys = itertools.cycle([{}, {"authorization": "Bearer other"}, {"authorization": "Basic secret"}])
    with engine, running(app, engine) as (url, _), httpx.Client(base_url=url) as client:
        for path in [*paths, *without_route]:
            for method in ("GET", "HEAD", "POST", "OPTIONS", "ODD"):
                headers = next(wrong_keys)
                reply = client.request(method, path, headers=headers)
                assert (reply.status_code != 401) == (path in open_paths), (method, path, headers)
            reply = client.get(path, headers={"authorization": "Bearer secret"}, follow_redirects=True)
            if path in answering:
                assert reply.status_code == 405
            elif path.rstrip("/") in paths:
                assert reply.status_code == 200
            else:
                assert reply.status_code == 404
        reply = client.post(CHAT, json=REQUEST, headers={"authorization": "bearer secret"})
        assert reply.status_code == 200


HOSTS = [
    ("localhost", 200),
    ("LOCALHOST:80", 200),
    ("app.localhost.", 200),
    ("127.0.0.1:1", 200),
    ("192.0.2.7", 200),
    ("[::1]:8000", 200),
    ("ships.example:443", 200),
    ("evil.example", 403),
    ("evil.example:8000", 403),
    ("localhost.evil.example", 403),
    ("127.0.0.1.evil.example", 403),
    ("x.ships.example", 403),
    ("user@evil.example", 403),
    ("[::1", 403),
    ("", 403),
]


@pytest.mark.parametrize(("host", "status"), HOSTS)
def test_hosts(url, host, status):
    for path in ("/health", "/v1/models"):
        reply = httpx.get(url + path, headers={"host": host})
        assert reply.status_code == status
        if status != 200:
            assert "hosts=" in reply.json()["error"]["message"]


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:3000", "http://127.0.0.1"])
def test_foreign_pages_are_refused_and_learn_nothing(served, origin):
    url, engine = served
    tokens_before = engine.totals.prompt_tokens
    reply = httpx.post(url + CHAT, json=REQUEST, headers={"origin": origin})
    assert reply.status_code == 403
    assert "origins=" in reply.json()["error"]["message"]
    assert "access-control-allow-origin" not in reply.headers
    headers = {"origin": origin, "access-control-request-method": "POST"}
    preflight = httpx.options(url + CHAT, headers=headers)
    assert preflight.status_code in (400, 403)
    assert "access-control-allow-origin" not in preflight.headers
    assert engine.totals.prompt_tokens == tokens_before


def test_pages_that_may_use_the_server(url):
    reply = httpx.post(url + CHAT, json=REQUEST, headers={"origin": ORIGIN})
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == ORIGIN
    headers = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    preflight = httpx.options(url + CHAT, headers=headers)
    assert preflight.status_code == 200
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    assert httpx.post(url + CHAT, json=REQUEST, headers={"origin": url}).status_code == 200, "its own name"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", None])
def test_bodies_that_forms_can_send(url, kind):
    headers = {} if kind is None else {"content-type": kind}
    reply = httpx.post(url + CHAT, content=b'{"model": "tiny"}', headers=headers)
    assert reply.status_code == 415
    assert "application/json" in reply.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
def test_json_with_parameters(url, kind):
    assert httpx.post(url + CHAT, content=b"{}", headers={"content-type": kind}).status_code == 400
