"""Prompt compressors that read text: LLMLingua-2, sentence similarity, and truncation, the baseline."""

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.files import at_home
from keepsight.runtime import registry
from keepsight.runtime.images import Images
from keepsight.runtime.prompt_compression.method import ShortenPrompt


@dataclass(frozen=True)
class ShortenText(ShortenPrompt):
    """A method that selects tokens by their text, so that nothing is tokenised again.

    Attributes:
        tokenizer: The base model's tokenizer.
    """

    window: int = 64
    tokenizer: PreTrainedTokenizerBase = field(kw_only=True, repr=False)

    def with_window(self, kept: Tensor, length: int) -> Tensor:
        """Indices [C] of kept tokens, followed by those of the window of a prompt of `length` tokens."""
        return torch.cat([kept, torch.arange(length - self.window, length, device=kept.device)])


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """The text of each token; joined, they are the text of all tokens.

    The text of tokens that are parts (bytes) of one character is that of the last of them.
    """
    texts: list[str] = []
    previous: list[int] = []
    current: list[int] = []  # the tokens of one character, or a single token
    for token in ids:
        current.append(token)
        # Decoded after the token before it: some tokenizers drop the space before a text's first word.
        prefix = _decode(tokenizer, previous)
        text = _decode(tokenizer, previous + current)
        if text.endswith("\ufffd") and len(current) < _LONGEST_CHARACTER:
            texts.append("")
            continue
        texts.append(text[len(prefix) :])
        previous = current
        current = []
    return texts


