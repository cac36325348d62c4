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
    defaults = {"window": 4, "draft": tiny_draft(), "kernel": 4}
    return SpecPC(budget, **(defaults | options))


def small_cascade(**options: Any) -> SpecKVPC:
    defaults: dict[str, Any] = {
        "budget": 16,
        "draft": tiny_draft(),
        "prompt_budget": 40,
        "lookahead": 5,
        "kernel": 4,
        "prompt_window": 6,
        "window": 9,
    }
    return SpecKVPC(**(defaults | options))


def by_word_length(text, rate):
    """A compressor for tests: it keeps the longest words, and of equally long ones the first."""
    words = text.split()
    longest_first = sorted(range(len(words)), key=lambda index: -len(words[index]))
    kept = longest_first[: round(rate * len(words))]
    return [(word, index in kept) for index, word in enumerate(words)]


def shared_words(sentences, question):
    """A similarity for tests: how many words of a sentence the question has too."""
    question_words = set(question.lower().split())
    counts = []
    for sentence in sentences:
        shared = question_words & set(sentence.lower().split())
        counts.append(float(len(shared)))
    return torch.tensor(counts)


def shared_with_question(question, chunks):
    """A reader for tests: each word is a token, and gets attention where the question has it too."""
    attention = []
    for index, chunk in enumerate(chunks):
        tokens = []
        for word in re.finditer(r"\w+", chunk):
            weight = 0.1 + (word[0] in question) + 0.01 * index
            tokens.append((word.start(), weight))
        mean = sum(weight for _, weight in tokens) / max(len(tokens), 1)
        attention.append(ChunkAttention(mean, tokens))
    return attention


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
