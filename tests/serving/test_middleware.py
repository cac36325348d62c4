"""The middleware of vLLM's server: what it makes of requests, without vLLM."""

import asyncio
import json
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
from tests.tiny import prompt_ids, tiny_model, tiny_tokenizer

CHAT, COMPLETIONS = PATHS
TEXT = "for item in the list:\n    print(item)"


@pytest.fixture(scope="module")
def rewriter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer().save_pretrained(str(folder))
    return Rewriter(str(folder / "prefixes"), str(folder))


def test_a_document_to_evict_from_is_read_as_keepsight_prefix_reads_it(rewriter: Rewriter):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
    asked = {"messages": turns, "max_completion_tokens": 50, "kv_transfer_params": {"keepsight_evict": 64}}
    found = rewriter.rewritten(CHAT, asked)
    before = "<|system|>Be brief.<|end|><|user|>"
    ids = rewriter.tokenizer(before + TEXT, add_special_tokens=False)["input_ids"]
    params = {"keepsight_evict": 64, "keepsight_before": before, "prompt_token_ids": ids}
    assert found == asked | {"max_completion_tokens": 1, "kv_transfer_params": params}
    assert rewriter.rewritten(CHAT, asked | {"kv_transfer_params": {"keepsight_evict": False}})["messages"] == turns


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
    asked = {"messages": turns, "prompt": TEXT, "kv_transfer_params": {"keepsight_evict": True}}
    with pytest.raises(UserError) as error:
        rewriter.rewritten(path, asked | changes)
    assert error.value.field in fields


def sent(rewriter: Rewriter, path: str, body: bytes, **scope: Any) -> tuple[int, bytes]:
    """The status of a refusal and its body, or 0 and the body that the application behind is given."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend([0, (await receive())["body"]])

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        seen.append(message.get("status", message.get("body")))

    headers = [(b"content-type", b"application/json")]
    asked = {"type": "http", "method": "POST", "path": path, "headers": headers, **scope}
    asyncio.run(Prefixes(app, rewriter)(asked, receive, send))
    return seen[0], seen[1]


@pytest.fixture(scope="module")
def digest(rewriter: Rewriter):
    model = tiny_model()
    state = SnapKV(140, window=8).start(model, prompt_ids(200)[0])
    return export(model, state, rewriter.store.root, before="<|user|>")[0]


def test_a_prefix_is_found_behind_a_root_path(rewriter: Rewriter, digest):
    body = json.dumps({"messages": [{"role": "user", "content": f"[[keepsight:{digest}]]Why?"}]}).encode()
    for given in ({"path": CHAT}, {"path": f"/api{CHAT}", "root_path": "/api"}):
        status, changed = sent(rewriter, body=body, **given)
        assert status == 0 and len(json.loads(changed)["kv_transfer_params"]["prompt_token_ids"]) > 140


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
    asked = {"messages": [{"role": "user", "content": f"[[keepsight:{digest}]]Why?"}]}
    turns = [*changes.get("messages", []), *asked["messages"]]
    status, said = sent(rewriter, CHAT, json.dumps(asked | changes | {"messages": turns}).encode())
    assert status == 400 and json.loads(said)["error"]["param"] == param


NAME = "[[keepsight:ID]]"


def chat_body(digest: str, *contents: Any, **options: Any) -> bytes:
    """A chat whose user messages have these contents, with the prefix's id in the place of ID."""
    turns = [{"role": "user", "content": content} for content in contents]
    return json.dumps({"messages": turns, **options}).replace("ID", digest).encode()


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
    status, changed = sent(rewriter, CHAT, chat_body(digest, content))
    ids = json.loads(changed)["kv_transfer_params"]["prompt_token_ids"]
    assert status == 0 and ids[:140] == placeholders(digest, 140, rewriter.alphabet)
    assert rewriter.tokenizer.decode(ids[140:]) == f"{question}<|end|><|assistant|>".replace("ID", digest)


@pytest.mark.parametrize(
    "contents, why",
    [
        ([f"{NAME}Why?", f"{NAME}How?"], "reads one prefix"),
        ([NAME], "no question"),
        ([f"{NAME} \n"], "no question"),
        ([[part(NAME), part(" ")]], "no question"),
        ([[part(f"{NAME}Why?"), {"type": "image_url", "image_url": {"url": "data:"}}]], "text alone"),
        ([f"{NAME}Why?", [{"type": "image_url", "image_url": {"url": "data:"}}]], "text alone"),
    ],
)
def test_a_prefix_that_cannot_be_read_is_refused(rewriter: Rewriter, digest, contents, why):
    status, said = sent(rewriter, CHAT, chat_body(digest, *contents))
    assert status == 400 and why in json.loads(said)["error"]["message"]


def test_a_question_may_stand_in_a_later_message(rewriter: Rewriter, digest):
    status, changed = sent(rewriter, CHAT, chat_body(digest, NAME, "Why?"))
    ids = json.loads(changed)["kv_transfer_params"]["prompt_token_ids"]
    assert status == 0 and str(rewriter.tokenizer.decode(ids[140:])).endswith("Why?<|end|><|assistant|>")


