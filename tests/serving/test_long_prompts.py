"""Long prompts are read beside vLLM: the worker at its socket, and the middleware, without vLLM."""

import asyncio
import errno
import json
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keepsight import DapQ, SnapKV
from keepsight.commands.serve import _prefix_folder
from keepsight.models.decoder import decoder_of
from keepsight.models.targets import Target, load_target
from keepsight.runtime.allocate import Uniform
from keepsight.serving.choices import Choice, Choices
from keepsight.serving.export import export
from keepsight.serving.prefix import PrefixStore, file_of, placeholders
from keepsight.serving.vllm.access import PATHS
from keepsight.serving.vllm.middleware import Prefixes, Rewriter
from keepsight.serving.vllm.reader import Complete, Reader, WorkerReader
from keepsight.serving.worker import Worker
from tests.refused import refused
from tests.serving.adapters import adapters_of
from tests.tiny import save_tiny_target, tiny_tokenizer

COMPLETIONS = PATHS[1]
TEXT = "for item in the list:\n    print(item)"
LONG = list(range(10, 210)) * 2


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(str(save_tiny_target(tmp_path_factory.mktemp("target"))), device="cpu")


@asynccontextmanager
async def connected(
    socket: Path, ids: Any, salt: str | None = None, **choice: Any
) -> AsyncIterator[asyncio.StreamReader]:
    """A connection that has asked the worker for a prompt."""
    while not socket.exists():
        await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_unix_connection(socket)
    writer.write(json.dumps({"ids": ids, "salt": salt, **choice}).encode() + b"\n")
    await writer.drain()
    try:
        yield reader
    finally:
        writer.close()


async def asked(socket: Path, ids: Any, salt: str | None = None, **choice: Any) -> Any:
    """What the worker replies; None where it says nothing."""
    async with connected(socket, ids, salt, **choice) as reader:
        line = await reader.readline()
    return json.loads(line) if line else None


async def settled(condition: Callable[[], bool]) -> None:
    """Wait until something is so."""
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it is not so after a minute")


def talk(worker: Worker, socket: Path, conversation: Callable[[], Awaitable[None]]) -> None:
    """Have a conversation with a worker that serves at a socket, and close it."""

    async def run() -> None:
        serving = asyncio.create_task(worker.serve(socket))
        try:
            await conversation()
        finally:
            serving.cancel()

    try:
        asyncio.run(run())
    finally:
        worker.close()
    assert not [*worker.root.glob("*.safetensors")]


