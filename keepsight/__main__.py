"""`python -m keepsight`."""

import sys

from keepsight.commands.cli import main

sys.exit(main())
