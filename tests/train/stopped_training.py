"""`train_lookahead.py` whose second process gets a SIGTERM at its third batch, as a job that runs out of time.

The first process takes its time to write the weights, and the second ends as soon as it may.
Each process prints how many of the target's weights it held before FSDP2 sharded them and when the module was made.
"""

import os
import signal
import sys
import time
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from keepsight.commands import train
from keepsight.commands.cli import main
from keepsight.models.lookahead import Lookahead
from keepsight.train.distributed import shard_layers
from keepsight.train.importance import ImportanceObjective
from tests.train.runs import at_batch


def _held(model: nn.Module) -> int:
    local = [each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()]
    return sum(each.numel() for each in local if not each.is_meta)


def _sharded(model: PreTrainedModel) -> None:
    print(f"weights read: {_held(model)}", flush=True)
    shard_layers(model)


def _stopped(lookahead: Lookahead, *given: Any) -> ImportanceObjective:
    print(f"weights held: {_held(lookahead.model)}", flush=True)
    if os.environ["RANK"] == "0":
        return ImportanceObjective(lookahead, *given)
    return at_batch(ImportanceObjective(lookahead, *given), 3, lambda _: os.kill(os.getpid(), signal.SIGTERM))


def _saved(*given: Any) -> None:
    time.sleep(2)
    _save(*given)


if __name__ == "__main__":
    _save = train.save
    train.save = _saved  # type: ignore[assignment]
    train.shard_layers = _sharded
    train.ImportanceObjective = _stopped  # type: ignore[assignment, misc]
    status = main(["train", *sys.argv[1:]])
    if os.environ["RANK"] != "0":
        time.sleep(0.5)  # for the first to say that it stopped, before its launcher ends it too
    sys.exit(status)