def files(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.safetensors")}


class Gate:
    """Holds the worker's thread in the first layer of a model until it is opened; counts layers."""

    def __init__(self, target: Target) -> None:
        self.entered, self.open, self.layers = threading.Event(), threading.Event(), 0
        layers = decoder_of(target.model).layers
        self.hooks = [layer.register_forward_pre_hook(self._passed) for layer in layers]
        self.last = len(layers)

    def _passed(self, *_: Any) -> None:
        self.layers += 1
        self.entered.set()
        assert self.open.wait(60)

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()


@pytest.fixture
def gate(target: Target) -> Iterator[Gate]:
    gate = Gate(target)
    yield gate
    gate.open.set()
    gate.remove()


def test_prompts_are_read_in_turn_and_too_many_are_refused(target: Target, gate: Gate, tmp_path: Path) -> None:
    worker, socket = Worker(target, SnapKV(140, window=8), tmp_path, page=0, waiting=2), tmp_path / "socket"

    async def conversation() -> None:
        first = asyncio.create_task(asked(socket, LONG))
        await asyncio.to_thread(gate.entered.wait, 60)
        async with connected(socket, LONG[:-1]):
            await asyncio.sleep(0.05)  # it leaves before its turn: it is not read
        several = [asyncio.create_task(asked(socket, LONG[: -2 - number])) for number in range(6)]
        await settled(lambda: sum(task.done() for task in several) == 4)
        gate.open.set()
        good = await first
        assert good["entries"] == 140 and PrefixStore(tmp_path).header(good["id"]).seen == len(LONG)
        replies = await asyncio.gather(*several)
        assert sorted(reply.get("status", 200) for reply in replies) == [200] * 2 + [429] * 4
        assert {PrefixStore(tmp_path).header(name).seen for name in files(tmp_path)}.isdisjoint({len(LONG) - 1})

    talk(worker, socket, conversation)


@pytest.mark.parametrize(
    "ids, status, why",
    [
        (LONG * 20, 400, "maximum context length is 4096 tokens. However, your prompt has 8001 tokens"),
        (LONG[:20], 400, "entries"),
        ([*LONG, "x"], 400, "'x' is not a token id"),
        ([*LONG, 10**6], 400, "1000000' is not a token id"),
        ([*LONG, -1], 400, "-1"),
    ],
)
def test_what_cannot_be_read_is_refused(target: Target, tmp_path: Path, ids, status, why) -> None:
    worker, socket = Worker(target, SnapKV(140, window=8), tmp_path, page=0, waiting=2), tmp_path / "socket"

    async def conversation() -> None:
        reply = await asked(socket, ids)
        assert reply["status"] == status and why in reply["error"]
        assert reply.get("code") == ("context_length_exceeded" if "maximum" in why else None)

    talk(worker, socket, conversation)


def test_the_longest_prompt_leaves_room_for_what_observes_it(target: Target, tmp_path: Path) -> None:
    """Clients look for OpenAI's words, whatever else the method would say of a prompt that is too long for it."""
    worker, socket = Worker(target, DapQ(140), tmp_path, page=0, waiting=2), tmp_path / "socket"

    async def conversation() -> None:
        reply = await asked(socket, (LONG * 20)[:4090])
        assert reply["code"] == "context_length_exceeded" and "maximum context length is 4096" in reply["error"]
        worker.max_tokens = 300
        replies = [await asked(socket, LONG[:length]) for length in (300, 299)]
        assert replies[0]["code"] == "context_length_exceeded" and replies[1]["entries"] == 140
        assert "maximum context length is 300" in replies[0]["error"]

    talk(worker, socket, conversation)


def test_a_prompt_that_nobody_waits_for_is_read_no_further(target: Target, gate: Gate, tmp_path: Path) -> None:
    worker, socket = Worker(target, SnapKV(140, window=8), tmp_path, page=0, waiting=2), tmp_path / "socket"

    async def conversation() -> None:
        async with connected(socket, LONG):
            await asyncio.to_thread(gate.entered.wait, 60)
        await asyncio.sleep(0.1)  # until the worker knows that it has left
        gate.open.set()
        short = await asked(socket, LONG[:300])
        assert gate.layers == 1 + 3 * gate.last  # the second prompt, and two passes that check its rotation
        assert files(tmp_path) == {short["id"]}
        await asked(socket, LONG[:310])
        assert gate.layers == 1 + 4 * gate.last  # which are run once a model

    talk(worker, socket, conversation)


def test_a_prompt_is_read_to_its_end_while_another_waits_for_it(target: Target, gate: Gate, tmp_path: Path) -> None:
    worker, socket = Worker(target, SnapKV(140, window=8), tmp_path, page=0, waiting=2), tmp_path / "socket"

    async def conversation() -> None:
        async with connected(socket, LONG):
            await asyncio.to_thread(gate.entered.wait, 60)
            second = asyncio.create_task(asked(socket, LONG))
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.1)
        gate.open.set()
        reply = await second
        assert reply["known"] and files(tmp_path) == {reply["id"]}

    talk(worker, socket, conversation)


def test_a_lost_file_is_made_again(target: Target, tmp_path: Path) -> None:
    worker, socket = Worker(target, SnapKV(140, window=8), tmp_path, page=0, waiting=2), tmp_path / "socket"

    async def conversation() -> None:
        first, again = await asked(socket, LONG), await asked(socket, LONG)
        assert (first["known"], again["known"]) == (False, True) and again["id"] == first["id"]
        file_of(tmp_path, first["id"]).unlink()
        replies = await asyncio.gather(*(asked(socket, LONG) for _ in range(3)))
        assert all(reply["id"] == first["id"] for reply in replies) and files(tmp_path) == {first["id"]}

    talk(worker, socket, conversation)


