"""Prune and distil a retrieval head: `accelerate launch train_retrieval_head.py head=runs/head data=... out=...`.

On a laptop: `python train_retrieval_head.py head=runs/head data=... out=... model.dtype=bfloat16`.
"""

import sys

from keepsight.commands.cli import main

if __name__ == "__main__":
    sys.exit(main(["train_retrieval_head", *sys.argv[1:]]))
