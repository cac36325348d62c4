"""Tokenizers of all kinds: what they read and write is the same wherever keepsight asks them, or is refused."""

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from keepsight.data_gen.generate import render_prompt
from keepsight.data_gen.prompts import Prompt
from keepsight.errors import UserError
from keepsight.eval.tasks.samples import Sample, render
from keepsight.models.answer_text import AnswerText, answer_text
from keepsight.models.chat import chat_text, encode, has_chat_template
from keepsight.serving.requests import ChatRequest, prompt_of
from tests.faults.texts import Verdict, accepted, hostile, judged
from tests.faults.world import World
from tests.tokenizers import TEMPLATE, TOOL_TEMPLATE, byte_fallback_tokenizer, tokenizers_of_all_kinds

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def tokenizers(world: World, rng: Random, count: int) -> Iterator[Verdict]:
    """A tokenizer that is drawn, and a text, ids, a chat or a tool's history for it."""
    trials = (_texts, _ids, _chats, _tools)
    for _ in range(count):
        kind = rng.choice([*_KINDS])
        trial = rng.choice(trials)
        seed = rng.random()
        yield judged((trial.__name__, kind, seed), partial(trial, _KINDS[kind](Random(seed)), Random(seed)))


def _of_kind(kind: str) -> Callable[[Random], Any]:
    return lambda _: tokenizers_of_all_kinds()[kind]


def _another_vocabulary(rng: Random) -> Any:
    """Byte fallback with a vocabulary and a decoder that are drawn."""
    base = byte_fallback_tokenizer()
    words = {"".join(rng.choice("abcxyz\u2581\u00e9\u65e5.,") for _ in range(rng.randint(1, 4))) for _ in range(30)}
    names = [*dict.fromkeys([*base.get_vocab(), *sorted(words), *"abcxyz"])]
    vocabulary = {name: token for token, name in enumerate(rng.sample(names, len(names)))}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=rng.random() < 0.5))
    prepend = [normalizers.Prepend("\u2581")] if rng.random() < 0.5 else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "\u2581")])
    strip = [decoders.Strip(" ", 1, 0)] if prepend else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return _finished(backend, ["<s>", "</s>", "<unk>"], rng)


def _unigram(rng: Random) -> Any:
    """Words by their likelihood, without bytes: other letters are unknown."""
    words = [("<unk>", 0.0), *((letter, -2.0 - rng.random()) for letter in "\u2581abcdefghinostuxy.\u00e9")]
    backend = Tokenizer(models.Unigram([*words, ("\u2581the", -1.0), ("ing", -1.5)], 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=rng.choice(["always", "first", "never"]))
    backend.decoder = decoders.Metaspace(prepend_scheme=rng.choice(["always", "first", "never"]))
    return _finished(backend, ["<s>", "</s>", "<pad>"], rng)


def _finished(backend: Tokenizer, special: list[str], rng: Random) -> Any:
    roles = ["<|user|>", "<|assistant|>", "<|tool|>"]
    special_tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    options: dict[str, Any] = {"additional_special_tokens": roles[: rng.randrange(4)]}
    template = rng.choice([TEMPLATE, TOOL_TEMPLATE])
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special_tokens, **options)


_KINDS: dict[str, Callable[[Random], Any]] = {
    **{kind: _of_kind(kind) for kind in tokenizers_of_all_kinds()},
    "another vocabulary": _another_vocabulary,
    "unigram": _unigram,
}


def _streamed(tokenizer: Any, ids: list[int]) -> str:
    """The text of an answer; its stream must be the same."""
    answer = AnswerText(tokenizer)
    sent = ""
    for token in ids:
        answer.add(token)
        assert answer.text.startswith(sent)
        sent = answer.text[: answer.settled]
    answer.finish()
    assert answer.text.startswith(sent)
    assert answer.text == answer_text(tokenizer, ids)
    return answer.text


