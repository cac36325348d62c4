"""The text of an answer, token by token, and the stops that end it; for any tokenizer of transformers.

Only public methods of tokenizers are used (`decode`, `get_vocab`), so that those without a backend of the tokenizers
library work too: ByT5's, mistral-common's, and others written in Python.
"""

import codecs
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def answer_text(tokenizer: Any, ids: Iterable[int]) -> str:
    """The text of ids [N] without special tokens; bytes that are no UTF-8 become replacement characters."""
    answer = AnswerText(tokenizer)
    for token in ids:
        answer.add(int(token))
    answer.finish()
    return answer.text


class AnswerText:
    """The text of an answer that grows token by token and ends before the first stop.

    Stops are looked for in the answer alone, never in the prompt. One that names special tokens, such as
    `<|im_end|>` or `</s>` and a line break, is found too, though special tokens are no part of the text.

    Args:
        tokenizer: Any tokenizer of transformers.
        stops: Texts before which the answer ends; none of them is empty.
        stop_tokens: Tokens before which it ends.
        min_tokens: Number of tokens after which stops are looked for; one that an earlier token ends is none.

    Attributes:
        text: The text so far, without special tokens; whole after `finish`.
        has_stopped: Whether a stop has ended it.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str] = (), stop_tokens: Sequence[int] = (), min_tokens: int = 0
    ) -> None:
        self.text = ""
        self.has_stopped = False
        self._tokenizer = tokenizer
        self._vocabulary = _vocabulary_of(tokenizer)
        self._stops = list(stops)
        self._stop_tokens = frozenset(stop_tokens)
        self._longest_stop = max(map(len, self._stops), default=0)
        self._min_tokens = min_tokens
        self._tokens = 0  # number of tokens so far
        self._ids: list[int] = []
        self._first = 0  # of the tokens that are decoded with the next one: some decode otherwise at a text's start
        self._decoded = 0  # number of tokens whose text is in `text`
        self._bytes: Any = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._specials: list[_Special] = []

    def add(self, token: int) -> bool:
        """Add a token; returns whether the answer ends with it."""
        self._tokens += 1
        if self.has_stopped or (token in self._stop_tokens and self._tokens > self._min_tokens):
            self.has_stopped = True
            return True
        length_before = len(self.text)
        byte = self._vocabulary.bytes.get(token)
        if byte is not None:
            self._add_characters(self._bytes.decode(bytes([byte])))
        else:
            self._add_token(token)
        self._decode(is_last=False)
        self._stop_from(length_before)
        return self.has_stopped

    def _add_token(self, token: int) -> None:
        """Add a token that does not stand for a byte: a special one, or one of the vocabulary; others are left out."""
        special_text = self._special_text(token)
        if special_text:
            if self._stops:  # one may name it: bytes before it are no part of a character after it
                self._add_characters(self._bytes.decode(b"", final=True))
                self._decode(is_last=True)
            self._specials.append(_Special(len(self.text), special_text))
        elif token in self._vocabulary.ids:
            self._add_characters(self._bytes.decode(b"", final=True))
            self._ids.append(token)

    def finish(self) -> None:
        """End the text: bytes that wait for the rest of their character become a replacement character."""
        if self.has_stopped:
            return
        length_before = len(self.text)
        self._add_characters(self._bytes.decode(b"", final=True))
        self._decode(is_last=True)
        self._stop_from(length_before)

    @property
    def settled(self) -> int:
        """Number of the text's characters that stay, whatever follows: the others may begin a stop."""
        if self.has_stopped or not self._stops:
            return len(self.text)
        settled = len(self.text)
        tail = self._with_specials(max(len(self.text) - self._longest_stop, 0))
        for stop in self._stops:
            for length in range(1, len(stop)):
                if self.text.endswith(stop[:length]):
                    settled = min(settled, len(self.text) - length)
                if tail.text.endswith(stop[:length]):
                    settled = min(settled, tail.position_in_answer(len(tail.text) - length))
        return settled

    def marked(self, start: int, stop: int, specials: int) -> tuple[str, int]:
        """Characters `start` to `stop` with the special tokens between them, and the number of special tokens so far.

        The first `specials` of these are left out, as an earlier call returned them.
        """
        text = ""
        for special in self._specials[specials:]:
            if special.position > stop:
                break
            text += self.text[start : special.position] + special.text
            start = max(start, special.position)
            specials += 1
        return text + self.text[start:stop], specials

    def _add_characters(self, characters: str) -> None:
        """Add the tokens of whole characters that byte tokens spell."""
        self._ids += [self._vocabulary.of_byte[byte] for byte in characters.encode()]

    def _decode(self, is_last: bool) -> None:
        """Add the text of new tokens, once it is whole characters or the last one."""
        if self._decoded == len(self._ids):
            return
        text_before = self._plain_text(self._ids[self._first : self._decoded])
        text = self._plain_text(self._ids[self._first :])
        if len(text) > len(text_before) and (is_last or not text.endswith(_REPLACEMENT)):
            self.text += text[len(text_before) :]
            self._first = self._decoded
            self._decoded = len(self._ids)

    def _plain_text(self, ids: list[int]) -> str:
        """The text of ids without special tokens."""
        text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text) if ids else ""

    def _special_text(self, token: int) -> str:
        """The text of a special token, which `decode` leaves out; empty for any other token."""
        if token not in self._vocabulary.ids or self._plain_text([token, token]):  # a space alone may be no text
            return ""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def _stop_from(self, length_before: int) -> None:
        """End the text before the first stop, if one ends after the first `length_before` characters."""
        if not self._stops or self._tokens <= self._min_tokens:
            return
        tail = self._with_specials(max(length_before - self._longest_stop, 0))
        starts: list[int] = []
        for stop in self._stops:
            starts += tail.starts_of(stop)
            start = self.text.find(stop, max(length_before - len(stop) + 1, 0))
            if start >= 0:
                starts.append(start)
        if starts:
            self.text = self.text[: min(starts)]
            self.has_stopped = True

    def _with_specials(self, start: int) -> "_Tail":
        """The text from `start` on, with the special tokens in it."""
        text = ""
        spans: list[tuple[int, int]] = []
        copied = start
        for special in self._specials:
            if special.position < start:
                continue
            text += self.text[copied : special.position]
            copied = special.position
            spans.append((len(text), len(text) + len(special.text)))
            text += special.text
        return _Tail(start, text + self.text[copied:], spans)


