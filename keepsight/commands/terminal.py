"""Output to a terminal, which text from a model or a file must not control."""

import re

_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with control characters (but tabs and line breaks), changes of direction and lone surrogates escaped."""
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
