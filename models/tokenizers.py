"""Load a target's tokenizer, and see that it works."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase


def load_tokenizer(source: str | Path, **options: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub id; pads on the left, with its end token where it has no token for that.

    It encodes a word at once: some values of a damaged tokenizer_config.json raise only then.

    Args:
        source: Folder or Hub id.
        options: Passed on to transformers' `from_pretrained`.

    Raises:
        Exception: of any type, as transformers and tokenizers raise them where files are missing or damaged.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(source, padding_side="left", **options)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer("word")
    return tokenizer
