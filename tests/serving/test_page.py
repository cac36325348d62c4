"""The tables of fields in docs/serving.md: every row is sent to the applications, and every field has a row."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

import httpx
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import BaseModel
from tokenizers.processors import TemplateProcessing

from keepsight.models.targets import Target, load_target
from keepsight.runtime.generate import generate
from keepsight.serving.requests import IGNORED, NOT_SUPPORTED, ChatRequest, CompletionRequest
from keepsight.serving.vllm.middleware import BYPASS, Rewriter
from tests.serving.beside_vllm import FixedReader, Middleware, VllmStandIn
from tests.serving.loopback import METHOD, serving
from tests.serving.test_fields import VALUES
from tests.serving.test_tools import TEMPLATE, WEATHER, call, response_template
from tests.serving.test_tools import speaking as speaking
from tests.tiny import save_tiny_target
from tests.typed import text_of

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
PATHS = (CHAT, PLAIN)
TEXT = "Nine ships sailed on the sea. " * 8
TURNS = [{"role": "user", "content": TEXT}]
STATUSES = {"supported", "ignored", "refused"}


def rows_after(heading: str) -> list[list[str]]:
    """The cells of the rows of the table whose first line begins so."""
    table = text_of("docs/serving.md").partition(f"\n{heading}")[2].partition("\n\n")[0]
    rows = []
    for line in table.splitlines()[2:]:
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    assert rows
    return rows


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def statuses_of_page() -> dict[tuple[str, str], str]:
    """What the page says of each field on each path."""
    statuses: dict[tuple[str, str], str] = {}
    for fields, status_in_chats, status_in_completions, _ in rows_after("| field | chats |"):
        for name in names_in(fields):
            assert (CHAT, name) not in statuses, f"{name} has two rows"
            statuses[CHAT, name] = status_in_chats
            statuses[PLAIN, name] = status_in_completions
    assert {*statuses.values()} <= STATUSES
    return statuses


PAGE = statuses_of_page()
MODELS: dict[str, type[BaseModel]] = {CHAT: ChatRequest, PLAIN: CompletionRequest}


def test_every_field_has_its_row() -> None:
    """That of each class of requests, what is refused and what is ignored; and no row is of anything else."""
    expected = {}
    names = {*ChatRequest.model_fields, *CompletionRequest.model_fields, *IGNORED, *NOT_SUPPORTED}
    for path, model in MODELS.items():
        for name in names:
            status = "refused" if name in NOT_SUPPORTED else "ignored"
            if name in model.model_fields:
                status = "supported"
            expected[path, name] = status
    assert expected == PAGE


def test_every_field_of_openais_client_has_a_row() -> None:
    chats = get_type_hints(chat_create_params.CompletionCreateParamsStreaming)
    completions = get_type_hints(completion_create_params.CompletionCreateParamsStreaming)
    assert {(CHAT, name) for name in chats} | {(PLAIN, name) for name in completions} <= PAGE.keys()


# Our own server

MOODY = "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}{{ reasoning_effort }}{{ mood }}"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A target whose tokenizer begins texts, whose template says how it was asked, and whose answers end soon."""
    target = load_target(str(save_tiny_target(tmp_path_factory.mktemp("paged"))), device="cpu")
    tokenizer: Any = target.tokenizer
    tokenizer.chat_template += MOODY
    start = TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = start
    ends = []
    chat = tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    for text, special in ((TEXT, True), (chat, False)):
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=special)["input_ids"]
        ends.append(int(generate(target.model, ids, METHOD, max_new_tokens=6)[0, 5]))
    target.model.generation_config.eos_token_id = ends
    return target


@pytest.fixture(scope="module")
def url(target: Target) -> Iterator[str]:
    with serving(target, session_bytes=1 << 24, service={"max_budget": 60}) as (url, _):
        yield url


def post(url: str, path: str, fields: dict[str, Any]) -> httpx.Response:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 12}
    if path == CHAT:
        body["messages"] = TURNS
    else:
        body["prompt"] = TEXT
    return httpx.post(url + path, json=body | fields, timeout=60)


def lines_of(reply: httpx.Response) -> list[str]:
    """The lines of a reply, without what is new in every one."""
    assert reply.status_code == 200, reply.text
    text = re.sub(r'"(id|created|cached_tokens)": ?("[^"]*"|\d+)', r'"\1": 0', reply.text)
    return [line for line in text.splitlines() if line]


