"""Methods that shorten prompts, small enough for tests, and prompts for them."""

import re
from dataclasses import dataclass
from typing import Any

import torch

from keepsight.runtime.prompt_compression.r2c import R2C, ChunkAttention
from keepsight.runtime.prompt_compression.specpc import SpecKVPC, SpecPC
from keepsight.runtime.prompt_compression.text import LLMLingua2, SentenceSimilarity, ShortenText
from tests.tiny import tiny_model, tiny_tokenizer


@dataclass(frozen=True)
class Fixed:
    """One draft for every target."""

    model: Any
    name: str = "fixed"

    def of(self, target):
        return self.model


def tiny_draft(family="llama", **changes):
    return Fixed(tiny_model(family, seed=7, **changes))


def small_specpc(budget: int | float = 20, **options: Any) -> SpecPC:
    return SpecPC(budget, **({"window": 4, "draft": tiny_draft(), "kernel": 4} | options))


def small_cascade(**options: Any) -> SpecKVPC:
    settings: dict[str, Any] = {
        "budget": 16,
        "draft": tiny_draft(),
        "prompt_budget": 40,
        "lookahead": 5,
        "kernel": 4,
        "prompt_window": 6,
        "window": 9,
    }
    return SpecKVPC(**(settings | options))


def by_word_length(text, rate):
    """A compressor of a test: the longest words, the first ones of equals, are kept."""
    words = text.split()
    ranked = sorted(range(len(words)), key=lambda place: -len(words[place]))[: round(rate * len(words))]
    return [(word, place in ranked) for place, word in enumerate(words)]


def shared_words(sentences, question):
    """A similarity of a test: how many words of a sentence the question has too."""
    asked = set(question.lower().split())
    return torch.tensor([float(len(asked & set(sentence.lower().split()))) for sentence in sentences])


def shared_with_question(question, chunks):
    """A reader of a test: each word is a token, and gets attention where the question has it too."""
    read = []
    for place, chunk in enumerate(chunks):
        found = [(each.start(), 0.1 + (each[0] in question) + 0.01 * place) for each in re.finditer(r"\w+", chunk)]
        read.append(ChunkAttention(sum(weight for _, weight in found) / max(len(found), 1), found))
    return read


def text_methods(budget: int = 20, window: int = 5) -> list[ShortenText]:
    common: dict[str, Any] = {"window": window, "tokenizer": tiny_tokenizer()}
    return [
        LLMLingua2(budget, label=by_word_length, **common),
        SentenceSimilarity(budget, similarity=shared_words, **common),
        R2C(budget, relevance=shared_with_question, chunk=30, **common),
    ]


def wide_model():
    return tiny_model(vocab_size=512)


def text_ids(text: str) -> torch.Tensor:
    return torch.tensor(tiny_tokenizer().encode(text))


PROSE = (
    "The for statement is used to iterate over the elements of a sequence. A class definition is executed.\n"
    "Is the suite run again? The with statement wraps the execution of a block! Nothing else is 3.5 times better."
    "\n\nWhich statement wraps a block?"
)
