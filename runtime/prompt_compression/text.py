"""Prompts as text, for the methods that select words or sentences rather than tokens."""

from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from keepsight.errors import UserError
from keepsight.runtime.prompt_compression.method import ShortenPrompt


@dataclass(frozen=True)
class ShortenText(ShortenPrompt):
    """A method that works on the prompt's text.

    It is the text of the tokens themselves, special tokens included, so that what is kept of it maps back to tokens
    without tokenising again. The window (question and assistant header) is kept as it is.

    Attributes:
        tokenizer: The target's tokenizer.
    """

    window: int = 64
    tokenizer: PreTrainedTokenizerBase = field(kw_only=True, repr=False)

    def with_window(self, kept: Tensor, length: int) -> Tensor:
        """Indices [C] of kept tokens, followed by those of the window of a prompt of `length` tokens."""
        return torch.cat([kept, torch.arange(length - self.window, length, device=kept.device)])


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """The text of each token; joined, they are the text of all tokens.

    Tokens that are parts (bytes) of one character give their text to the last of them. A token is decoded together with
    the one before it, because some tokenizers drop the space before a text's first word.
    """
    texts: list[str] = []
    before: list[int] = []
    group: list[int] = []
    for token in ids:
        group.append(token)
        prefix, text = _decode(tokenizer, before), _decode(tokenizer, before + group)
        if text.endswith("\ufffd") and len(group) < _LONGEST_CHARACTER:
            texts.append("")
            continue
        texts.append(text[len(prefix) :])
        before, group = group, []
    return texts


_LONGEST_CHARACTER = 4  # bytes in UTF-8


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def optional_package(name: str, extra: str) -> ModuleType:
    """Import an optional package.

    Args:
        name: Name of the module.
        extra: Extra of keepsight that installs it.

    Raises:
        UserError: it is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise UserError(f"package {name!r} is not installed; run `pip install keepsight[{extra}]`") from None
