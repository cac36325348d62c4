"""Answers from a server that speaks the completions protocol: forms of prompts, retries, refusals, a death."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from keepsight.data_gen.backends import Decoding, Rendered, answer
from keepsight.data_gen.generate import generate_data
from keepsight.data_gen.store import TrainingSample, finished_manifest, finished_samples
from keepsight.endpoint import ServerSettings
from keepsight.errors import BadRow, Code
from keepsight.files import read_json
from keepsight.models.targets import Target, outline_target
from tests.data_gen.served import Heard, Reply, answered, client, prompts, server, speaks
from tests.refused import refused

pytestmark = pytest.mark.usefixtures("no_waiting")
MIXTURE = {"min_tokens": 100, "max_tokens": 200, "sources": [{"kind": "key_values"}]}


def own(target: Target, asked: list[Rendered]) -> dict[int, list[int]]:
    """The model's own answers."""
    return {prompt.index: answer(target, [prompt], Decoding(12))[0] for prompt in asked}


def test_ids_there_and_back_are_the_models_own(target: Target) -> None:
    asked = prompts(*range(8, 18))
    with server(speaks(target)) as heard:
        assert answered(client(target, heard, parallel=4), asked) == own(target, asked)
    assert 1 < heard.most_at_once <= 4 and len(heard.bodies) == 10
    assert "authorization" not in heard.headers[0] and not {"seed", "top_p"} & heard.bodies[0].keys()


def test_sampling_is_asked_for_with_a_seed_of_each_prompt(target: Target) -> None:
    with server(lambda _: choice()) as heard:
        for _ in range(2):
            list(client(target, heard, parallel=1)(prompts(9, 9), Decoding(5, 0.7, 0.9, seed=3)))
    asked = [(body["max_tokens"], body["temperature"], body["top_p"], body["seed"]) for body in heard.bodies]
    assert asked[:2] == asked[2:] and {each[:3] for each in asked} == {(5, 0.7, 0.9)} and asked[0] != asked[1]


@pytest.mark.parametrize("takes", ["ids", "text"])
def test_a_server_that_returns_text(target: Target, takes: str) -> None:
    """It is asked in each form once, and from then on in the one that it takes."""
    text = target.tokenizer("The vault is open. Who opened it, and when?")["input_ids"]
    asked = [Rendered(index, "test", text[: 6 + index], None) for index in range(4)]
    with server(speaks(target, takes)) as heard:
        backend = client(target, heard)
        made = answered(backend, asked)
        assert answered(backend, asked) == made
    forms = Counter(("return_token_ids" in body, type(body["prompt"]).__name__) for body in heard.bodies)
    assert forms == ({(True, "list"): 1, (False, "list"): 8} if takes == "ids"
                     else {(True, "list"): 1, (False, "list"): 1, (False, "str"): 8})  # fmt: skip
    for index, ids in own(target, asked).items():
        again = target.tokenizer(target.tokenizer.decode(ids, skip_special_tokens=True))["input_ids"]
        assert made[index] == [*again, *([2] if ids[-1] in target.end_tokens else [])][:12]


def test_ids_that_no_text_stands_for_are_not_sent_as_text(target: Target) -> None:
    ids = [token for letter in "opened" for token in target.tokenizer(letter)["input_ids"]]
    with server(speaks(target, "text")) as heard:
        (((_, skipped),),) = client(target, heard)([Rendered(7, "test", ids, None)], Decoding(12))
    assert isinstance(skipped, BadRow)
    assert "it takes no token ids, and no text has exactly the ids of prompt 7" in str(skipped)
    assert all(isinstance(body["prompt"], list) for body in heard.bodies)


def choice(**changes: Any) -> Reply:
    return 200, {"choices": [{"text": "a", "token_ids": [7], "finish_reason": "stop", **changes}]}


MALFORMED: list[Reply] = [
    *((503, {}), None, (429, {}), (200, {"choices": []})),
    *(choice(text=text) for text in (None, 7)),
    *(choice(token_ids=ids) for ids in ([7.9], [True], "789", [-1], [1 << 40], [[7]])),
    (200, {"choices": [{"text": "a"}], "usage": "n/a"}),
    choice(finish_reason="abort"),
]
"""Replies with a passing fault, or of another form; vLLM aborts answers, with status 200, when it ends."""


@pytest.mark.parametrize("fault", MALFORMED, ids=str)
def test_malformed_replies_are_asked_for_again_and_never_stored(target: Target, fault: Reply) -> None:
    say, asked, left = speaks(target), prompts(9, 10), [fault]
    with server(lambda body: left.pop() if left else say(body)) as heard:
        assert answered(client(target, heard, parallel=1), asked) == own(target, asked)
        assert len(heard.bodies) == 3
    with server(lambda _: fault) as heard, refused("server.url", "service") as caught:
        answered(client(target, heard), asked)
    assert len(heard.bodies) == 3 and "\n" not in str(caught.value)


@pytest.mark.parametrize("reason", ["eos_token", "stop_sequence", "stop_str", "STOP", "", None])
def test_other_names_of_a_finished_answer(target: Target, reason: str | None) -> None:
    with server(lambda _: choice(text="open", token_ids=[] if reason else None, finish_reason=reason)) as heard:
        (ids,) = answered(client(target, heard), prompts(9)).values()
    text = target.tokenizer("open")["input_ids"]
    assert ids == ([*text, 2] if reason else text) and len(heard.bodies) == 1


