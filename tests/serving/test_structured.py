"""Answers that follow a JSON schema, whatever the random model would rather say."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from keepsight.models.targets import Target
from tests.serving.loopback import assert_field_refused, serving
from tests.tiny import tiny_model, tiny_tokenizer

pytest.importorskip("llguidance", reason="the extra serving has it")
CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
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


def post(url: str, path: str, **fields):
    body = {"model": "tiny", "max_tokens": 400} | fields
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": "A ship?"}]
    else:
        body["prompt"] = "A ship: "
    return httpx.post(url + path, json=body, timeout=60)


@pytest.mark.parametrize("path", [PLAIN, CHAT])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "seed": 3, "n": 3}])
def test_answers_follow_the_schema(url, path, sampling):
    reply = post(url, path, response_format=FORMAT, **sampling).raise_for_status()
    choices = reply.json()["choices"]
    assert len(choices) == sampling.get("n", 1)
    for choice in choices:
        answer = choice["text"] if path == PLAIN else choice["message"]["content"]
        ship = json.loads(answer)
        assert ship.keys() == {"ship", "masts"}
        assert ship["ship"] in ("sloop", "brig")
        assert 1 <= ship["masts"] <= 9
        assert choice["finish_reason"] == "stop"


def test_an_object_of_any_kind_and_an_ordinary_answer_beside_it(url):
    def text_of(fields):
        return post(url, PLAIN, max_tokens=20, **fields).json()["choices"][0]["text"]

    with ThreadPoolExecutor(2) as pool:
        text, json_text = pool.map(text_of, ({}, {"response_format": {"type": "json_object"}}))
    assert json_text.lstrip().startswith("{")
    assert text == text_of({})
    assert text != json_text


@pytest.mark.parametrize(
    "schema",
    [{"type": "ship"}, {"$ref": "#/nowhere"}, {"type": "object", "properties": {"a": False}, "required": ["a"]}],
)
def test_schemas_that_nothing_follows_are_refused(url, schema):
    response_format = {"type": "json_schema", "json_schema": {"schema": schema}}
    assert_field_refused(post(url, CHAT, response_format=response_format), "response_format")