@functools.lru_cache(maxsize=1 << 16)
def token_text(tokenizer: Any, token: int) -> str:
    """The text of a token within a text, also of a special one; replacement characters for a part of a character."""
    if token not in _vocabulary_of(tokenizer).ids:
        return ""
    # After another token: some tokenizers leave out the space before a text's first word.
    before = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    text = str(tokenizer.decode([*before, token], **options))
    start = str(tokenizer.decode(before, **options))
    return text.removeprefix(start)


@dataclass(frozen=True)
class _Special:
    """A special token of an answer: the number of the text's characters before it, and its own text."""

    position: int
    text: str


@dataclass(frozen=True)
class _Tail:
    """The end of a text from its character `start` on, with special tokens at `spans` of it."""

    start: int
    text: str
    spans: list[tuple[int, int]]

    def position_in_answer(self, position: int) -> int:
        """The position in the text without special tokens that a position in this text stands for."""
        special_characters = 0
        for start, end in self.spans:
            if start < position:
                special_characters += min(end, position) - start
        return self.start + position - special_characters

    def starts_of(self, stop: str) -> list[int]:
        """Where a stop that names special tokens wholly begins in the text without them; empty where there is none."""
        if not self.spans:
            return []
        positions = []
        start = self.text.find(stop)
        while start >= 0:
            end = start + len(stop)
            touched = [span for span in self.spans if span[0] < end and span[1] > start]
            if touched and start <= touched[0][0] and touched[-1][1] <= end:
                positions.append(self.position_in_answer(start))
            start = self.text.find(stop, start + 1)
        return positions


@dataclass(frozen=True)
class _Vocabulary:
    """The ids that a tokenizer can decode, and the byte of each token that stands for one (byte fallback)."""

    ids: frozenset[int]
    bytes: dict[int, int]
    of_byte: list[int]


@functools.lru_cache(maxsize=16)
def _vocabulary_of(tokenizer: Any) -> _Vocabulary:
    vocabulary = tokenizer.get_vocab()
    ids = frozenset([*vocabulary.values(), *range(len(tokenizer))])
    of_byte = [vocabulary.get(f"<0x{byte:02X}>", -1) for byte in range(256)]
    bytes_by_token: dict[int, int] = {}
    if min(of_byte) >= 0 and str(tokenizer.decode([of_byte[ord("A")]])).strip() == "A":
        bytes_by_token = {token: byte for byte, token in enumerate(of_byte)}
    return _Vocabulary(ids, bytes_by_token, of_byte)