AZURE = """The response was filtered due to the prompt triggering Azure OpenAI's management policy. Please modify your
prompt and retry. To learn more about our policies please read our documentation: https://go.microsoft.com/fwlink/?lin
kid=2198766. Please contact the support with the time and the number of this request if you think that it is wrong."""
FILTERED: list[Reply] = [
    choice(finish_reason="content_filter"),
    choice(finish_reason="content_filter", text="", token_ids=None),
    (400, {"error": {"code": "content_filter"}}),
    (400, {"error": {"message": AZURE, "type": None, "param": "prompt", "code": "content_filter"}}),
    (200, {"error": {"code": 403, "message": "x requires moderation. Your input was flagged."}}),
    (400, {"error": {"message": "Invalid prompt: your prompt was flagged as potentially violating our usage policy."}}),
    *(choice(finish_reason=reason) for reason in ("sensitive", "PROHIBITED_CONTENT", "refusal", "content-filter")),
    *(choice(text="", token_ids=ids, finish_reason="length") for ids in (None, list[int]())),
]


@pytest.mark.parametrize("refusal", FILTERED, ids=str)
def test_what_a_content_filter_refuses_or_leaves_empty_is_skipped(target: Target, refusal: Reply) -> None:
    say, asked = speaks(target), prompts(9, 10, 11)
    with server(lambda body: refusal if body["prompt"] == asked[1].ids else say(body)) as heard:
        made = {prompt.index: ids for ready in client(target, heard)(asked, Decoding(12)) for prompt, ids in ready}
    assert isinstance(made[1], BadRow) and "prompt 1 (test)" in str(made[1])
    assert {0: made[0], 2: made[2]} == own(target, asked[::2])


def test_a_server_with_too_short_a_context_is_refused(target: Target) -> None:
    """As vLLM with a small --max-model-len, which ends an answer with status 200 where its context is full."""
    say = speaks(target, "ids")

    def short(body: dict[str, Any]) -> Reply:
        status, reply = say(body | {"max_tokens": 5}) or (0, {})
        if status == 200:
            reply["usage"]["completion_tokens"] = 5
            reply["choices"][0]["finish_reason"] = "length"
        return status, reply

    with server(short) as heard, refused("server.url", "range"):
        answered(client(target, heard), prompts(9))


def test_what_a_server_refuses_is_to_be_fixed_first(target: Target) -> None:
    """Of a later prompt that is too long vLLM says so with status 400; the same command would meet it again."""
    say = speaks(target)
    too_long = {"message": "This model's maximum context length is 10 tokens."}
    with (
        server(lambda body: say(body) if len(body["prompt"]) < 10 else (400, {"error": too_long})) as heard,
        refused("server.url", "service") as error,
    ):
        answered(client(target, heard), prompts(9, 11))
    assert "once this is fixed" in str(error.value) and too_long["message"].rstrip(".") in str(error.value)


@pytest.mark.parametrize(
    ("reply", "field", "code"),
    [
        ({"choices": [{"text": "a", "token_ids": [7]}], "usage": {"prompt_tokens": 10}}, "server.url", "model"),
        ({"choices": [{"text": "a", "token_ids": [99999]}]}, "server.url", "model"),
    ],
)
def test_a_server_of_another_model_is_refused(target: Target, reply: dict[str, Any], field: str, code: Code) -> None:
    with server(lambda _: (200, reply)) as heard, refused(field, code):
        answered(client(target, heard), prompts(9))


def test_bad_keys() -> None:
    with refused("server.url", "missing"):
        ServerSettings().check()
    with refused("parallel", "range"):
        ServerSettings(url="http://a", parallel=0).check()


def make(outline: Target, heard: Heard, out: Path) -> dict[str, Any]:
    made: dict[str, Any] = {"limit": 20, "seed": 3, "max_new_tokens": 8, "shard_size": 8}
    return generate_data(outline, MIXTURE, out, backend=client(outline, heard, parallel=3), **made)


def samples(out: Path) -> list[TrainingSample]:
    return [*finished_samples(out, finished_manifest(out))]


def test_a_server_that_dies_ends_the_run_clearly_and_nothing_is_lost_or_doubled(
    target: Target, folder: Path, tmp_path: Path
) -> None:
    """The weights are never loaded: the outline has none."""
    outline = outline_target(str(folder))
    assert outline.model.device.type == "meta"
    say, left = speaks(target), [11]

    def dies(body: dict[str, Any]) -> Reply:
        left[0] -= 1
        return say(body) if left[0] >= 0 else None

    with server(dies) as heard:
        with refused("server.url", "service"):
            make(outline, heard, tmp_path / "data")
        assert read_json(tmp_path / "data" / "manifest.json")["complete"] is False
    assert len([*(tmp_path / "data").glob("*.arrow")]) == 1
    (partial,) = (tmp_path / "data").glob("*.partial")
    assert partial.read_bytes().count(b"\n") == 3
    with server(say) as heard:
        manifest = make(outline, heard, tmp_path / "data")
        assert len(heard.bodies) == 9
        assert make(outline, heard, tmp_path / "once")["digest"] == manifest["digest"]
    rows = samples(tmp_path / "data")
    assert [row.index for row in rows] == list(range(20))
    assert all(
        row.answer_ids == answer(target, [Rendered(0, "", row.prompt_ids, None)], Decoding(8))[0] for row in rows
    )
