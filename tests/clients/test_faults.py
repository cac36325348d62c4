"""What real clients make of refusals, and of what goes wrong: their own classes of errors, and others are answered."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from keepsight.models.decoder import decoder_layers
from keepsight.models.targets import Target
from tests.clients.served import (
    PROMPTS,
    QUICK,
    TOKENS,
    Served,
    client_command,
    environment_without_paths,
    outcomes_of,
    starting_beside_vllm,
)
from tests.serving.loopback import serving, wait_until

pytestmark = pytest.mark.clients
Refused: TypeAlias = dict[str, tuple[str, int | None, str]]
LONG = PROMPTS[8] * 6
SLOW = 100
"""Tokens of a pass from which it is slow."""
CASES: dict[str, Any] = {
    "short": PROMPTS[0],
    "long": LONG,
    "too_long": "the ship " * 5000,
    "too_large": "x" * 70_000,
    "tokens": TOKENS,
    "patience": 1.5,
}
REFUSED: dict[str, Refused] = {
    "openai": {
        "wrong key": ("AuthenticationError", 401, "key"),
        "models without the key": ("AuthenticationError", 401, "key"),
        "text/plain": ("APIStatusError", 415, "application/json"),
        "too long": ("BadRequestError", 400, "maximum context length"),
        "too large": ("APIStatusError", 413, "65536"),
        "leaves in a prefill": ("APITimeoutError", None, ""),
        "a task that is cancelled": ("TimeoutError", None, ""),
    },
    "litellm": {
        "wrong key": ("AuthenticationError", 401, "key"),
        "too long": ("ContextWindowExceededError", 400, "maximum context length"),
        "too large": ("APIError", 413, "65536"),
    },
    "langchain-openai": {
        "wrong key": ("OpenAIAuthenticationError", 401, "key"),
        "too long": ("OpenAIInvalidRequestError", 400, "maximum context length"),
        "too large": ("APIStatusError", 413, "65536"),
    },
}
"""For each client the class of its error, the status, and a part of the message."""
REFUSED_BY_OURS: dict[str, Refused] = {
    "openai": {
        "a demanded call": ("BadRequestError", 400, "tool_choice"),
        "Host": ("PermissionDeniedError", 403, "hosts="),
        "Origin": ("PermissionDeniedError", 403, "origins="),
    },
    "litellm": {"Origin": ("APIError", 403, "origins=")},
    "langchain-openai": {"too long": ("OpenAIContextOverflowError", 400, "prompt is too long")},
}


def check(
    client: str, served: Served, open_url: str, refused: Refused, folder: Path, patience: float = CASES["patience"]
) -> None:
    """Compare what a client met, which leaves a long prompt after so many seconds."""
    cases = CASES | {"patience": patience}
    *faults, afterwards = outcomes_of("fault.py", client, served.url, open_url, cases=cases, folder=folder)
    assert {fault["what"] for fault in faults} == refused.keys()

    for fault in faults:
        error, status, message = refused[fault["what"]]
        assert fault["error"] == error, fault
        assert fault["status"] == status, fault
        assert message in fault["text"], fault
    kind = "completion" if client == "openai" else "chat"
    assert afterwards["error"] == ""
    assert afterwards["text"] == served.expected(kind, CASES["short"])


@pytest.fixture
def slow_layers(target: Target) -> Iterator[list[int]]:
    """The lengths of slow passes of layers: those over many tokens, which outlast a client's patience."""
    lengths: list[int] = []

    def wait(module: Any, arguments: Any, output: Any) -> None:
        length = arguments[0].shape[1]
        if length > SLOW:
            lengths.append(length)
            time.sleep(4)

    with ExitStack() as hooks:
        for layer in decoder_layers(target.model):
            hooks.callback(layer.register_forward_hook(wait).remove)
        yield lengths