SAMPLED = {"temperature": 1.5, "seed": 4}
ENDLESS = {"ignore_eos": True, "max_tokens": 30}
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "stream": (True, {}),
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "seed": (5, {"temperature": 1.5, "seed": 4}),
    "messages": ([{"role": "user", "content": "Hello"}], {}),
    "prompt": ("Hello", {}),
    "max_tokens": (2, {}),
    "max_completion_tokens": (2, {"max_tokens": None}),
    "n": (2, {}),
    "temperature": (1.5, {"seed": 4}),
    "top_p": (0.1, SAMPLED),
    "top_k": (1, SAMPLED),
    "min_p": (0.9, SAMPLED),
    "repetition_penalty": (5.0, ENDLESS),
    "presence_penalty": (2.0, ENDLESS),
    "frequency_penalty": (2.0, ENDLESS),
    "logit_bias": ({"5": 100}, {}),
    "min_tokens": (9, {}),
    "ignore_eos": (True, {}),
    "top_logprobs": (2, {"logprobs": True}),
    "chat_template_kwargs": ({"mood": "calm"}, {}),
    "reasoning_effort": ("none", {}),
    "add_generation_prompt": (False, {}),
    "continue_final_message": (True, {"messages": [*TURNS, {"role": "assistant", "content": "It sailed"}]}),
    "add_special_tokens": (False, {}),
    "response_format": ({"type": "json_object"}, {}),
    "keepsight": ({"budget": 20}, {}),
}
"""For each field a value that changes an answer, and further fields of both requests."""


@pytest.mark.parametrize(("path", "name"), [key for key, status in PAGE.items() if status == "supported"])
def test_supported_fields_change_the_answer(url: str, path: str, name: str) -> None:
    if name in CHECKS:
        CHECKS[name](url, path)
        return
    value, other_fields = CHANGES[name]
    without = lines_of(post(url, path, other_fields))
    assert lines_of(post(url, path, other_fields | {name: value})) != without


def check_model(url: str, path: str) -> None:
    assert post(url, path, {"model": "other"}).status_code == 404


def check_logprobs(url: str, path: str) -> None:
    if path == CHAT:
        (choice,) = post(url, path, {"logprobs": True}).json()["choices"]
        assert choice["logprobs"]["content"]
    else:
        (choice,) = post(url, path, {"logprobs": 1}).json()["choices"]
        assert choice["logprobs"]["tokens"]


def text_of_answer(url: str, path: str, fields: dict[str, Any]) -> str:
    (choice,) = post(url, path, fields).raise_for_status().json()["choices"]
    return str(choice["text"] if path == PLAIN else choice["message"]["content"])


def check_stop(url: str, path: str) -> None:
    text = text_of_answer(url, path, {})
    stop = text[3]
    assert text_of_answer(url, path, {"stop": stop}) == text[: text.index(stop)]


def check_stop_ids(url: str, path: str) -> None:
    chosen = {"logit_bias": {"50": 100}}
    assert text_of_answer(url, path, chosen) != ""
    assert text_of_answer(url, path, chosen | {"stop_token_ids": [50]}) == ""


def check_salt(url: str, path: str) -> None:
    def cached(fields: dict[str, Any]) -> int:
        usage = post(url, path, fields).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    post(url, path, {})
    assert cached({}) > 0
    assert cached({"cache_salt": f"of {path}"}) == 0


def calls_of(path: str, fields: dict[str, Any]) -> int:
    """How many calls the answer of a model has that calls a tool twice."""
    response = response_template("<tool_call>", "</tool_call>")
    with speaking(call("Ulm") + call("Bonn"), TEMPLATE, response) as url:
        body = post(url, path, {"max_tokens": 200} | fields).raise_for_status().json()
    message = body["choices"][0]["message"]
    return len(message.get("tool_calls") or [])


def check_tools(url: str, path: str) -> None:
    assert calls_of(path, {"tools": [WEATHER]}) == 2


def check_tool_choice(url: str, path: str) -> None:
    assert calls_of(path, {"tools": [WEATHER], "tool_choice": "none"}) == 0


def check_parallel_calls(url: str, path: str) -> None:
    assert calls_of(path, {"tools": [WEATHER], "parallel_tool_calls": False}) == 1


