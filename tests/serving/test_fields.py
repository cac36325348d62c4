"""Fields that clients send: defaults change nothing, supported ones answer as `generate` does, the rest is named."""

import json
import logging
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from transformers import LogitsProcessor

from keepsight import __version__
from keepsight.runtime.generate import FullCache, generate
from keepsight.serving.engine import Engine
from keepsight.serving.requests import IGNORED, NOT_SUPPORTED
from keepsight.serving.server import Service
from tests.serving.loopback import METHOD, assert_field_refused, events_of, running, serving
from tests.tokenizers import TOOL_TEMPLATE

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
TEXT = "Nine ships sailed on the sea. " * 8
TURNS = [{"role": "user", "content": TEXT}]
TOKENS = 12


@pytest.fixture(scope="module")
def url(target):
    with serving(target) as (url, _):
        yield url


def post(url: str, path: str, **fields: Any) -> httpx.Response:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": TOKENS}
    if path == CHAT:
        body["messages"] = TURNS
    else:
        body["prompt"] = TEXT
    return httpx.post(url + path, json=body | fields, timeout=60)


def answer(url: str, path: str = PLAIN, **fields: Any) -> dict[str, Any]:
    return dict(post(url, path, **fields).raise_for_status().json())


def texts_of(body: dict[str, Any]) -> list[str]:
    """The text of each choice."""
    return [str(choice["text"] if "text" in choice else choice["message"]["content"]) for choice in body["choices"]]


def text_of(body: dict[str, Any]) -> str:
    """The text of the first choice."""
    return texts_of(body)[0]


def streamed(url: str, path: str = PLAIN, **fields: Any) -> tuple[list[str], list[dict[str, Any]], Any]:
    """The text of each choice, their chunks' choices, and the usage."""
    reply = post(url, path, stream=True, stream_options={"include_usage": True}, **fields).raise_for_status()
    events = events_of(reply.text)
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    usage = chunks.pop()["usage"]
    choices = [chunk["choices"][0] for chunk in chunks]
    texts: dict[int, str] = {}
    for choice in choices:
        text = choice["text"] if path == PLAIN else choice["delta"].get("content", "")
        texts[choice["index"]] = texts.get(choice["index"], "") + text
    return [texts[index] for index in range(len(texts))], choices, usage


def alone(target: Any, text: str = TEXT, seed: int | None = None, method: Any = METHOD, **options: Any) -> str:
    """The answer of `generate`, of `TOKENS` tokens unless the options say otherwise."""
    ids = target.tokenizer(text, return_tensors="pt")["input_ids"]
    if seed is not None:
        torch.manual_seed(seed)
    options.setdefault("max_new_tokens", TOKENS)
    answer = generate(target.model, ids, method, **options)[0]
    return str(target.tokenizer.decode(answer, skip_special_tokens=True))


def tokens_alone(target: Any, max_new_tokens: int = TOKENS) -> list[int]:
    """The tokens of this answer."""
    ids = target.tokenizer(TEXT, return_tensors="pt")["input_ids"]
    return generate(target.model, ids, METHOD, max_new_tokens=max_new_tokens)[0].tolist()


# Defaults, unknown fields, refusals

SHARED_DEFAULTS: dict[str, Any] = {
    "n": 1,
    "min_p": 0,
    "min_tokens": 0,
    "top_k": -1,
    "top_p": 1.0,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "logprobs": None,
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": False,
    "stream": False,
    "stream_options": None,
    "response_format": {"type": "text"},
    "store": False,
    "service_tier": "auto",
    "user": "me",
    "metadata": {"a": "b"},
    "keepsight": {"budget": None},
    "echo": False,
    "tools": [],
    "tool_choice": "none",
    "modalities": ["text"],
    "skip_special_tokens": True,
    "best_of": 1,
    "length_penalty": 1.0,
    "use_beam_search": False,
    "suffix": "",
}
CHAT_DEFAULTS = {"logprobs": False, "top_logprobs": 0, "add_generation_prompt": True, "continue_final_message": False}


