"""Train a lookahead module: `accelerate launch train_lookahead.py recipe=smollm2-135m data=runs/data out=runs/adapter`.

On a laptop, in a few minutes: `python train_lookahead.py data=runs/data out=runs/adapter train.steps=200`.
"""

import sys

from keepsight.commands import train
from keepsight.commands.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command(train, sys.argv[1:]))
