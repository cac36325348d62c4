"""Train a lookahead module: `accelerate launch train_lookahead.py recipe=smollm2-135m data=runs/data out=runs/adapter`.

On a laptop, in a few minutes: `python train_lookahead.py data=runs/data out=runs/adapter train.steps=200`.
"""

import sys

from keepsight.commands.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
