"""Long prompts are read beside vLLM: the worker at its socket, and the middleware, without vLLM."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepsight import SnapKV
from keepsight.errors import UserError
from keepsight.models.targets import load_target
from keepsight.serving.prefix import PrefixStore, file_of, placeholders
from keepsight.serving.vllm.access import PATHS
from keepsight.serving.vllm.middleware import Prefixes, Rewriter
from keepsight.serving.worker import Worker
from tests.tiny import save_tiny_target, tiny_tokenizer

COMPLETIONS = PATHS[1]
TEXT = "for item in the list:\n    print(item)"
LONG = list(range(10, 210)) * 2


async def asked(socket: Path, ids: Any, leave: bool = False) -> Any:
    """What the worker replies; None where it says nothing."""
    reader, writer = await asyncio.open_unix_connection(socket)
    writer.write(json.dumps({"ids": ids}).encode() + b"\n")
    await writer.drain()
    line = b"" if leave else await reader.readline()
    writer.close()
    return json.loads(line) if line else None


def test_prompts_are_read_in_turn_and_too_many_are_refused(tmp_path: Path):
    target = load_target(str(save_tiny_target(tmp_path / "model")), device="cpu")
    worker = Worker(target, SnapKV(140, window=8), tmp_path, page=0, waiting=2)
    socket, read = tmp_path / "socket", list[int]()
    once, gone = worker.read, threading.Event()

    def noted(ids: list[int]) -> dict[str, Any]:
        gone.wait(60)  # the first prompt is read until the client that leaves has left
        read.append(len(ids))
        return once(ids)

    worker.read = noted  # type: ignore[method-assign]

    async def talk() -> list[Any]:
        serving = asyncio.create_task(worker.serve(socket))
        while not socket.exists():
            await asyncio.sleep(0.01)
        first = asyncio.create_task(asked(socket, LONG))
        await asyncio.sleep(0.05)
        await asked(socket, LONG[:-1], leave=True)  # before its turn: it is not read
        await asyncio.sleep(0.05)
        gone.set()
        replies = [await first, *await asyncio.gather(*(asked(socket, LONG[:-2]) for _ in range(6)))]
        replies += [await asked(socket, LONG * 20), await asked(socket, LONG[:20]), await asked(socket, "x" * 10)]
        serving.cancel()
        return replies

    good, *several, long, short, odd = asyncio.run(talk())
    assert good["entries"] == 140 and PrefixStore(tmp_path).header(good["id"]).seen == len(LONG)
    assert sorted(reply.get("status", 200) for reply in several) == [200] * 3 + [429] * 3
    assert long["status"] == short["status"] == 400 and "4096" in long["error"] and odd["status"] == 500
    assert len(LONG) - 1 not in read
    worker.close()
    assert not [*tmp_path.glob("*.safetensors")]


def test_no_prefix_is_left_without_its_client_or_with_too_few_entries(tmp_path: Path):
    target = load_target(str(save_tiny_target(tmp_path / "model")), device="cpu")
    worker = Worker(target, SnapKV(0.5, window=8), tmp_path, page=0, waiting=2)
    socket, once, begun, gone = tmp_path / "socket", worker.read, threading.Event(), threading.Event()

    def slow(ids: list[int]) -> dict[str, Any]:
        begun.set()
        gone.wait(60)
        return once(ids)

    worker.read = slow  # type: ignore[method-assign]

    async def talk() -> Any:
        serving = asyncio.create_task(worker.serve(socket))
        while not socket.exists():
            await asyncio.sleep(0.01)
        await asked(socket, LONG, leave=True)
        await asyncio.to_thread(begun.wait, 60)  # its prompt is being read
        await asyncio.sleep(0.05)
        gone.set()
        few = await asked(socket, LONG[:40])
        files = [*tmp_path.glob("*.safetensors")]
        kept = await asked(socket, LONG)
        assert not files and few["status"] == 400 and "cannot spell an id" in few["error"]
        assert [*tmp_path.glob("*.safetensors")] == [file_of(tmp_path, kept["id"])]
        serving.cancel()

    asyncio.run(talk())
    worker.close()


def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    given = {"KEEPSIGHT_ROOT": str(tmp_path), "KEEPSIGHT_MODEL": str(save_tiny_target(tmp_path / "model"))}
    for name, value in given.items():
        with pytest.raises(UserError, match=f"^{name} is not set; give {name}="):
            Prefixes(None)
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KEEPSIGHT_WORKER", "socket")
    with pytest.raises(UserError, match=r"^KEEPSIGHT_LEAST is not set; "):
        Prefixes(None)


@pytest.fixture(scope="module")
def rewriter(tmp_path_factory: pytest.TempPathFactory) -> Rewriter:
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer().save_pretrained(str(folder))
    return Rewriter(str(folder / "prefixes"), str(folder))


class Engine:
    """Stands for vLLM's application: answers `/tokenize`, and notes what else it is sent."""

    def __init__(self, tokenizer: Any, *keys: str) -> None:
        self.tokenizer, self.seen = tokenizer, list[tuple[str, Any]]()
        self.state = SimpleNamespace(args=SimpleNamespace(api_key=[*keys]))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        if scope["path"] == "/tokenize":
            body = {"tokens": self.tokenizer(body["prompt"])["input_ids"]}
        else:
            self.seen.append((scope["path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})


class Reads:
    """Stands for a `Reader`: every prompt is the prefix 0f0f... of 130 entries."""

    least = 20

    def __init__(self) -> None:
        self.asked, self.open = list[list[int]](), 0

    @asynccontextmanager
    async def prefix(self, ids: list[int]) -> AsyncIterator[tuple[str, int]]:
        self.asked.append(ids)
        self.open += 1
        yield "0f" * 16, 130
        self.open -= 1


def sent(app: Prefixes, engine: Engine, path: str, body: Any, key: str = "") -> tuple[int, Any]:
    """Status and body of the reply to a request."""
    messages: list[Any] = [{"type": "http.request", "body": json.dumps(body).encode()}]
    replies = list[Any]()

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        replies.append(message)

    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "app": engine}
    asyncio.run(app(scope, receive, send))
    return replies[0]["status"], json.loads(replies[1]["body"])


def test_a_long_prompt_is_read_elsewhere_and_a_short_one_is_not(rewriter: Rewriter):
    engine, reader = Engine(rewriter.tokenizer), Reads()
    app = Prefixes(engine, rewriter, reader)  # type: ignore[arg-type]
    body = {"prompt": TEXT * 5, "max_tokens": 3}
    ids = rewriter.tokenizer(TEXT * 5)["input_ids"]
    sent(app, engine, COMPLETIONS, body)
    ((_, seen),) = engine.seen
    assert reader.asked == [ids[:-1]] and reader.open == 0
    assert seen == body | {"prompt": [*placeholders("0f" * 16, 130, rewriter.alphabet), ids[-1]]}
    sent(app, engine, COMPLETIONS, {"prompt": "for"})
    assert engine.seen[-1] == (COMPLETIONS, {"prompt": "for"}) and len(reader.asked) == 1
    status, reply = sent(app, engine, COMPLETIONS, body | {"echo": True})
    assert status == 400 and "echo" in reply["error"]["message"] and len(engine.seen) == 2
    odd = {"messages": [{"role": "user", "content": TEXT * 5}], "chat_template_kwargs": 3}
    sent(app, engine, PATHS[0], odd)
    assert engine.seen[-1] == (PATHS[0], odd) and len(reader.asked) == 1  # vLLM says what is wrong


def test_without_the_key_nothing_is_read_and_other_endpoints_are_closed(rewriter: Rewriter):
    engine, reader = Engine(rewriter.tokenizer, "secret"), Reads()
    app = Prefixes(engine, rewriter, reader)  # type: ignore[arg-type]
    for key in ("", "secre", "other"):
        assert sent(app, engine, COMPLETIONS, {"prompt": TEXT * 5}, key)[0] == 401
    assert not engine.seen and not reader.asked
    sent(app, engine, COMPLETIONS, {"prompt": TEXT * 5}, "secret")
    assert len(reader.asked) == 1
    status, reply = sent(app, engine, "/v1/responses", {"input": TEXT}, "secret")
    assert status == 404 and COMPLETIONS in reply["error"]["message"]
