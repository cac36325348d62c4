"""The text of an answer is what its tokens say, streamed or at once, and ends at stops of every form."""

from random import Random
from typing import Any

import pytest

from keepsight.models.answer_text import AnswerText, answer_text, token_text
from tests.tiny import tiny_tokenizer
from tests.tokenizers import OwnChats, byt5_tokenizer, byte_fallback_tokenizer, tokenizers_of_all_kinds

FALLBACK = byte_fallback_tokenizer()
BROKEN: Any = FALLBACK.convert_tokens_to_ids(["Hi", "<0x0A>", "<0xF0>", "x", "."])


def stream(tokenizer: Any, ids: list[int], **stops: Any) -> tuple[list[str], AnswerText]:
    """The pieces that a client receives, and the answer."""
    answer = AnswerText(tokenizer, **stops)
    pieces: list[str] = []
    sent = 0
    for token in ids:
        has_ended = answer.add(token)
        pieces.append(answer.text[sent : answer.settled])
        sent = max(sent, answer.settled)
        if has_ended:
            break
    answer.finish()
    pieces.append(answer.text[sent:])
    return pieces, answer


def test_bytes_that_are_no_character_become_a_replacement_character() -> None:
    assert answer_text(FALLBACK, BROKEN) == "Hi\n\N{REPLACEMENT CHARACTER}x."
    pieces, answer = stream(FALLBACK, BROKEN)
    assert "".join(pieces) == answer.text == "Hi\n\N{REPLACEMENT CHARACTER}x."
    assert pieces[:3] == ["Hi", "\n", ""]


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (["<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "."], "\N{SLIGHTLY SMILING FACE}."),
        (["<0xF0>", "<0x9F>", "x"], "\N{REPLACEMENT CHARACTER}x"),
        (["<0xFF>", "\u2581x"], "\N{REPLACEMENT CHARACTER} x"),
        (["\u2581Hi", "<0xC3>"], "Hi\N{REPLACEMENT CHARACTER}"),
        (["<0xC3>", "</s>", "<0xA9>"], "\N{LATIN SMALL LETTER E WITH ACUTE}"),
    ],
)
def test_byte_tokens_spell_characters(tokens: list[str], text: str) -> None:
    ids: Any = FALLBACK.convert_tokens_to_ids(tokens)
    pieces, answer = stream(FALLBACK, ids)
    assert "".join(pieces) == answer.text == text


@pytest.mark.parametrize("name", tokenizers_of_all_kinds())
def test_a_stream_is_the_text_of_all_tokens(name: str) -> None:
    tokenizer = tokenizers_of_all_kinds()[name]
    rng = Random(name)
    texts = ["Hi \N{SLIGHTLY SMILING FACE} x.\n  def\u65e5\u672c ", "  x", "\u00e9" * 5, "a\N{REPLACEMENT CHARACTER}b"]
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        expected = tokenizer.decode(ids, skip_special_tokens=True)
        pieces, _ = stream(tokenizer, ids)
        assert "".join(pieces) == expected
    for _ in range(200):
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randint(1, 30))]
        pieces, answer = stream(tokenizer, ids)
        assert "".join(pieces) == answer.text
        if name != "byte fallback":  # where its own decoder replaces whole characters beside broken bytes
            assert answer.text == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", tokenizers_of_all_kinds())
def test_ids_outside_the_tokenizer_are_no_text(name: str) -> None:
    tokenizer = tokenizers_of_all_kinds()[name]
    ids = [*tokenizer("Hi", add_special_tokens=False)["input_ids"], len(tokenizer) + 7]
    assert answer_text(tokenizer, ids) == answer_text(tokenizer, ids[:-1])


BYTE_LEVEL = tiny_tokenizer()


