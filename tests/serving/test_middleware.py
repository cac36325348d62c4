"""The middleware of vLLM's server: what it makes of requests, without vLLM."""

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from keepsight import SnapKV
from keepsight.errors import UserError
from keepsight.runtime.allocate import Global
from keepsight.serving.export import export
from keepsight.serving.prefix import placeholders
from keepsight.serving.vllm.access import PATHS
from keepsight.serving.vllm.middleware import Prefixes, Rewriter
from tests.tiny import prompt_ids, tiny_model

CHAT, COMPLETIONS = PATHS
TEXT = "for item in the list:\n    print(item)"


def test_a_document_to_evict_from_is_read_as_keepsight_prefix_reads_it(rewriter: Rewriter):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
    body = {"messages": turns, "max_completion_tokens": 50, "kv_transfer_params": {"keepsight_evict": 64}}
    before = "<|system|>Be brief.<|end|><|user|>"
    ids = rewriter.tokenizer(before + TEXT, add_special_tokens=False)["input_ids"]
    params = {"keepsight_evict": 64, "keepsight_before": before, "prompt_token_ids": ids}
    expected = body | {"max_completion_tokens": 1, "kv_transfer_params": params}
    assert rewriter.rewritten(CHAT, body) == expected
    plain = body | {"kv_transfer_params": {"keepsight_evict": False}}
    assert rewriter.rewritten(CHAT, plain)["messages"] == turns


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"kv_transfer_params": {"keepsight_evict": "all"}}, ("kv_transfer_params",)),
        ({"kv_transfer_params": {"keepsight_evict": 0}}, ("kv_transfer_params",)),
        ({"n": 2}, ("n",)),
        ({"stream": True}, ("stream",)),
        ({"messages": [], "prompt": ["one", "two"]}, ("messages", "prompt")),
    ],
)
def test_what_cannot_be_evicted_from_is_refused(rewriter: Rewriter, path, changes, fields):
    turns = [{"role": "user", "content": TEXT}]
    body = {"messages": turns, "prompt": TEXT, "kv_transfer_params": {"keepsight_evict": True}}
    with pytest.raises(UserError) as error:
        rewriter.rewritten(path, body | changes)
    assert error.value.field in fields


def sent(rewriter: Rewriter, path: str, body: bytes, **scope: Any) -> tuple[int, bytes]:
    """The status of a refusal and its body, or 0 and the body that the application behind is given."""
    results: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        results.extend([0, message["body"]])

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        results.append(message.get("status", message.get("body")))

    headers = [(b"content-type", b"application/json")]
    request = {"type": "http", "method": "POST", "path": path, "headers": headers, **scope}
    asyncio.run(Prefixes(app, rewriter)(request, receive, send))
    return results[0], results[1]


def handed_on(rewriter: Rewriter, path: str, body: bytes, **scope: Any) -> Any:
    """The body that the application behind is given; an AssertionError if the request is refused."""
    status, changed = sent(rewriter, path, body, **scope)
    assert status == 0, changed
    return json.loads(changed)


def error_of(rewriter: Rewriter, path: str, body: bytes, **scope: Any) -> dict[str, Any]:
    """The error with which a request is refused with 400; an AssertionError if it is not."""
    status, reply = sent(rewriter, path, body, **scope)
    assert status == 400
    return json.loads(reply)["error"]


def encoded(body: Any) -> bytes:
    return json.dumps(body).encode()


@pytest.fixture(scope="module")
def digest(rewriter: Rewriter):
    model = tiny_model()
    state = SnapKV(140, window=8).start(model, prompt_ids(200)[0])
    return export(model, state, rewriter.store.root, before="<|user|>")[0]


