"""Train a draft head: `accelerate launch train_draft_head.py recipe=smollm2-135m data=runs/data out=runs/draft_head`.

On a laptop: `python train_draft_head.py data=runs/data out=runs/draft_head draft_head.train.steps=200`.
"""

import sys

from keepsight.commands.cli import main

if __name__ == "__main__":
    sys.exit(main(["train_draft_head", *sys.argv[1:]]))