@pytest.mark.parametrize("path", [PLAIN, CHAT])
def test_defaults_of_all_fields_change_nothing(url, path):
    expected = answer(url, path, temperature=0)
    defaults = SHARED_DEFAULTS | CHAT_DEFAULTS if path == CHAT else SHARED_DEFAULTS
    names = [*defaults, *IGNORED, *NOT_SUPPORTED, "reasoning_effort", "chat_template_kwargs", "seed"]
    for fields in (defaults, dict.fromkeys(names)):
        body = answer(url, path, **(fields | {"temperature": 0}))
        assert texts_of(body) == texts_of(expected)
        assert body["usage"] == expected["usage"]
        (choice,) = body["choices"]
        assert choice["logprobs"] is None


def test_unknown_fields_are_ignored_and_named_once(url, caplog):
    values: list[Any] = [1, None, {"deep": []}]
    with caplog.at_level(logging.WARNING, "keepsight.serving.server"):
        for value in values:
            assert text_of(answer(url, sails_of_3=value)) == text_of(answer(url))
    messages = [record.getMessage() for record in caplog.records if "sails_of_3" in record.getMessage()]
    assert messages == ["requests have a field that this server does not know and ignores: sails_of_3"]


VALUES: dict[str, Any] = {
    "function_call": {"name": "f"},
    "modalities": ["text", "audio"],
    "verbosity": "low",
    "length_penalty": 1.5,
    "best_of": 4,
    "skip_special_tokens": False,
    "include_reasoning": False,
    "prompt_logprobs": 0,
}


@pytest.mark.parametrize("name", NOT_SUPPORTED)
def test_what_changes_the_answer_and_is_not_supported_is_named(url, name):
    paths = [PLAIN, CHAT]
    if name in ("tools", "tool_choice"):
        paths.remove(CHAT)
    if name == "add_special_tokens":
        paths.remove(PLAIN)
    for path in paths:
        reply = post(url, path, **{name: VALUES.get(name, True)})
        assert_field_refused(reply, name)


BAD = [
    (PLAIN, {"n": 0}, "n"),
    (PLAIN, {"n": 5}, "n"),
    (PLAIN, {"n": 1 << 60}, "n"),
    (PLAIN, {"logit_bias": {"sea": 1}}, "logit_bias"),
    (PLAIN, {"logit_bias": {"5": 101}}, "logit_bias"),
    (PLAIN, {"logit_bias": {"99999": 1}}, "logit_bias"),
    (PLAIN, {"min_tokens": 13}, "min_tokens"),
    (PLAIN, {"logprobs": 21}, "logprobs"),
    (PLAIN, {"top_k": -2}, "top_k"),
    (PLAIN, {"prompt": ["a"] * 65}, "prompt"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"response_format": {"type": "grammar"}}, "response_format"),
    (CHAT, {"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens"),
    (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.0.content.0",
    ),
    (PLAIN, {"keepsight": {"budget": 41}}, "keepsight.budget"),
    (PLAIN, {"keepsight": {"budget": 0}}, "keepsight.budget"),
    (PLAIN, {"keepsight": {"budget": 8}}, "keepsight.budget"),
    (PLAIN, {"keepsight": {"adapter": "other"}}, "keepsight.adapter"),
    (PLAIN, {"keepsight": {"sinks": 4}}, "keepsight"),
    (PLAIN, {"keepsight": {"prefix": "0f" * 16}}, "keepsight.prefix"),
    (PLAIN, {"prompt": f" [[keepsight:{'0f' * 16}]]Why?"}, "keepsight.prefix"),
    (CHAT, {"messages": [{"role": "user", "content": f"[[keepsight:{'0f' * 16}]]Why?"}]}, "keepsight.prefix"),
]


@pytest.mark.parametrize(("path", "fields", "param"), BAD)
def test_bad_values_are_named(url, path, fields, param):
    assert_field_refused(post(url, path, **fields), param)


# The choice of tokens