def test_a_prefix_is_found_behind_a_root_path(rewriter: Rewriter, digest):
    body = chat_body(digest, f"{NAME}Why?")
    for scope in ({"path": CHAT}, {"path": f"/api{CHAT}", "root_path": "/api"}):
        changed = handed_on(rewriter, body=body, **scope)
        assert len(changed["kv_transfer_params"]["prompt_token_ids"]) > 140


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"echo": True}, "echo"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"kv_transfer_params": ["a"]}, "kv_transfer_params"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"chat_template_kwargs": 3}, None),
        ({"keepsight": {"budget": 64}}, "keepsight.budget"),
        ({"keepsight": {"adapter": "law"}}, "keepsight.adapter"),
        ({"keepsight": {"budget": 0}}, "keepsight.budget"),
        ({"keepsight": {"sinks": 4}}, "keepsight"),
        ({"keepsight": 3}, "keepsight"),
        ({"messages": [{"role": "system", "content": "Rhyme."}]}, "prefix"),
    ],
)
def test_what_a_prefix_cannot_answer_is_refused(rewriter: Rewriter, digest, changes, param):
    question = {"role": "user", "content": f"[[keepsight:{digest}]]Why?"}
    turns = [*changes.get("messages", []), question]
    error = error_of(rewriter, CHAT, encoded(changes | {"messages": turns}))
    assert error["param"] == param


NAME = "[[keepsight:ID]]"


def chat_body(digest: str, *contents: Any, **options: Any) -> bytes:
    """A chat whose user messages have these contents, with the prefix's id in the place of ID."""
    turns = [{"role": "user", "content": content} for content in contents]
    return json.dumps({"messages": turns, **options}).replace("ID", digest).encode()


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    "content, question",
    [
        (f" {NAME}Why?", "Why?"),
        (f"\n\t {NAME}\n\nWhy?", "\n\nWhy?"),
        ([part(f"{NAME}Why?")], "Why?"),
        ([part(NAME), part("Why?")], "\nWhy?"),
        ([part(f" {NAME} "), part("Why"), part("not?")], " \nWhy\nnot?"),
        ("[[ Keepsight: ID ]]Why?", "Why?"),
        (f"{NAME}Why {NAME}?", f"Why {NAME}?"),
    ],
)
def test_a_prefix_is_found_in_each_form_of_a_message(rewriter: Rewriter, digest, content, question):
    """These were answered as text, with 200 and an invented answer."""
    changed = handed_on(rewriter, CHAT, chat_body(digest, content))
    ids = changed["kv_transfer_params"]["prompt_token_ids"]
    assert ids[:140] == placeholders(digest, 140, rewriter.alphabet)
    expected = f"{question}<|end|><|assistant|>".replace("ID", digest)
    assert rewriter.tokenizer.decode(ids[140:]) == expected


@pytest.mark.parametrize(
    "contents, why",
    [
        ([f"{NAME}Why?", f"{NAME}How?"], "reads one prefix"),
        ([NAME], "no question"),
        ([f"{NAME} \n"], "no question"),
        ([[part(NAME), part(" ")]], "no question"),
        ([[part(f"{NAME}Why?"), IMAGE]], "text alone"),
        ([f"{NAME}Why?", [IMAGE]], "text alone"),
    ],
)
def test_a_prefix_that_cannot_be_read_is_refused(rewriter: Rewriter, digest, contents, why):
    error = error_of(rewriter, CHAT, chat_body(digest, *contents))
    assert why in error["message"]


def test_a_question_may_stand_in_a_later_message(rewriter: Rewriter, digest):
    changed = handed_on(rewriter, CHAT, chat_body(digest, NAME, "Why?"))
    ids = changed["kv_transfer_params"]["prompt_token_ids"]
    assert str(rewriter.tokenizer.decode(ids[140:])).endswith("Why?<|end|><|assistant|>")


