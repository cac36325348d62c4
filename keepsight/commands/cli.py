"""The command line: `keepsight COMMAND key=value ...`, and what every command does with bad input."""

import errno
import importlib
import logging
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from safetensors import SafetensorError

from keepsight.errors import UserError

COMMANDS = {
    "data": "training data: prompts of a mixture and the target's answers, in resumable shards",
    "train": "train a lookahead module (the same as train_lookahead.py)",
    "train_draft_head": "train an EAGLE-3 draft head (the same as train_draft_head.py)",
    "train_retrieval_head": "prune and distil a retrieval head (the same as train_retrieval_head.py)",
    "eval": "score methods and KV budgets on needle tasks or real samples; table, plots, report",
    "report": "the page, plots and tables of one evaluation or of several as one",
    "compare": "evaluations side by side, with paired differences",
    "hits": "top-k hit rate of retrieval heads, Quest and exact top-k, step by step",
    "inspect": "an HTML page that shows which prompt tokens a method keeps",
    "push": "upload an adapter, a draft head or a retrieval head to the Hugging Face Hub",
    "bench": "measure speed and memory; keepsight bench --help lists the benchmarks",
    "demo": "data, training and evaluation on a small model",
    "plan": "how many layers' KV entries must lie in CPU memory, by length",
    "draft": "search the target's layers for those that make a good draft",
}
BAD_INPUT = 2
"""Exit status."""
_HELP = ("-h", "--help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `keepsight COMMAND ...`; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    about = "keepsight keeps the KV-cache entries that a language model's coming answer will read."
    return _guard(lambda: _dispatch("keepsight", "keepsight.commands", about, COMMANDS, given))


def run_command(command: Any, arguments: Sequence[str]) -> int:
    """Run a command's module: its `Config` is parsed from `key=value` arguments and given to its `run`."""
    return _guard(lambda: _execute(command, arguments))


def _dispatch(usage: str, package: str, about: str, commands: Mapping[str, str], given: Sequence[str]) -> None:
    """Run the command that the first argument names; a package of commands asks for the next name."""
    if not given or given[0] in _HELP:
        print(_overview(usage, about, commands))
        return
    name = given[0].replace("-", "_")
    if name not in commands:
        raise UserError(f"{given[0]!r} is no command of {usage}; choose one of {', '.join(commands)}")
    module = importlib.import_module(f"{package}.{name}")
    if hasattr(module, "COMMANDS"):
        _dispatch(f"{usage} {name}", module.__name__, module.__doc__ or "", module.COMMANDS, given[1:])
    else:
        _execute(module, given[1:])


def _execute(command: Any, arguments: Sequence[str]) -> None:
    from keepsight.commands.config import parse  # takes half a second

    logging.basicConfig(format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if {*_HELP} & {*arguments}:
        print(_help(command))
    else:
        command.run(parse(command.Config, _positional(command, arguments)))


def _positional(command: Any, arguments: Sequence[str]) -> list[str]:
    """Arguments without `=` in the order of the command's POSITIONAL keys, or all of them as its POSITIONAL_LIST.

    `--dry-run` means `dry_run=true`.
    """
    keys, many = iter(getattr(command, "POSITIONAL", ())), getattr(command, "POSITIONAL_LIST", None)
    overrides, listed = [], []
    for argument in arguments:
        if argument.startswith("--"):
            flag, given, value = argument.removeprefix("--").partition("=")
            argument = f"{flag.replace('-', '_')}={value if given else 'true'}"
        elif "=" not in argument and many is not None:
            listed.append("'" + argument.replace("\\", "\\\\").replace("'", "\\'") + "'")
            continue
        elif "=" not in argument:
            key = next(keys, None)
            if key is None:
                raise UserError(f"{argument!r} is not understood; arguments are written key=value, see --help")
            argument = f"{key}={argument}"
        overrides.append(argument)
    return [*overrides, f"{many}=[{','.join(listed)}]"] if listed else overrides


def _guard(action: Callable[[], None]) -> int:
    try:
        action()
    except UserError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted; what was done is kept: run the same command again to resume")
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        advice = "; free some space and run the same command again, what was done is kept" if full else ""
        return _fail(f"{' '.join(str(error).split())}{advice}")
    return 0


def _fail(message: str) -> int:
    print(f"keepsight: error: {message}", file=sys.stderr)
    return BAD_INPUT


def _overview(usage: str, about: str, commands: Mapping[str, str]) -> str:
    width = max(map(len, commands))
    rows = "\n".join(f"  {name:<{width}}  {note}" for name, note in commands.items())
    return (
        f"{about}\n\nusage: {usage} COMMAND key=value ...\n\n{rows}\n\n{usage} COMMAND --help shows a command's keys."
    )


def _help(command: Any) -> str:
    """A command's docstring and its keys, each with default and meaning."""
    from keepsight.commands.config import Recipe, describe

    width = min(shutil.get_terminal_size().columns, 120)
    shared = {key for key, _, _ in describe(Recipe)}
    own, recipe = [f"{command.__doc__ or ''}\nkeys (key=value) and their defaults:"], ["\nkeys that the recipe sets:"]
    for key, default, note in describe(command.Config):
        lines = recipe if key in shared else own
        lines.append(f"  {key}={default}")
        lines += textwrap.wrap(note, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join([*own, *recipe])
