"""Long prompts are read beside vLLM: the worker at its socket, and the middleware, without vLLM."""

import asyncio
import errno
import json
import os
import threading
import time
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
from keepsight.serving.vllm.reader import WorkerReader
from keepsight.serving.worker import Worker
from tests.refused import refused
from tests.serving.adapters import adapters_of
from tests.serving.beside_vllm import ENTRIES, LONG, PREFIX, FixedReader, Middleware, VllmStandIn, prefix_ids, wait_for
from tests.tiny import save_tiny_target

CHAT, COMPLETIONS = PATHS
METHOD = SnapKV(140, window=8)
TEXT = "for item in the list:\n    print(item)"
MESSAGES = [{"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(str(save_tiny_target(tmp_path_factory.mktemp("target"))), device="cpu")


# The worker at its socket


def new_worker(target: Target, folder: Path, method: Any = METHOD, waiting: int = 2, **options: Any) -> Worker:
    """A worker whose heads all keep the same number of entries."""
    return Worker(target, method, folder, page=0, waiting=waiting, **options)


@pytest.fixture
def worker(target: Target, tmp_path: Path) -> Worker:
    return new_worker(target, tmp_path)


def socket_of(worker: Worker) -> Path:
    return worker.root / "socket"


@asynccontextmanager
async def connected(
    worker: Worker, ids: Any, salt: str | None = None, **choice: Any
) -> AsyncIterator[asyncio.StreamReader]:
    """A connection that has asked the worker for a prompt."""
    end = time.monotonic() + 20
    while not socket_of(worker).exists():
        assert time.monotonic() < end, "the worker never listened"
        await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_unix_connection(socket_of(worker))
    writer.write(json.dumps({"ids": ids, "salt": salt, **choice}).encode() + b"\n")
    await writer.drain()
    try:
        yield reader
    finally:
        writer.close()


async def ask(worker: Worker, ids: Any, salt: str | None = None, **choice: Any) -> Any:
    """The worker's reply; None where it sends none."""
    async with connected(worker, ids, salt, **choice) as reader:
        line = await reader.readline()
    return json.loads(line) if line else None


def talk(worker: Worker, conversation: Callable[[], Awaitable[None]]) -> None:
    """Have a conversation with a worker that serves, and close it, which leaves no prefix."""

    async def run() -> None:
        serving = asyncio.create_task(worker.serve(socket_of(worker)))
        try:
            await conversation()
        finally:
            serving.cancel()

    try:
        asyncio.run(run())
    finally:
        worker.close()
    assert not prefix_ids(worker.root)


class Gate:
    """Holds the worker's thread in the first layer of a model until it is opened; counts layers."""

    def __init__(self, target: Target) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        self.layers_passed = 0
        layers = decoder_of(target.model).layers
        self.hooks = [layer.register_forward_pre_hook(self._passed) for layer in layers]
        self.layers_of_a_pass = len(layers)

    def _passed(self, *_: Any) -> None:
        self.layers_passed += 1
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


def test_prompts_are_read_in_turn_and_too_many_are_refused(worker: Worker, gate: Gate) -> None:
    async def conversation() -> None:
        first = asyncio.create_task(ask(worker, LONG))
        await asyncio.to_thread(gate.entered.wait, 60)
        async with connected(worker, LONG[:-1]):
            await asyncio.sleep(0.05)  # it leaves before its turn: it is not read
        later = [asyncio.create_task(ask(worker, LONG[: -2 - number])) for number in range(6)]
        await wait_for(lambda: sum(task.done() for task in later) == 4)
        gate.open.set()
        reply = await first
        store = PrefixStore(worker.root)
        assert reply["entries"] == 140
        assert store.header(reply["id"]).seen == len(LONG)
        statuses = [reply.get("status", 200) for reply in await asyncio.gather(*later)]
        assert sorted(statuses) == [200] * 2 + [429] * 4
        lengths_read = {store.header(prefix).seen for prefix in prefix_ids(worker.root)}
        assert len(LONG) - 1 not in lengths_read

    talk(worker, conversation)


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
def test_what_cannot_be_read_is_refused(worker: Worker, ids, status, why) -> None:
    code = "context_length_exceeded" if "maximum" in why else None

    async def conversation() -> None:
        reply = await ask(worker, ids)
        assert reply["status"] == status
        assert why in reply["error"]
        assert reply.get("code") == code

    talk(worker, conversation)


def test_the_longest_prompt_leaves_room_for_what_observes_it(target: Target, tmp_path: Path) -> None:
    """Clients look for OpenAI's words, whatever else the method would say of a prompt that is too long for it."""
    worker = new_worker(target, tmp_path, DapQ(140))

    async def conversation() -> None:
        reply = await ask(worker, (LONG * 20)[:4090])
        assert reply["code"] == "context_length_exceeded"
        assert "maximum context length is 4096" in reply["error"]
        worker.max_tokens = 300
        reply = await ask(worker, LONG[:300])
        assert reply["code"] == "context_length_exceeded"
        assert "maximum context length is 300" in reply["error"]
        reply = await ask(worker, LONG[:299])
        assert reply["entries"] == 140

    talk(worker, conversation)


def test_a_prompt_that_nobody_waits_for_is_read_no_further(worker: Worker, gate: Gate) -> None:
    async def conversation() -> None:
        async with connected(worker, LONG):
            await asyncio.to_thread(gate.entered.wait, 60)
        await asyncio.sleep(0.1)  # until the worker knows that it has left
        gate.open.set()
        reply = await ask(worker, LONG[:300])
        # One layer of the first prompt, then the second prompt, and two passes that check its rotation.
        assert gate.layers_passed == 1 + 3 * gate.layers_of_a_pass
        assert prefix_ids(worker.root) == {reply["id"]}
        await ask(worker, LONG[:310])
        assert gate.layers_passed == 1 + 4 * gate.layers_of_a_pass, "the rotation is checked once a model"

    talk(worker, conversation)


def test_a_prompt_is_read_to_its_end_while_another_waits_for_it(worker: Worker, gate: Gate) -> None:
    async def conversation() -> None:
        async with connected(worker, LONG):
            await asyncio.to_thread(gate.entered.wait, 60)
            second = asyncio.create_task(ask(worker, LONG))
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.1)
        gate.open.set()
        reply = await second
        assert reply["known"]
        assert prefix_ids(worker.root) == {reply["id"]}

    talk(worker, conversation)


def test_a_lost_file_is_made_again(worker: Worker) -> None:
    async def conversation() -> None:
        first = await ask(worker, LONG)
        again = await ask(worker, LONG)
        assert not first["known"]
        assert again["known"]
        assert again["id"] == first["id"]
        file_of(worker.root, first["id"]).unlink()
        replies = await asyncio.gather(*(ask(worker, LONG) for _ in range(3)))
        assert [reply["id"] for reply in replies] == [first["id"]] * 3
        assert prefix_ids(worker.root) == {first["id"]}

    talk(worker, conversation)


def test_salts_share_nothing(worker: Worker) -> None:
    async def conversation() -> None:
        replies = [await ask(worker, LONG, salt) for salt in (None, "ada", "bob", "ada", None)]
        assert [reply["known"] for reply in replies] == [False, False, False, True, True]
        unsalted, ada, bob, ada_again, unsalted_again = (reply["id"] for reply in replies)
        assert len({unsalted, ada, bob}) == 3
        assert ada_again == ada
        assert unsalted_again == unsalted

    talk(worker, conversation)


def test_budgets_and_adapters_share_nothing(target: Target, tmp_path: Path) -> None:
    """Each prefix holds what its own method keeps; a request that names the server's own budget shares its prefix."""
    default, law = adapters_of(target, tmp_path / "modules", 140, allocate=Uniform())
    folder = tmp_path / "prefixes"
    folder.mkdir()
    worker = new_worker(target, folder, default, adapters={"law": law})
    methods: list[tuple[dict[str, Any], Any]] = [
        ({}, default),
        ({"budget": 136}, replace(default, budget=136)),
        ({"budget": 0.4}, replace(default, budget=0.4)),
        ({"adapter": "law"}, law),
        ({"adapter": "law", "budget": 136}, replace(law, budget=136)),
    ]

    async def conversation() -> None:
        prefixes = []
        for choice, method in methods:
            reply = await ask(worker, LONG, **choice)
            assert not reply["known"]
            tensors = PrefixStore(folder).tensors(reply["id"])
            expected, header = export(target.model, started(target, method), tmp_path / "own")
            for name, tensor in PrefixStore(tmp_path / "own").tensors(expected).items():
                assert torch.equal(tensors[name], tensor)
            assert reply["entries"] == header.entries
            prefixes.append(reply["id"])
        assert len({*prefixes}) == len(methods)
        for (choice, _), prefix in zip(methods, prefixes, strict=True):
            reply = await ask(worker, LONG, **choice)
            assert reply["known"]
            assert reply["id"] == prefix
        reply = await ask(worker, LONG, budget=140)
        assert reply["id"] == prefixes[0]
        reply = await ask(worker, LONG, adapter="code")
        assert reply["status"] == 400
        assert reply["field"] == "keepsight.adapter"
        assert "'code'" in reply["error"]
        reply = await ask(worker, LONG, budget=0)
        assert reply["status"] == 400
        assert reply["field"] == "keepsight.budget"

    talk(worker, conversation)


@torch.no_grad()
def started(target: Target, method: Any) -> Any:
    """The state of the long prompt, from which a method has evicted."""
    return method.start(target.model, torch.tensor([LONG]))


def test_kept_prefixes_are_bounded_by_bytes_and_those_in_use_stay(target: Target, tmp_path: Path) -> None:
    worker = new_worker(target, tmp_path, waiting=9)

    async def conversation() -> None:
        async with connected(worker, LONG) as lease:
            used = json.loads(await lease.readline())["id"]
            worker.kept.max_bytes = int(2.5 * file_of(tmp_path, used).stat().st_size)
            replies = [await ask(worker, LONG[: 390 + number]) for number in range(4)]
            latest = replies[-1]["id"]
            await wait_for(lambda: prefix_ids(tmp_path) == {used, latest})
            worker.kept.max_bytes = 0
            await ask(worker, LONG[:380])
            await wait_for(lambda: prefix_ids(tmp_path) == {used})
        await wait_for(lambda: not prefix_ids(tmp_path))

    talk(worker, conversation)


def test_a_worker_that_stops_refuses_at_once_and_leaves_prefixes_in_use(
    target: Target, gate: Gate, tmp_path: Path
) -> None:
    worker = new_worker(target, tmp_path, waiting=9)

    async def conversation() -> None:
        gate.open.set()
        async with connected(worker, LONG) as lease:
            used = json.loads(await lease.readline())["id"]
            gate.entered.clear()
            gate.open.clear()
            waiting = [asyncio.create_task(ask(worker, LONG[: 390 + number])) for number in range(3)]
            await asyncio.to_thread(gate.entered.wait, 60)
            worker.stop()
            gate.open.set()
            replies = await asyncio.gather(*waiting)
            assert [reply["status"] for reply in replies] == [503] * 3
            late = await ask(worker, LONG[:380])
            assert late["status"] == 503
            assert prefix_ids(tmp_path) == {used}

    talk(worker, conversation)


def test_servers_share_a_folder_of_named_prefixes_and_no_other(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the old and the new one of a rolling restart: what ends removes nothing that the other answers from."""
    monkeypatch.setattr("keepsight.serving.vllm.folder.MEMORY", tmp_path)
    named = tmp_path / "named"
    document, _ = export(target.model, started(target, METHOD), named)

    async def prefix_by(worker: Worker) -> str:
        serving = asyncio.create_task(worker.serve(socket_of(worker)))
        try:
            reply = await ask(worker, LONG)
        finally:
            serving.cancel()
        return str(reply["id"])

    with _prefix_folder(tmp_path, 1) as new_folder:
        new = new_worker(target, new_folder)
        with _prefix_folder(tmp_path, 1) as old_folder:
            old = new_worker(target, old_folder)
            prefix = asyncio.run(prefix_by(old))
            assert asyncio.run(prefix_by(new)) == prefix, "the same prompt has the same id"
            old.close()
        assert prefix_ids(new_folder) == {prefix}
        assert prefix_ids(named) == {document}
        assert not old_folder.exists()
        assert PrefixStore(named, new_folder).tensors(prefix)
        assert PrefixStore(named).tensors(document)
        new.close()
    assert prefix_ids(named) == {document}


def test_a_full_disk_is_named_to_the_client_and_in_the_log(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def conversation() -> None:
        with monkeypatch.context() as patch:
            patch.setattr("keepsight.serving.worker.export", fail)
            reply = await ask(worker, LONG)
        assert reply["status"] == 500
        assert "No space left" in reply["error"]
        assert "No space left" in caplog.text
        assert "400 tokens" in caplog.text
        again = await ask(worker, LONG)
        assert again["entries"] == 140

    talk(worker, conversation)


def test_no_prefix_is_left_with_too_few_entries(target: Target, tmp_path: Path) -> None:
    worker = new_worker(target, tmp_path, SnapKV(0.5, window=8))

    async def conversation() -> None:
        short = await ask(worker, LONG[:40])
        assert not prefix_ids(tmp_path)
        assert short["status"] == 400
        assert "cannot spell an id" in short["error"]
        long = await ask(worker, LONG)
        assert prefix_ids(tmp_path) == {long["id"]}

    talk(worker, conversation)


# The middleware


def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    variables = {"KEEPSIGHT_ROOT": str(tmp_path), "KEEPSIGHT_MODEL": str(save_tiny_target(tmp_path / "model"))}
    for name, value in variables.items():
        with refused(name, "missing"):
            Prefixes(None)
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KEEPSIGHT_WORKER", "socket")
    with refused("KEEPSIGHT_LEAST", "missing"):
        Prefixes(None)


@pytest.fixture
def reader() -> FixedReader:
    return FixedReader()


@pytest.fixture
def server(rewriter: Rewriter, reader: FixedReader) -> Middleware:
    return Middleware(rewriter, reader)


def test_a_long_prompt_is_read_elsewhere_and_a_short_one_is_not(
    rewriter: Rewriter, reader: FixedReader, server: Middleware
):
    body = {"prompt": TEXT * 5, "max_tokens": 3}
    ids = rewriter.tokenizer(TEXT * 5)["input_ids"]
    server.post(COMPLETIONS, body)
    ((_, handed_on),) = server.vllm.requests
    assert reader.prompts == [ids[:-1]]
    assert reader.open == 0
    assert handed_on == body | {"prompt": [*placeholders(PREFIX, ENTRIES, rewriter.alphabet), ids[-1]]}

    short = {"prompt": "for"}
    server.post(COMPLETIONS, short)
    assert server.vllm.requests[-1] == (COMPLETIONS, short)
    assert len(reader.prompts) == 1

    status, reply = server.post(COMPLETIONS, body | {"echo": True})
    assert status == 400
    assert "echo" in reply["error"]["message"]
    assert len(server.vllm.requests) == 2

    malformed = {"messages": [{"role": "user", "content": TEXT * 5}], "chat_template_kwargs": 3}
    server.post(CHAT, malformed)
    assert server.vllm.requests[-1] == (CHAT, malformed), "vLLM says what is wrong"
    assert len(reader.prompts) == 1


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_prompt_and_its_answer_fit_the_context(reader: FixedReader, server: Middleware, name) -> None:
    """vLLM knows only the entries that are kept of the prompt."""

    def post(prompt_tokens: int, answer_tokens: int | None) -> tuple[int, Any]:
        params = {"prompt_token_ids": (LONG * 5)[:prompt_tokens]}
        return server.post(CHAT, {"messages": MESSAGES, "kv_transfer_params": params, name: answer_tokens})

    status, reply = post(1900, 101)
    assert status == 400
    assert reply["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 2000 tokens" in reply["error"]["message"]
    assert not reader.prompts

    status, _ = post(1900, 100)
    _, handed_on = server.vllm.requests[-1]
    assert status == 200
    assert handed_on[name] == 100

    post(1900, None)
    _, handed_on = server.vllm.requests[-1]
    assert handed_on["max_completion_tokens"] == 100, "a length that the request does not name is what fits"

    post(1500, None)
    _, handed_on = server.vllm.requests[-1]
    assert handed_on.get(name) is None, "or the server's"

    if name == "max_tokens":
        status, reply = server.post(COMPLETIONS, {"prompt": LONG * 4, name: 401})
        assert status == 400
        assert reply["error"]["code"] == "context_length_exceeded"


def test_texts_beyond_all_prompts_are_not_tokenized(rewriter: Rewriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor sent to vLLM, which would tokenize all of them, and let others wait."""
    monkeypatch.setattr(rewriter, "context", 2000)
    without_tokenizer = VllmStandIn(None)
    server = Middleware(rewriter, FixedReader(), without_tokenizer)
    text = "for item in the list " * 2000
    for path, body in (
        (COMPLETIONS, {"prompt": text}),
        (COMPLETIONS, {"prompt": ["for", text]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}),
    ):
        status, reply = server.post(path, body)
        assert status == 400
        assert reply["error"]["code"] == "context_length_exceeded"
        assert "maximum context length is 2000 tokens" in reply["error"]["message"]
        assert not without_tokenizer.requests


def test_salts_reach_the_worker_and_bad_ones_vllm(reader: FixedReader, server: Middleware) -> None:
    for salt in ("ada", None):
        server.post(COMPLETIONS, {"prompt": TEXT * 5, "cache_salt": salt})
    assert reader.salts == ["ada", ""]
    for bad_salt in ("", 3, ["a"]):
        body = {"prompt": TEXT * 5, "cache_salt": bad_salt}
        server.post(COMPLETIONS, body)
        assert server.vllm.requests[-1] == (COMPLETIONS, body), "vLLM says what is wrong"
    assert len(reader.prompts) == 2


def test_what_a_request_chooses_reaches_the_worker(reader: FixedReader, server: Middleware) -> None:
    """Within the operator's limits; vLLM does not see the field."""
    choices = [Choice(), Choice(budget=130), Choice(budget=0.3), Choice("law"), Choice("law", 136)]
    for choice in choices:
        body = {"prompt": TEXT * 15, "keepsight": {"adapter": choice.adapter, "budget": choice.budget}}
        status, _ = server.post(COMPLETIONS, body)
        _, handed_on = server.vllm.requests[-1]
        assert status == 200
        assert handed_on.keys() == {"prompt"}
    assert reader.choices_made == choices
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
            status, reply = server.post(COMPLETIONS, {"prompt": prompt, "keepsight": fields})
            assert status == 400, fields
            assert reply["error"]["param"] == f"keepsight.{name}", fields
            assert why in reply["error"]["message"], fields
    assert len(reader.prompts) == len(choices)


def test_short_prompts_are_answered_by_vllm_whatever_they_choose(reader: FixedReader, server: Middleware) -> None:
    """By a budget of its own, a prompt is long from twice that budget; what is chosen is checked all the same."""

    def status_of(prompt: Any, budget: float | None) -> int:
        status, _ = server.post(COMPLETIONS, {"prompt": prompt, "keepsight": {"budget": budget}})
        return status

    reader.least = 300
    lengths: list[tuple[int | float | None, int, bool]] = [
        (None, 300, True),
        (None, 299, False),
        (128, 256, True),
        (128, 255, False),
        (140, 280, True),
        (140, 279, False),
        (0.3, 300, True),
        (0.3, 299, False),
    ]
    for budget, tokens, is_long in lengths:
        read_before = len(reader.prompts)
        assert status_of(LONG[:tokens], budget) == 200, (budget, tokens)
        assert len(reader.prompts) - read_before == int(is_long), (budget, tokens)
    reader.least = 20
    assert status_of(LONG[:130], 130) == 200
    _, handed_on = server.vllm.requests[-1]
    assert handed_on["prompt"] == LONG[:130]
    for prompt in (LONG[:30], "Hi"):
        assert status_of(prompt, 141) == 400
        assert status_of(prompt, 140) == 200


def test_servers_and_models_without_eviction_refuse_what_is_chosen(rewriter: Rewriter) -> None:
    vllm = VllmStandIn(rewriter.tokenizer)
    vllm.state.openai_serving_models = SimpleNamespace(lora_requests={"poet": None})
    evicting = Middleware(rewriter, FixedReader(), vllm)
    plain = Middleware(rewriter, None, vllm)
    body = {"prompt": TEXT * 5, "keepsight": {"budget": 128}}
    document = {"kv_transfer_params": {"keepsight_evict": True}}
    for server, fields, why in (
        (plain, {}, "evicts from no plain request"),
        (evicting, {"model": "poet"}, "LoRA"),
        (evicting, document, "keepsight_evict"),
    ):
        status, reply = server.post(COMPLETIONS, body | fields)
        assert status == 400
        assert why in reply["error"]["message"]
        assert not vllm.requests
    status, _ = plain.post(COMPLETIONS, body | {"keepsight": {"budget": None}})
    assert status == 200


def test_the_largest_budget_and_the_adapters_come_from_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variables = {
        "KEEPSIGHT_ROOT": str(tmp_path),
        "KEEPSIGHT_MODEL": str(save_tiny_target(tmp_path / "model")),
        "KEEPSIGHT_WORKER": "socket",
        "KEEPSIGHT_LEAST": "20",
        "KEEPSIGHT_ADAPTERS": '["law"]',
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for value, max_budget in (("256", 256), ("0.25", 0.25), ("1e-3", 0.001)):
        monkeypatch.setenv("KEEPSIGHT_MAX_BUDGET", value)
        reader: Any = Prefixes(None).reader
        assert reader.choices == Choices(max_budget, ["law"])
    for value in ("much", "0", "1.5", "[]"):
        monkeypatch.setenv("KEEPSIGHT_MAX_BUDGET", value)
        with refused("KEEPSIGHT_MAX_BUDGET", "type"):
            Prefixes(None)


def test_a_prompt_for_a_lora_is_left_to_vllm(reader: FixedReader, server: Middleware) -> None:
    """The worker reads with the base model, and the engine loads no prefix under a LoRA."""
    server.vllm.state.openai_serving_models = SimpleNamespace(lora_requests={"poet": None})
    body = {"prompt": TEXT * 5, "model": "poet"}
    server.post(COMPLETIONS, body)
    assert server.vllm.requests == [(COMPLETIONS, body)]
    assert not reader.prompts
    server.post(COMPLETIONS, body | {"model": ["poet"]})  # vLLM says what is wrong


def test_token_ids_of_a_chat_are_read_in_the_place_of_its_messages(reader: FixedReader, server: Middleware) -> None:
    server.post(CHAT, {"messages": MESSAGES, "kv_transfer_params": {"prompt_token_ids": LONG}})
    assert reader.prompts == [LONG[:-1]]


def test_a_refusal_of_the_worker_has_its_status_and_code(target: Target, rewriter: Rewriter, tmp_path: Path) -> None:
    worker = new_worker(target, tmp_path, max_tokens=300)
    server = Middleware(rewriter, WorkerReader(str(socket_of(worker)), 20))

    async def conversation() -> None:
        await wait_for(socket_of(worker).exists)
        status, reply = await server.reply(COMPLETIONS, {"prompt": LONG})
        assert status == 400
        assert reply["error"]["code"] == "context_length_exceeded"
        assert "maximum context length is 300 tokens" in reply["error"]["message"]

        status, _ = await server.reply(COMPLETIONS, {"prompt": LONG[:280]})
        _, handed_on = server.vllm.requests[-1]
        assert status == 200
        assert len(handed_on["prompt"]) == 141

        worker.stop()
        status, reply = await server.reply(COMPLETIONS, {"prompt": LONG[:270]})
        assert status == 503
        assert "shutting down" in reply["error"]["message"]

    talk(worker, conversation)


def test_the_next_prompt_is_read_while_an_answer_runs(worker: Worker, rewriter: Rewriter) -> None:
    async def conversation() -> None:
        is_answering = asyncio.Event()
        may_end = asyncio.Event()

        class SlowAnswers(VllmStandIn):
            async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
                is_answering.set()
                await may_end.wait()
                await super().__call__(scope, receive, send)

        reader = WorkerReader(str(socket_of(worker)), 20)
        server = Middleware(rewriter, reader, SlowAnswers(rewriter.tokenizer))
        await wait_for(socket_of(worker).exists)
        first = asyncio.create_task(server.reply(COMPLETIONS, {"prompt": LONG}))
        await is_answering.wait()
        second = asyncio.create_task(server.reply(COMPLETIONS, {"prompt": LONG[:300]}))
        await wait_for(lambda: len(prefix_ids(worker.root)) == 2)
        assert not first.done()
        may_end.set()
        replies = await asyncio.gather(first, second)
        assert [status for status, _ in replies] == [200, 200]

    talk(worker, conversation)


def test_without_the_key_nothing_is_read_and_other_endpoints_are_closed(rewriter: Rewriter, reader: FixedReader):
    server = Middleware(rewriter, reader, VllmStandIn(rewriter.tokenizer, "secret"))
    body = {"prompt": TEXT * 5}
    for bad_key in ("", "secre", "other"):
        status, _ = server.post(COMPLETIONS, body, bad_key)
        assert status == 401
    assert not server.vllm.requests
    assert not reader.prompts
    server.post(COMPLETIONS, body, "secret")
    assert len(reader.prompts) == 1
    status, reply = server.post("/v1/responses", {"input": TEXT}, "secret")
    assert status == 404
    assert COMPLETIONS in reply["error"]["message"]