def test_text_about_prefixes_is_text(rewriter: Rewriter, digest):
    """A page that was pasted, documentation, and what tools and answers say, whatever they begin with."""
    name = NAME.replace("ID", digest)
    texts = [
        "What is [[keepsight:ID]]?",
        "keepsight: 0f0f",
        "0f" * 16,
        "[[keepsight]]",
        f"Look: {name}Why?",
        f"Why [[ Keepsight: {digest} ]]?",
        f"`{name}` is an id.",
        f"\n> {name}",
    ]
    for text in texts:
        body = encoded({"messages": [{"role": "user", "content": text}], "prompt": text})
        for path in PATHS:
            assert sent(rewriter, path, body) == (0, body)
    in_parts = encoded({"messages": [{"role": "user", "content": [part("Look:"), part(f"{name}Why?")]}]})
    assert sent(rewriter, CHAT, in_parts) == (0, in_parts)
    message = "{% if message.role == 'tool' %}{{ message.content }}{% endif %}"
    template = f"{{% for message in messages %}}{message}{{% endfor %}}"
    for role in ("assistant", "tool"):
        turns = [{"role": "user", "content": "Why?"}, {"role": role, "content": f"{name}So."}]
        body = encoded({"messages": turns, "chat_template": template})
        assert sent(rewriter, CHAT, body) == (0, body)


def with_header(rewriter: Rewriter, path: str, body: Any, *ids: str) -> tuple[int, Any]:
    """The status, and the body of the reply or of the request that the application is given."""
    headers = [(b"content-type", b"application/json")]
    headers += [(b"keepsight-prefix", name.encode()) for name in ids]
    status, reply_or_request = sent(rewriter, path, encoded(body), headers=headers)
    return status, json.loads(reply_or_request)


@pytest.mark.parametrize("is_header", [False, True], ids=["field", "header"])
def test_a_prefix_is_named_beside_the_messages(rewriter: Rewriter, digest, is_header: bool):
    """Then all that messages say is text, also what would name another prefix."""
    fields = {} if is_header else {"keepsight": {"prefix": digest}}
    headers = [digest] if is_header else []
    prefix = placeholders(digest, 140, rewriter.alphabet)
    foreign = f"[[keepsight:{'0f' * 16}]]Why?"
    for content, text in (("Why?", "Why?"), ([part("Why"), part("not?")], "Why\nnot?"), (foreign, foreign)):
        turns = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": "So."},
            {"role": "user", "content": f"And [[keepsight:{digest}]]?"},
        ]
        status, changed = with_header(rewriter, CHAT, {"messages": turns} | fields, *headers)
        assert status == 0
        assert "keepsight" not in changed
        ids = changed["kv_transfer_params"]["prompt_token_ids"]
        assert ids[:140] == prefix
        after = f"{text}<|end|><|assistant|>So.<|end|><|user|>And [[keepsight:{digest}]]?<|end|><|assistant|>"
        assert rewriter.tokenizer.decode(ids[140:]) == after
    question = rewriter.tokenizer("Why?")["input_ids"]
    for prompt in ("Why?", question):
        status, changed = with_header(rewriter, COMPLETIONS, {"prompt": prompt} | fields, *headers)
        assert status == 0
        assert changed["prompt"] == prefix + question
    status, changed = with_header(rewriter, COMPLETIONS, {"prompt": ["Why?", question]} | fields, *headers)
    assert status == 0
    assert changed["prompt"][1] == prefix + question


def test_a_prefix_beside_a_system_message_is_read_after_it(rewriter: Rewriter):
    model = tiny_model()
    state = SnapKV(140, window=8).start(model, prompt_ids(210)[0])
    digest, _ = export(model, state, rewriter.store.root, before="<|system|>Be brief.<|end|><|user|>")
    system = {"role": "system", "content": "Be brief."}
    question = {"role": "user", "content": "Why?"}
    status, changed = with_header(rewriter, CHAT, {"messages": [system, question]}, digest)
    assert status == 0
    ids = changed["kv_transfer_params"]["prompt_token_ids"]
    assert rewriter.tokenizer.decode(ids[140:]) == "Why?<|end|><|assistant|>"
    status, reply = with_header(rewriter, CHAT, {"messages": [question]}, digest)
    assert status == 400
    assert "after other text" in reply["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "names", "param"),
    [
        ({"keepsight": {"prefix": "ID"}}, ["0f" * 16], "keepsight.prefix"),
        ({}, ["ID", "0f" * 16], "keepsight.prefix"),
        ({}, [""], "prefix"),
        ({}, ["../ID"], "prefix"),
        ({"keepsight": {"prefix": 3}}, [], "keepsight.prefix"),
        ({"messages": []}, ["ID"], "messages"),
        ({"messages": [{"role": "user", "content": " "}]}, ["ID"], "messages"),
        ({"kv_transfer_params": {"keepsight_evict": True}}, ["ID"], "keepsight.prefix"),
        ({"keepsight": {"prefix": "ID", "budget": 64}}, [], "keepsight.budget"),
    ],
)
def test_a_prefix_beside_the_messages_that_cannot_be_read(rewriter: Rewriter, digest, fields, names, param):
    body = {"messages": [{"role": "user", "content": "Why?"}]} | fields
    body = json.loads(json.dumps(body).replace("ID", digest))
    headers = [name.replace("ID", digest) for name in names]
    status, reply = with_header(rewriter, CHAT, body, *headers)
    assert status == 400
    assert reply["error"]["param"] == param


