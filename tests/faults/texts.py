"""Texts as they come from outside, and the verdict on what is done with them in this process."""

from collections.abc import Callable
from random import Random
from typing import Any

from keepsight.errors import UserError

Verdict = tuple[str, str]
"""How a trial ended in one word, and what was done."""
_PIECES = (
    *("plain", "two words", "é", "日本語", "🙂", "\u202etxt", "\x1b[2J", "\x1b]0;x\x07", "\r", "\n", "\t", "\x00"),
    *("=1+1", "+cmd|' /C x'!A0", "-2+3", "@SUM(A1)", "\n=2", "<script>alert(1)</script>", "<img src=x onerror=y>"),
    *("|", "\\|", "\\", "`", "```\n", "\n---\n", "\n# heading\n", "[x](javascript:y)", "${env:HOME}", "{{ 7 * 7 }}"),
    *('"', "'", "&lt;", "%s", "{0}", "../../up", "/etc/x", "~", "a" * 300, ": ", "- ", "!!python/object:x", "&a *a"),
    *("</td>", "{%", "\x7f", "\u2028"),
)


def hostile(rng: Random, most: int = 4) -> str:
    """Up to `most` pieces, of which each has once broken something somewhere."""
    return "".join(rng.choice(_PIECES) for _ in range(rng.randint(1, most)))


def judged(what: object, action: Callable[[], str]) -> Verdict:
    """How an action ends: with the word that it returns, one line, or as none may."""
    try:
        return action(), str(what)
    except AssertionError as error:
        return "wrong", f"{what}: {error}"
    except UserError as error:
        message = str(error)
        word = "one line" if len(message.splitlines()) == 1 else "not one line"
        return word, f"{what}: {message[:500]}"
    except Exception as error:
        return "traceback", f"{what}: {error!r}"[:1000]


def accepted(action: Callable[[], Any]) -> Any:
    """The value of an action on something good, which must not be refused."""
    try:
        return action()
    except UserError as error:
        raise AssertionError(f"refused: {error}") from None
