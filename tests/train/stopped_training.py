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


def count_weights(model: nn.Module) -> int:
    """Weights that this process holds."""
    weights = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in model.parameters()]
    return sum(weight.numel() for weight in weights if not weight.is_meta)


def shard_and_print(model: PreTrainedModel) -> None:
    print(f"weights read: {count_weights(model)}", flush=True)
    shard_layers(model)


def end_the_job(_: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def stopped_objective(lookahead: Lookahead, *args: Any) -> ImportanceObjective:
    print(f"weights held: {count_weights(lookahead.model)}", flush=True)
    objective = ImportanceObjective(lookahead, *args)
    if os.environ["RANK"] == "0":
        return objective
    return at_batch(objective, 3, end_the_job)


def save_slowly(*args: Any) -> None:
    time.sleep(2)
    save(*args)


if __name__ == "__main__":
    save = train.save
    train.save = save_slowly  # type: ignore[assignment]
    train.shard_layers = shard_and_print
    train.ImportanceObjective = stopped_objective  # type: ignore[assignment, misc]
    status = main(["train", *sys.argv[1:]])
    if os.environ["RANK"] != "0":
        time.sleep(0.5)  # for the first to say that it stopped, before its launcher ends it too
    sys.exit(status)