def test_salts_share_nothing(target: Target, tmp_path: Path) -> None:
    worker, socket = Worker(target, SnapKV(140, window=8), tmp_path, page=0, waiting=2), tmp_path / "socket"

    async def conversation() -> None:
        replies = [await asked(socket, LONG, salt) for salt in (None, "ada", "bob", "ada", None)]
        assert [reply["known"] for reply in replies] == [False, False, False, True, True]
        ids = [reply["id"] for reply in replies]
        assert len({*ids}) == 3 and ids[3:] == [ids[1], ids[0]]

    talk(worker, socket, conversation)


def test_budgets_and_adapters_share_nothing(target: Target, tmp_path: Path) -> None:
    """Each prefix holds what its own method keeps; a request that names the server's own budget shares its prefix."""
    default, other = adapters_of(target, tmp_path / "modules", 140, allocate=Uniform())
    folder = tmp_path / "prefixes"
    worker = Worker(target, default, folder, adapters={"law": other}, page=0, waiting=2)
    socket = tmp_path / "socket"
    wanted: list[tuple[dict[str, Any], Any]] = [
        ({}, default),
        ({"budget": 136}, replace(default, budget=136)),
        ({"budget": 0.4}, replace(default, budget=0.4)),
        ({"adapter": "law"}, other),
        ({"adapter": "law", "budget": 136}, replace(other, budget=136)),
    ]

    async def conversation() -> None:
        ids = []
        for choice, method in wanted:
            reply = await asked(socket, LONG, **choice)
            assert not reply["known"]
            found = PrefixStore(folder).tensors(reply["id"])
            expected, header = export(target.model, started(target, method), tmp_path / "own")
            for name, tensor in PrefixStore(tmp_path / "own").tensors(expected).items():
                assert torch.equal(found[name], tensor)
            assert reply["entries"] == header.entries
            ids.append(reply["id"])
        assert len({*ids}) == len(wanted)
        for (choice, _), name in zip(wanted, ids, strict=True):
            reply = await asked(socket, LONG, **choice)
            assert reply["known"] and reply["id"] == name
        assert (await asked(socket, LONG, budget=140))["id"] == ids[0]
        reply = await asked(socket, LONG, adapter="code")
        assert (reply["status"], reply["field"]) == (400, "keepsight.adapter") and "'code'" in reply["error"]
        reply = await asked(socket, LONG, budget=0)
        assert (reply["status"], reply["field"]) == (400, "keepsight.budget")

    talk(worker, socket, conversation)


@torch.no_grad()
def started(target: Target, method: Any) -> Any:
    """The state of the long prompt, from which a method has evicted."""
    return method.start(target.model, torch.tensor([LONG]))


def test_kept_prefixes_are_bounded_by_bytes_and_those_in_use_stay(target: Target, tmp_path: Path) -> None:
    worker, socket = Worker(target, SnapKV(140, window=8), tmp_path, page=0, waiting=9), tmp_path / "socket"

    async def conversation() -> None:
        async with connected(socket, LONG) as lease:
            used = json.loads(await lease.readline())["id"]
            worker.kept.max_bytes = int(2.5 * file_of(tmp_path, used).stat().st_size)
            others = [(await asked(socket, LONG[: 390 + number]))["id"] for number in range(4)]
            await settled(lambda: files(tmp_path) == {used, others[-1]})
            worker.kept.max_bytes = 0
            await asked(socket, LONG[:380])
            await settled(lambda: files(tmp_path) == {used})
        await settled(lambda: not files(tmp_path))

    talk(worker, socket, conversation)


def test_a_worker_that_stops_refuses_at_once_and_leaves_prefixes_in_use(
    target: Target, gate: Gate, tmp_path: Path
) -> None:
    worker, socket = Worker(target, SnapKV(140, window=8), tmp_path, page=0, waiting=9), tmp_path / "socket"

    async def conversation() -> None:
        gate.open.set()
        async with connected(socket, LONG) as lease:
            used = json.loads(await lease.readline())["id"]
            gate.entered.clear()
            gate.open.clear()
            waiting = [asyncio.create_task(asked(socket, LONG[: 390 + number])) for number in range(3)]
            await asyncio.to_thread(gate.entered.wait, 60)
            worker.stop()
            gate.open.set()
            assert [reply["status"] for reply in await asyncio.gather(*waiting)] == [503] * 3
            assert (await asked(socket, LONG[:380]))["status"] == 503
            assert files(tmp_path) == {used}

    talk(worker, socket, conversation)


