"""LLMLingua-2 (arXiv 2403.12968): a small encoder decides which words of a prompt to keep, without the question.

The encoder runs in its authors' package: `pip install keepsight[llmlingua]`.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.runtime.images import Images
from keepsight.runtime.prompt_compression.text import ShortenText, optional_package, token_texts

LabelledWords = list[tuple[str, bool]]
"""The words of a text in their order, and whether each is kept."""

_KINDS = ("xlm-roberta-large", "bert-base-multilingual-cased")
_STEP = 0.01  # the package keeps whole percents
_SLACK = 32  # characters between two words, beyond what could not be found
_BETWEEN_WORDS, _BEFORE_LABEL = "\t\t|\t\t", " "


@dataclass(frozen=True)
class Package:
    """Word labels from the `llmlingua` package with its own defaults.

    Attributes:
        model: Folder or Hub id of the encoder, whose name tells the package its kind.

    Raises:
        UserError: the name says nothing to the package.
    """

    model: str = "microsoft/llmlingua-2-xlm-roberta-large-meetingbank"

    def __post_init__(self) -> None:
        if not any(kind in self.model for kind in _KINDS):
            raise UserError(f"LLMLingua2: model {self.model!r} must have {' or '.join(_KINDS)} in its name")

    def __call__(self, text: str, rate: float) -> LabelledWords:
        """The words of a text, a share `rate` of which is kept.

        Raises:
            UserError: the package is not installed or its models cannot be had.
        """
        labelled = _compressor(self.model).compress_prompt_llmlingua2(
            [text], rate=rate, return_word_label=True, word_sep=_BETWEEN_WORDS, label_sep=_BEFORE_LABEL
        )["fn_labeled_original_prompt"]
        pairs = (each.rpartition(_BEFORE_LABEL) for each in labelled.split(_BETWEEN_WORDS) if each)
        return [(word, label == "1") for word, _, label in pairs]


@dataclass(frozen=True)
class LLMLingua2(ShortenText):
    """Keeps the window, and the words before it that LLMLingua-2 (arXiv 2403.12968, section 4) keeps.

    The package is asked for the share of words that fits the budget. Its words are not the target's tokens, and it
    rounds to whole percents of each stretch of 510 of its own tokens, so that the result may fall short of the budget;
    where it would exceed it, the package is asked again for less. Line breaks are not words and are dropped.

    Attributes:
        label: Labels the words of a text, given the share of them to keep; the package by default.
    """

    label: Callable[[str, float], LabelledWords] = Package()

    @override
    def select(self, model: PreTrainedModel, input_ids: Tensor, images: Images | None = None) -> Tensor:
        texts = token_texts(self.tokenizer, input_ids[: len(input_ids) - self.window].tolist())
        room = self.budget_for(len(input_ids)) - self.window
        rate = room / len(texts)
        kept: list[int] = []
        while rate > 0:
            kept = kept_tokens(texts, self.label("".join(texts), rate))
            if len(kept) <= room:
                break
            rate, kept = rate * room / len(kept) - _STEP, []
        return self.with_window(torch.tensor(kept, dtype=torch.long, device=input_ids.device), len(input_ids))


def kept_tokens(texts: list[str], words: LabelledWords) -> list[int]:
    """The tokens that hold a part of a kept word, ascending.

    Args:
        texts: The text of each token; see `keepsight.runtime.prompt_compression.text.token_texts`.
        words: The words of the joined text in order. A word that is not found where it should be (the encoder
            rewrites some characters) is skipped.
    """
    text = "".join(texts)
    marked = np.zeros(len(text) + 1, dtype=np.int64)
    cursor, slack = 0, _SLACK
    for word, is_kept in words:
        while cursor < len(text) and text[cursor].isspace():
            cursor += 1
        start = text.find(word, cursor, cursor + slack + len(word))
        if start < 0 or not word:
            slack += len(word) + 1
            continue
        cursor, slack = start + len(word), _SLACK
        marked[start:cursor] = is_kept
    before = [0, *marked.cumsum().tolist()]
    ends = [0, *accumulate(len(each) for each in texts)]
    kept: list[int] = []
    for token in reversed(range(len(texts))):
        # A token without text is the beginning of the next one's character.
        starts_kept = not texts[token] and kept[-1:] == [token + 1]
        if starts_kept or before[ends[token + 1]] > before[ends[token]]:
            kept.append(token)
    return kept[::-1]


@lru_cache(maxsize=1)
def _compressor(model: str) -> Any:
    package = optional_package("llmlingua", "llmlingua")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        with _same_random_numbers():
            return package.PromptCompressor(
                model_name=model,
                device_map=device,
                model_config={"trust_remote_code": False, "use_safetensors": True},
                use_llmlingua2=True,
            )
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"LLMLingua2: model {model!r} cannot be loaded; give a folder or a Hub id: {reason}") from None


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Restore the state of every random generator afterwards: the package seeds them all."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
