"""`python -m keepsight`."""

import sys

from keepsight.cli import main

sys.exit(main())