_LONGEST_CHARACTER = 4  # bytes in UTF-8


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _optional_package(name: str, extra: str) -> ModuleType:
    """Import a package that an extra of keepsight installs."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise UserError(
            f"package {name!r} is not installed; run `pip install 'keepsight[{extra}]'`",
            field=name,
            code="missing",
        ) from None


_KINDS = ("xlm-roberta-large", "bert-base-multilingual-cased")
_STEP = 0.01  # the package keeps whole percents
_SLACK = 32  # characters between two words, beyond words that were not found
_BETWEEN_WORDS = "\t\t|\t\t"
_BEFORE_LABEL = " "
LabelledWords = list[tuple[str, bool]]
"""The words of a text in their order, and whether each is kept."""


@registry.part("label", "package")
@dataclass(frozen=True)
class Package:
    """Word labels from the `llmlingua` package with its own defaults.

    Attributes:
        model: Folder or Hub id of the encoder, whose name tells the package its kind; others are a `UserError`.
    """

    model: str = "microsoft/llmlingua-2-xlm-roberta-large-meetingbank"

    def __post_init__(self) -> None:
        if not any(kind in self.model for kind in _KINDS):
            raise UserError(
                f"LLMLingua2: model {self.model!r} must have {' or '.join(_KINDS)} in its name",
                field="model",
                code="unknown",
            )

    def __call__(self, text: str, rate: float) -> LabelledWords:
        """The words of a text, a share `rate` of which is kept; a `UserError` without the package or its models."""
        compressed = _compressor(self.model).compress_prompt_llmlingua2(
            [text], rate=rate, return_word_label=True, word_sep=_BETWEEN_WORDS, label_sep=_BEFORE_LABEL
        )
        words = []
        for labelled_word in compressed["fn_labeled_original_prompt"].split(_BETWEEN_WORDS):
            if labelled_word:
                word, _, label = labelled_word.rpartition(_BEFORE_LABEL)
                words.append((word, label == "1"))
        return words


@registry.method("llmlingua2")
@dataclass(frozen=True)
class LLMLingua2(ShortenText):
    """Keeps the window, and the words before it that LLMLingua-2 (arXiv 2403.12968, section 4) keeps.

    The package is asked for the share of words that fits the budget. Its words are not the model's tokens, and it
    rounds to whole percents of each stretch of 510 of its own tokens: the result may fall short of the budget; where it
    would exceed it, the package is asked again for less. Line breaks are not words and are dropped.

    Attributes:
        label: Labels the words of a text for a share of them to keep; the package by default.
    """

    label: Callable[[str, float], LabelledWords] = Package()

    @override
    def select(self, model: PreTrainedModel, input_ids: Tensor, images: Images | None = None) -> Tensor:
        length = len(input_ids)
        texts = token_texts(self.tokenizer, input_ids[: length - self.window].tolist())
        text = "".join(texts)
        budget = self.budget_for(length) - self.window
        positions: list[int] = []
        rate = budget / len(texts)
        while rate > 0:
            kept = kept_tokens(texts, self.label(text, rate))
            if len(kept) <= budget:
                positions = kept
                break
            rate = rate * budget / len(kept) - _STEP
        return self.with_window(torch.tensor(positions, dtype=torch.long, device=input_ids.device), length)


def kept_tokens(texts: list[str], words: LabelledWords) -> list[int]:
    """The tokens, by their `texts`, that hold a part of a kept word, ascending.

    `words` are those of the joined text in order. One that is not found where it should be (the encoder rewrites some
    characters) is skipped.
    """
    text = "".join(texts)
    is_kept_character = [False] * len(text)
    cursor = 0
    slack = _SLACK
    for word, is_kept in words:
        while cursor < len(text) and text[cursor].isspace():
            cursor += 1
        start = text.find(word, cursor, cursor + slack + len(word))
        if start < 0 or not word:
            slack += len(word) + 1
            continue
        cursor = start + len(word)
        slack = _SLACK
        is_kept_character[start:cursor] = [is_kept] * len(word)

    kept: list[int] = []
    end = len(text)
    for token in reversed(range(len(texts))):
        start = end - len(texts[token])
        # A token without text is the beginning of the next one's character.
        begins_kept = not texts[token] and kept[-1:] == [token + 1]
        if begins_kept or any(is_kept_character[start:end]):
            kept.append(token)
        end = start
    return kept[::-1]


@lru_cache(maxsize=1)
def _compressor(model: str) -> Any:
    package = _optional_package("llmlingua", "llmlingua")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        with _same_random_numbers():
            return package.PromptCompressor(
                model_name=at_home(model),
                device_map=device,
                model_config={"trust_remote_code": False, "use_safetensors": True},
                use_llmlingua2=True,
            )
    except OSError as error:
        raise _not_loaded("LLMLingua2", model, error) from None


def _not_loaded(name: str, model: str, error: OSError) -> UserError:
    reason = str(error).strip().splitlines()[0]
    return UserError(
        f"{name}: model {model!r} cannot be loaded; give a folder or a Hub id: {reason}", field="model", code="file"
    )


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Restore the state of every random generator afterwards: the package seeds them all."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


_SENTENCE = re.compile(r".+?(?:[.!?]+[\"')\]]*(?=\s|\Z)|\n|\Z)", re.DOTALL)


@registry.part("similarity", "cosine")
@dataclass(frozen=True)
class Cosine:
    """Cosine similarity of sentence embeddings.

    Attributes:
        model: Folder or Hub id of a sentence encoder.
    """

    model: str = "sentence-transformers/all-MiniLM-L6-v2"

    def __call__(self, sentences: list[str], question: str) -> Tensor:
        """How close each sentence is to the question, [S] float32; a `UserError` without the package or encoder."""
        embeddings = _encoder(self.model).encode(
            [*sentences, question], convert_to_tensor=True, normalize_embeddings=True, show_progress_bar=False
        )
        return (embeddings[:-1] @ embeddings[-1]).float().cpu()


@registry.method("sentence_similarity")
@dataclass(frozen=True)
class SentenceSimilarity(ShortenText):
    """Keeps the window and, in their original order, the earlier sentences most similar to it (after CPC).

    CPC (arXiv 2409.01227) is `similarity=Contextual(MODEL, ADAPTER)`; by default a small public encoder embeds each
    sentence alone. The window's text is the question, with what the chat template puts after it. A token belongs to the
    sentence in which its text begins. The last sentence kept is cut to what is left of the budget, so that it is always
    used up; CPC keeps it whole, beyond the budget. CPC's patterns, whose sentences are taken first, are left out. Ties
    go to the earlier sentence.

    Attributes:
        similarity: Scores sentences by a question, [S]: `Cosine` or `Contextual`.
    """

    similarity: Callable[[list[str], str], Tensor] = Cosine()

    @override
    def select(self, model: PreTrainedModel, input_ids: Tensor, images: Images | None = None) -> Tensor:
        texts = token_texts(self.tokenizer, input_ids.tolist())
        before_window = len(texts) - self.window
        sentences, owners = split_sentences(texts[:before_window])
        question = "".join(texts[before_window:])
        with_text = [index for index, sentence in enumerate(sentences) if sentence.strip()]
        scores = torch.full((len(sentences),), -torch.inf, dtype=torch.float32)
        if with_text:
            similarity = self.similarity([sentences[index] for index in with_text], question)
            scores[with_text] = similarity.to(scores.dtype)

        # Tokens by the rank of their sentence, in their order within one.
        ranks = torch.empty(len(sentences), dtype=torch.long)
        ranks[scores.argsort(descending=True, stable=True)] = torch.arange(len(sentences))
        token_ranks = ranks[torch.tensor(owners, dtype=torch.long)]
        best_tokens = token_ranks.argsort(stable=True)[: self.budget_for(len(texts)) - self.window]
        kept_positions = best_tokens.sort().values
        return self.with_window(kept_positions.to(input_ids.device), len(texts))


def split_sentences(texts: list[str]) -> tuple[list[str], list[int]]:
    """The sentences of a text, and which of them each token belongs to, from the text of each token.

    The sentences joined are the text. One ends at a line break, or at a full stop, exclamation or question mark before
    white space.
    """
    sentences = _SENTENCE.findall("".join(texts)) or [""]
    owners = []
    current = 0
    sentence_end = len(sentences[0])
    start = 0
    for text in texts:
        while start >= sentence_end and current + 1 < len(sentences):
            current += 1
            sentence_end += len(sentences[current])
        owners.append(current)
        start += len(text)
    return sentences, owners


@lru_cache(maxsize=1)
def _encoder(model: str) -> Any:
    package = _optional_package("sentence_transformers", "sentences")
    try:
        return package.SentenceTransformer(model, trust_remote_code=False, model_kwargs={"use_safetensors": True})
    except OSError as error:
        raise _not_loaded("SentenceSimilarity", model, error) from None


@registry.method("truncation")
@dataclass(frozen=True)
class Truncation(ShortenPrompt):
    """Spends half of the budget on either end of the prompt and drops the middle (LongBench, arXiv 2308.14508).

    The odd token of an odd budget goes to the end; LongBench drops it. The tokens are kept as they are; LongBench
    decodes both halves and tokenises the joined text again.
    """

    @override
    def select(self, model: PreTrainedModel, input_ids: Tensor, images: Images | None = None) -> Tensor:
        length = len(input_ids)
        budget = self.budget_for(length)
        first = budget // 2
        last = budget - first
        positions = torch.arange(length, device=input_ids.device)
        return torch.cat([positions[:first], positions[length - last :]])
