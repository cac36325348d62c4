"""Which prompts a module was trained on: a later stage holds out others, or says that it cannot."""

import base64
import hashlib
from array import array
from collections.abc import Iterable

from keepsight.data_gen.store import TrainingSample
from keepsight.errors import UserError

Seen = frozenset[bytes]
"""Digests of prompts."""
NOTHING: Seen = frozenset()
_BYTES = 6
"""Of a digest: between a million prompts and a million others, the chance of a collision is 1 in 250."""


def prompt_digest(sample: TrainingSample) -> bytes:
    """A digest that identifies a sample's prompt."""
    return hashlib.sha256(array("q", sample.prompt_ids).tobytes()).digest()[:_BYTES]


def seen_in(samples: Iterable[TrainingSample]) -> Seen:
    """The prompts of samples."""
    return frozenset(map(prompt_digest, samples))


def as_text(seen: Seen | None) -> str:
    """How an artifact records them; nothing where they are not known."""
    return base64.b64encode(b"".join(sorted(seen or ()))).decode()


def from_text(text: str) -> Seen | None:
    """What `as_text` was given.

    Raises:
        UserError: the text is damaged.
    """
    try:
        joined = base64.b64decode(text, validate=True)
    except ValueError:
        raise UserError(f"trained_on={text[:20]!r}... is no base64; fetch the artifact again") from None
    return frozenset(joined[start : start + _BYTES] for start in range(0, len(joined), _BYTES)) or None


def held_out_text(held_out: Iterable[TrainingSample], seen: Seen | None) -> tuple[str, bool]:
    """What a card says of held-out samples, and whether all of them are known to be new."""
    digests = [prompt_digest(sample) for sample in held_out]
    if seen is None:
        return f"{len(digests)}; whether an earlier stage was trained on them is not recorded", not digests
    again = sum(digest in seen for digest in digests)
    return f"{len(digests)}, {again or 'none'} of them trained on before", not again
