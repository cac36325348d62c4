"""Answers from a server that speaks the completions protocol: forms of prompts, retries, refusals, a death."""

import itertools
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
from tests.data_gen.served import Heard, Reply, answers_of, client, prompts, server, speaks
from tests.refused import refused

pytestmark = pytest.mark.usefixtures("no_waiting")
MIXTURE = {"min_tokens": 100, "max_tokens": 200, "sources": [{"kind": "key_values"}]}


def direct_answers(target: Target, asked: list[Rendered]) -> dict[int, list[int]]:
    """The model's own answers, without a server."""
    return {prompt.index: answer(target, [prompt], Decoding(12))[0] for prompt in asked}


def test_ids_there_and_back_are_the_models_own(target: Target) -> None:
    asked = prompts(*range(8, 18))
    with server(speaks(target)) as heard:
        assert answers_of(client(target, heard, parallel=4), asked) == direct_answers(target, asked)
    assert 1 < heard.most_at_once <= 4
    assert len(heard.bodies) == 10
    assert "authorization" not in heard.headers[0]
    assert "seed" not in heard.bodies[0]
    assert "top_p" not in heard.bodies[0]


def test_sampling_is_asked_for_with_a_seed_of_each_prompt(target: Target) -> None:
    decoding = Decoding(5, 0.7, 0.9, seed=3)
    with server(lambda _: choice()) as heard:
        for _ in range(2):
            list(client(target, heard, parallel=1)(prompts(9, 9), decoding))
    for body in heard.bodies:
        assert (body["max_tokens"], body["temperature"], body["top_p"]) == (5, 0.7, 0.9)
    seeds = [body["seed"] for body in heard.bodies]
    assert seeds[:2] == seeds[2:]
    assert seeds[0] != seeds[1]


@pytest.mark.parametrize(
    ("takes", "expected_forms"),
    [
        ("ids", {(True, "list"): 1, (False, "list"): 8}),
        ("text", {(True, "list"): 1, (False, "list"): 1, (False, "str"): 8}),
    ],
    ids=["ids", "text"],
)
def test_a_server_that_returns_text(target: Target, takes: str, expected_forms: dict[tuple[bool, str], int]) -> None:
    """It is asked in each form once, and from then on in the one that it takes."""
    text = target.tokenizer("The vault is open. Who opened it, and when?")["input_ids"]
    asked = [Rendered(index, "test", text[: 6 + index], None) for index in range(4)]
    with server(speaks(target, takes)) as heard:
        backend = client(target, heard)
        answers = answers_of(backend, asked)
        assert answers_of(backend, asked) == answers
    forms = Counter(("return_token_ids" in body, type(body["prompt"]).__name__) for body in heard.bodies)
    assert forms == expected_forms
    for index, ids in direct_answers(target, asked).items():
        answer_text = target.tokenizer.decode(ids, skip_special_tokens=True)
        expected = target.tokenizer(answer_text)["input_ids"]
        if ids[-1] in target.end_tokens:
            expected = [*expected, 2]
        assert answers[index] == expected[:12]


def test_ids_that_no_text_stands_for_are_not_sent_as_text(target: Target) -> None:
    ids = []
    for letter in "opened":
        ids += target.tokenizer(letter)["input_ids"]
    with server(speaks(target, "text")) as heard:
        (((_, skipped),),) = client(target, heard)([Rendered(7, "test", ids, None)], Decoding(12))
    assert isinstance(skipped, BadRow)
    assert "it takes no token ids, and no text has exactly the ids of prompt 7" in str(skipped)
    assert all(isinstance(body["prompt"], list) for body in heard.bodies)


def choice(**changes: Any) -> Reply:
    return 200, {"choices": [{"text": "a", "token_ids": [7], "finish_reason": "stop", **changes}]}


MALFORMED: list[Reply] = [
    (503, {}),
    None,
    (429, {}),
    (200, {"choices": []}),
    choice(text=None),
    choice(text=7),
    choice(token_ids=[7.9]),
    choice(token_ids=[True]),
    choice(token_ids="789"),
    choice(token_ids=[-1]),
    choice(token_ids=[1 << 40]),
    choice(token_ids=[[7]]),
    (200, {"choices": [{"text": "a"}], "usage": "n/a"}),
    choice(finish_reason="abort"),
]
"""Replies with a passing fault, or of another form; vLLM aborts answers, with status 200, when it ends."""


@pytest.mark.parametrize("fault", MALFORMED, ids=str)
def test_malformed_replies_are_asked_for_again_and_never_stored(target: Target, fault: Reply) -> None:
    say = speaks(target)
    asked = prompts(9, 10)
    faults = [fault]
    with server(lambda body: faults.pop() if faults else say(body)) as heard:
        assert answers_of(client(target, heard, parallel=1), asked) == direct_answers(target, asked)
        assert len(heard.bodies) == 3
    with server(lambda _: fault) as heard, refused("server.url", "service") as caught:
        answers_of(client(target, heard), asked)
    assert len(heard.bodies) == 3
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("reason", ["eos_token", "stop_sequence", "stop_str", "STOP", "", None])
def test_other_names_of_a_finished_answer(target: Target, reason: str | None) -> None:
    reply = choice(text="open", token_ids=[] if reason else None, finish_reason=reason)
    with server(lambda _: reply) as heard:
        (ids,) = answers_of(client(target, heard), prompts(9)).values()
    text = target.tokenizer("open")["input_ids"]
    assert ids == ([*text, 2] if reason else text)
    assert len(heard.bodies) == 1


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
    choice(finish_reason="sensitive"),
    choice(finish_reason="PROHIBITED_CONTENT"),
    choice(finish_reason="refusal"),
    choice(finish_reason="content-filter"),
    choice(text="", token_ids=None, finish_reason="length"),
    choice(text="", token_ids=[], finish_reason="length"),
]