def ids_of(text: str) -> list[int]:
    ids: list[int] = BYTE_LEVEL(text, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.parametrize(
    ("full_text", "stops", "text"),
    [
        ("def f(): x.", ["\ndef"], "def f(): x."),
        ("one two three", ["o t"], "one tw"),
        ("one two three", ["three", "two"], "one "),
        ("one\n\ntwo", ["\n\n"], "one"),
        ("one<|end|>two", ["<|end|>"], "one"),
        ("one<|user|>\ntwo", ["<|user|>\n"], "one"),
        ("one\n<|user|>two", ["\n<|user|>"], "one"),
        ("one<|user|>two", ["onetwo"], ""),
        ("one<|user|>two", ["e<|user|><|user|>"], "onetwo"),
        ("one<|user|>two", ["user"], "onetwo"),
        ("one<|user|>two|", ["|"], "onetwo"),
        ("one two", [], "one two"),
    ],
)
def test_stops_end_the_answer(full_text: str, stops: list[str], text: str) -> None:
    pieces, answer = stream(BYTE_LEVEL, ids_of(full_text), stops=stops)
    assert "".join(pieces) == answer.text == text
    text_without_stops = full_text.replace("<|user|>", "").replace("<|end|>", "")
    assert answer.has_stopped == (text != text_without_stops)


@pytest.mark.parametrize("stop", ["</s>", "</s> x", "\N{REPLACEMENT CHARACTER}</s>"])
def test_a_stop_that_names_a_special_token_after_broken_bytes(stop: str) -> None:
    ids: Any = FALLBACK.convert_tokens_to_ids(["Hi", "<0xF0>", "</s>", "\u2581x"])
    pieces, answer = stream(FALLBACK, ids, stops=[stop])
    text = "Hi" if stop.startswith("\N{REPLACEMENT CHARACTER}") else "Hi\N{REPLACEMENT CHARACTER}"
    assert "".join(pieces) == answer.text == text
    assert answer.has_stopped


def test_stop_tokens_end_the_answer() -> None:
    ids = ids_of("one two")
    for last in range(1, len(ids)):
        stop_token = ids[last]
        _, answer = stream(BYTE_LEVEL, ids, stop_tokens=[stop_token])
        assert answer.text == BYTE_LEVEL.decode(ids[: ids.index(stop_token)])
        assert answer.has_stopped


def test_a_stop_of_characters_that_span_tokens_of_bytes() -> None:
    for tokenizer in (FALLBACK, byt5_tokenizer(), OwnChats(), BYTE_LEVEL):
        ids = tokenizer("a\N{SLIGHTLY SMILING FACE}b", add_special_tokens=False)["input_ids"]
        pieces, answer = stream(tokenizer, ids, stops=["\N{SLIGHTLY SMILING FACE}"])
        assert "".join(pieces) == answer.text == "a"
        assert answer.has_stopped


def test_stops_are_looked_for_after_the_least_number_of_tokens() -> None:
    tokenizer = tiny_tokenizer()
    ids: list[int] = [tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "abxabxab"]
    _, answer = stream(tokenizer, ids, stops=["x"])
    assert answer.text == "ab"
    pieces, answer = stream(tokenizer, ids, stops=["x"], min_tokens=3)
    assert "".join(pieces) == answer.text == "abxab"
    assert answer.has_stopped
    _, answer = stream(tokenizer, ids, stop_tokens=[ids[2]], min_tokens=3)
    assert answer.text == "abxab"
    assert answer.has_stopped
    _, answer = stream(tokenizer, ids, stops=["x"], min_tokens=6)
    assert answer.text == "abxabxab"
    assert not answer.has_stopped


@pytest.mark.parametrize("name", tokenizers_of_all_kinds())
def test_texts_of_single_tokens_make_the_text_of_all(name: str) -> None:
    tokenizer = tokenizers_of_all_kinds()[name]
    ids = tokenizer("Hi x. stop a", add_special_tokens=False)["input_ids"]
    text = "".join(token_text(tokenizer, token) for token in ids)
    assert text.removeprefix(" ") == "Hi x. stop a", "SentencePiece's begin with a space"
    (special,) = tokenizer.convert_tokens_to_ids([tokenizer.eos_token])
    assert token_text(tokenizer, special).strip() == tokenizer.eos_token
    assert token_text(tokenizer, len(tokenizer) + 7) == "", "models have rows that no token uses"


def test_marked_text_has_each_special_token_once() -> None:
    tokenizer = tiny_tokenizer()
    text = "one<|user|>two n<|system|><|end|>"
    answer = AnswerText(tokenizer, stops=["never"])
    pieces: list[str] = []
    start = 0
    specials = 0
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        answer.add(token)
        piece, specials = answer.marked(start, answer.settled, specials)
        pieces.append(piece)
        start = answer.settled
    answer.finish()
    last_piece, _ = answer.marked(start, len(answer.text), specials)
    assert "".join([*pieces, last_piece]) == text