def test_text_about_prefixes_is_text(rewriter: Rewriter, digest):
    """A page that was pasted, documentation, and what tools and answers say, whatever they begin with."""
    name = NAME.replace("ID", digest)
    texts = ["What is [[keepsight:ID]]?", "keepsight: 0f0f", "0f" * 16, "[[keepsight]]", f"Look: {name}Why?"]
    texts += [f"Why [[ Keepsight: {digest} ]]?", f"`{name}` is an id.", f"\n> {name}"]
    for text in texts:
        body = json.dumps({"messages": [{"role": "user", "content": text}], "prompt": text}).encode()
        for path in PATHS:
            assert sent(rewriter, path, body) == (0, body)
    parts = json.dumps({"messages": [{"role": "user", "content": [part("Look:"), part(f"{name}Why?")]}]}).encode()
    assert sent(rewriter, CHAT, parts) == (0, parts)
    shown = "{% if message.role == 'tool' %}{{ message.content }}{% endif %}"
    template = f"{{% for message in messages %}}{shown}{{% endfor %}}"
    for role in ("assistant", "tool"):
        turns = [{"role": "user", "content": "Why?"}, {"role": role, "content": f"{name}So."}]
        body = json.dumps({"messages": turns, "chat_template": template}).encode()
        assert sent(rewriter, CHAT, body) == (0, body)


def with_header(rewriter: Rewriter, path: str, body: Any, *ids: str) -> tuple[int, Any]:
    """The status, and the body of the reply or of the request that the application is given."""
    headers = [(b"content-type", b"application/json"), *((b"keepsight-prefix", name.encode()) for name in ids)]
    status, said = sent(rewriter, path, json.dumps(body).encode(), headers=headers)
    return status, json.loads(said)


@pytest.mark.parametrize("is_header", [False, True], ids=["field", "header"])
def test_a_prefix_is_named_beside_the_messages(rewriter: Rewriter, digest, is_header: bool):
    """Then all that messages say is text, also what would name another prefix."""
    fields = {} if is_header else {"keepsight": {"prefix": digest}}
    names = [digest] if is_header else []
    spelled = placeholders(digest, 140, rewriter.alphabet)
    for text in ("Why?", [part("Why"), part("not?")], f"[[keepsight:{'0f' * 16}]]Why?"):
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "So."}]
        turns.append({"role": "user", "content": f"And [[keepsight:{digest}]]?"})
        status, changed = with_header(rewriter, CHAT, {"messages": turns} | fields, *names)
        ids = changed["kv_transfer_params"]["prompt_token_ids"]
        said = text if isinstance(text, str) else "Why\nnot?"
        rest = f"{said}<|end|><|assistant|>So.<|end|><|user|>And [[keepsight:{digest}]]?<|end|><|assistant|>"
        assert status == 0 and ids[:140] == spelled and rewriter.tokenizer.decode(ids[140:]) == rest
        assert "keepsight" not in changed
    (why,) = (rewriter.tokenizer("Why?")["input_ids"],)
    for prompt in ("Why?", why, ["Why?", why]):
        status, changed = with_header(rewriter, COMPLETIONS, {"prompt": prompt} | fields, *names)
        ids = changed["prompt"] if isinstance(changed["prompt"][0], int) else changed["prompt"][1]
        assert status == 0 and ids == spelled + why


def test_a_prefix_beside_a_system_message_is_read_after_it(rewriter: Rewriter):
    model = tiny_model()
    state = SnapKV(140, window=8).start(model, prompt_ids(210)[0])
    digest, _ = export(model, state, rewriter.store.root, before="<|system|>Be brief.<|end|><|user|>")
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    status, changed = with_header(rewriter, CHAT, {"messages": turns}, digest)
    ids = changed["kv_transfer_params"]["prompt_token_ids"]
    assert status == 0 and rewriter.tokenizer.decode(ids[140:]) == "Why?<|end|><|assistant|>"
    status, said = with_header(rewriter, CHAT, {"messages": turns[1:]}, digest)
    assert status == 400 and "after other text" in said["error"]["message"]


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
    asked = {"messages": [{"role": "user", "content": "Why?"}]} | json.loads(json.dumps(fields).replace("ID", digest))
    status, said = with_header(rewriter, CHAT, asked, *(name.replace("ID", digest) for name in names))
    assert status == 400 and said["error"]["param"] == param


