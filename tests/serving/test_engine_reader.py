"""Plain requests to an engine that evicts: the middleware's two steps, with a stand-in for vLLM's application."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepsight.serving.inside import evicting_config, evicting_method, plain_eviction
from keepsight.serving.prefix import file_of, letters_of_id, placeholders
from keepsight.serving.vllm.access import CHAT, COMPLETIONS, STOPPING
from keepsight.serving.vllm.middleware import Prefixes, Rewriter
from tests.refused import refused
from tests.serving.test_long_prompts import LONG, files, settled
from tests.tiny import tiny_tokenizer

BUDGET, ENTRIES, CONTEXT = 128, 130, 600
Step = tuple[str, dict[str, Any]]


@pytest.fixture(scope="module")
def rewriter(tmp_path_factory: pytest.TempPathFactory) -> Rewriter:
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer().save_pretrained(str(folder))
    return Rewriter(str(folder / "prefixes"), str(folder))


class Evicting:
    """Stands for vLLM's application, whose engine writes a prefix for each prompt that it is asked to evict from.

    Attributes:
        steps: Paths and bodies of what it was asked, in order.
        open: While it is not set, prompts are being read.
        refusal: The status and the body with which it answers a prompt instead.
        left: Prompts that were broken off.
    """

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.steps = list[Step]()
        self.ids = list[str]()
        self.open = asyncio.Event()
        self.refusal: tuple[int, Any] | None = None
        self.left = 0
        folder.mkdir(parents=True, exist_ok=True)
        transfer = evicting_config(folder.parent, folder, {"name": "snapkv", "budget": BUDGET})
        model = SimpleNamespace(
            hf_text_config=SimpleNamespace(num_hidden_layers=3),
            get_total_num_kv_heads=lambda: 2,
            get_head_size=lambda: 8,
            max_model_len=CONTEXT,
        )
        config = SimpleNamespace(
            model_config=model,
            cache_config=SimpleNamespace(block_size=16),
            kv_transfer_config=SimpleNamespace(**transfer),
        )
        self.state = SimpleNamespace(vllm_config=config)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        if scope["path"] == "/tokenize":
            await reply(send, 200, {"tokens": self.tokenizer(body["prompt"])["input_ids"]})
            return
        self.steps.append((scope["path"], body))
        params = body.get("kv_transfer_params") or {}
        if not params.get("keepsight_evict"):
            await self.answer(body, send)
        elif self.refusal is not None:
            await reply(send, *self.refusal)
        else:
            await self.evict(receive, send)

    async def evict(self, receive: Any, send: Any) -> None:
        read = asyncio.ensure_future(self.open.wait())
        gone = asyncio.ensure_future(receive())
        await asyncio.wait({read, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not read.done():
            read.cancel()
            self.left += 1
            await reply(send, 200, None)
            return
        self.ids.append(f"{len(self.ids) + 1:032x}")
        file_of(self.folder, self.ids[-1]).write_bytes(b"0" * 100)
        await reply(send, 200, {"kv_transfer_params": {"keepsight": self.ids[-1], "entries": ENTRIES}})

    async def answer(self, body: dict[str, Any], send: Any) -> None:
        if not body.get("stream"):
            await reply(send, 200, body)
            return
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for word in (b"data: one\n\n", b"data: [DONE]\n\n"):
            await send({"type": "http.response.body", "body": word, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def reply(send: Any, status: int, body: Any) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


class Client:
    """A client of the middleware, which may leave."""

    def __init__(self, app: Prefixes, engine: Evicting) -> None:
        self.app = app
        self.engine = engine
        self.left = asyncio.Event()
        self.status = 0
        self.body = b""

    async def ask(self, path: str, request: dict[str, Any]) -> "Client":
        waiting = [{"type": "http.request", "body": json.dumps(request).encode()}]

        async def receive() -> Any:
            if waiting:
                return waiting.pop()
            await self.left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self.status = message.get("status", self.status)
            self.body += message.get("body", b"")

        headers = [(b"content-type", b"application/json"), (b"x-request-id", b"mine")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "app": self.engine}
        await self.app(scope, receive, send)
        return self

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


def chat(ids: list[int], **options: Any) -> dict[str, Any]:
    """A chat whose prompt has these tokens."""
    turns = [{"role": "user", "content": "for item in the list:"}]
    return {"messages": turns, "max_tokens": 8, "kv_transfer_params": {"prompt_token_ids": ids}, **options}


def with_engine(
    rewriter: Rewriter, folder: Path, conversation: Callable[[Evicting, Callable[[], Client]], Any]
) -> None:
    """Have a conversation, in which each client is new."""

    async def run() -> None:
        engine = Evicting(folder / "plain", rewriter.tokenizer)
        engine.open.set()
        app = Prefixes(engine, rewriter)
        await conversation(engine, lambda: Client(app, engine))

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_plain_chat_is_read_and_then_answered_from_what_was_kept(rewriter: Rewriter, tmp_path: Path, stream) -> None:
    async def conversation(engine: Evicting, new: Callable[[], Client]) -> None:
        client = await new().ask(CHAT, chat(LONG, stream=stream, model="tiny", cache_salt="ada", temperature=1.5))
        assert client.status == 200
        (first, evicted), (second, answered) = engine.steps
        name = evicted["kv_transfer_params"].pop("keepsight_plain")
        assert len(name) == 32 and evicted == {
            "model": "tiny",
            "prompt": LONG[:-1],
            "max_tokens": 1,
            "temperature": 0,
            "cache_salt": "ada",
            "kv_transfer_params": {"keepsight_evict": True},
        }
        ids = [*placeholders(engine.ids[0], ENTRIES, rewriter.alphabet), LONG[-1]]
        assert (first, second) == (COMPLETIONS, CHAT)
        assert answered["kv_transfer_params"] == {"prompt_token_ids": ids} and answered["temperature"] == 1.5
        if stream:
            assert client.body == b"data: one\n\ndata: [DONE]\n\n"

    with_engine(rewriter, tmp_path, conversation)


def test_the_same_prompt_is_read_once_and_salts_share_nothing(rewriter: Rewriter, tmp_path: Path) -> None:
    async def conversation(engine: Evicting, new: Callable[[], Client]) -> None:
        engine.open.clear()
        asked = [asyncio.create_task(new().ask(CHAT, chat(LONG))) for _ in range(3)]
        await settled(lambda: len(engine.steps) == 1)
        engine.open.set()
        await asyncio.gather(*asked)
        await new().ask(COMPLETIONS, {"prompt": LONG, "max_tokens": 4})
        assert len(engine.ids) == 1
        await new().ask(CHAT, chat(LONG, cache_salt="bob"))
        assert len(engine.ids) == 2
        file_of(engine.folder, engine.ids[0]).unlink()
        await new().ask(CHAT, chat(LONG))
        assert len(engine.ids) == 3  # a lost file is made again

    with_engine(rewriter, tmp_path, conversation)


def test_a_budget_of_a_request(rewriter: Rewriter, tmp_path: Path, monkeypatch) -> None:
    """The engine is asked for so many entries; prefixes of one budget are not those of another."""
    monkeypatch.setenv("KEEPSIGHT_MAX_BUDGET", "160")

    async def conversation(engine: Evicting, new: Callable[[], Client]) -> None:
        wanted = []
        for budget in (None, BUDGET, 160, 0.35, 160, 0.35, None):
            client = await new().ask(CHAT, chat(LONG, keepsight={"budget": budget}))
            assert client.status == 200 and "keepsight" not in json.loads(client.body)
        for path, body in engine.steps:
            if path == COMPLETIONS:
                wanted.append(body["kv_transfer_params"]["keepsight_evict"])
        assert wanted == [True, 160, 0.35] and len({*engine.ids}) == 3
        steps = len(engine.steps)
        for fields, param in (({"budget": 161}, "budget"), ({"budget": 100}, "budget"), ({"adapter": "a"}, "adapter")):
            client = await new().ask(CHAT, chat(LONG, keepsight=fields))
            assert client.status == 400 and client.error["param"] == f"keepsight.{param}"
        assert len(engine.steps) == steps

    with_engine(rewriter, tmp_path, conversation)


def test_kept_prefixes_are_bounded_by_bytes(rewriter: Rewriter, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KEEPSIGHT_PREFIX_BYTES", "250")

    async def conversation(engine: Evicting, new: Callable[[], Client]) -> None:
        for number in range(4):
            await new().ask(CHAT, chat(LONG[: 390 + number]))
        assert files(engine.folder) == {*engine.ids[-2:]}

    with_engine(rewriter, tmp_path, conversation)


def test_short_prompts_and_documents_are_one_request(rewriter: Rewriter, tmp_path: Path) -> None:
    least = 2 * max(BUDGET, letters_of_id(len(rewriter.alphabet)))

    async def conversation(engine: Evicting, new: Callable[[], Client]) -> None:
        await new().ask(CHAT, chat(LONG[: least - 1]))
        document = {"prompt": LONG, "kv_transfer_params": {"keepsight_evict": True}}
        await new().ask(COMPLETIONS, document)
        assert engine.steps == [(CHAT, chat(LONG[: least - 1])), (COMPLETIONS, document)]
        await new().ask(CHAT, chat(LONG[:least]))
        assert len(engine.steps) == 4

    with_engine(rewriter, tmp_path, conversation)


@pytest.mark.parametrize(
    ("refusal", "status", "why"),
    [
        ((400, {"error": {"message": "no\nmodel", "code": "model_not_found"}}), 400, "no model"),
        ((429, {"error": {"message": "later", "code": 429}}), 429, "later"),
        ((500, {"error": {"message": "EngineCore died", "code": 500}}), 500, "EngineCore died"),
        ((200, {"kv_transfer_params": {"keepsight_error": "spell", "keepsight_status": 400}}), 400, "keepsight: spell"),
        ((200, {"kv_transfer_params": {"keepsight_error": "No space left"}}), 500, "No space left"),
        ((200, {"kv_transfer_params": None}), 500, "does not say"),
        ((200, {"kv_transfer_params": {"keepsight": "0f" * 16, "entries": ENTRIES}}), 500, "FileNotFoundError"),
        ((200, None), 503, "not read to its end"),
    ],
)
def test_an_error_of_the_first_step_is_the_answer(rewriter: Rewriter, tmp_path: Path, refusal, status, why) -> None:
    async def conversation(engine: Evicting, new: Callable[[], Client]) -> None:
        engine.refusal = refusal
        client = await new().ask(CHAT, chat(LONG, stream=True))
        assert client.status == status and why in client.error["message"] and "\n" not in client.error["message"]
        assert len(engine.steps) == 1
        engine.refusal = None
        client = await new().ask(CHAT, chat(LONG))
        assert client.status == 200 and len(engine.steps) == 3  # it is read anew

    with_engine(rewriter, tmp_path, conversation)


@pytest.mark.parametrize("refusal", [None, (429, {"error": {"message": "later", "code": 429}})])
def test_a_stream_begins_while_its_prompt_is_still_read(rewriter: Rewriter, tmp_path, monkeypatch, refusal) -> None:
    """By empty lines, which are no events; an error is an event then. Whole answers wait for their status."""
    monkeypatch.setattr("keepsight.serving.vllm.middleware._PATIENCE", 0.05)
    monkeypatch.setattr("keepsight.serving.vllm.middleware._PING", 0.05)

    async def conversation(engine: Evicting, new: Callable[[], Client]) -> None:
        evict = engine.evict

        async def refuse(receive: Any, send: Any) -> None:
            await engine.open.wait()
            await reply(send, *refusal)

        if refusal is not None:
            monkeypatch.setattr(engine, "evict", refuse)
        engine.open.clear()
        stream = new()
        whole = new()
        asked = [asyncio.create_task(stream.ask(CHAT, chat(LONG, stream=True)))]
        asked.append(asyncio.create_task(whole.ask(CHAT, chat(LONG))))
        await settled(lambda: stream.body == b"\n\n\n")
        assert (stream.status, whole.status, whole.body) == (200, 0, b"")
        engine.open.set()
        await asyncio.gather(*asked)
        end = stream.body.decode().lstrip("\n")
        if refusal is None:
            assert end == "data: one\n\ndata: [DONE]\n\n" and whole.status == 200
        else:
            error, done = end.strip().split("\n\n")
            assert "later" in error and json.loads(error.removeprefix("data: "))["error"]["code"] == 429
            assert done == "data: [DONE]" and (stream.status, whole.status) == (200, 429)
        monkeypatch.setattr(engine, "evict", evict)

    with_engine(rewriter, tmp_path, conversation)


@pytest.mark.parametrize(("tokens", "max_tokens"), [(CONTEXT, None), (CONTEXT, 1), (CONTEXT - 9, 10), (2000, 1)])
def test_a_prompt_that_is_too_long_is_not_read(rewriter: Rewriter, tmp_path: Path, tokens, max_tokens) -> None:
    async def conversation(engine: Evicting, new: Callable[[], Client]) -> None:
        client = await new().ask(CHAT, chat((LONG * 5)[:tokens], max_tokens=max_tokens))
        assert client.status == 400 and client.error["code"] == "context_length_exceeded" and not engine.steps
        assert f"maximum context length is {CONTEXT} tokens" in client.error["message"]
        client = await new().ask(CHAT, chat((LONG * 5)[: CONTEXT - 9], max_tokens=9))
        assert client.status == 200

    with_engine(rewriter, tmp_path, conversation)


def test_a_prompt_whose_client_leaves_is_broken_off_unless_another_waits(rewriter: Rewriter, tmp_path: Path) -> None:
    async def conversation(engine: Evicting, new: Callable[[], Client]) -> None:
        engine.open.clear()
        clients = [new(), new()]
        asked = [asyncio.create_task(client.ask(CHAT, chat(LONG))) for client in clients]
        await settled(lambda: len(engine.steps) == 1)
        clients[0].left.set()
        await settled(asked[0].done)
        await asyncio.sleep(0.2)
        assert not engine.left
        clients[1].left.set()
        await settled(lambda: engine.left == 1)
        await asyncio.gather(*asked)
        engine.open.set()
        assert (await new().ask(CHAT, chat(LONG))).status == 200 and len(engine.ids) == 1

    with_engine(rewriter, tmp_path, conversation)


def test_a_prompt_that_is_being_read_when_the_server_stops_is_refused(
    rewriter: Rewriter, tmp_path, monkeypatch
) -> None:
    stopping = tmp_path / "stopping"
    monkeypatch.setenv(STOPPING, str(stopping))

    async def conversation(engine: Evicting, new: Callable[[], Client]) -> None:
        engine.open.clear()
        client = new()
        asked = asyncio.create_task(client.ask(CHAT, chat(LONG)))
        await settled(lambda: len(engine.steps) == 1)
        stopping.touch()
        await asked
        assert client.status == 503 and engine.left == 1

    with_engine(rewriter, tmp_path, conversation)


def test_the_names_of_the_servers_own_prefixes_are_not_the_clients(rewriter: Rewriter, tmp_path: Path) -> None:
    async def conversation(engine: Evicting, new: Callable[[], Client]) -> None:
        params = {"keepsight_evict": True, "keepsight_plain": "x"}
        client = await new().ask(COMPLETIONS, {"prompt": LONG, "kv_transfer_params": params})
        assert client.status == 400 and client.error["param"] == "kv_transfer_params" and not engine.steps

    with_engine(rewriter, tmp_path, conversation)


def test_an_engine_without_a_folder_of_ours_answers_plain_requests_alone(rewriter: Rewriter, tmp_path: Path) -> None:
    async def conversation(engine: Evicting, new: Callable[[], Client]) -> None:
        options = engine.state.vllm_config.kv_transfer_config.kv_connector_extra_config
        del options["plain"]
        assert plain_eviction(engine.state.vllm_config) is None
        await new().ask(CHAT, chat(LONG))
        assert engine.steps == [(CHAT, chat(LONG))]

    with_engine(rewriter, tmp_path, conversation)


@pytest.mark.parametrize(
    ("evict", "ragged", "code"),
    [
        ({"name": "snapkv"}, False, "missing"),
        ({"name": "quest", "budget": 128}, False, "model"),
        ({"name": "dapq", "budget": 128}, False, "model"),
        ({"name": "adakv", "budget": 128}, False, "conflict"),
        ({"name": "snapkv", "budget": 128, "allocate": {"name": "global", "page": 32}}, False, "conflict"),
        ({"name": "snapkv", "budget": 128, "allocate": {"name": "global", "page": 16}}, True, "conflict"),
    ],
)
def test_methods_that_cannot_run_inside_are_refused(evict, ragged, code) -> None:
    with refused("evict", code):
        evicting_method(evict, 32, ragged=ragged)