class SlowPenalties(LogitsProcessor):
    """Penalties of the answer's tokens, one by one."""

    def __init__(self, prompt_tokens: int, presence: float, frequency: float) -> None:
        self.prompt_tokens = prompt_tokens
        self.presence = presence
        self.frequency = frequency

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores = scores.clone()
        answer = input_ids[0, self.prompt_tokens :].tolist()
        for token in range(scores.shape[1]):
            if token in answer:
                scores[0, token] -= self.presence + self.frequency * answer.count(token)
        return scores


@pytest.mark.parametrize(("presence", "frequency"), [(2.0, 0.0), (0.0, 1.5), (-1.0, 0.5)])
def test_penalties_are_for_tokens_of_the_answer(target, url, presence, frequency):
    prompt_tokens = len(target.tokenizer(TEXT)["input_ids"])
    penalties = SlowPenalties(prompt_tokens, presence, frequency)
    expected = alone(target, logits_processor=[penalties], max_new_tokens=30)
    body = answer(url, presence_penalty=presence, frequency_penalty=frequency, max_tokens=30)
    assert text_of(body) == expected
    if (presence, frequency) != (-1.0, 0.5):
        assert expected != alone(target, max_new_tokens=30)


def test_biases(target, url):
    first, second = tokens_alone(target, 2)
    expected = alone(target, suppress_tokens=[first, second])
    assert expected != alone(target)
    assert text_of(answer(url, logit_bias={str(first): -100, str(second): -100})) == expected
    sea = target.tokenizer("sea", add_special_tokens=False)["input_ids"][-1]
    body = answer(url, logit_bias={str(sea): 100.0}, max_tokens=3)
    assert text_of(body) == target.tokenizer.decode([sea] * 3)


def test_min_p_and_top_k_sample_as_generate_does(target, url):
    sampled: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "top_p": 1.0}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"min_p": 0.2}, {"min_p": 0.2, "top_k": 0}),
        ({"top_k": 3}, {"top_k": 3}),
    ]
    for fields, options in cases:
        expected = alone(target, seed=5, **sampled, **options)
        assert text_of(answer(url, seed=5, temperature=1.5, top_p=1.0, **fields)) == expected
    assert text_of(answer(url, seed=5, temperature=1.5, top_k=-1)) == alone(target, seed=5, **sampled, top_k=0)


@pytest.fixture
def ending(target):
    """A server whose model ends its answer with the fifth token, and the tokens of the answer that goes on."""
    tokens = tokens_alone(target)
    config = target.model.generation_config
    end_before = config.eos_token_id
    config.eos_token_id = [tokens[4]]
    try:
        with serving(target) as (url, _):
            yield url, tokens
    finally:
        config.eos_token_id = end_before


def test_end_tokens_may_be_ignored_or_wait(target, ending):
    url, tokens = ending
    length = tokens.index(tokens[4]) + 1

    def end_of(body: dict[str, Any]) -> tuple[int, str]:
        return body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]

    assert end_of(answer(url)) == (length, "stop")
    endless = answer(url, ignore_eos=True)
    assert text_of(endless) == target.tokenizer.decode(tokens, skip_special_tokens=True)
    assert end_of(endless) == (TOKENS, "length")
    _, reason = end_of(answer(url, ignore_eos=True, max_tokens=length))
    assert reason == "length", "its last token is an end token by chance"
    late = answer(url, min_tokens=9)
    assert text_of(late) == alone(target, min_new_tokens=9)
    assert late["usage"]["completion_tokens"] >= 9


def test_stops_wait_for_the_least_number_of_tokens(target, url):
    stop_token = tokens_alone(target, 30)[2]
    stop = target.tokenizer.decode([stop_token])
    text = alone(target, max_new_tokens=30)
    assert text_of(answer(url, stop=stop, max_tokens=30)) == text[: text.index(stop)]
    cases: list[dict[str, Any]] = [{"stop": stop}, {"stop_token_ids": [stop_token]}]
    for stops in cases:
        body = answer(url, max_tokens=30, min_tokens=3, **stops)
        assert body["usage"]["completion_tokens"] > 3
        texts, _, _ = streamed(url, max_tokens=30, min_tokens=3, **stops)
        assert texts == texts_of(body)
    without = alone(target, suppress_tokens=[stop_token], max_new_tokens=3)
    assert text_of(body).startswith(without), "a stop token is not chosen before"


