"""Prune and distil a retrieval head: `accelerate launch train_retrieval_head.py head=runs/head data=... out=...`.

On a laptop: `python train_retrieval_head.py head=runs/head data=... out=... model.dtype=bfloat16`.
"""

import sys

from keepsight.cli import run
from keepsight.commands import train_retrieval_head

if __name__ == "__main__":
    sys.exit(run(train_retrieval_head, sys.argv[1:]))