@pytest.mark.parametrize("client", [pytest.param("openai", marks=QUICK), *list(REFUSED)[1:]])
def test_our_own_server_refuses_in_words_of_clients(
    client: str, target: Target, slow_layers: list[int], tmp_path: Path
) -> None:
    """Prompts whose clients have left are read no further than the layer that they are in."""
    with serving(target, key="any") as (url, engine), serving(target) as (open_url, _):
        slow_layers.clear()
        served = Served(url, target, engine)
        check(client, served, open_url, REFUSED[client] | REFUSED_BY_OURS[client], tmp_path)
        wait_until(lambda: engine.load == (0, 0))
        cancelled = engine.totals.ended["cancelled"]
        assert cancelled == (2 if client == "openai" else 0)
        assert len(slow_layers) <= cancelled, "the second may leave while it waits"


@pytest.mark.parametrize("client", REFUSED)
def test_the_server_beside_vllm_refuses_in_words_of_clients(client: str, beside_vllm: Served, tmp_path: Path) -> None:
    check(client, beside_vllm, "", REFUSED[client], tmp_path, patience=0.02)


def outcomes_of_a_deploy(
    url: str, server: "subprocess.Popen[Any]", cases: dict[str, Any], folder: Path
) -> dict[str, dict[str, Any]]:
    """What the requests of a client end in, whose server gets SIGTERM once one is answered and others wait."""
    with subprocess.Popen(
        client_command("fault.py", "deploy", url, ""),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment_without_paths(),
        cwd=folder,
    ) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        json.dump(cases, client.stdin)
        client.stdin.close()
        assert client.stdout.readline() == "running\n"
        server.send_signal(signal.SIGTERM)
        outcomes = json.loads(client.stdout.read())
        assert client.wait(60) == 0
    return {outcome["what"]: outcome for outcome in outcomes}


def test_a_deploy_beside_vllm_cuts_no_answer_and_lets_nobody_wait(target: Target, folder: Path, tmp_path: Path) -> None:
    """SIGTERM while an answer runs and thirty long prompts wait for the worker: none that waits is read then."""
    queue = [f"{number} " + "the ship " * 700 for number in range(30)]
    with starting_beside_vllm(target, folder, tmp_path / "serve.log") as served:
        assert served.process is not None
        cases = CASES | {"tokens": 1500, "patience": 1, "queue": queue}
        outcomes = outcomes_of_a_deploy(served.url, served.process, cases, tmp_path)
        assert served.process.wait(120) == 0
    assert outcomes["running"]["text"] == "length"
    refusals = set()
    for what, outcome in outcomes.items():
        if not what.startswith("queued"):
            continue
        if outcome["error"]:
            refusals.add((outcome["error"], outcome["status"]))
            assert "shutting down" in outcome["text"]
        else:
            assert outcome["text"] in ("length", "stop")
    assert refusals == {("InternalServerError", 503)}


@QUICK
def test_a_deploy_cuts_no_answer_and_lets_nobody_wait(target: Target, folder: Path, tmp_path: Path) -> None:
    """SIGTERM while an answer runs and two requests wait."""
    arguments = [
        f"model.id={folder}",
        "model.device=cpu",
        "model.dtype=float32",
        "method=snapkv",
        "budget=40",
        "options={window: 8}",
        "rows=1",
        "grace=120",
        "port=0",
        "name=tiny",
        "max_new_tokens=2000",
    ]
    command = [sys.executable, "-m", "keepsight", "serve", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stderr is not None
            url = server.stdout.readline().split(" at ")[1].split()[0].removesuffix("/v1")
            cases = CASES | {"tokens": 1500, "patience": 1}
            outcomes = outcomes_of_a_deploy(url, server, cases, tmp_path)
            code = server.wait(120)
            errors = server.stderr.read()
        finally:
            server.kill()
    assert code == 0, errors[-3000:]
    assert outcomes["running"]["text"] == "length", errors[-3000:]
    assert outcomes["unstreamed"]["error"] == "InternalServerError"
    assert outcomes["unstreamed"]["status"] == 503
    assert "shutting down" in outcomes["unstreamed"]["text"]
    assert outcomes["stream"]["error"] == "APIError"
    assert "shutting down" in outcomes["stream"]["text"]
