"""`keepsight serve vllm=true`: ordinary chat requests with long prompts, answered from evicted caches by vLLM."""

import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Barrier

import httpx
import openai
import psutil
import pytest

from keepsight import SnapKV
from keepsight.runtime.allocate import Global
from tests.serving.vllm.stock import (
    BLOCK,
    TOKENS,
    TOPICS,
    Case,
    Library,
    Server,
    chatted,
    completed,
    free_port,
    process,
    stock_target,
)

BUDGET, KEY, ASK = 96, "a-secret", (completed, chatted)
TEXTS = [text[:1200] for text in TOPICS[:6]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    folder = tmp_path_factory.mktemp("serve")
    return Library(stock_target(folder / "model"), folder / "prefixes")


@contextmanager
def started(library: Library, port: int) -> Iterator[Server]:
    """The command, which also answers the library's prefixes."""
    folder = library.root.parent
    command = [sys.executable, "-m", "keepsight", "serve", f"model.id={folder / 'model'}", "model.device=cpu"]
    command += ["model.dtype=float32", "method=snapkv", f"budget={BUDGET}", "options={window: 8}", f"page={BLOCK}"]
    command += [f"prefixes={library.root}", f"port={port}", "name=tiny", "vllm=true", "max_new_tokens=400"]
    command += ["max_budget=128"]
    command += ["vllm_options={kv_cache_memory_bytes: 134217728}"]
    log = folder / "serve.log"
    environment = {"KEEPSIGHT_API_KEY": KEY, "TMPDIR": str(temporary_of(library))}
    with process(f"http://127.0.0.1:{port}", log, *command, **environment) as server:
        yield server


def temporary_of(library: Library) -> Path:
    """The folder in which servers make theirs; its path is short, for a socket."""
    folder = Path(tempfile.gettempdir(), f"ks-{library.root.parent.name}")
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def server(library: Library) -> Iterator[Server]:
    with started(library, free_port()) as running:
        yield running


def long_case(library: Library, text: str, budget: int = BUDGET) -> Case:
    """What `generate` answers for the last token of a prompt from which the rest was evicted."""
    ids = library.ids(library.before + text + library.after)
    method = SnapKV(budget, window=8, allocate=Global(page=BLOCK))
    state = method.start(library.target.model, ids[:, :-1])
    return Case("", text, ids[0].tolist(), library.answer(state, ids[:, -1:], TOKENS))


def test_long_prompts_short_ones_and_prefixes_by_sixteen_clients(server, library):
    long, short = [long_case(library, text) for text in TEXTS], [library.ordinary(text[:150]) for text in TEXTS]
    named = [each for text in TEXTS[:3] for each in library.cases(text, 64, BLOCK)]
    mixed = [*long, *short, *named] * 2
    with ThreadPoolExecutor(16) as pool:
        answers = [*pool.map(lambda place: ASK[place % 2](server, mixed[place], key=KEY), range(len(mixed)))]
    assert answers == [case.answer for case in mixed]
    assert server.metric("keepsight_prompts_total", KEY) == 2 * len(long)
    assert server.metric("keepsight_read_seconds_count", KEY) == len(long)  # each is read once
    assert server.metric("keepsight_kept_entries_total", KEY) == BUDGET * len(long)
    usage = server.client(KEY).completions.create(model="tiny", prompt=long[0].prompt, max_tokens=1).usage
    assert usage is not None and usage.prompt_tokens == BUDGET + 1


def test_a_request_has_a_budget_of_its_own(server, library):
    for budget in (64, 128):
        cases = [long_case(library, text, budget) for text in TEXTS[:2]]
        chosen = {"keepsight": {"budget": budget}}
        answers = [completed(server, case, key=KEY, extra_body=chosen) for case in cases]
        assert answers == [case.answer for case in cases]
    for fields, param in (({"budget": 129}, "budget"), ({"budget": 16}, "budget"), ({"adapter": "law"}, "adapter")):
        with pytest.raises(openai.BadRequestError) as refused:
            server.client(KEY).completions.create(model="tiny", prompt=TEXTS[0], extra_body={"keepsight": fields})
        assert refused.value.param == f"keepsight.{param}"


def test_what_is_refused_before_anything_is_read(server, library):
    read = server.metric("keepsight_read_seconds_count", KEY)
    text = TEXTS[0] + " and then?"
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
    url, key = f"{server.url}/v1/chat/completions", {"authorization": f"Bearer {KEY}"}
    assert httpx.post(url, json=body).status_code == 401
    assert httpx.post(url, json=body | {"model": "other"}, headers=key).status_code == 404
    reply = httpx.post(url, json=body | {"prompt_logprobs": 1}, headers=key)
    assert reply.status_code == 400 and "prompt_logprobs" in reply.json()["error"]["message"]
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096"):
        server.client(KEY).completions.create(model="tiny", prompt="the ship " * 5000)
    assert server.metric("keepsight_read_seconds_count", KEY) == read
    with pytest.raises(httpx.ReadTimeout):  # a client that leaves while its prompt is read
        httpx.post(url, json=body, headers=key, timeout=0.01)
    assert chatted(server, library.ordinary("Hello"), key=KEY) == library.ordinary("Hello").answer


def test_vllm_ends_with_the_worker_beside_it(server, library):
    """Killed in mid-answer: vLLM ends as well, and frees its port."""
    client = server.client(KEY)
    chunks = client.completions.create(model="tiny", prompt=TEXTS[1], max_tokens=400, stream=True)
    next(iter(chunks))
    server.process.send_signal(signal.SIGKILL)
    begin = time.monotonic()
    with suppress(openai.APIError, httpx.HTTPError):  # it may have the time to end this answer
        for _ in chunks:
            pass
    assert time.monotonic() - begin < 60  # and leaves no client waiting
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with suppress(httpx.TimeoutException, httpx.RemoteProtocolError, httpx.ReadError):
            try:
                httpx.get(f"{server.url}/health", timeout=1)
            except httpx.ConnectError:
                return
        time.sleep(0.2)
    raise AssertionError("vLLM's server outlives keepsight")


def test_a_deploy_ends_no_answer_and_a_crash_leaves_nothing(library):
    """After the server that was killed: the next one removes its folder. SIGTERM lets running answers end."""
    temporary, own = temporary_of(library), "keepsight-serve-*"  # vLLM's sockets lie beside
    (crashed,) = temporary.glob(own)
    with started(library, free_port()) as server:
        assert not crashed.exists() and len([*temporary.glob(own)]) == 1
        client, begun = server.client(KEY), Barrier(5)

        def answer(text: str) -> str | None:
            chunks = client.completions.create(model="tiny", prompt=text, max_tokens=300, stream=True)
            reason = None
            for number, chunk in enumerate(chunks):
                if number == 0:
                    begun.wait(300)
                reason = chunk.choices[0].finish_reason or reason
            return reason

        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(answer, text) for text in (*TEXTS[:2], "Hello", "Why?")]
            begun.wait(300)
            server.process.terminate()
            reasons = [future.result() for future in answers]
        assert {*reasons} <= {"length", "stop"} and server.process.wait(90) == 0
    assert not [*temporary.glob(own)]


def test_the_command_ends_with_vllms_engine(library):
    """Killed in mid-answer: the client is told, and the command ends with a line that says why."""
    folders = {*temporary_of(library).glob("keepsight-serve-*")}
    with started(library, free_port()) as server:
        chunks = server.client(KEY).completions.create(model="tiny", prompt=TEXTS[1], max_tokens=400, stream=True)
        next(iter(chunks))
        processes = psutil.Process(server.process.pid).children(recursive=True)
        (engine,) = [process for process in processes if "EngineCore" in " ".join(process.cmdline())]
        engine.kill()
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            for _ in chunks:
                pass
        assert server.process.wait(90) == 2 and "vLLM's server ended with status" in server.log.read_text()
    assert {*temporary_of(library).glob("keepsight-serve-*")} <= folders, "its own is removed"