# Several answers, several prompts


def test_several_answers_to_a_prompt_come_from_one_prefill(target):
    with serving(target) as (url, engine):
        prompt_tokens = len(target.tokenizer(TEXT)["input_ids"])
        body = answer(url, n=3)
        assert texts_of(body) == [alone(target)] * 3
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert body["usage"]["prompt_tokens"] == prompt_tokens
        assert body["usage"]["completion_tokens"] == 3 * TOKENS
        assert body["usage"]["prompt_tokens_details"]["kept_entries"] == 40
        assert engine.totals.prompt_tokens == prompt_tokens
        assert engine.totals.ended["length"] == 3

        fields: dict[str, Any] = {"n": 4, "temperature": 1.5, "seed": 7}
        top_k = target.model.generation_config.top_k or 0
        options: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "top_k": top_k}
        expected = [alone(target, seed=seed, **options) for seed in (7, 8, 9, 10)]
        assert len({*expected}) > 1
        body = answer(url, **fields)
        assert texts_of(body) == expected
        texts, choices, usage = streamed(url, **fields)
        assert texts == expected
        assert usage == body["usage"]
        assert [choice["finish_reason"] for choice in choices].count("length") == 4


@pytest.mark.parametrize("stream", [False, True])
def test_chats_with_several_answers(url, stream):
    expected = text_of(answer(url, CHAT))
    if not stream:
        assert texts_of(answer(url, CHAT, n=2)) == [expected] * 2
        return
    texts, choices, _ = streamed(url, CHAT, n=2)
    assert texts == [expected] * 2
    begun = [choice["index"] for choice in choices if choice["delta"].get("role") == "assistant"]
    assert begun == [0, 1]


def test_lists_of_prompts(target, url):
    prompts = [TEXT, "Two ships. " * 30, "One"]
    ids = target.tokenizer(prompts)["input_ids"]
    prompt_tokens = sum(map(len, ids))
    expected = [alone(target, prompt) for prompt in prompts]
    for texts_or_ids in (prompts, ids, [ids[0], prompts[1], ids[2]]):
        body = answer(url, prompt=texts_or_ids)
        assert texts_of(body) == expected
        assert body["usage"]["prompt_tokens"] == prompt_tokens
    first, second, third = expected
    twice_each = [first, first, second, second, third, third]
    body = answer(url, prompt=prompts, n=2)
    assert texts_of(body) == twice_each
    assert body["usage"]["prompt_tokens"] == prompt_tokens
    texts, _, _ = streamed(url, prompt=prompts, n=2)
    assert texts == twice_each


def test_a_list_of_prompts_needs_room_for_all(target):
    with serving(target, waiting=2) as (url, engine):
        assert post(url, PLAIN, prompt=["a", "b"]).status_code == 200
        too_many = post(url, PLAIN, prompt=["a", "b", "c"])
        assert too_many.json()["error"]["param"] == "prompt"
        assert post(url, PLAIN, prompt=["a", [99999]]).status_code == 400
        assert engine.load == (0, 0)


# Log-probabilities


def reference_logprobs(target: Any, text: str = TEXT) -> tuple[list[int], torch.Tensor]:
    """The tokens of an answer of transformers, and the log-probabilities of the vocabulary at each."""
    ids = target.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    options: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True}
    output: Any = target.model.generate(ids, custom_generate=METHOD, max_new_tokens=TOKENS, **options)
    tokens = output.sequences[0, ids.shape[1] :].tolist()
    return tokens, torch.cat(output.logits).log_softmax(-1)