def test_servers_share_a_folder_of_named_prefixes_and_no_other(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the old and the new one of a rolling restart: what ends removes nothing that the other answers from."""
    monkeypatch.setattr("keepsight.serving.vllm.folder.MEMORY", tmp_path)
    named = tmp_path / "named"
    document, _ = export(target.model, started(target, SnapKV(140, window=8)), named)

    async def ask(worker: Worker) -> str:
        serving = asyncio.create_task(worker.serve(worker.root / "socket"))
        try:
            return str((await asked(worker.root / "socket", LONG))["id"])
        finally:
            serving.cancel()

    with _prefix_folder(tmp_path, 1) as new_folder:
        new = Worker(target, SnapKV(140, window=8), new_folder, page=0, waiting=2)
        with _prefix_folder(tmp_path, 1) as old_folder:
            old = Worker(target, SnapKV(140, window=8), old_folder, page=0, waiting=2)
            name = asyncio.run(ask(old))
            assert asyncio.run(ask(new)) == name, "the same prompt has the same name"
            old.close()
        assert files(new_folder) == {name} and files(named) == {document} and not old_folder.exists()
        assert PrefixStore(named, new_folder).tensors(name) and PrefixStore(named).tensors(document)
        new.close()
    assert files(named) == {document}


def test_a_full_disk_is_named_to_the_client_and_in_the_log(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker, socket = Worker(target, SnapKV(140, window=8), tmp_path, page=0, waiting=2), tmp_path / "socket"

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def conversation() -> None:
        with monkeypatch.context() as patch:
            patch.setattr("keepsight.serving.worker.export", full)
            reply = await asked(socket, LONG)
        assert reply["status"] == 500 and "No space left" in reply["error"]
        assert "No space left" in caplog.text and "400 tokens" in caplog.text
        assert (await asked(socket, LONG))["entries"] == 140

    talk(worker, socket, conversation)


def test_no_prefix_is_left_with_too_few_entries(target: Target, tmp_path: Path) -> None:
    worker, socket = Worker(target, SnapKV(0.5, window=8), tmp_path, page=0, waiting=2), tmp_path / "socket"

    async def conversation() -> None:
        few = await asked(socket, LONG[:40])
        assert not files(tmp_path) and few["status"] == 400 and "cannot spell an id" in few["error"]
        kept = await asked(socket, LONG)
        assert files(tmp_path) == {kept["id"]}

    talk(worker, socket, conversation)


def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    given = {"KEEPSIGHT_ROOT": str(tmp_path), "KEEPSIGHT_MODEL": str(save_tiny_target(tmp_path / "model"))}
    for name, value in given.items():
        with refused(name, "missing"):
            Prefixes(None)
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KEEPSIGHT_WORKER", "socket")
    with refused("KEEPSIGHT_LEAST", "missing"):
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


class Reads(Reader):
    """A `Reader` without a worker: every prompt is the prefix 0f0f... of 130 entries."""

    def __init__(self) -> None:
        super().__init__(20, context=2000, answer_tokens=500, choices=Choices(140, ["law"]))
        self.asked, self.salts, self.open = list[list[int]](), list[str](), 0
        self.chosen = list[Choice]()

    @asynccontextmanager
    async def prefix(
        self, ids: list[int], salt: str, choice: Choice, complete: Complete
    ) -> AsyncIterator[tuple[str, int]]:
        self.asked.append(ids)
        self.chosen.append(choice)
        self.salts.append(salt)
        self.open += 1
        yield "0f" * 16, 130
        self.open -= 1


async def replied(app: Prefixes, engine: Engine, path: str, body: Any, key: str = "") -> tuple[int, Any]:
    """Status and body of the reply to a request."""
    messages: list[Any] = [{"type": "http.request", "body": json.dumps(body).encode()}]
    replies = list[Any]()

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        replies.append(message)

    headers = [(b"content-type", b"application/json")]
    if key:
        headers.append((b"authorization", f"Bearer {key}".encode()))
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "app": engine}
    await app(scope, receive, send)
    return replies[0]["status"], json.loads(replies[1]["body"])


def sent(app: Prefixes, engine: Engine, path: str, body: Any, key: str = "") -> tuple[int, Any]:
    return asyncio.run(replied(app, engine, path, body, key))


def test_a_long_prompt_is_read_elsewhere_and_a_short_one_is_not(rewriter: Rewriter):
    engine, reader = Engine(rewriter.tokenizer), Reads()
    app = Prefixes(engine, rewriter, reader)
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


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_prompt_and_its_answer_fit_the_context(rewriter: Rewriter, name) -> None:
    """vLLM knows only the entries that are kept of the prompt."""
    engine, reader = Engine(rewriter.tokenizer), Reads()
    app = Prefixes(engine, rewriter, reader)
    messages = [{"role": "user", "content": TEXT}]

    def ask(prompt: int, wanted: int | None) -> tuple[int, Any]:
        ids = {"prompt_token_ids": (LONG * 5)[:prompt]}
        return sent(app, engine, PATHS[0], {"messages": messages, "kv_transfer_params": ids, name: wanted})

    status, reply = ask(1900, 101)
    assert status == 400 and reply["error"]["code"] == "context_length_exceeded" and not reader.asked
    assert "maximum context length is 2000 tokens" in reply["error"]["message"]
    assert ask(1900, 100)[0] == 200 and engine.seen[-1][1][name] == 100
    ask(1900, None)
    assert engine.seen[-1][1]["max_completion_tokens"] == 100, "a length that the request does not name is what fits"
    ask(1500, None)
    assert engine.seen[-1][1].get(name) is None, "or the server's"
    if name == "max_tokens":
        status, reply = sent(app, engine, COMPLETIONS, {"prompt": LONG * 4, name: 401})
        assert status == 400 and reply["error"]["code"] == "context_length_exceeded"


def test_texts_beyond_all_prompts_are_not_tokenized(rewriter: Rewriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor sent to vLLM, which would tokenize all of them, and let others wait."""
    monkeypatch.setattr(rewriter, "context", 2000)
    engine = Engine(None)  # it cannot tokenize
    app = Prefixes(engine, rewriter, Reads())
    text = "for item in the list " * 2000
    for path, body in (
        (COMPLETIONS, {"prompt": text}),
        (COMPLETIONS, {"prompt": ["for", text]}),
        (PATHS[0], {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}),
    ):
        status, reply = sent(app, engine, path, body)
        assert status == 400 and reply["error"]["code"] == "context_length_exceeded" and not engine.seen
        assert "maximum context length is 2000 tokens" in reply["error"]["message"]


def test_salts_reach_the_worker_and_bad_ones_vllm(rewriter: Rewriter) -> None:
    engine, reader = Engine(rewriter.tokenizer), Reads()
    app = Prefixes(engine, rewriter, reader)
    for salt in ("ada", None):
        sent(app, engine, COMPLETIONS, {"prompt": TEXT * 5, "cache_salt": salt})
    assert reader.salts == ["ada", ""]
    for wrong in ("", 3, ["a"]):
        body = {"prompt": TEXT * 5, "cache_salt": wrong}
        sent(app, engine, COMPLETIONS, body)
        assert engine.seen[-1] == (COMPLETIONS, body)  # vLLM says what is wrong
    assert len(reader.asked) == 2


def test_what_a_request_chooses_reaches_the_worker(rewriter: Rewriter) -> None:
    """Within the operator's limits; vLLM does not see the field."""
    engine, reader = Engine(rewriter.tokenizer), Reads()
    app = Prefixes(engine, rewriter, reader)
    chosen = [Choice(), Choice(budget=130), Choice(budget=0.3), Choice("law"), Choice("law", 136)]
    for choice in chosen:
        body = {"prompt": TEXT * 15, "keepsight": {"adapter": choice.adapter, "budget": choice.budget}}
        assert sent(app, engine, COMPLETIONS, body)[0] == 200
        assert engine.seen[-1][1].keys() == {"prompt"}
    assert reader.chosen == chosen
    refused_fields: list[tuple[dict[str, Any], str, str]] = [
        ({"budget": 141}, "budget", "141 keeps more of this prompt than the 140 that this server allows (max_budget=)"),
        ({"budget": 0.9}, "budget", "max_budget="),
        ({"budget": 16}, "budget", "cannot spell an id"),
        ({"budget": 0}, "budget", "greater than"),
        ({"budget": "many"}, "budget", "many"),
        ({"adapter": "code"}, "adapter", "no adapter 'code'; this server has 'law'"),
        ({"adapter": 3}, "adapter", "string"),
    ]
    for fields, name, why in refused_fields:
        for prompt in (TEXT * 15, TEXT * 15 + " a", LONG):
            status, reply = sent(app, engine, COMPLETIONS, {"prompt": prompt, "keepsight": fields})
            error = reply["error"]
            assert status == 400 and error["param"] == f"keepsight.{name}" and why in error["message"], fields
    assert len(reader.asked) == len(chosen)


def test_short_prompts_are_answered_by_vllm_whatever_they_choose(rewriter: Rewriter) -> None:
    """By a budget of its own, a prompt is long from twice that budget; what is chosen is checked all the same."""
    engine, reader = Engine(rewriter.tokenizer), Reads()
    reader.least = 300
    app = Prefixes(engine, rewriter, reader)
    lengths: list[tuple[int | float | None, int, bool]] = [(None, 300, True), (None, 299, False)]
    lengths += [(128, 256, True), (128, 255, False), (140, 280, True), (140, 279, False)]
    lengths += [(0.3, 300, True), (0.3, 299, False)]
    for budget, tokens, is_long in lengths:
        before = len(reader.asked)
        status, _ = sent(app, engine, COMPLETIONS, {"prompt": LONG[:tokens], "keepsight": {"budget": budget}})
        assert (status, len(reader.asked) - before) == (200, int(is_long)), (budget, tokens)
    reader.least = 20
    body = {"prompt": LONG[:130], "keepsight": {"budget": 130}}
    assert sent(app, engine, COMPLETIONS, body)[0] == 200 and engine.seen[-1][1]["prompt"] == LONG[:130]
    for prompt in (LONG[:30], "Hi"):
        status, _ = sent(app, engine, COMPLETIONS, {"prompt": prompt, "keepsight": {"budget": 141}})
        assert status == 400
        assert sent(app, engine, COMPLETIONS, {"prompt": prompt, "keepsight": {"budget": 140}})[0] == 200


def test_servers_and_models_without_eviction_refuse_what_is_chosen(rewriter: Rewriter) -> None:
    engine = Engine(rewriter.tokenizer)
    engine.state.openai_serving_models = SimpleNamespace(lora_requests={"poet": None})
    body = {"prompt": TEXT * 5, "keepsight": {"budget": 128}}
    document = {"kv_transfer_params": {"keepsight_evict": True}}
    for app, further, why in (
        (Prefixes(engine, rewriter), {}, "evicts from no plain request"),
        (Prefixes(engine, rewriter, Reads()), {"model": "poet"}, "LoRA"),
        (Prefixes(engine, rewriter, Reads()), document, "keepsight_evict"),
    ):
        status, reply = sent(app, engine, COMPLETIONS, body | further)
        assert status == 400 and why in reply["error"]["message"] and not engine.seen
    assert sent(Prefixes(engine, rewriter), engine, COMPLETIONS, body | {"keepsight": {"budget": None}})[0] == 200


def test_the_largest_budget_and_the_adapters_come_from_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = {"KEEPSIGHT_ROOT": str(tmp_path), "KEEPSIGHT_MODEL": str(save_tiny_target(tmp_path / "model"))}
    given |= {"KEEPSIGHT_WORKER": "socket", "KEEPSIGHT_LEAST": "20", "KEEPSIGHT_ADAPTERS": '["law"]'}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    for value, largest in (("256", 256), ("0.25", 0.25), ("1e-3", 0.001)):
        monkeypatch.setenv("KEEPSIGHT_MAX_BUDGET", value)
        reader: Any = Prefixes(None).reader
        assert reader.choices == Choices(largest, ["law"])
    for value in ("much", "0", "1.5", "[]"):
        monkeypatch.setenv("KEEPSIGHT_MAX_BUDGET", value)
        with refused("KEEPSIGHT_MAX_BUDGET", "type"):
            Prefixes(None)


def test_a_prompt_for_a_lora_is_left_to_vllm(rewriter: Rewriter) -> None:
    """The worker reads with the base model, and the engine loads no prefix under a LoRA."""
    engine, reader = Engine(rewriter.tokenizer), Reads()
    engine.state.openai_serving_models = SimpleNamespace(lora_requests={"poet": None})
    app = Prefixes(engine, rewriter, reader)
    body = {"prompt": TEXT * 5, "model": "poet"}
    sent(app, engine, COMPLETIONS, body)
    assert engine.seen == [(COMPLETIONS, body)] and not reader.asked
    sent(app, engine, COMPLETIONS, body | {"model": ["poet"]})  # vLLM says what is wrong


def test_token_ids_of_a_chat_are_read_in_the_place_of_its_messages(rewriter: Rewriter) -> None:
    engine, reader = Engine(rewriter.tokenizer), Reads()
    app = Prefixes(engine, rewriter, reader)
    messages = [{"role": "user", "content": TEXT}]
    sent(app, engine, PATHS[0], {"messages": messages, "kv_transfer_params": {"prompt_token_ids": LONG}})
    assert reader.asked == [LONG[:-1]]


def test_a_refusal_of_the_worker_has_its_status_and_code(target: Target, rewriter: Rewriter, tmp_path: Path) -> None:
    worker, socket = Worker(target, SnapKV(140, window=8), tmp_path, page=0, waiting=2, max_tokens=300), tmp_path / "at"
    engine = Engine(rewriter.tokenizer)
    app = Prefixes(engine, rewriter, WorkerReader(str(socket), 20))

    async def conversation() -> None:
        while not socket.exists():
            await asyncio.sleep(0.01)
        status, reply = await replied(app, engine, COMPLETIONS, {"prompt": LONG})
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 300 tokens" in reply["error"]["message"]
        status, _ = await replied(app, engine, COMPLETIONS, {"prompt": LONG[:280]})
        assert status == 200 and len(engine.seen[-1][1]["prompt"]) == 141
        worker.stop()
        status, reply = await replied(app, engine, COMPLETIONS, {"prompt": LONG[:270]})
        assert status == 503 and "shutting down" in reply["error"]["message"]

    talk(worker, socket, conversation)


def test_the_next_prompt_is_read_while_an_answer_runs(target: Target, rewriter: Rewriter, tmp_path: Path) -> None:
    worker, socket = Worker(target, SnapKV(140, window=8), tmp_path, page=0, waiting=2), tmp_path / "at"

    async def conversation() -> None:
        answering, may_end = asyncio.Event(), asyncio.Event()

        class Slow(Engine):
            async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
                answering.set()
                await may_end.wait()
                await super().__call__(scope, receive, send)

        engine = Slow(rewriter.tokenizer)
        app = Prefixes(engine, rewriter, WorkerReader(str(socket), 20))
        while not socket.exists():
            await asyncio.sleep(0.01)
        first = asyncio.create_task(replied(app, engine, COMPLETIONS, {"prompt": LONG}))
        await answering.wait()
        second = asyncio.create_task(replied(app, engine, COMPLETIONS, {"prompt": LONG[:300]}))
        await settled(lambda: len(files(tmp_path)) == 2)
        assert not first.done()
        may_end.set()
        assert [status for status, _ in await asyncio.gather(first, second)] == [200, 200]

    talk(worker, socket, conversation)


def test_without_the_key_nothing_is_read_and_other_endpoints_are_closed(rewriter: Rewriter):
    engine, reader = Engine(rewriter.tokenizer, "secret"), Reads()
    app = Prefixes(engine, rewriter, reader)
    for key in ("", "secre", "other"):
        assert sent(app, engine, COMPLETIONS, {"prompt": TEXT * 5}, key)[0] == 401
    assert not engine.seen and not reader.asked
    sent(app, engine, COMPLETIONS, {"prompt": TEXT * 5}, "secret")
    assert len(reader.asked) == 1
    status, reply = sent(app, engine, "/v1/responses", {"input": TEXT}, "secret")
    assert status == 404 and COMPLETIONS in reply["error"]["message"]