@pytest.mark.parametrize("refusal", FILTERED, ids=str)
def test_what_a_content_filter_refuses_or_leaves_empty_is_skipped(target: Target, refusal: Reply) -> None:
    say = speaks(target)
    asked = prompts(9, 10, 11)
    with server(lambda body: refusal if body["prompt"] == asked[1].ids else say(body)) as heard:
        answers = {prompt.index: ids for ready in client(target, heard)(asked, Decoding(12)) for prompt, ids in ready}
    skipped = answers.pop(1)
    assert isinstance(skipped, BadRow)
    assert "prompt 1 (test)" in str(skipped)
    assert answers == direct_answers(target, [asked[0], asked[2]])


def test_a_server_with_too_short_a_context_is_refused(target: Target) -> None:
    """As vLLM with a small --max-model-len, which ends an answer with status 200 where its context is full."""
    say = speaks(target, "ids")

    def say_five_tokens(body: dict[str, Any]) -> Reply:
        status, reply = say(body | {"max_tokens": 5}) or (0, {})
        if status == 200:
            reply["usage"]["completion_tokens"] = 5
            reply["choices"][0]["finish_reason"] = "length"
        return status, reply

    with server(say_five_tokens) as heard, refused("server.url", "range"):
        answers_of(client(target, heard), prompts(9))


def test_what_a_server_refuses_is_to_be_fixed_first(target: Target) -> None:
    """Of a later prompt that is too long vLLM says so with status 400; the same command would meet it again."""
    say = speaks(target)
    message = "This model's maximum context length is 10 tokens"

    def say_to_short_prompts(body: dict[str, Any]) -> Reply:
        if len(body["prompt"]) < 10:
            return say(body)
        return 400, {"error": {"message": f"{message}."}}

    with server(say_to_short_prompts) as heard, refused("server.url", "service") as error:
        answers_of(client(target, heard), prompts(9, 11))
    assert "once this is fixed" in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("reply", "field", "code"),
    [
        ({"choices": [{"text": "a", "token_ids": [7]}], "usage": {"prompt_tokens": 10}}, "server.url", "model"),
        ({"choices": [{"text": "a", "token_ids": [99999]}]}, "server.url", "model"),
    ],
)
def test_a_server_of_another_model_is_refused(target: Target, reply: dict[str, Any], field: str, code: Code) -> None:
    with server(lambda _: (200, reply)) as heard, refused(field, code):
        answers_of(client(target, heard), prompts(9))


def test_bad_keys() -> None:
    with refused("server.url", "missing"):
        ServerSettings().check()
    with refused("parallel", "range"):
        ServerSettings(url="http://a", parallel=0).check()


def generate(outline: Target, heard: Heard, out: Path) -> dict[str, Any]:
    backend = client(outline, heard, parallel=3)
    return generate_data(outline, MIXTURE, out, backend=backend, limit=20, seed=3, max_new_tokens=8, shard_size=8)


def samples(out: Path) -> list[TrainingSample]:
    return [*finished_samples(out, finished_manifest(out))]


def test_a_server_that_dies_ends_the_run_clearly_and_nothing_is_lost_or_doubled(
    target: Target, folder: Path, tmp_path: Path
) -> None:
    """The weights are never loaded: the outline has none."""
    outline = outline_target(str(folder))
    assert outline.model.device.type == "meta"
    say = speaks(target)
    replies = itertools.count(1)

    def say_eleven_times(body: dict[str, Any]) -> Reply:
        return say(body) if next(replies) <= 11 else None

    data = tmp_path / "data"
    with server(say_eleven_times) as heard:
        with refused("server.url", "service"):
            generate(outline, heard, data)
        assert read_json(data / "manifest.json")["complete"] is False
    assert len(list(data.glob("*.arrow"))) == 1
    (partial,) = data.glob("*.partial")
    assert partial.read_bytes().count(b"\n") == 3
    with server(say) as heard:
        manifest = generate(outline, heard, data)
        assert len(heard.bodies) == 9
        uninterrupted_manifest = generate(outline, heard, tmp_path / "uninterrupted")
        assert uninterrupted_manifest["digest"] == manifest["digest"]
    stored = samples(data)
    assert [sample.index for sample in stored] == list(range(20))
    for sample in stored:
        prompt = Rendered(0, "", sample.prompt_ids, None)
        assert [sample.answer_ids] == answer(target, [prompt], Decoding(8))
