"""Answers from a server on the loopback that speaks the completions protocol: forms of prompts, retries, deaths."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from keepsight.data_gen.answers import Rendered, answer
from keepsight.data_gen.generate import generate_data
from keepsight.data_gen.mixture import Mixture
from keepsight.data_gen.server import Server, ServerSettings
from keepsight.errors import UserError
from keepsight.files import read_json, read_jsonl
from keepsight.models.outline import outline_target
from keepsight.models.targets import Target, load_target
from tests.tiny import save_tiny_target

ROOT = Path(__file__).parents[2]
Reply = tuple[int, dict[str, Any]] | None
Say = Callable[[dict[str, Any]], Reply]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepsight.endpoint.FIRST_WAIT", 0.0)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(str(folder), dtype="float32", device="cpu")


def prompts(*lengths: int) -> list[Rendered]:
    generator = torch.Generator().manual_seed(0)
    return [
        Rendered(index, "test", torch.randint(6, 300, (length,), generator=generator).tolist(), None)
        for index, length in enumerate(lengths)
    ]


@dataclass
class Heard:
    """What a server was asked, and how many requests it had at once at most."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    lock: Any = field(default_factory=threading.Lock)


@contextmanager
def server(say: Say, port: int = 0) -> Iterator[Heard]:
    """A server whose replies `say` gives, as a status and a body; None breaks the connection."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with heard.lock:
                heard.bodies.append(body)
                heard.headers.append(dict(self.headers))
                heard.at_once += 1
                heard.most_at_once = max(heard.most_at_once, heard.at_once)
            reply = say(body) if self.path == "/v1/completions" else (404, {"error": "no such path"})
            with heard.lock:
                heard.at_once -= 1
            if reply is None:
                self.connection.close()
                return
            data = json.dumps(reply[1]).encode()
            self.send_response(reply[0])
            if 300 <= reply[0] < 400:
                self.send_header("Location", f"{heard.url}/elsewhere")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def handle(self) -> None:
            with suppress(OSError, ValueError):  # the client was killed, or the connection was broken on purpose
                super().handle()

    made = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    made.daemon_threads = True
    heard = Heard(f"http://127.0.0.1:{made.server_port}/v1")
    threading.Thread(target=made.serve_forever, daemon=True).start()
    try:
        yield heard
    finally:
        made.shutdown()
        made.server_close()


def speaks(target: Target, takes: str = "ids and back") -> Say:
    """The target itself behind a server that takes prompts as ids, and returns ids, or text only."""
    lock = threading.Lock()

    def say(body: dict[str, Any]) -> Reply:
        prompt = body["prompt"]
        if "return_token_ids" in body and takes != "ids and back":
            return 422, {"error": "unknown field return_token_ids"}
        if takes == "text" and not isinstance(prompt, str):
            return 400, {"detail": "prompt must be a string."}
        assert body["temperature"] == 0.0 and body["model"] == "served"
        ids = target.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        with lock:
            made = answer(target, [Rendered(0, "", ids, None)], body["max_tokens"])[0]
        text = target.tokenizer.decode(made, skip_special_tokens=True)
        choice: dict[str, Any] = {"text": text, "finish_reason": "stop" if made[-1] in target.end_tokens else "length"}
        if takes == "ids and back":
            choice["token_ids"] = made
        return 200, {"choices": [choice], "usage": {"prompt_tokens": len(ids)}}

    return say


def client(target: Target, heard: Heard, **changes: Any) -> Server:
    settings: dict[str, Any] = {"url": heard.url, "model": "served", "tries": 3, **changes}
    return Server(target, ServerSettings(**settings))


def answered(backend: Server, asked: list[Rendered], longest: int = 12) -> dict[int, list[int]]:
    pairs = [(prompt.index, ids) for ready in backend(asked, longest) for prompt, ids in ready]
    assert len(dict(pairs)) == len(pairs) == len(asked)
    return dict(pairs)


def test_ids_there_and_back_are_the_targets_own(target: Target) -> None:
    asked = prompts(*range(8, 28))
    with server(speaks(target)) as heard:
        made = answered(client(target, heard, parallel=4), asked)
    assert made == {prompt.index: answer(target, [prompt], 12)[0] for prompt in asked}
    assert 1 < heard.most_at_once <= 4 and len(heard.bodies) == 20
    assert "Authorization" not in heard.headers[0]


@pytest.mark.parametrize("takes", ["ids", "text"])
def test_a_server_that_returns_text(target: Target, takes: str) -> None:
    """It is asked in each form once, and from then on in the one that it takes."""
    text = target.tokenizer("The vault is open. Who opened it, and when?")["input_ids"]
    asked = [Rendered(index, "test", text[: 6 + index], None) for index in range(6)]
    with server(speaks(target, takes)) as heard:
        backend = client(target, heard)
        made = answered(backend, asked)
        assert answered(backend, asked) == made
    forms = Counter(("return_token_ids" in body, type(body["prompt"]).__name__) for body in heard.bodies)
    assert forms == ({(True, "list"): 1, (False, "list"): 12} if takes == "ids"
                     else {(True, "list"): 1, (False, "list"): 1, (False, "str"): 12})  # fmt: skip
    for prompt in asked:
        ids = answer(target, [prompt], 12)[0]
        again = target.tokenizer(target.tokenizer.decode(ids, skip_special_tokens=True))["input_ids"]
        end = [2] if ids[-1] in target.end_tokens else []
        assert made[prompt.index] == [*again, *end][:12]


def test_ids_that_no_text_stands_for_are_not_sent_as_text(target: Target) -> None:
    ids = [token for letter in "opened" for token in target.tokenizer(letter)["input_ids"]]
    broken = Rendered(7, "test", ids, None)
    with (
        server(speaks(target, "text")) as heard,
        pytest.raises(UserError, match="it takes no token ids, and no text stands for the ids of prompt 7"),
    ):
        answered(client(target, heard), [broken])
    assert all(isinstance(body["prompt"], list) for body in heard.bodies)


def test_passing_faults_are_tried_again(target: Target) -> None:
    say = speaks(target)
    faults: list[Reply] = [(503, {}), None, (429, {}), (200, {"choices": []})]

    def unsteady(body: dict[str, Any]) -> Reply:
        return faults.pop() if faults else say(body)

    asked = prompts(9, 10, 11)
    with server(unsteady) as heard:
        made = answered(client(target, heard, parallel=1, tries=6), asked)
    assert made == {prompt.index: answer(target, [prompt], 12)[0] for prompt in asked}
    assert len(heard.bodies) == 7


def test_an_answer_that_a_server_aborts_is_asked_for_again(target: Target) -> None:
    """A server of vLLM that ends gives back what it has so far, with status 200."""
    say, cut = speaks(target), [3]

    def ends(body: dict[str, Any]) -> Reply:
        status, reply = say(body) or (0, {})
        if cut[0] > 0:
            cut[0] -= 1
            choice = reply["choices"][0]
            choice |= {"token_ids": choice["token_ids"][:2], "finish_reason": "abort"}
        return status, reply

    asked = prompts(9, 10, 11)
    with server(ends) as heard:
        made = answered(client(target, heard, parallel=1, tries=4), asked)
        cut[0] = 9
        with pytest.raises(
            UserError, match=r"no answer \(ValueError: the answer is cut: finish_reason=abort\); what was"
        ):
            answered(client(target, heard), asked)
    assert made == {prompt.index: answer(target, [prompt], 12)[0] for prompt in asked}


def test_a_server_with_too_short_a_context_is_refused(target: Target) -> None:
    """As vLLM with a small --max-model-len, which ends an answer with status 200 where its context is full."""
    say = speaks(target, "ids")

    def short(body: dict[str, Any]) -> Reply:
        status, reply = say(body | {"max_tokens": 5}) or (0, {})
        if status == 200:
            reply["usage"]["completion_tokens"] = 5
            reply["choices"][0]["finish_reason"] = "length"
        return status, reply

    with (
        server(short) as heard,
        pytest.raises(UserError, match="prompt 0 has 9 tokens, which leaves no room for 12 more; serve it with a long"),
    ):
        answered(client(target, heard), prompts(9))


def test_what_a_server_refuses_is_to_be_mended_first(target: Target) -> None:
    """Of a later prompt that is too long vLLM says so with status 400; the same command would meet it again."""
    say = speaks(target)
    too_long = {"message": "This model's maximum context length is 10 tokens."}

    def short(body: dict[str, Any]) -> Reply:
        return say(body) if len(body["prompt"]) < 10 else (400, {"error": too_long})

    refused = (
        r"HTTP Error 400: Bad Request .*maximum context length is 10 tokens.*once this is mended, run the same com"
    )
    with server(short) as heard, pytest.raises(UserError, match=refused):
        answered(client(target, heard), prompts(9, 11))


def test_a_key_is_sent_to_the_server_alone_and_never_shown(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret-key")
    unauthorised = r"no answer \(HTTPError: HTTP Error 401: Unauthorized"
    with (
        server(lambda _: (401, {"error": "no key like s3cret-key"})) as heard,
        pytest.raises(UserError, match=unauthorised) as refused,
    ):
        answered(client(target, heard, key="MY_KEY"), prompts(9))
    assert [each["Authorization"] for each in heard.headers] == ["Bearer s3cret-key"]
    assert "s3cret-key" not in str(refused.value) and "***" in str(refused.value)
    with server(lambda _: (307, {})) as heard, pytest.raises(UserError, match="HTTP Error 307"):
        answered(client(target, heard, key="MY_KEY"), prompts(9))
    assert len(heard.bodies) == 1


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"choices": [{"text": "a", "token_ids": [7]}], "usage": {"prompt_tokens": 10}}, "as 10 tokens, not as 9"),
        ({"choices": [{"text": "a", "token_ids": [99999]}]}, "has tokens outside the vocabulary; it must serve"),
        ({"choices": [{"text": "", "token_ids": []}]}, "its answer to prompt 0 is empty"),
    ],
)  # fmt: skip
def test_a_server_of_another_model_is_refused(target: Target, reply: dict[str, Any], message: str) -> None:
    with server(lambda _: (200, reply)) as heard, pytest.raises(UserError, match=message):
        answered(client(target, heard), prompts(9))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "backend=server needs server.url="),
        ({"url": "localhost:8000"}, "server.url=localhost:8000 must begin with"),
        ({"url": "http://a", "parallel": 0}, "server.parallel=0 must be at least 1"),
        ({"url": "http://a", "tries": 0}, "server.tries=0 must be at least 1"),
    ],
)
def test_bad_keys(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ServerSettings(**settings).check()


MIXTURE = {"min_tokens": 100, "max_tokens": 200, "sources": [{"kind": "key_values"}]}


def make(outline: Target, heard: Heard, out: Path) -> dict[str, Any]:
    backend = client(outline, heard, parallel=3)
    mixture = Mixture.from_config(MIXTURE)
    return generate_data(
        outline, mixture, MIXTURE, out, limit=20, seed=3, max_new_tokens=8, shard_size=8, backend=backend
    )


def samples(out: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(out.glob("shard-*.jsonl")) for row in read_jsonl(path)]


def test_a_server_that_dies_ends_the_run_clearly_and_nothing_is_lost_or_doubled(
    target: Target, folder: Path, tmp_path: Path
) -> None:
    """The target's weights are never loaded: its outline has none."""
    outline = outline_target(str(folder))
    assert outline.model.device.type == "meta"
    assert (outline.version, outline.template_digest) == (target.version, target.template_digest)
    assert (outline.end_tokens, outline.pad_token) == (target.end_tokens, target.pad_token)
    say, left = speaks(target), [11]

    def dies(body: dict[str, Any]) -> Reply:
        left[0] -= 1
        return say(body) if left[0] >= 0 else None

    with server(dies) as heard:
        with pytest.raises(UserError, match=r"no answer .*what was answered is kept: run the same command again"):
            make(outline, heard, tmp_path / "data")
        assert read_json(tmp_path / "data" / "manifest.json")["complete"] is False
    kept = sum(path.read_bytes().count(b"\n") for path in (tmp_path / "data").glob("shard-*"))
    assert kept == 11
    with server(say) as heard:
        manifest = make(outline, heard, tmp_path / "data")
        assert len(heard.bodies) == 9
        assert make(outline, heard, tmp_path / "once")["digest"] == manifest["digest"]
    assert [row["index"] for row in samples(tmp_path / "data")] == list(range(20))
    for row in samples(tmp_path / "data"):
        assert row["answer_ids"] == answer(target, [Rendered(0, "", row["prompt_ids"], None)], 8)[0]


