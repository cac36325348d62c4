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
from keepsight.serving.vllm.middleware import BYPASS, Prefixes, Rewriter
from tests.serving.loopback import METHOD, serving
from tests.serving.test_fields import VALUES
from tests.serving.test_long_prompts import Engine as StandIn
from tests.serving.test_long_prompts import Reads, sent
from tests.serving.test_tools import TEMPLATE, WEATHER, call, response_template
from tests.serving.test_tools import speaking as speaking
from tests.tiny import save_tiny_target, tiny_tokenizer
from tests.typed import text_of

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
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
    for fields, chats, completions, _ in rows_after("| field | chats |"):
        for name in names_in(fields):
            for path, status in ((CHAT, chats), (PLAIN, completions)):
                assert status in STATUSES and (path, name) not in statuses, f"{name} of {path}"
                statuses[path, name] = status
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
    shared = {"model": "tiny", "max_tokens": 12}
    asked = {"messages": TURNS} if path == CHAT else {"prompt": TEXT}
    return httpx.post(url + path, json=shared | asked | fields, timeout=60)


def said(reply: httpx.Response) -> Any:
    """What a reply says, without what each one has of its own."""
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
    if name in OF_THEIR_OWN:
        OF_THEIR_OWN[name](url, path)
        return
    value, beside = CHANGES[name]
    plain = said(post(url, path, beside))
    assert said(post(url, path, beside | {name: value})) != plain


def check_model(url: str, path: str) -> None:
    assert post(url, path, {"model": "other"}).status_code == 404


def check_logprobs(url: str, path: str) -> None:
    (choice,) = post(url, path, {"logprobs": True if path == CHAT else 1}).json()["choices"]
    assert choice["logprobs"]["content" if path == CHAT else "tokens"]


def text_of_answer(url: str, path: str, fields: dict[str, Any]) -> str:
    (choice,) = post(url, path, fields).raise_for_status().json()["choices"]
    return str(choice["text"] if path == PLAIN else choice["message"]["content"])


def check_stop(url: str, path: str) -> None:
    text = text_of_answer(url, path, {})
    assert text_of_answer(url, path, {"stop": text[3]}) == text[: text.index(text[3])]


def check_stop_ids(url: str, path: str) -> None:
    chosen = {"logit_bias": {"50": 100}}
    assert text_of_answer(url, path, chosen) != "" == text_of_answer(url, path, chosen | {"stop_token_ids": [50]})


def check_salt(url: str, path: str) -> None:
    def cached(fields: dict[str, Any]) -> int:
        return int(post(url, path, fields).json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    post(url, path, {})
    assert cached({}) > 0 == cached({"cache_salt": f"of {path}"})


def calls_of(path: str, fields: dict[str, Any]) -> int:
    """How many calls the answer of a model has that calls a tool twice."""
    response = response_template("<tool_call>", "</tool_call>")
    with speaking(call("Ulm") + call("Bonn"), TEMPLATE, response) as url:
        body = post(url, path, {"max_tokens": 200} | fields).raise_for_status().json()
    return len(body["choices"][0]["message"].get("tool_calls") or [])


def check_tools(url: str, path: str) -> None:
    assert calls_of(path, {"tools": [WEATHER]}) == 2


def check_tool_choice(url: str, path: str) -> None:
    assert calls_of(path, {"tools": [WEATHER], "tool_choice": "none"}) == 0


def check_parallel_calls(url: str, path: str) -> None:
    assert calls_of(path, {"tools": [WEATHER], "parallel_tool_calls": False}) == 1


OF_THEIR_OWN: dict[str, Callable[[str, str], None]] = {
    "model": check_model,
    "logprobs": check_logprobs,
    "stop": check_stop,
    "stop_token_ids": check_stop_ids,
    "cache_salt": check_salt,
    "tools": check_tools,
    "tool_choice": check_tool_choice,
    "parallel_tool_calls": check_parallel_calls,
}
"""Fields that are seen in another way."""


@pytest.mark.parametrize("path", PATHS)
def test_ignored_fields_change_nothing(url: str, path: str) -> None:
    plain = said(post(url, path, {"temperature": 0}))
    for (path_of_row, name), status in PAGE.items():
        if status == "ignored" and path_of_row == path:
            assert said(post(url, path, {name: {"deep": [7, True]}, "temperature": 0})) == plain, name


@pytest.mark.parametrize(("path", "name"), [key for key, status in PAGE.items() if status == "refused"])
def test_refused_fields_are_named_with_what_to_do(url: str, path: str, name: str) -> None:
    reply = post(url, path, {name: VALUES.get(name, True)})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == name
    assert error["message"] == f"{name}: is not supported; {NOT_SUPPORTED[name]}"


@pytest.mark.parametrize("value", [names_in(row[0])[0] for row in rows_after("| value | why |")])
def test_refused_values_are_named(url: str, value: str) -> None:
    fields = json.loads(value)
    reply = post(url, CHAT, fields)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"].partition(".")[0] in fields
    for words in ("Input should", "List should", "pydantic", "validation error"):
        assert words not in error["message"]


# The one beside vLLM, without vLLM


@pytest.fixture(scope="module")
def rewriter(tmp_path_factory: pytest.TempPathFactory) -> Rewriter:
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer().save_pretrained(str(folder))
    return Rewriter(str(folder / "prefixes"), str(folder))


class Tokenizing(StandIn):
    """Stands for vLLM's application, and tells the tokens of chats too."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def prompt() -> Any:
            message = await receive()
            body = json.loads(message["body"])
            if scope["path"] == "/tokenize" and "messages" in body:
                rendered = self.tokenizer.apply_chat_template(body["messages"], tokenize=False)
                message = message | {"body": json.dumps({"prompt": rendered}).encode()}
            return message

        await super().__call__(scope, prompt, send)


BESIDE_VLLM = {
    name: (evicted, short)
    for fields, evicted, short in rows_after("| field | prompts that are evicted from")
    for name in names_in(fields)
}


def test_every_field_that_the_middleware_refuses_has_its_row() -> None:
    assert {*BYPASS, "keepsight"} == BESIDE_VLLM.keys()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_short", [False, True], ids=["evicted from", "short"])
def test_other_fields_are_handed_on_to_vllm(rewriter: Rewriter, path: str, is_short: bool) -> None:
    """Each field of the page, with a value that our own server supports or refuses; `keepsight` does not reach vLLM."""
    text = "Hi" if is_short else TEXT
    plain: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    values: dict[str, Any] = {name: value for name, (value, _) in CHANGES.items()} | VALUES
    for name in ("messages", "prompt", "kv_transfer_params", "chat_template"):
        values[name] = plain.get(name)
    for path_of_row, name in PAGE:
        if path_of_row != path:
            continue
        vllm = Tokenizing(rewriter.tokenizer)
        value = {"budget": 130} if name == "keepsight" else values.get(name, True)
        status, reply = sent(Prefixes(vllm, rewriter, Reads()), vllm, path, plain | {name: value})
        if BESIDE_VLLM.get(name, ("handed on", "handed on"))[is_short] == "refused":
            assert status == 400 and reply["error"]["param"] == name and not vllm.seen
            assert name in reply["error"]["message"] and "leave it out" in reply["error"]["message"]
        else:
            ((_, seen),) = vllm.seen
            assert status == 200, f"{name}: {reply}"
            if name == "keepsight":
                assert name not in seen
            else:
                assert name in ("prompt", "kv_transfer_params") or seen.get(name) == value
