"""The processes of one launch (torchrun, accelerate launch)."""

from datetime import timedelta

import torch
from accelerate import PartialState


def launched() -> PartialState:
    """This process among those of its launch; alone when it was started by itself.

    They wait for each other as long as it takes: work is divided before it is known how long each part lasts.
    """
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=30))