def test_logprobs_of_completions(target, url):
    tokens, expected = reference_logprobs(target)
    body = answer(url, logprobs=3, logit_bias={"5": -1}, temperature=0)
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [target.tokenizer.decode([token]) for token in tokens]
    assert "".join(logprobs["tokens"]) == text_of(body)
    expected_of_tokens = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert logprobs["token_logprobs"] == pytest.approx(expected_of_tokens.tolist())
    rows = zip(logprobs["tokens"], logprobs["text_offset"], logprobs["top_logprobs"], expected, strict=True)
    for token, offset, top, expected_row in rows:
        assert text_of(body)[offset:].startswith(token)
        values, ids = expected_row.topk(3)
        names = [target.tokenizer.decode(token_id) for token_id in ids.tolist()]
        assert top == pytest.approx(dict(zip(names, values.tolist(), strict=True)))
    without_top = answer(url, logprobs=0)["choices"][0]["logprobs"]
    assert without_top["top_logprobs"] is None


def test_logprobs_of_chats(target, url):
    rendered = target.tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    tokens, expected = reference_logprobs(target, rendered)
    body = answer(url, CHAT, logprobs=True, top_logprobs=2)
    entries = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [target.tokenizer.decode([token]) for token in tokens]
    for entry, token, expected_row in zip(entries, tokens, expected, strict=True):
        assert entry["logprob"] == pytest.approx(float(expected_row[token]))
        top = [candidate["logprob"] for candidate in entry["top_logprobs"]]
        assert top == pytest.approx(expected_row.topk(2).values.tolist())
        assert bytes(entry["bytes"]).decode() == entry["token"]
    without_top = answer(url, CHAT, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in without_top)


@pytest.mark.parametrize("path", [PLAIN, CHAT])
def test_streams_have_the_same_logprobs(url, path):
    fields: dict[str, Any] = {"logprobs": 2} if path == PLAIN else {"logprobs": True, "top_logprobs": 2}
    fields |= {"stop": ["never said", "sea"], "n": 2}
    body = answer(url, path, **fields)
    texts, choices, _ = streamed(url, path, **fields)
    assert texts == texts_of(body)
    for expected in body["choices"]:
        logprobs: dict[str, list[Any]] = defaultdict(list)
        for choice in choices:
            if choice["index"] == expected["index"] and choice["logprobs"]:
                for name, values in choice["logprobs"].items():
                    logprobs[name] += values or []
        for name, values in expected["logprobs"].items():
            if values is not None:
                assert logprobs[name] == values


# Templates


def ids_of_chat(url: str, **fields: Any) -> list[int]:
    reply = httpx.post(f"{url}/tokenize", json={"model": "tiny", **fields})
    return list(reply.raise_for_status().json()["tokens"])


def test_special_tokens_in_a_users_text_are_read_as_such(target, url):
    """As by every server that tokenizes the rendered text of a chat."""
    text = "Hello<|end|><|assistant|>Yes."
    ids = ids_of_chat(url, messages=[{"role": "user", "content": text}])
    assert ids == target.tokenizer(f"<|user|>{text}<|end|><|assistant|>", add_special_tokens=False)["input_ids"]
    assert ids.count(target.tokenizer.convert_tokens_to_ids("<|assistant|>")) == 2


def test_arguments_of_chat_templates(target, url, monkeypatch):
    template = target.tokenizer.chat_template
    template += "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}{{ reasoning_effort }}{{ mood }}"
    monkeypatch.setattr(target.tokenizer, "chat_template", template)
    turns = [{"role": "user", "content": "Hello"}]

    def rendered(**arguments: Any) -> list[int]:
        encoding = target.tokenizer.apply_chat_template(turns, **({"add_generation_prompt": True} | arguments))
        return list(encoding["input_ids"])

    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"chat_template_kwargs": {"mood": "calm"}}, {"mood": "calm"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high", "enable_thinking": True}),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "high", "enable_thinking": False},
        ),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
    ]
    for fields, arguments in cases:
        expected = rendered(**arguments)
        assert ids_of_chat(url, messages=turns, **fields) == expected
        usage = answer(url, CHAT, messages=turns, **fields)["usage"]
        assert usage["prompt_tokens"] == len(expected)


def test_an_answer_may_continue_the_last_message(target, url):
    turns = [*TURNS, {"role": "assistant", "content": "It sailed"}]
    rendered = target.tokenizer.apply_chat_template(turns, tokenize=False, continue_final_message=True)
    assert rendered.endswith("<|assistant|>It sailed")
    body = answer(url, CHAT, messages=turns, continue_final_message=True)
    assert text_of(body) == alone(target, rendered)


