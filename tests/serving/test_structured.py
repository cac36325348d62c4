"""Answers that follow a JSON schema, whatever the random model would rather say."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from keepsight.models.targets import Target
from tests.serving.loopback import serving
from tests.tiny import tiny_model, tiny_tokenizer

pytest.importorskip("llguidance", reason="the extra serving has it")
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"ship": {"enum": ["sloop", "brig"]}, "masts": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["ship", "masts"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "ship", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def url():
    tokenizer = tiny_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer) + 8, max_position_embeddings=4096, pad_token_id=0)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    with serving(Target(model, tokenizer, "tiny", "1")) as (url, _):
        yield url


def asked(path: str, **fields):
    prompt = {"messages": [{"role": "user", "content": "A ship?"}]} if path == CHAT else {"prompt": "A ship: "}
    return {"model": "tiny", "max_tokens": 400, **prompt, **fields}


@pytest.mark.parametrize("path", [PLAIN, CHAT])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "seed": 3, "n": 3}])
def test_answers_follow_the_schema(url, path, sampling):
    body = httpx.post(url + path, json=asked(path, response_format=FORMAT, **sampling), timeout=60).raise_for_status()
    choices = body.json()["choices"]
    assert len(choices) == sampling.get("n", 1)
    for choice in choices:
        ship = json.loads(choice["text"] if path == PLAIN else choice["message"]["content"])
        assert ship["ship"] in ("sloop", "brig") and 1 <= ship["masts"] <= 9 and len(ship) == 2
        assert choice["finish_reason"] == "stop"


def test_an_object_of_any_kind_and_an_ordinary_answer_beside_it(url):
    plain = asked(PLAIN, max_tokens=20)
    json_asked = plain | {"response_format": {"type": "json_object"}}
    with ThreadPoolExecutor(2) as pool:
        bodies = pool.map(lambda body: httpx.post(url + PLAIN, json=body, timeout=60).json(), (plain, json_asked))
        text, json_text = (body["choices"][0]["text"] for body in bodies)
    assert json_text.lstrip().startswith("{")
    assert text == httpx.post(url + PLAIN, json=plain, timeout=60).json()["choices"][0]["text"] != json_text


@pytest.mark.parametrize(
    "schema",
    [{"type": "ship"}, {"$ref": "#/nowhere"}, {"type": "object", "properties": {"a": False}, "required": ["a"]}],
)
def test_schemas_that_nothing_follows_are_refused(url, schema):
    fields = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    reply = httpx.post(url + CHAT, json=asked(CHAT, **fields))
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "response_format"