def test_a_client_that_is_killed_goes_on(target: Target, folder: Path, tmp_path: Path) -> None:
    mixture, out = tmp_path / "mixture.yaml", tmp_path / "data"
    mixture.write_text(yaml.safe_dump(MIXTURE))
    say = speaks(target)

    def slowly(body: dict[str, Any]) -> Reply:
        time.sleep(0.05)
        return say(body)

    def start(url: str) -> "subprocess.Popen[bytes]":
        given = ["data", f"model.id={folder}", f"mixture={mixture}", f"out={out}", "limit=20", "seed=3"]
        given += ["max_new_tokens=8", "shard_size=8", "backend=server", f"server.url={url}", "server.model=served"]
        given += ["server.parallel=3", "adapter=null"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([sys.executable, "-m", "keepsight", *given], env=environment)

    with server(slowly) as heard:
        process = start(heard.url)
        deadline = time.monotonic() + 90
        while process.poll() is None and len(heard.bodies) < 10 and time.monotonic() < deadline:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
    outline = outline_target(str(folder))
    with server(say) as heard:
        make(outline, heard, out)
        assert 0 < len(heard.bodies) < 20
        make(outline, heard, tmp_path / "once")
    assert [row["index"] for row in samples(out)] == list(range(20))
    assert samples(out) == samples(tmp_path / "once")