def _texts(tokenizer: Any, rng: Random) -> str:
    text = hostile(rng, 6)
    ids = accepted(lambda: encode(tokenizer, [text], special=rng.random() < 0.5))[0]
    expected = str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    streamed = _streamed(tokenizer, ids)
    assert streamed == expected, f"{streamed!a} of {text!a}, and the tokenizer says {expected!a}"
    return "right"


def _ids(tokenizer: Any, rng: Random) -> str:
    ids = [rng.randrange(len(tokenizer) + 9) for _ in range(rng.randint(0, 40))]
    streamed = _streamed(tokenizer, ids)
    in_vocabulary = [token for token in ids if token < len(tokenizer)]
    expected = str(tokenizer.decode(in_vocabulary, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    # The decoder of byte fallback replaces each byte of a run in which one is broken, whole characters too.
    has_bytes = "<0x00>" in tokenizer.get_vocab()
    difference = f"{streamed!a} of {ids}, and the tokenizer says {expected!a}"
    if _REPLACEMENT not in expected or not has_bytes:
        assert streamed == expected, difference
    else:
        for text in expected.split(_REPLACEMENT):
            assert text in streamed, difference
        assert _REPLACEMENT in streamed
    return "right"


def _chats(tokenizer: Any, rng: Random) -> str:
    turns = [{"role": "user", "content": hostile(rng)}]
    for _ in range(rng.randrange(3)):
        turns += [{"role": "assistant", "content": hostile(rng)}, {"role": "user", "content": hostile(rng)}]
    rendered = tokenizer.apply_chat_template(turns, tokenize=True, add_generation_prompt=True)
    expected = list(rendered["input_ids"])
    assert has_chat_template(tokenizer)
    text = accepted(lambda: chat_text(tokenizer, turns))
    messages = ChatRequest.model_validate({"model": "a", "messages": turns}).messages
    served_text = accepted(lambda: prompt_of(messages, tokenizer))
    prompts = [
        *encode(tokenizer, [text], special=False),
        *encode(tokenizer, [served_text], special=False),
    ]
    if len(turns) == 1:
        rendered_prompt = accepted(lambda: render_prompt(0, Prompt("a", tuple(turns)), tokenizer))
        prompts.append(rendered_prompt.ids)
        sample = Sample("0", "a", 0, turns[0]["content"], (), "exact", 1)
        prompts.append(accepted(lambda: render(sample, tokenizer)).prompt_ids.tolist())
    for ids in prompts:
        assert ids == expected, f"{prompts}, not {expected}, of {turns!a}"
    return "right"


def _tools(tokenizer: Any, rng: Random) -> str:
    """Each name of a call and each result is in the prompt, or the request is refused."""
    calls = [f"tool_{rng.randrange(100)}" for _ in range(rng.randint(1, 3))]
    functions = [{"name": name, "arguments": rng.choice(["", "{}", '{"a": [1]}'])} for name in calls]
    result = f"result {rng.randrange(1000)}"
    messages: list[Any] = [
        {"role": "user", "content": rng.choice([*calls, result, hostile(rng)])},
        {"role": "assistant", "content": rng.choice(["", None, hostile(rng)]), "tool_calls": []},
        {"role": "tool", "tool_call_id": "x", "content": result},
    ]
    messages[1]["tool_calls"] = [{"id": "x", "type": "function", "function": function} for function in functions]
    messages = messages[: rng.choice([2, 3])]
    request = ChatRequest.model_validate({"model": "a", "messages": messages})
    try:
        prompt = prompt_of(request.messages, tokenizer)
    except UserError as error:
        assert tokenizer.chat_template and "tojson" not in tokenizer.chat_template, f"refused: {error}"
        assert "lost" in str(error), str(error)
        return "one line"
    _, _, after_question = prompt.partition(str(messages[0]["content"]))
    for name in calls:
        assert name in after_question, f"{prompt!a} lacks {name}"
    assert len(messages) == 2 or result in after_question, f"{prompt!a} lacks {result}"
    return "right"
