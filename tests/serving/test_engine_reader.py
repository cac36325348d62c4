"""Plain requests to an engine that evicts: the middleware's two steps, with a stand-in for vLLM's application."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepsight.serving.inside import evicting_config, evicting_method, plain_eviction
from keepsight.serving.prefix import file_of, letters_of_id, placeholders
from keepsight.serving.vllm.access import CHAT, COMPLETIONS, STOPPING
from keepsight.serving.vllm.middleware import Prefixes, Rewriter
from tests.refused import refused
from tests.serving.beside_vllm import LONG, prefix_ids, wait_for

BUDGET = 128
ENTRIES = 130
CONTEXT = 600
BUSY = (429, {"error": {"message": "later", "code": 429}})


class Evicting:
    """Stands for vLLM's application, whose engine writes a prefix for each prompt that it is asked to evict from.

    Attributes:
        steps: Paths and bodies of what it was asked, in order.
        ids: The ids of the prefixes that it has written, in order.
        open: While it is not set, prompts are being read.
        refusal: The status and the body with which it answers a prompt instead.
        broken_off: Number of prompts that were not read to their end.
    """

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.steps = list[tuple[str, dict[str, Any]]]()
        self.ids = list[str]()
        self.open = asyncio.Event()
        self.refusal: tuple[int, Any] | None = None
        self.broken_off = 0
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
        reading = asyncio.ensure_future(self.open.wait())
        leaving = asyncio.ensure_future(receive())
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not reading.done():
            reading.cancel()
            self.broken_off += 1
            await reply(send, 200, None)
            return
        prefix = f"{len(self.ids) + 1:032x}"
        self.ids.append(prefix)
        file_of(self.folder, prefix).write_bytes(b"0" * 100)
        await reply(send, 200, {"kv_transfer_params": {"keepsight": prefix, "entries": ENTRIES}})

    async def answer(self, body: dict[str, Any], send: Any) -> None:
        if not body.get("stream"):
            await reply(send, 200, body)
            return
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for event in (b"data: one\n\n", b"data: [DONE]\n\n"):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def reply(send: Any, status: int, body: Any) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


class Client:
    """A client of the middleware, which may leave."""

    def __init__(self, app: Prefixes, engine: Evicting) -> None:
        self.app = app
        self.engine = engine
        self.has_left = asyncio.Event()
        self.status = 0
        self.body = b""

    async def ask(self, path: str, request: dict[str, Any]) -> "Client":
        requests = [{"type": "http.request", "body": json.dumps(request).encode()}]

        async def receive() -> Any:
            if requests:
                return requests.pop()
            await self.has_left.wait()
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


NewClient = Callable[[], Client]


def chat(ids: list[int], **options: Any) -> dict[str, Any]:
    """A chat whose prompt has these tokens."""
    turns = [{"role": "user", "content": "for item in the list:"}]
    return {"messages": turns, "max_tokens": 8, "kv_transfer_params": {"prompt_token_ids": ids}, **options}


def with_engine(
    rewriter: Rewriter, folder: Path, conversation: Callable[[Evicting, NewClient], Awaitable[None]]
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
    async def conversation(engine: Evicting, new: NewClient) -> None:
        client = await new().ask(CHAT, chat(LONG, stream=stream, model="tiny", cache_salt="ada", temperature=1.5))
        assert client.status == 200
        (path_of_reading, reading), (path_of_answer, answering) = engine.steps
        assert path_of_reading == COMPLETIONS
        assert len(reading["kv_transfer_params"].pop("keepsight_plain")) == 32
        assert reading == {
            "model": "tiny",
            "prompt": LONG[:-1],
            "max_tokens": 1,
            "temperature": 0,
            "cache_salt": "ada",
            "kv_transfer_params": {"keepsight_evict": True},
        }
        assert path_of_answer == CHAT
        ids = [*placeholders(engine.ids[0], ENTRIES, rewriter.alphabet), LONG[-1]]
        assert answering["kv_transfer_params"] == {"prompt_token_ids": ids}
        assert answering["temperature"] == 1.5
        if stream:
            assert client.body == b"data: one\n\ndata: [DONE]\n\n"

    with_engine(rewriter, tmp_path, conversation)


def test_the_same_prompt_is_read_once_and_salts_share_nothing(rewriter: Rewriter, tmp_path: Path) -> None:
    async def conversation(engine: Evicting, new: NewClient) -> None:
        engine.open.clear()
        requests = [asyncio.create_task(new().ask(CHAT, chat(LONG))) for _ in range(3)]
        await wait_for(lambda: len(engine.steps) == 1)
        engine.open.set()
        await asyncio.gather(*requests)
        await new().ask(COMPLETIONS, {"prompt": LONG, "max_tokens": 4})
        assert len(engine.ids) == 1
        await new().ask(CHAT, chat(LONG, cache_salt="bob"))
        assert len(engine.ids) == 2
        file_of(engine.folder, engine.ids[0]).unlink()
        await new().ask(CHAT, chat(LONG))
        assert len(engine.ids) == 3, "a lost file is made again"

    with_engine(rewriter, tmp_path, conversation)


def test_a_budget_of_a_request(rewriter: Rewriter, tmp_path: Path, monkeypatch) -> None:
    """The engine is asked for so many entries; prefixes of one budget are not those of another."""
    monkeypatch.setenv("KEEPSIGHT_MAX_BUDGET", "160")

    async def conversation(engine: Evicting, new: NewClient) -> None:
        for budget in (None, BUDGET, 160, 0.35, 160, 0.35, None):
            client = await new().ask(CHAT, chat(LONG, keepsight={"budget": budget}))
            assert client.status == 200
            assert "keepsight" not in json.loads(client.body)
        evictions = []
        for path, body in engine.steps:
            if path == COMPLETIONS:
                evictions.append(body["kv_transfer_params"]["keepsight_evict"])
        assert evictions == [True, 160, 0.35]
        assert len({*engine.ids}) == 3
        steps_before = len(engine.steps)
        for fields, param in (({"budget": 161}, "budget"), ({"budget": 100}, "budget"), ({"adapter": "a"}, "adapter")):
            client = await new().ask(CHAT, chat(LONG, keepsight=fields))
            assert client.status == 400
            assert client.error["param"] == f"keepsight.{param}"
        assert len(engine.steps) == steps_before

    with_engine(rewriter, tmp_path, conversation)


def test_kept_prefixes_are_bounded_by_bytes(rewriter: Rewriter, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KEEPSIGHT_PREFIX_BYTES", "250")

    async def conversation(engine: Evicting, new: NewClient) -> None:
        for number in range(4):
            await new().ask(CHAT, chat(LONG[: 390 + number]))
        assert prefix_ids(engine.folder) == {*engine.ids[-2:]}

    with_engine(rewriter, tmp_path, conversation)


def test_short_prompts_and_documents_are_one_request(rewriter: Rewriter, tmp_path: Path) -> None:
    least = 2 * max(BUDGET, letters_of_id(len(rewriter.alphabet)))

    async def conversation(engine: Evicting, new: NewClient) -> None:
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
        (BUSY, 429, "later"),
        ((500, {"error": {"message": "EngineCore died", "code": 500}}), 500, "EngineCore died"),
        ((200, {"kv_transfer_params": {"keepsight_error": "spell", "keepsight_status": 400}}), 400, "keepsight: spell"),
        ((200, {"kv_transfer_params": {"keepsight_error": "No space left"}}), 500, "No space left"),
        ((200, {"kv_transfer_params": None}), 500, "does not say"),
        ((200, {"kv_transfer_params": {"keepsight": "0f" * 16, "entries": ENTRIES}}), 500, "FileNotFoundError"),
        ((200, None), 503, "not read to its end"),
    ],
)
def test_an_error_of_the_first_step_is_the_answer(rewriter: Rewriter, tmp_path: Path, refusal, status, why) -> None:
    async def conversation(engine: Evicting, new: NewClient) -> None:
        engine.refusal = refusal
        client = await new().ask(CHAT, chat(LONG, stream=True))
        assert client.status == status
        assert why in client.error["message"]
        assert "\n" not in client.error["message"]
        assert len(engine.steps) == 1
        engine.refusal = None
        client = await new().ask(CHAT, chat(LONG))
        assert client.status == 200
        assert len(engine.steps) == 3, "it is read anew"

    with_engine(rewriter, tmp_path, conversation)


@pytest.mark.parametrize("refusal", [None, BUSY])
def test_a_stream_begins_while_its_prompt_is_still_read(rewriter: Rewriter, tmp_path, monkeypatch, refusal) -> None:
    """By empty lines, which are no events; an error is an event then. Unstreamed answers wait for their status."""
    monkeypatch.setattr("keepsight.serving.vllm.middleware._PATIENCE", 0.05)
    monkeypatch.setattr("keepsight.serving.vllm.middleware._PING", 0.05)

    async def conversation(engine: Evicting, new: NewClient) -> None:
        async def refuse(receive: Any, send: Any) -> None:
            await engine.open.wait()
            await reply(send, *refusal)

        if refusal is not None:
            monkeypatch.setattr(engine, "evict", refuse)
        engine.open.clear()
        stream = new()
        unstreamed = new()
        requests = [
            asyncio.create_task(stream.ask(CHAT, chat(LONG, stream=True))),
            asyncio.create_task(unstreamed.ask(CHAT, chat(LONG))),
        ]
        await wait_for(lambda: stream.body == b"\n\n\n")
        assert stream.status == 200
        assert unstreamed.status == 0
        assert unstreamed.body == b""
        engine.open.set()
        await asyncio.gather(*requests)
        assert stream.status == 200
        events = stream.body.decode().strip("\n").split("\n\n")
        if refusal is None:
            assert events == ["data: one", "data: [DONE]"]
            assert unstreamed.status == 200
        else:
            error, end = events
            assert "later" in error
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == 429
            assert end == "data: [DONE]"
            assert unstreamed.status == 429

    with_engine(rewriter, tmp_path, conversation)


@pytest.mark.parametrize(("tokens", "max_tokens"), [(CONTEXT, None), (CONTEXT, 1), (CONTEXT - 9, 10), (2000, 1)])
def test_a_prompt_that_is_too_long_is_not_read(rewriter: Rewriter, tmp_path: Path, tokens, max_tokens) -> None:
    async def conversation(engine: Evicting, new: NewClient) -> None:
        client = await new().ask(CHAT, chat((LONG * 5)[:tokens], max_tokens=max_tokens))
        assert client.status == 400
        assert client.error["code"] == "context_length_exceeded"
        assert f"maximum context length is {CONTEXT} tokens" in client.error["message"]
        assert not engine.steps
        client = await new().ask(CHAT, chat((LONG * 5)[: CONTEXT - 9], max_tokens=9))
        assert client.status == 200

    with_engine(rewriter, tmp_path, conversation)


def test_a_prompt_whose_client_leaves_is_broken_off_unless_another_waits(rewriter: Rewriter, tmp_path: Path) -> None:
    async def conversation(engine: Evicting, new: NewClient) -> None:
        engine.open.clear()
        first = new()
        second = new()
        first_request = asyncio.create_task(first.ask(CHAT, chat(LONG)))
        second_request = asyncio.create_task(second.ask(CHAT, chat(LONG)))
        await wait_for(lambda: len(engine.steps) == 1)
        first.has_left.set()
        await wait_for(first_request.done)
        await asyncio.sleep(0.2)
        assert not engine.broken_off
        second.has_left.set()
        await wait_for(lambda: engine.broken_off == 1)
        await asyncio.gather(first_request, second_request)
        engine.open.set()
        third = await new().ask(CHAT, chat(LONG))
        assert third.status == 200
        assert len(engine.ids) == 1

    with_engine(rewriter, tmp_path, conversation)


def test_a_prompt_that_is_being_read_when_the_server_stops_is_refused(
    rewriter: Rewriter, tmp_path, monkeypatch
) -> None:
    stopping = tmp_path / "stopping"
    monkeypatch.setenv(STOPPING, str(stopping))

    async def conversation(engine: Evicting, new: NewClient) -> None:
        engine.open.clear()
        client = new()
        request = asyncio.create_task(client.ask(CHAT, chat(LONG)))
        await wait_for(lambda: len(engine.steps) == 1)
        stopping.touch()
        await request
        assert client.status == 503
        assert engine.broken_off == 1

    with_engine(rewriter, tmp_path, conversation)


def test_the_names_of_the_servers_own_prefixes_are_not_the_clients(rewriter: Rewriter, tmp_path: Path) -> None:
    async def conversation(engine: Evicting, new: NewClient) -> None:
        params = {"keepsight_evict": True, "keepsight_plain": "x"}
        client = await new().ask(COMPLETIONS, {"prompt": LONG, "kv_transfer_params": params})
        assert client.status == 400
        assert client.error["param"] == "kv_transfer_params"
        assert not engine.steps

    with_engine(rewriter, tmp_path, conversation)


def test_an_engine_without_a_folder_of_ours_answers_plain_requests_alone(rewriter: Rewriter, tmp_path: Path) -> None:
    async def conversation(engine: Evicting, new: NewClient) -> None:
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
