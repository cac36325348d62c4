"""Answers that follow a JSON schema, whatever the random model would rather say."""

import json

import httpx
import pytest

from tests.serving.loopback import serving

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
def url(target):
    with serving(target) as (url, _):
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
    bias = {"logit_bias": {str(token): 100 for token in range(87, 95)}}
    fields = {"response_format": {"type": "json_object"}, "max_tokens": 300, "temperature": 1.0, "seed": 1}
    body = httpx.post(url + PLAIN, json=asked(PLAIN, **fields), timeout=60).raise_for_status().json()
    assert body["choices"][0]["text"].lstrip().startswith("{")
    assert httpx.post(url + PLAIN, json=asked(PLAIN, **bias)).status_code == 200


@pytest.mark.parametrize(
    "schema",
    [{"type": "ship"}, {"$ref": "#/nowhere"}, {"type": "object", "properties": {"a": False}, "required": ["a"]}],
)
def test_schemas_that_nothing_follows_are_refused(url, schema):
    fields = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    reply = httpx.post(url + CHAT, json=asked(CHAT, **fields))
    assert reply.status_code == 400 and "response_format: the schema" in reply.json()["error"]["message"]