CHECKS: dict[str, Callable[[str, str], None]] = {
    "model": check_model,
    "logprobs": check_logprobs,
    "stop": check_stop,
    "stop_token_ids": check_stop_ids,
    "cache_salt": check_salt,
    "tools": check_tools,
    "tool_choice": check_tool_choice,
    "parallel_tool_calls": check_parallel_calls,
}
"""For each other field the check that shows its effect."""


@pytest.mark.parametrize("path", PATHS)
def test_ignored_fields_change_nothing(url: str, path: str) -> None:
    without = lines_of(post(url, path, {"temperature": 0}))
    for (path_of_row, name), status in PAGE.items():
        if status == "ignored" and path_of_row == path:
            reply = post(url, path, {name: {"deep": [7, True]}, "temperature": 0})
            assert lines_of(reply) == without, name


@pytest.mark.parametrize(("path", "name"), [key for key, status in PAGE.items() if status == "refused"])
def test_refused_fields_are_named_with_what_to_do(url: str, path: str, name: str) -> None:
    reply = post(url, path, {name: VALUES.get(name, True)})
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["param"] == name
    assert error["message"] == f"{name}: is not supported; {NOT_SUPPORTED[name]}"


@pytest.mark.parametrize("value", [names_in(row[0])[0] for row in rows_after("| value | why |")])
def test_refused_values_are_named(url: str, value: str) -> None:
    fields = json.loads(value)
    reply = post(url, CHAT, fields)
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["param"].partition(".")[0] in fields
    for jargon in ("Input should", "List should", "pydantic", "validation error"):
        assert jargon not in error["message"]


# The one beside vLLM, without vLLM


class TokenizesChats(VllmStandIn):
    """Stands for vLLM's application, and tells the tokens of chats too."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def receive_prompt() -> Any:
            message = await receive()
            body = json.loads(message["body"])
            if scope["path"] == "/tokenize" and "messages" in body:
                rendered = self.tokenizer.apply_chat_template(body["messages"], tokenize=False)
                message = message | {"body": json.dumps({"prompt": rendered}).encode()}
            return message

        await super().__call__(scope, receive_prompt, send)


def statuses_beside_vllm() -> dict[str, tuple[str, str]]:
    """What the page says of each field with a prompt that is evicted from, and with a short one."""
    statuses: dict[str, tuple[str, str]] = {}
    for fields, status_if_evicted, status_if_short in rows_after("| field | prompts that are evicted from"):
        for name in names_in(fields):
            statuses[name] = (status_if_evicted, status_if_short)
    return statuses


BESIDE_VLLM = statuses_beside_vllm()


def test_every_field_that_the_middleware_refuses_has_its_row() -> None:
    assert {*BYPASS, "keepsight"} == BESIDE_VLLM.keys()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_short", [False, True], ids=["evicted from", "short"])
def test_other_fields_are_handed_on_to_vllm(rewriter: Rewriter, path: str, is_short: bool) -> None:
    """Each field of the page, with a value that our own server supports or refuses; `keepsight` does not reach vLLM."""
    text = "Hi" if is_short else TEXT
    body: dict[str, Any] = {"prompt": text}
    if path == CHAT:
        body = {"messages": [{"role": "user", "content": text}]}
    values: dict[str, Any] = {name: value for name, (value, _) in CHANGES.items()} | VALUES
    for name in ("messages", "prompt", "kv_transfer_params", "chat_template"):
        values[name] = body.get(name)
    values["keepsight"] = {"budget": 130}
    for path_of_row, name in PAGE:
        if path_of_row != path:
            continue
        vllm = TokenizesChats(rewriter.tokenizer)
        value = values.get(name, True)
        status, reply = Middleware(rewriter, FixedReader(), vllm).post(path, body | {name: value})
        expected = BESIDE_VLLM.get(name, ("handed on", "handed on"))[is_short]
        if expected == "refused":
            assert status == 400
            assert reply["error"]["param"] == name
            assert name in reply["error"]["message"]
            assert "leave it out" in reply["error"]["message"]
            assert not vllm.requests
            continue
        assert status == 200, f"{name}: {reply}"
        ((_, handed_on),) = vllm.requests
        if name == "keepsight":
            assert name not in handed_on
        elif name not in ("prompt", "kv_transfer_params"):
            assert handed_on.get(name) == value
