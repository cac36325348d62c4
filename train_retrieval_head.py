"""Prune and distil a retrieval head: `accelerate launch train_retrieval_head.py head=runs/head data=... out=...`.

On a laptop: `python train_retrieval_head.py head=runs/head data=... out=... model.dtype=bfloat16`.
"""

import sys

from keepsight.commands import train_retrieval_head
from keepsight.commands.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command(train_retrieval_head, sys.argv[1:]))
