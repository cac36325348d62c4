"""The middleware of vLLM's server: what it makes of requests, without vLLM."""

import asyncio
import json
from typing import Any

import pytest

from keepsight import SnapKV
from keepsight.errors import UserError
from keepsight.serving.export import export
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
    "changes, why",
    [
        ({"kv_transfer_params": {"keepsight_evict": "all"}}, "'all'; give true, or a budget"),
        ({"kv_transfer_params": {"keepsight_evict": 0}}, "a budget above 0"),
        ({"n": 2}, "leave n out"),
        ({"stream": True}, "leave stream out"),
        ({"messages": [], "prompt": ["one", "two"]}, "the document as the text|give one prompt"),
    ],
)
def test_what_cannot_be_evicted_from_is_refused(rewriter: Rewriter, path, changes, why):
    turns = [{"role": "user", "content": TEXT}]
    asked = {"messages": turns, "prompt": TEXT, "kv_transfer_params": {"keepsight_evict": True}}
    with pytest.raises(UserError, match=why):
        rewriter.rewritten(path, asked | changes)


def sent(rewriter: Rewriter, path: str, body: bytes, **scope: Any) -> tuple[int, bytes]:
    """The status of a refusal and its body, or 0 and the body that the application behind is given."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend([0, (await receive())["body"]])

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        seen.append(message.get("status", message.get("body")))

    asked = {"type": "http", "method": "POST", "path": path, "headers": [], **scope}
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
    "changes, why",
    [
        ({"prompt_logprobs": 0}, "prompt_logprobs needs"),
        ({"echo": True}, "echo needs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens needs"),
        ({"kv_transfer_params": ["a"]}, "must be an object"),
        ({"chat_template": "{{ messages }}"}, "chat_template changes"),
        ({"documents": [{"text": "a"}]}, "documents changes"),
        ({"chat_template_kwargs": 3}, "cannot be read"),
        ({"messages": [{"role": "system", "content": "Rhyme."}]}, "made after other text"),
    ],
)
def test_what_a_prefix_cannot_answer_is_refused(rewriter: Rewriter, digest, changes, why):
    asked = {"messages": [{"role": "user", "content": f"[[keepsight:{digest}]]Why?"}]}
    turns = [*changes.get("messages", []), *asked["messages"]]
    status, said = sent(rewriter, CHAT, json.dumps(asked | changes | {"messages": turns}).encode())
    assert status == 400 and why in json.loads(said)["error"]["message"]


def test_other_requests_are_passed_on_as_they_are(rewriter: Rewriter):
    for path in PATHS:
        for body in (b"{", b"[]", b'{"messages": 3, "prompt": null}', b'{"messages": ["a"]}'):
            assert sent(rewriter, path, body) == (0, body)
    assert sent(rewriter, "/v1/responses", b"{}")[0] == 404
