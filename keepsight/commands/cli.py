"""The command line: `keepsight COMMAND key=value ...`, and what every command does with bad input."""

import errno
import importlib
import inspect
import logging
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from safetensors import SafetensorError

from keepsight.errors import UserError

COMMANDS = {
    "data": "prompts of a mixture, answered by the target, in resumable shards",
    "train": "train a lookahead module (the same as train_lookahead.py)",
    "eval": "score methods and budgets on needle tasks or real samples; table, plots, report",
    "hits": "how many of the entries the target looks at retrieval heads, Quest and exact top-k read",
    "inspect": "an HTML page that shows which prompt tokens a method keeps",
    "push": "upload an adapter, a draft head or a retrieval head to the Hugging Face Hub",
    "bench": "measure speed and memory: bench train, eval, evict, specache, speculate, retrieve",
    "demo": "the main job on a small model: data, training, evaluation",
    "plan": "how many layers' entries must lie in the CPU's memory, by length",
    "draft": "search the target's layers for those that make a good draft",
}
BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `keepsight COMMAND ...`; the value is the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(_overview())
        return 0
    name, *rest = given
    if name not in COMMANDS:
        return _fail(f"{name!r} is no command; choose one of {', '.join(COMMANDS)}")
    return _guard(lambda: _execute(importlib.import_module(f"keepsight.commands.{name}"), rest))


def run(command: Any, arguments: Sequence[str]) -> int:
    """Run a command's module: its `Config` is parsed from `key=value` arguments and given to its `run`."""
    return _guard(lambda: _execute(command, arguments))


def _execute(command: Any, arguments: Sequence[str]) -> None:
    from keepsight.commands.config import parse  # takes seconds: it brings torch

    logging.basicConfig(format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if {"-h", "--help"} & set(arguments):
        print(_help(command))
    else:
        command.run(parse(command.Config, _positional(command, arguments)))


def _positional(command: Any, arguments: Sequence[str]) -> list[str]:
    """Arguments without `=` in the order of the command's POSITIONAL keys; `--dry-run` means `dry_run=true`."""
    keys = iter(getattr(command, "POSITIONAL", ()))
    overrides = []
    for argument in arguments:
        if argument.startswith("--"):
            flag, given, value = argument.removeprefix("--").partition("=")
            argument = f"{flag.replace('-', '_')}={value if given else 'true'}"
        elif "=" not in argument:
            key = next(keys, None)
            if key is None:
                raise UserError(f"{argument!r} is not understood; arguments are written key=value, see --help")
            argument = f"{key}={argument}"
        overrides.append(argument)
    return overrides


def _guard(action: Callable[[], None]) -> int:
    try:
        action()
    except UserError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted; what was done is kept: run the same command again to go on")
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        advice = "; free some space and run the same command again, what was done is kept" if full else ""
        return _fail(f"{' '.join(str(error).split())}{advice}")
    return 0


def _fail(message: str) -> int:
    print(f"keepsight: error: {message}", file=sys.stderr)
    return BAD_INPUT


def _overview() -> str:
    rows = "\n".join(f"  {name:<9} {note}" for name, note in COMMANDS.items())
    return (
        "keepsight keeps the KV-cache entries that a language model's coming answer will read.\n\n"
        f"usage: keepsight COMMAND key=value ...\n\n{rows}\n\nkeepsight COMMAND --help shows a command's keys."
    )


def _help(command: Any) -> str:
    """A command's docstring and its keys, each with default and meaning."""
    from keepsight.commands.config import describe

    width = min(shutil.get_terminal_size().columns, 120)
    lines = [inspect.cleandoc(command.__doc__ or ""), "", "keys (key=value), with their defaults before the recipe:"]
    for key, default, note in describe(command.Config):
        lines.append(f"  {key}={default}")
        lines += textwrap.wrap(note, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)