def test_ids_of_other_tenants_give_nothing_away(rewriter: Rewriter, tmp_path):
    """The same answer as for an id that there is not, in each form in which a request may name it."""
    model = tiny_model()
    state = SnapKV(140, window=8).start(model, prompt_ids(220)[0])
    foreign, _ = export(model, state, tmp_path / "tenant", before="<|user|>")

    def refusals(name: str) -> list[str]:
        """What requests that name a prefix are answered, with the prefix's id left out."""
        plain = {"messages": [{"role": "user", "content": "Why?"}], "prompt": "Why?"}
        spelled = [*placeholders(name, 140, rewriter.alphabet), 9]
        cut = [*spelled[:130], 9]
        text = f"[[keepsight:{name}]]Why?"
        bodies: list[dict[str, Any]] = [
            {"messages": [{"role": "user", "content": text}], "prompt": text},
            plain | {"keepsight": {"prefix": name}},
            plain | {"prompt": spelled, "kv_transfer_params": {"prompt_token_ids": spelled}},
            plain | {"prompt": cut, "kv_transfer_params": {"prompt_token_ids": cut}},
        ]
        replies = []
        for path in PATHS:
            replies.append(with_header(rewriter, path, plain, name))
            for body in bodies:
                replies.append(with_header(rewriter, path, body))
        assert {status for status, _ in replies} == {400}
        return [json.dumps(reply).replace(name, "ID") for _, reply in replies]

    assert refusals(foreign) == refusals("0f" * 16)


def test_prompts_of_completions_follow_the_same_rules(rewriter: Rewriter, digest):
    name = NAME.replace("ID", digest)
    prefix = placeholders(digest, 140, rewriter.alphabet)
    question = rewriter.tokenizer("Why?")["input_ids"]
    begin = rewriter.tokenizer.bos_token_id
    for prompt in (f" {name}Why?", f"{name}Why?", prefix + question, [f"{name}Why?", f"So: {name}Why?"]):
        handed_on(rewriter, COMPLETIONS, encoded({"prompt": prompt}))
    refused: list[tuple[Any, str]] = [
        (f"{name} ", "no question"),
        ([begin, *prefix, *question], "must be the first"),
        ([*prefix, *prefix, *question], "must be the first"),
    ]
    for prompt, why in refused:
        alone = error_of(rewriter, COMPLETIONS, encoded({"prompt": prompt}))
        assert why in alone["message"]
        in_a_list = error_of(rewriter, COMPLETIONS, encoded({"prompt": [prompt, "Why?"]}))
        assert why in in_a_list["message"]


def application(page: int = 16, kv_heads: int = 2, loras: Any = ()) -> Any:
    """What the middleware sees of vLLM's application, whose engine has a model with the shape of `tiny_model`."""
    model = SimpleNamespace(
        hf_text_config=SimpleNamespace(num_hidden_layers=3),
        get_total_num_kv_heads=lambda: kv_heads,
        get_head_size=lambda: 8,
    )
    config = SimpleNamespace(model_config=model, cache_config=SimpleNamespace(block_size=page))
    models = SimpleNamespace(lora_requests=dict.fromkeys(loras))
    return SimpleNamespace(state=SimpleNamespace(vllm_config=config, openai_serving_models=models))


