"""Answers from a server that speaks the completions protocol: forms of prompts, retries, what is refused."""

from collections import Counter
from typing import Any

import pytest

from keepsight.data_gen.backends import Rendered, ServerSettings, answer
from keepsight.errors import UserError
from keepsight.models.targets import Target
from tests.data_gen.served import Reply, answered, client, prompts, server, speaks

pytestmark = pytest.mark.usefixtures("no_waiting")


def test_ids_there_and_back_are_the_targets_own(target: Target) -> None:
    asked = prompts(*range(8, 28))
    with server(speaks(target)) as heard:
        made = answered(client(target, heard, parallel=4), asked)
    assert made == {prompt.index: answer(target, [prompt], 12)[0] for prompt in asked}
    assert 1 < heard.most_at_once <= 4 and len(heard.bodies) == 20
    assert "Authorization" not in heard.headers[0]


@pytest.mark.parametrize("takes", ["ids", "text"])
def test_a_server_that_returns_text(target: Target, takes: str) -> None:
    """It is asked in each form once, and from then on in the one that it takes."""
    text = target.tokenizer("The vault is open. Who opened it, and when?")["input_ids"]
    asked = [Rendered(index, "test", text[: 6 + index], None) for index in range(6)]
    with server(speaks(target, takes)) as heard:
        backend = client(target, heard)
        made = answered(backend, asked)
        assert answered(backend, asked) == made
    forms = Counter(("return_token_ids" in body, type(body["prompt"]).__name__) for body in heard.bodies)
    assert forms == ({(True, "list"): 1, (False, "list"): 12} if takes == "ids"
                     else {(True, "list"): 1, (False, "list"): 1, (False, "str"): 12})  # fmt: skip
    for prompt in asked:
        ids = answer(target, [prompt], 12)[0]
        again = target.tokenizer(target.tokenizer.decode(ids, skip_special_tokens=True))["input_ids"]
        end = [2] if ids[-1] in target.end_tokens else []
        assert made[prompt.index] == [*again, *end][:12]


def test_ids_that_no_text_stands_for_are_not_sent_as_text(target: Target) -> None:
    ids = [token for letter in "opened" for token in target.tokenizer(letter)["input_ids"]]
    broken = Rendered(7, "test", ids, None)
    with (
        server(speaks(target, "text")) as heard,
        pytest.raises(UserError, match="it takes no token ids, and no text stands for the ids of prompt 7"),
    ):
        answered(client(target, heard), [broken])
    assert all(isinstance(body["prompt"], list) for body in heard.bodies)


def test_passing_faults_are_tried_again(target: Target) -> None:
    say = speaks(target)
    faults: list[Reply] = [(503, {}), None, (429, {}), (200, {"choices": []})]

    def unsteady(body: dict[str, Any]) -> Reply:
        return faults.pop() if faults else say(body)

    asked = prompts(9, 10, 11)
    with server(unsteady) as heard:
        made = answered(client(target, heard, parallel=1, tries=6), asked)
    assert made == {prompt.index: answer(target, [prompt], 12)[0] for prompt in asked}
    assert len(heard.bodies) == 7


def test_an_answer_that_a_server_aborts_is_asked_for_again(target: Target) -> None:
    """A server of vLLM that ends gives back what it has so far, with status 200."""
    say, cut = speaks(target), [3]

    def ends(body: dict[str, Any]) -> Reply:
        status, reply = say(body) or (0, {})
        if cut[0] > 0:
            cut[0] -= 1
            choice = reply["choices"][0]
            choice |= {"token_ids": choice["token_ids"][:2], "finish_reason": "abort"}
        return status, reply

    asked = prompts(9, 10, 11)
    with server(ends) as heard:
        made = answered(client(target, heard, parallel=1, tries=4), asked)
        cut[0] = 9
        with pytest.raises(
            UserError, match=r"no answer \(ValueError: the answer is cut: finish_reason=abort\); what was"
        ):
            answered(client(target, heard), asked)
    assert made == {prompt.index: answer(target, [prompt], 12)[0] for prompt in asked}


def test_a_server_with_too_short_a_context_is_refused(target: Target) -> None:
    """As vLLM with a small --max-model-len, which ends an answer with status 200 where its context is full."""
    say = speaks(target, "ids")

    def short(body: dict[str, Any]) -> Reply:
        status, reply = say(body | {"max_tokens": 5}) or (0, {})
        if status == 200:
            reply["usage"]["completion_tokens"] = 5
            reply["choices"][0]["finish_reason"] = "length"
        return status, reply

    with (
        server(short) as heard,
        pytest.raises(UserError, match="prompt 0 has 9 tokens, which leaves no room for 12 more; serve it with a long"),
    ):
        answered(client(target, heard), prompts(9))


def test_what_a_server_refuses_is_to_be_mended_first(target: Target) -> None:
    """Of a later prompt that is too long vLLM says so with status 400; the same command would meet it again."""
    say = speaks(target)
    too_long = {"message": "This model's maximum context length is 10 tokens."}

    def short(body: dict[str, Any]) -> Reply:
        return say(body) if len(body["prompt"]) < 10 else (400, {"error": too_long})

    refused = (
        r"HTTP Error 400: Bad Request .*maximum context length is 10 tokens.*once this is mended, run the same com"
    )
    with server(short) as heard, pytest.raises(UserError, match=refused):
        answered(client(target, heard), prompts(9, 11))


def test_a_key_is_sent_to_the_server_alone_and_never_shown(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret-key")
    unauthorised = r"no answer \(HTTPError: HTTP Error 401: Unauthorized"
    with (
        server(lambda _: (401, {"error": "no key like s3cret-key"})) as heard,
        pytest.raises(UserError, match=unauthorised) as refused,
    ):
        answered(client(target, heard, key="MY_KEY"), prompts(9))
    assert [each["Authorization"] for each in heard.headers] == ["Bearer s3cret-key"]
    assert "s3cret-key" not in str(refused.value) and "***" in str(refused.value)
    with server(lambda _: (307, {})) as heard, pytest.raises(UserError, match="HTTP Error 307"):
        answered(client(target, heard, key="MY_KEY"), prompts(9))
    assert len(heard.bodies) == 1


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"choices": [{"text": "a", "token_ids": [7]}], "usage": {"prompt_tokens": 10}}, "as 10 tokens, not as 9"),
        ({"choices": [{"text": "a", "token_ids": [99999]}]}, "has tokens outside the vocabulary; it must serve"),
        ({"choices": [{"text": "", "token_ids": []}]}, "its answer to prompt 0 is empty"),
    ],
)  # fmt: skip
def test_a_server_of_another_model_is_refused(target: Target, reply: dict[str, Any], message: str) -> None:
    with server(lambda _: (200, reply)) as heard, pytest.raises(UserError, match=message):
        answered(client(target, heard), prompts(9))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "backend=server needs server.url="),
        ({"url": "localhost:8000"}, "server.url=localhost:8000 must begin with"),
        ({"url": "http://a", "parallel": 0}, "server.parallel=0 must be at least 1"),
        ({"url": "http://a", "tries": 0}, "server.tries=0 must be at least 1"),
    ],
)
def test_bad_keys(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ServerSettings(**settings).check()
