"""`train_lookahead.py` whose second process gets a SIGTERM at its third batch, as a job that runs out of time.

Each process prints how many of the target's weights it held when the module was made.
"""

import os
import signal
import sys
from typing import Any

from keepsight.commands import train
from keepsight.commands.cli import main
from keepsight.models.lookahead import Lookahead
from keepsight.train.lookahead.objective import LookaheadObjective
from tests.train.runs import Disturbed


def _stopped(lookahead: Lookahead, *given: Any) -> LookaheadObjective:
    print(f"weights held: {sum(weight.numel() for weight in lookahead.model.parameters())}", flush=True)
    if os.environ["RANK"] == "0":
        return LookaheadObjective(lookahead, *given)
    return Disturbed(3, lambda _: os.kill(os.getpid(), signal.SIGTERM), lookahead, *given)


if __name__ == "__main__":
    train.LookaheadObjective = _stopped  # type: ignore[assignment, misc]
    sys.exit(main(["train", *sys.argv[1:]]))
