"""How many tokens of a new prompt are read at a time while answers run: as many as their streams can wait for.

A pass that reads a part of a prompt keeps the running answers waiting. Where it takes three times as long as a decoding
step, no token comes more than about four steps after the one before it. Smaller parts cost throughput, as weights are
read, and the answers' entries attended to, once for each: while further prompts wait, a part takes twice as long, and
is no smaller than `CHUNK`. All gaps between tokens are then about as long.
"""

import statistics
from collections import deque

CHUNK = 256
"""Tokens of a part before anything was measured, and the fewest while further prompts wait."""
_STEPS = 3.0
_STEPS_OF_QUEUE = 6.0
"""How many decoding steps a part takes, and how many while further prompts wait."""
_FEWEST = 64
_MOST = 4096
_MULTIPLE = 16
"""Bounds of the tokens of a part, and what divides them, so that their shapes are few."""
_MEASURED = 9
"""Number of latest passes and steps of which the median counts."""


class Pace:
    """The size of a part, by the times of the latest passes and steps.

    Args:
        tokens: Tokens of every part; None to choose them by these times.
    """

    def __init__(self, tokens: int | None) -> None:
        self._tokens = tokens
        self._step_seconds: deque[float] = deque(maxlen=_MEASURED)
        self._token_seconds: deque[float] = deque(maxlen=_MEASURED)

    def stepped(self, seconds: float) -> None:
        """Note the time of a decoding step."""
        self._step_seconds.append(seconds)

    def passed(self, tokens: int, seconds: float) -> None:
        """Note the time of a pass over so many tokens of a prompt, with or without those of the answers."""
        self._token_seconds.append(seconds / tokens)

    def tokens(self, *, others_wait: bool) -> int:
        """Tokens of the next part; `others_wait` says whether further prompts wait."""
        if self._tokens is not None:
            return self._tokens
        if not self._step_seconds or not self._token_seconds:
            return CHUNK
        steps = _STEPS_OF_QUEUE if others_wait else _STEPS
        seconds = steps * statistics.median(self._step_seconds)
        tokens = int(seconds / statistics.median(self._token_seconds))
        fewest = CHUNK if others_wait else _FEWEST
        return min(max(tokens - tokens % _MULTIPLE, fewest), _MOST)
