"""vLLM's server with the connector, the middleware and the plugin: every answer is that of `generate`, id for id."""

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from keepsight import SnapKV
from keepsight.serving.export import export
from tests.serving.vllm.stock import (
    BLOCK,
    TOKENS,
    TOPICS,
    Case,
    Library,
    Server,
    chatted,
    completed,
    completed_together,
    serving,
    stock_target,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def library(folder: Path) -> Library:
    return Library(stock_target(folder / "model"), folder / "prefixes")


@pytest.fixture(scope="module")
def cases(library: Library) -> dict[str, list[Case]]:
    """Uniform heads, in 70 entries that end inside a block and in 128, and ragged ones in pages."""
    return {
        "uniform": [each for n in range(8) for each in library.cases(TOPICS[n][:1500], (70, 128)[n % 2])],
        "ragged": [each for n in range(8) for each in library.cases(TOPICS[n][:1500], (64, 96)[n % 2], BLOCK)],
        "ordinary": [library.ordinary(TOPICS[n][:200]) for n in range(8)],
    }


@pytest.fixture(scope="module")
def server(folder: Path, library: Library, cases: dict[str, list[Case]]) -> Iterator[Server]:
    with serving(folder / "model", library.root, folder / "server.log") as started:
        yield started


@pytest.mark.parametrize("kind", ["uniform", "ragged", "ordinary"])
def test_one_at_a_time_and_again_from_vllms_own_prefix_cache(server, cases, kind):
    some = cases[kind][:: len(cases[kind]) // 4]
    for ask in (completed, chatted):
        assert [ask(server, case) for case in some] == [case.answer for case in some]
    assert server.metric("vllm:prefix_cache_hits_total") > 0


def test_sixteen_clients_at_once_with_ordinary_requests_among_them(server, cases):
    mixed = [case for kind in cases.values() for case in kind] * 2
    random.Random(0).shuffle(mixed)
    with ThreadPoolExecutor(16) as pool:
        answers = [*pool.map(lambda pair: (completed, chatted)[pair[0] % 2](server, pair[1]), enumerate(mixed))]
    assert answers == [case.answer for case in mixed]


def test_placeholders_do_not_count_in_a_repetition_penalty(server, library):
    """Their letters are tokens that a trained model never samples; this random one is kept from it."""
    penalty, document = {"repetition_penalty": 1.5}, TOPICS[0][:1500]
    barred = [*library.alphabet]
    for budget, page in ((70, 0), (64, BLOCK)):
        cases = library.cases(document, budget, page, **penalty, suppress_tokens=barred)
        options = penalty | {"logit_bias": dict.fromkeys(map(str, barred), -100)}
        assert [completed(server, case, extra_body=options) for case in cases] == [case.answer for case in cases]
        plain = library.cases(document, budget, page)
        assert [case.answer for case in cases] != [case.answer for case in plain]


PLAIN, CHAT = "/v1/completions", "/v1/chat/completions"


def bad_requests(library: Library, case: Case, tenant: Path, other: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Path, body, and a word of the reason."""

    def chat(content: str, **options: Any) -> tuple[str, dict[str, Any]]:
        return CHAT, {"messages": [{"role": "user", "content": content}], **options}

    named = f"[[keepsight:{case.digest}]]"
    entries = len(case.prompt) - len(library.ids(case.question + library.after)[0])
    alone = case.prompt[:entries]
    for id in ("0" * 32, "A" * 32, "", f"../{tenant.name}/{case.digest}", "/etc/passwd", f"{tenant}/{case.digest}"):
        yield *chat(f"[[keepsight:{id}]]Why?"), "prefix"
        yield PLAIN, {"prompt": f"[[keepsight:{id}]]Why?"}, "prefix"
    for path in tenant.iterdir():  # another tenant's, and a link to it in this one's folder
        yield *chat(f"[[keepsight:{path.stem}]]Why?"), "no prefix"
    yield *chat(f"[[keepsight:{other}]]Why?"), "another base model"
    yield PLAIN, {"prompt": alone}, "of its own"
    yield PLAIN, {"prompt": [*alone[:-1], 40, 41]}, "placeholders"
    yield PLAIN, {"prompt": named}, "no question"
    yield *chat(f"{named} "), "no question"
    yield *chat("Why?", keepsight={"prefix": "0" * 32}), "no prefix"
    yield *chat("Why?", keepsight={"budget": 128}), "no plain request"
    yield CHAT, {"messages": [{"role": "wizard", "content": f"{named}Why?"}]}, "no role 'wizard'"
    yield PLAIN, {"prompt": [1, *case.prompt]}, "must be the first"
    yield PLAIN, {"prompt": case.prompt, "echo": True}, "echo"
    yield PLAIN, {"prompt": case.prompt, "prompt_logprobs": 1}, "prompt_logprobs"
    yield PLAIN, {"prompt": library.target.tokenizer.decode(case.prompt), "prompt_logprobs": 1}, "prompt_logprobs"
    yield *chat(f"{named}Why?", prompt_logprobs=1), "prompt_logprobs"
    yield *chat("Why?", prompt_logprobs=1, kv_transfer_params={"prompt_token_ids": case.prompt}), "prompt_logprobs"
    yield *chat("Why?", kv_transfer_params={"prompt_token_ids": alone}), "of its own"
    system = {"role": "system", "content": "Be brief."}
    yield CHAT, {"messages": [system, {"role": "user", "content": f"{named}Why?"}]}, "other text"
    yield CHAT, {"messages": [{"role": "user", "content": named}] * 2}, "one prefix"
    yield "/v1/responses", {"input": f"{named}Why?"}, "/v1/chat/completions"
    yield PLAIN, {"prompt": f"{named}Why?", "max_tokens": 5000}, "max_tokens"
    yield PLAIN, {"prompt": f"{named}Why?", "temperature": -1}, "temperature"


def test_a_prefix_is_named_beside_the_messages_and_text_about_it_is_text(server, library, cases):
    case = cases["uniform"][0]
    create: Any = server.client().chat.completions.create
    for options in (
        {"extra_body": {"keepsight": {"prefix": case.digest}, "return_token_ids": True}},
        {"extra_body": {"return_token_ids": True}, "extra_headers": {"Keepsight-Prefix": case.digest}},
    ):
        turns = [{"role": "user", "content": case.question}]
        reply = create(model="tiny", messages=turns, max_tokens=TOKENS, temperature=0, **options)
        assert reply.choices[0].model_dump()["token_ids"] == case.answer
    text = f"The words [[keepsight:{case.digest}]] stand for a document."
    assert chatted(server, library.ordinary(text)) == library.ordinary(text).answer


def test_what_cannot_be_answered_rightly_is_refused_in_one_line(server, library, cases, folder):
    tenant = folder / "tenant"
    model = library.target.model
    theirs, _ = export(model, SnapKV(40, window=8).start(model, library.ids(TOPICS[9][:900])), tenant)
    os.symlink(tenant / f"{theirs}.safetensors", library.root / f"{theirs}.safetensors")
    another = Library(stock_target(folder / "another", "qwen3"), library.root)
    (stranger, *_) = another.cases(TOPICS[3][:900], 64)
    (paged, *_) = library.cases(TOPICS[3][:900], 64, BLOCK // 2)
    found = [*bad_requests(library, cases["uniform"][0], tenant, stranger.digest)]
    found.append((CHAT, {"messages": [{"role": "user", "content": f"[[keepsight:{paged.digest}]]Why?"}]}, "page=32"))
    for path, body, word in found:
        reply = httpx.post(server.url + path, json={"model": "tiny", "max_tokens": 4, **body}, timeout=60)
        message = str(reply.json()["error"]["message"])
        assert 400 <= reply.status_code < 500 and word in message and "\n" not in message, (path, body, reply.text)
    for kind in ("uniform", "ragged"):  # nothing that was refused has left anything in a cache
        assert [completed(server, case) for case in cases[kind][::4]] == [case.answer for case in cases[kind][::4]]


def test_a_load_that_fails_fails_its_own_request_alone(server, library, cases):
    """The file is damaged after its header was read, so that the middleware lets its requests pass."""
    (lost, *_) = library.cases(TOPICS[11][:900], 64)
    path = library.root / f"{lost.digest}.safetensors"
    whole = path.read_bytes()
    with pytest.raises(openai.BadRequestError, match="placeholders"):
        completed(server, replace(lost, prompt=lost.prompt[:40]))  # the middleware knows it now, the engine does not
    path.write_bytes(whole[:-100])

    def ask(case: Case) -> list[int] | str:
        try:
            return completed(server, case)
        except openai.APIStatusError as error:
            return f"{error.status_code}"

    mixed = [each for case in cases["ragged"][:8] + cases["uniform"][:8] for each in (case, lost)]
    with ThreadPoolExecutor(16) as pool:
        answers = [*pool.map(ask, mixed)]
    assert answers == [each for case in mixed[::2] for each in (case.answer, "500")]
    path.write_bytes(whole)
    assert completed(server, lost) == lost.answer


@pytest.mark.parametrize("family", ["qwen3"])
def test_little_room_small_chunks_a_kill_and_a_restart(folder, family):
    """16 prompts at once in the room of 3, read 16 tokens at a time; the server is killed while it answers.

    They are one request: 16 clients of a busy machine may come one after another, and then nothing is preempted.
    """
    library = Library(stock_target(folder / family, family), folder / f"{family}-prefixes")
    long = 100
    whole = {"tokens": long, "min_new_tokens": long}  # an answer that ends early leaves its room to others
    cases = [each for n in range(4) for each in library.cases(TOPICS[n][:1500], 128, **whole)]
    cases += [each for n in range(4) for each in library.cases(TOPICS[n][:1500], 128, BLOCK, **whole)]
    little: dict[str, Any] = {
        "num_gpu_blocks_override": 24,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 12,
        "max_model_len": 512,
    }
    given = folder / family, library.root, folder / f"{family}.log"
    with serving(*given, **little) as server:
        assert all(len(case.answer) == long for case in cases)
        assert completed_together(server, cases, long) == [case.answer for case in cases]
        assert server.metric("vllm:num_preemptions_total") > 0
        chunks = server.client().completions.create(model="tiny", prompt=cases[0].prompt, max_tokens=300, stream=True)
        next(iter(chunks))
        server.kill(signal.SIGKILL)
        with pytest.raises((openai.APIError, httpx.HTTPError)):  # and not an answer that looks whole
            for _ in chunks:
                pass
    with serving(*given, **little) as server:
        again = [completed(server, case, long, extra_body={"min_tokens": long}) for case in cases[::5]]
        assert again == [case.answer for case in cases[::5]]