def test_ids_of_other_tenants_give_nothing_away(rewriter: Rewriter, tmp_path):
    """The same answer as for an id that there is not, in each form in which a request may name it."""
    model = tiny_model()
    state = SnapKV(140, window=8).start(model, prompt_ids(220)[0])
    foreign, _ = export(model, state, tmp_path / "tenant", before="<|user|>")

    def answers(name: str) -> list[str]:
        asked = {"messages": [{"role": "user", "content": "Why?"}], "prompt": "Why?"}
        spelled = [*placeholders(name, 140, rewriter.alphabet), 9]
        cut = [*spelled[:130], 9]
        named = f"[[keepsight:{name}]]Why?"
        found = [with_header(rewriter, path, asked, name) for path in PATHS]
        bodies: list[dict[str, Any]] = [
            {"messages": [{"role": "user", "content": named}], "prompt": named},
            asked | {"keepsight": {"prefix": name}},
            asked | {"prompt": spelled, "kv_transfer_params": {"prompt_token_ids": spelled}},
            asked | {"prompt": cut, "kv_transfer_params": {"prompt_token_ids": cut}},
        ]
        for body in bodies:
            found += [with_header(rewriter, path, body) for path in PATHS]
        assert {status for status, _ in found} == {400}
        return [json.dumps(said).replace(name, "ID") for _, said in found]

    assert answers(foreign) == answers("0f" * 16)


def test_prompts_of_completions_follow_the_same_rules(rewriter: Rewriter, digest):
    name = NAME.replace("ID", digest)
    spelled = placeholders(digest, 140, rewriter.alphabet)
    (why,) = (rewriter.tokenizer("Why?")["input_ids"],)
    for prompt in (f" {name}Why?", f"{name}Why?", spelled + why, [f"{name}Why?", f"So: {name}Why?"]):
        status, _ = sent(rewriter, COMPLETIONS, json.dumps({"prompt": prompt}).encode())
        assert status == 0, prompt
    refused = {
        f"{name} ": "no question",
        (rewriter.tokenizer.bos_token_id, *spelled, *why): "must be the first",
        (*spelled, *spelled, *why): "must be the first",
    }
    for prompt, reason in refused.items():
        asked = prompt if isinstance(prompt, str) else [*prompt]
        for given in (asked, [asked, "Why?"]):
            status, said = sent(rewriter, COMPLETIONS, json.dumps({"prompt": given}).encode())
            assert status == 400 and reason in json.loads(said)["error"]["message"]


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
    body, plain = chat_body(paged, f"{NAME}Why?"), chat_body(digest, f"{NAME}Why?")
    assert sent(rewriter, CHAT, body, app=application(16))[0] == 0
    assert sent(rewriter, CHAT, plain, app=application(32))[0] == 0
    status, said = sent(rewriter, CHAT, body, app=application(32))
    assert status == 400 and "pages of 16 entries; make it with page=32" in said.decode()
    assert b"another model" in sent(rewriter, CHAT, plain, app=application(kv_heads=4))[1]
    lora = chat_body(digest, f"{NAME}Why?", model="poet")
    assert sent(rewriter, CHAT, lora, app=application())[0] == 0
    assert b"without the LoRA" in sent(rewriter, CHAT, lora, app=application(loras=["poet"]))[1]
    monkeypatch.setenv("KEEPSIGHT_RAGGED", "0")
    assert b"make it without page=" in sent(rewriter, CHAT, body, app=application(16))[1]


@pytest.mark.parametrize("role", ["wizard", "developer", "tool", "User", ""])
def test_roles_that_the_template_does_not_have_are_refused(rewriter: Rewriter, role):
    """It would write them into the prompt."""
    turns = [{"role": "user", "content": "Why?"}, {"role": role, "content": "So."}]
    status, said = sent(rewriter, CHAT, json.dumps({"messages": turns}).encode())
    assert status == 400 and f"no role {role!r}" in json.loads(said)["error"]["message"]
    own = "{% for message in messages %}{% if message.role == 'wizard' %}{{ message.content }}{% endif %}{% endfor %}"
    body = json.dumps({"messages": turns, "chat_template": own}).encode()
    assert (sent(rewriter, CHAT, body)[0] == 0) == (role == "wizard")
    served = SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(chat_template=own)))
    assert (sent(rewriter, CHAT, json.dumps({"messages": turns}).encode(), app=served)[0] == 0) == (role == "wizard")


def test_vllm_learns_that_a_client_has_left(rewriter: Rewriter, digest):
    """Its prefill ends then; the body, rewritten or not, was read before."""
    for content in (f"[[keepsight:{digest}]]Why?", "Why?"):
        messages = [
            {"type": "http.request", "body": chat_body("", content), "more_body": False},
            {"type": "http.disconnect"},
        ]
        seen = list[str]()

        async def app(scope: Any, receive: Any, send: Any, seen: list[str] = seen) -> None:
            seen.extend([(await receive())["type"], (await receive())["type"]])

        async def receive(messages: list[Any] = messages) -> Any:
            return messages.pop(0)

        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [(b"content-type", b"application/json")]}
        asyncio.run(Prefixes(app, rewriter)(scope, receive, app))  # type: ignore[arg-type]
        assert seen == ["http.request", "http.disconnect"]


def test_other_requests_are_passed_on_as_they_are(rewriter: Rewriter):
    for path in PATHS:
        for body in (b"{", b"[]", b'{"messages": 3, "prompt": null}', b'{"messages": ["a"]}'):
            assert sent(rewriter, path, body) == (0, body)
    assert sent(rewriter, "/v1/responses", b"{}")[0] == 404
