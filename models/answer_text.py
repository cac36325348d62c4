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

    Attributes:
        text: The text so far, without special tokens; whole after `finish`.
        has_stopped: Whether a stop has ended it.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), stop_tokens: Sequence[int] = ()) -> None:
        self.text, self.has_stopped = "", False
        self._tokenizer, self._vocabulary = tokenizer, _vocabulary_of(tokenizer)
        self._stops, self._stop_tokens = [*stops], frozenset(stop_tokens)
        self._longest = max(map(len, self._stops), default=0)
        self._ids: list[int] = []
        self._first = 0  # of the tokens that are decoded with the next one: some decode otherwise at a text's start
        self._decoded = 0  # number of tokens whose text is known
        self._bytes: Any = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._specials: list[_Special] = []

    def add(self, token: int) -> bool:
        """Add a token; returns whether the answer ends with it."""
        if self.has_stopped or token in self._stop_tokens:
            self.has_stopped = True
            return True
        before = len(self.text)
        if (byte := self._vocabulary.bytes.get(token)) is not None:
            self._add_characters(self._bytes.decode(bytes([byte])))
        elif name := self._special_name(token):
            if self._stops:  # one may name it: bytes before it are no part of a character after it
                self._add_characters(self._bytes.decode(b"", final=True))
                self._decode(is_last=True)
            self._specials.append(_Special(len(self.text), name))
        elif token in self._vocabulary.ids:
            self._add_characters(self._bytes.decode(b"", final=True))
            self._ids.append(token)
        self._decode(is_last=False)
        self._stop_from(before)
        return self.has_stopped

    def finish(self) -> None:
        """End the text: bytes that wait for the rest of their character become a replacement character."""
        if self.has_stopped:
            return
        before = len(self.text)
        self._add_characters(self._bytes.decode(b"", final=True))
        self._decode(is_last=True)
        self._stop_from(before)

    @property
    def settled(self) -> int:
        """Number of the text's characters that stay, whatever follows: the others may begin a stop."""
        if self.has_stopped or not self._stops:
            return len(self.text)
        settled = len(self.text)
        tail = self._with_specials(max(len(self.text) - self._longest, 0))
        for stop in self._stops:
            for length in range(1, len(stop)):
                if self.text.endswith(stop[:length]):
                    settled = min(settled, len(self.text) - length)
                if tail.text.endswith(stop[:length]):
                    settled = min(settled, tail.visible(len(tail.text) - length))
        return settled

    def _add_characters(self, characters: str) -> None:
        """Add the tokens of whole characters that byte tokens spell."""
        self._ids += [self._vocabulary.of_byte[byte] for byte in characters.encode()]

    def _decode(self, is_last: bool) -> None:
        """Add the text of new tokens, once it is whole characters or the last one."""
        if self._decoded == len(self._ids):
            return
        known = self._plain(self._ids[self._first : self._decoded])
        text = self._plain(self._ids[self._first :])
        if len(text) > len(known) and (is_last or not text.endswith(_REPLACEMENT)):
            self.text += text[len(known) :]
            self._first = self._decoded
            self._decoded = len(self._ids)

    def _plain(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text) if ids else ""

    def _special_name(self, token: int) -> str:
        """The text of a special token, which `decode` leaves out; empty for any other token."""
        if token not in self._vocabulary.ids or self._plain([token, token]):  # a space alone may be no text
            return ""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def _stop_from(self, before: int) -> None:
        """End the text before the first stop, if there is one that ends after its first `before` characters."""
        if not self._stops:
            return
        tail = self._with_specials(max(before - self._longest, 0))
        found = [place for stop in self._stops for place in tail.places_of(stop)]
        shown = [self.text.find(stop, max(before - len(stop) + 1, 0)) for stop in self._stops]
        if found := [*found, *(place for place in shown if place >= 0)]:
            self.text, self.has_stopped = self.text[: min(found)], True

    def _with_specials(self, start: int) -> "_Tail":
        """The text from `start` on, with the special tokens in it."""
        text, spans, last = "", list[tuple[int, int]](), start
        for special in self._specials:
            if special.place >= start:
                text += self.text[last : special.place]
                spans.append((len(text), len(text) + len(special.name)))
                text, last = text + special.name, special.place
        return _Tail(start, text + self.text[last:], spans)


@dataclass(frozen=True)
class _Special:
    """A special token of an answer: the number of the text's characters before it, and its own text."""

    place: int
    name: str


@dataclass(frozen=True)
class _Tail:
    """The end of a text from its character `start` on, with special tokens at `spans` of it."""

    start: int
    text: str
    spans: list[tuple[int, int]]

    def visible(self, place: int) -> int:
        """The place in the text without special tokens that a place in this text stands for."""
        hidden = sum(min(end, place) - start for start, end in self.spans if start < place)
        return self.start + place - hidden

    def places_of(self, stop: str) -> list[int]:
        """Where a stop that names special tokens wholly begins in the text without them; empty where there is none."""
        places = []
        place = self.text.find(stop) if self.spans else -1
        while place >= 0:
            touched = [span for span in self.spans if span[0] < place + len(stop) and span[1] > place]
            if touched and place <= touched[0][0] and touched[-1][1] <= place + len(stop):
                places.append(self.visible(place))
            place = self.text.find(stop, place + 1)
        return places


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
    falls_back = min(of_byte) >= 0 and str(tokenizer.decode([of_byte[ord("A")]])).strip() == "A"
    return _Vocabulary(ids, {token: byte for byte, token in enumerate(of_byte)} if falls_back else {}, of_byte)