@pytest.fixture(scope="module")
def paged(rewriter: Rewriter) -> str:
    """A prefix with pages of 16 entries."""
    model = tiny_model()
    state = SnapKV(144, window=8, allocate=Global(page=16)).start(model, prompt_ids(200)[0])
    return export(model, state, rewriter.store.root, page=16, before="<|user|>")[0]


def test_a_prefix_that_the_engine_cannot_load_is_refused(rewriter: Rewriter, digest, paged, monkeypatch):
    """The engine would fail the request, with 500."""
    monkeypatch.setenv("KEEPSIGHT_RAGGED", "1")
    ragged = chat_body(paged, f"{NAME}Why?")
    plain = chat_body(digest, f"{NAME}Why?")
    lora = chat_body(digest, f"{NAME}Why?", model="poet")
    handed_on(rewriter, CHAT, ragged, app=application(16))
    handed_on(rewriter, CHAT, plain, app=application(32))
    error = error_of(rewriter, CHAT, ragged, app=application(32))
    assert "pages of 16 entries; make it with page=32" in error["message"]
    error = error_of(rewriter, CHAT, plain, app=application(kv_heads=4))
    assert "another model" in error["message"]
    handed_on(rewriter, CHAT, lora, app=application())
    error = error_of(rewriter, CHAT, lora, app=application(loras=["poet"]))
    assert "without the LoRA" in error["message"]
    monkeypatch.setenv("KEEPSIGHT_RAGGED", "0")
    error = error_of(rewriter, CHAT, ragged, app=application(16))
    assert "make it without page=" in error["message"]


@pytest.mark.parametrize("role", ["wizard", "developer", "tool", "User", ""])
def test_roles_that_the_template_does_not_have_are_refused(rewriter: Rewriter, role):
    """It would write them into the prompt."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Why?"}, {"role": role, "content": "So."}]}
    error = error_of(rewriter, CHAT, encoded(body))
    assert f"no role {role!r}" in error["message"]
    message = "{% if message.role == 'wizard' %}{{ message.content }}{% endif %}"
    with_wizard = f"{{% for message in messages %}}{message}{{% endfor %}}"
    args = SimpleNamespace(chat_template=with_wizard)
    server = SimpleNamespace(state=SimpleNamespace(args=args))
    status_of_request, _ = sent(rewriter, CHAT, encoded(body | {"chat_template": with_wizard}))
    status_of_server, _ = sent(rewriter, CHAT, encoded(body), app=server)
    assert (status_of_request == 0) == (role == "wizard"), "the request's template"
    assert (status_of_server == 0) == (role == "wizard"), "the server's template"


def test_vllm_learns_that_a_client_has_left(rewriter: Rewriter, digest):
    """Its prefill ends then; the body, rewritten or not, was read before."""
    for content in (f"[[keepsight:{digest}]]Why?", "Why?"):
        messages = iter(
            [
                {"type": "http.request", "body": chat_body("", content), "more_body": False},
                {"type": "http.disconnect"},
            ]
        )
        received = list[str]()

        async def app(scope: Any, receive: Any, send: Any, received: list[str] = received) -> None:
            for _ in range(2):
                message = await receive()
                received.append(message["type"])

        async def receive(messages: Iterator[Any] = messages) -> Any:
            return next(messages)

        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [(b"content-type", b"application/json")]}
        asyncio.run(Prefixes(app, rewriter)(scope, receive, app))  # type: ignore[arg-type]
        assert received == ["http.request", "http.disconnect"]


def test_other_requests_are_passed_on_as_they_are(rewriter: Rewriter):
    for path in PATHS:
        for body in (b"{", b"[]", b'{"messages": 3, "prompt": null}', b'{"messages": ["a"]}'):
            assert sent(rewriter, path, body) == (0, body)
    assert sent(rewriter, "/v1/responses", b"{}")[0] == 404
