"""Stand-ins for vLLM's application and for what reads its long prompts."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from keepsight.serving.choices import Choice, Choices
from keepsight.serving.vllm.middleware import Prefixes, Rewriter
from keepsight.serving.vllm.reader import Complete, Reader

LONG = list(range(10, 210)) * 2
"""The token ids of a long prompt."""
PREFIX = "0f" * 16
"""The id of the prefix of every prompt that a `FixedReader` is asked for."""
ENTRIES = 130
"""The entries of this prefix."""


class VllmStandIn:
    """Stands for vLLM's application: answers `/tokenize`, and notes path and body of any other request."""

    def __init__(self, tokenizer: Any, *keys: str) -> None:
        self.tokenizer = tokenizer
        self.requests = list[tuple[str, Any]]()
        self.state = SimpleNamespace(args=SimpleNamespace(api_key=[*keys]))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        if scope["path"] == "/tokenize":
            body = {"tokens": self.tokenizer(body["prompt"])["input_ids"]}
        else:
            self.requests.append((scope["path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})


class FixedReader(Reader):
    """A reader without a worker: every prompt has the prefix `PREFIX`.

    Attributes:
        prompts: The token ids of each prompt that was asked for.
        salts: The salt of each.
        choices_made: The adapter and the budget of each.
        open: Number of prefixes in use.
    """

    def __init__(self) -> None:
        super().__init__(20, context=2000, answer_tokens=500, choices=Choices(140, ["law"]))
        self.prompts = list[list[int]]()
        self.salts = list[str]()
        self.choices_made = list[Choice]()
        self.open = 0

    @asynccontextmanager
    async def prefix(
        self, ids: list[int], salt: str, choice: Choice, complete: Complete
    ) -> AsyncIterator[tuple[str, int]]:
        self.prompts.append(ids)
        self.choices_made.append(choice)
        self.salts.append(salt)
        self.open += 1
        yield PREFIX, ENTRIES
        self.open -= 1


class Middleware:
    """Our middleware, before an application that stands for vLLM's."""

    def __init__(self, rewriter: Rewriter, reader: Reader | None = None, vllm: VllmStandIn | None = None) -> None:
        self.vllm = vllm or VllmStandIn(rewriter.tokenizer)
        self.app = Prefixes(self.vllm, rewriter, reader)

    async def reply(self, path: str, body: Any, key: str = "") -> tuple[int, Any]:
        """Status and body of the reply to a request."""
        requests: list[Any] = [{"type": "http.request", "body": json.dumps(body).encode()}]
        messages = list[Any]()

        async def receive() -> Any:
            return requests.pop() if requests else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            messages.append(message)

        headers = [(b"content-type", b"application/json")]
        if key:
            headers.append((b"authorization", f"Bearer {key}".encode()))
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "app": self.vllm}
        await self.app(scope, receive, send)
        return messages[0]["status"], json.loads(messages[1]["body"])

    def post(self, path: str, body: Any, key: str = "") -> tuple[int, Any]:
        """Status and body of the reply to a request that is sent alone."""
        return asyncio.run(self.reply(path, body, key))


def prefix_ids(folder: Path) -> set[str]:
    """The ids of the prefixes whose files are in a folder."""
    return {path.stem for path in folder.glob("*.safetensors")}


async def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; an AssertionError if it does not within a minute."""
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not hold within a minute")
