"""`train_draft_head.py` with four texts in a file of features; each process prints how many texts it read."""

import sys

from torch import Tensor

from keepsight.commands.cli import main
from keepsight.train import draft_head as module
from keepsight.train.draft_head import HiddenStates, RunModel

if __name__ == "__main__":
    run_model = RunModel.__call__
    lengths: list[int] = []

    def counted(self: RunModel, ids: Tensor) -> HiddenStates:
        lengths.append(len(ids))
        return run_model(self, ids)

    RunModel.__call__ = counted  # type: ignore[method-assign]
    module._SHARD = 4
    status = main(["train_draft_head", *sys.argv[1:]])
    print(f"texts read: {len(lengths)}", flush=True)
    sys.exit(status)
