"""Data sets of the Hugging Face Hub, where it can be reached or has been."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from datasets import load_dataset
from huggingface_hub import constants, get_session, hf_hub_download, try_to_load_from_cache

from keepsight.errors import UserError

_PATIENCE = 5.0
"""Seconds for the first word from the Hub; its own client tries for half a minute."""


@lru_cache(maxsize=1)
def hub_reachable() -> bool:
    """Whether the Hub answers, or is told to be read from the local cache alone (`HF_HUB_OFFLINE`)."""
    if constants.HF_HUB_OFFLINE:
        return True
    try:
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE)
    except Exception:  # the client's own kinds differ between its versions
        return False
    return True


def hub_rows(name: str, split: str, configuration: str | None = None) -> list[dict[str, Any]] | None:
    """The rows of a data set; None where the Hub can be reached neither now nor in the cache."""
    if not hub_reachable():
        return None
    try:
        return [dict(row) for row in load_dataset(name, configuration, split=split)]
    except (OSError, ValueError):  # ValueError: not in the cache of an offline machine
        return None


def hub_file(name: str, file: str, instead: str) -> Path:
    """A file of a data set, downloaded once.

    Args:
        name: `user/name` of the data set.
        file: Its path there.
        instead: What a user without the Hub can do, for the message.

    Raises:
        UserError: it is not in the cache and the Hub cannot be reached, or refuses.
    """
    cached = try_to_load_from_cache(name, file, repo_type="dataset")
    if isinstance(cached, str):
        return Path(cached)
    if not hub_reachable():
        raise UserError(f"{name}/{file}: the Hub cannot be reached; {instead}")
    try:
        return Path(hf_hub_download(name, file, repo_type="dataset"))
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{name}/{file} cannot be downloaded ({reason}); {instead}") from None
