"""`keepsight serve vllm=true reader=vllm`: plain requests are read by vLLM, evicted from, and answered, in one."""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from keepsight import SnapKV
from keepsight.runtime.allocate import Global, Uniform
from keepsight.serving.prefix import placeholders
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
from tests.serving.vllm.test_serve import temporary_of

BUDGET = 96
TEXTS = [text[:1200] for text in TOPICS[:6]]
PLAIN = "keepsight-serve-*/prefixes/*.safetensors"


@pytest.fixture(scope="module", params=[0, BLOCK], ids=["uniform", "ragged"])
def page(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, page: int) -> Library:
    folder = tmp_path_factory.mktemp("one")
    return Library(stock_target(folder / "model"), folder / "prefixes")


@pytest.fixture(scope="module")
def server(library: Library, page: int) -> Iterator[Server]:
    """A server whose prefixes are all in its temporary folder: memory has no room for so many."""
    folder, port = library.root.parent, free_port()
    command = [sys.executable, "-m", "keepsight", "serve", f"model.id={folder / 'model'}", "model.device=cpu"]
    command += ["model.dtype=float32", "method=snapkv", f"budget={BUDGET}", "options={window: 8}", f"page={page}"]
    command += ["vllm=true", "reader=vllm", f"port={port}", "name=tiny", "max_new_tokens=400", "prefix_bytes=1000TiB"]
    command += ["max_budget=128"]
    command += ["vllm_options={kv_cache_memory_bytes: 134217728, max_num_batched_tokens: 256, block_size: 32}"]
    url = f"http://127.0.0.1:{port}"
    with process(url, folder / "serve.log", *command, TMPDIR=str(temporary_of(library))) as running:
        yield running
        running.process.terminate()
        assert running.process.wait(90) == 0
    assert not [*temporary_of(library).glob(PLAIN)]


def case_of(library: Library, text: str, page: int, budget: int = BUDGET) -> Case:
    """What `generate` answers for the last token of a prompt from which the rest was evicted."""
    ids = library.ids(library.before + text + library.after)
    allocate = Global(page=page) if page else Uniform()
    state = SnapKV(budget, window=8, allocate=allocate).start(library.target.model, ids[:, :-1])
    return Case("", text, ids[0].tolist(), library.answer(state, ids[:, -1:], TOKENS))


@pytest.fixture(scope="module")
def cases(library: Library, page: int) -> list[Case]:
    return [case_of(library, text, page) for text in TEXTS]


def whole_chat(server: Server, case: Case, **options: Any) -> list[int]:
    """The ids that a chat answers without a stream."""
    turns: Any = [{"role": "user", "content": case.question}]
    create: Any = server.client().chat.completions.create
    asked = {"model": "tiny", "messages": turns, "max_tokens": TOKENS, "temperature": 0} | options
    return create(**asked, extra_body={"return_token_ids": True}).choices[0].model_dump()["token_ids"]


def of_two_requests(server: Server, library: Library, case: Case) -> list[int]:
    """The ids that a client gets who asks for a prefix first, and then for the answer."""
    body = {"model": "tiny", "prompt": case.prompt[:-1], "kv_transfer_params": {"keepsight_evict": True}}
    kept = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).json()["kv_transfer_params"]
    spelled = placeholders(kept["keepsight"], kept["entries"], library.alphabet)
    return completed(server, replace(case, prompt=[*spelled, case.prompt[-1]]))


def test_a_plain_request_is_answered_as_by_two_and_as_by_generate(server, library, cases):
    for case in cases[:3]:
        answers = [whole_chat(server, case), chatted(server, case), completed(server, case)]
        assert answers == [of_two_requests(server, library, case)] * 3 == [case.answer] * 3


def test_sixteen_clients_with_long_and_short_prompts(server, library, cases):
    short = [library.ordinary(text[:150]) for text in TEXTS]
    mixed = [*cases, *short] * 2
    asks: list[Callable[..., list[int]]] = [chatted, completed, whole_chat]
    with ThreadPoolExecutor(16) as pool:
        answers = [*pool.map(lambda index: asks[index % 3](server, mixed[index]), range(len(mixed)))]
    assert answers == [case.answer for case in mixed]
    reads = server.metric("keepsight_read_seconds_count")
    assert reads <= len(cases)  # each prompt once, in this test and the one before it
    usage = server.client().completions.create(model="tiny", prompt=cases[0].prompt, max_tokens=1).usage
    assert usage is not None and usage.prompt_tokens == BUDGET + 1


def test_a_request_has_a_budget_of_its_own(server, library, page):
    case = case_of(library, TEXTS[0], page, 64)
    assert completed(server, case, extra_body={"keepsight": {"budget": 64}}) == case.answer
    with pytest.raises(openai.BadRequestError) as refused:
        server.client().completions.create(model="tiny", prompt=TEXTS[0], extra_body={"keepsight": {"budget": 129}})
    assert refused.value.param == "keepsight.budget"


def test_what_cannot_be_read_is_refused_in_one_line(server, cases):
    url = f"{server.url}/v1/chat/completions"
    body = {"model": "tiny", "messages": [{"role": "user", "content": f"{TEXTS[0]} and then?"}]}
    asked = server.metric("keepsight_prompts_total")
    refused: list[tuple[dict[str, Any], int, str]] = [
        ({"model": "other"}, 404, "does not exist"),
        ({"prompt_logprobs": 1}, 400, "prompt_logprobs"),
        ({"max_tokens": 4000}, 400, "maximum context length is 4096 tokens"),
        ({"messages": [{"role": "user", "content": "the ship " * 5000}]}, 400, "maximum context length is 4096 tokens"),
        ({"kv_transfer_params": {"keepsight_plain": "x"}}, 400, "keepsight_plain"),
    ]
    for changes, status, why in refused:
        for stream in (False, True):
            reply = httpx.post(url, json=body | {"stream": stream} | changes, timeout=300)
            error = reply.json()["error"]
            assert reply.status_code == status and why in error["message"] and "\n" not in error["message"]
            if "context" in why:
                assert error["code"] == "context_length_exceeded"
    assert server.metric("keepsight_prompts_total") == asked
    assert chatted(server, cases[0]) == cases[0].answer


def test_a_client_that_leaves_leaves_nothing(server, library, cases):
    """In the first step: the engine stops reading its prompt, whose prefix nobody will use."""
    folder = temporary_of(library)
    before = {*folder.glob(PLAIN)}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "the ship " * 1800}], "max_tokens": 4}
    with suppress(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=0.1)
    assert chatted(server, cases[1]) == cases[1].answer
    end = time.monotonic() + 120
    while server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting"):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert {*folder.glob(PLAIN)} == before
    chunks = server.client().completions.create(model="tiny", prompt=cases[2].prompt, max_tokens=300, stream=True)
    next(iter(chunks))
    chunks.close()  # in the second
    assert completed(server, cases[2]) == cases[2].answer


def test_the_prefixes_of_plain_requests_cannot_be_named(server, library):
    names = [path.stem for path in temporary_of(library).glob(PLAIN)]
    assert names
    turns: Any = [{"role": "user", "content": f"[[keepsight:{names[0]}]]Why?"}]
    with pytest.raises(openai.BadRequestError, match="there is no prefix"):
        server.client().chat.completions.create(model="tiny", messages=turns)
