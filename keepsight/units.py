"""Amounts of memory as text."""

import re

from keepsight.errors import UserError

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def read_bytes(text: str) -> int:
    """Parse bytes from text such as 24GiB, 24 GB, 1.5GiB or 25769803776.

    Raises:
        UserError: the text has another form, or is not above 0.
    """
    written = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if written is None or written[2] not in _UNITS or not (size := int(float(written[1]) * _UNITS[written[2]])):
        raise UserError(f"{text!r} is no amount of memory; write it as 24GiB, 24GB or a number of bytes")
    return size


def size_text(size: int) -> str:
    """Bytes as text, in GiB, or MiB below one GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