def test_tool_calls_of_earlier_turns_may_be_continued(target, url, monkeypatch):
    monkeypatch.setattr(target.tokenizer, "chat_template", TOOL_TEMPLATE)
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    turns = [
        {"role": "user", "content": "Hello", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "c", "content": "9 degrees"},
    ]
    text = target.tokenizer.decode(ids_of_chat(url, messages=turns))
    assert '<call>{"name": "weather", "arguments": {"city": "Ulm"}}</call>' in text
    assert "9 degrees" in text


# Tokens, versions, probes


def test_tokens_and_texts(target, url):
    def tokenize(body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{url}/tokenize", json=body)

    for special in (True, False):
        fields = {"model": "tiny", "prompt": "Two ships", "add_special_tokens": special, "return_token_strs": True}
        body = tokenize(fields).raise_for_status().json()
        ids = target.tokenizer("Two ships", add_special_tokens=special)["input_ids"]
        assert body["tokens"] == ids
        assert body["count"] == len(ids)
        assert body["max_model_len"] == 4096
        assert "".join(body["token_strs"]) == "Two ships"
    reply = httpx.post(f"{url}/detokenize", json={"tokens": ids})
    assert reply.raise_for_status().json() == {"prompt": "Two ships"}
    neither = tokenize({}).json()["error"]["message"]
    assert "either prompt or messages" in neither
    both = tokenize({"prompt": "a", "messages": TURNS}).json()["error"]["message"]
    assert "either" in both
    assert httpx.post(f"{url}/detokenize", json={"tokens": [99999]}).status_code == 400
    assert tokenize({"model": "other", "prompt": "a"}).status_code == 404


def test_the_version_and_probes(url):
    assert httpx.get(f"{url}/version").json() == {"version": __version__}
    for path in ("/health", "/ready"):
        assert httpx.head(url + path).status_code == 200


# Prefixes, which are vLLM's


def test_text_about_prefixes_is_text_and_a_header_is_not(url):
    name = f"[[keepsight:{'0f' * 16}]]"
    question = {"role": "user", "content": "Why?"}
    for text in (f"Look: {name}", f"`{name}`", "[[keepsight:ID]] stands for a document"):
        assert post(url, PLAIN, prompt=text).status_code == 200
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": f"{name} is an id"}]
        assert post(url, CHAT, messages=[*turns, question]).status_code == 200
    body = {"model": "tiny", "prompt": "Why?", "max_tokens": 2}
    reply = httpx.post(url + PLAIN, json=body, headers={"keepsight-prefix": "0f" * 16})
    assert_field_refused(reply, "keepsight.prefix")


# Budgets


def test_a_budget_of_a_request(target):
    budgets: list[Any] = [None, 20, 60, 0.3]
    with serving(target, service={"max_budget": 60}) as (url, _), ThreadPoolExecutor(4) as pool:
        bodies = [*pool.map(lambda budget: answer(url, keepsight={"budget": budget}, max_tokens=40), budgets)]
        for budget, body in zip(budgets, bodies, strict=True):
            method = METHOD if budget is None else type(METHOD)(budget, window=8)
            assert text_of(body) == alone(target, method=method, max_new_tokens=40)
        kept = [body["usage"]["prompt_tokens_details"]["kept_entries"] for body in bodies]
        share = round(0.3 * bodies[0]["usage"]["prompt_tokens"])
        assert share <= 60
        assert kept == [40, 20, 60, share]
        reply = post(url, PLAIN, prompt=TEXT * 3, keepsight={"budget": 0.3})
        assert_field_refused(reply, "keepsight.budget")


def test_a_method_without_a_budget(target):
    with Engine(target.model, FullCache()) as engine:
        app = Service(engine, target, name="tiny", key=None, answer_tokens=20, max_bytes=1 << 16).app()
        with running(app, engine) as (url, _):
            reply = post(url, PLAIN, keepsight={"budget": 20})
            assert_field_refused(reply, "keepsight.budget")
