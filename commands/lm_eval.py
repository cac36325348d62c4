"""keepsight-lm-eval: lm-evaluation-harness's own command with the model `keepsight` in its registry.

Up to 0.4.13 the harness finds only models of its own package, so that its command `lm_eval` alone cannot find this
one; later versions read the entry point in pyproject.toml.
"""

# pyright: reportMissingImports=false

import sys

from keepsight.errors import UserError, print_any_text, printable


def run_harness() -> int:
    """Run `lm_eval` with the arguments of this process; returns the exit status."""
    print_any_text()
    try:
        from lm_eval.__main__ import cli_evaluate

        from keepsight.eval import harness as harness  # registers the model
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("lm_eval"):
            raise
        return _fail("lm-evaluation-harness is missing; run `pip install 'keepsight[lm-eval]'`")
    try:
        cli_evaluate()
    except UserError as error:
        return _fail(str(error))
    return 0


def _fail(message: str) -> int:
    print(f"keepsight: error: {printable(message)}", file=sys.stderr)
    return 2
