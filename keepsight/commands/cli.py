"""The command line: `keepsight COMMAND key=value ...`, and what every command does with bad input."""

import errno
import importlib
import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from keepsight import __version__
from keepsight.commands.terminal import printable
from keepsight.errors import UserError

COMMANDS = {
    "data": "training data: prompts of a mixture and the target's answers, in resumable shards",
    "train": "train a lookahead module (the same as train_lookahead.py)",
    "ablate": "train lookahead modules of several shapes or settings side by side, and compare them",
    "train_draft_head": "train an EAGLE-3 draft head (the same as train_draft_head.py)",
    "train_head_weights": "learn how the heads of a lookahead module share one budget",
    "finetune": "train a lookahead module further, on what evicting with it costs answers",
    "train_retrieval_head": "prune and distil a retrieval head (the same as train_retrieval_head.py)",
    "eval": "score methods and KV budgets on needle tasks or real samples; table, plots, report",
    "report": "the page, plots and tables of one evaluation or of several as one",
    "compare": "evaluations side by side, with paired differences",
    "hits": "top-k hit rate of retrieval heads, Quest and exact top-k, step by step",
    "inspect": "an HTML page that shows which prompt tokens a method keeps",
    "push": "upload an adapter, a draft head or a retrieval head to the Hugging Face Hub",
    "bench": "measure speed and memory; keepsight bench --help lists the benchmarks",
    "fit": "data, training, evaluation and card of a lookahead module in one command",
    "demo": "data, training and evaluation on a small model",
    "plan": "how many layers' KV entries must lie in CPU memory, by length",
    "draft": "search the target's layers for those that make a good draft",
}
BAD_INPUT, STOPPED = 2, 141
"""Exit statuses: an error the user can fix, and what a shell reports when a pipe's reader is gone."""
_HELP = ("-h", "--help")
_FULL_DISK = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `keepsight COMMAND ...`; returns the exit status.

    Commands are imported inside, so that Ctrl-C during the imports ends in one line too.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # tells every command what is slow on a CPU
    about = "keepsight keeps the KV-cache entries that a language model's coming answer will read."
    return _guard(lambda: _dispatch("keepsight", "keepsight.commands", about, COMMANDS, given))


def _dispatch(usage: str, package: str, about: str, commands: Mapping[str, str], given: Sequence[str]) -> None:
    """Run the command that the first argument names; of a package of commands, the one that the next argument names."""
    if not given or given[0] in _HELP:
        _show(_overview(usage, about, commands))
        return
    if given[0] == "--version":
        _show(f"keepsight {__version__}")
        return
    name = given[0].replace("-", "_")
    if name not in commands:
        raise UserError(f"{given[0]!r} is no command of {usage}; choose one of {', '.join(commands)}")
    module = importlib.import_module(f"{package}.{name}")
    further = getattr(module, "COMMANDS", {})
    if (further and not hasattr(module, "run")) or {*given[1:2]} & {*further}:
        _dispatch(f"{usage} {name}", module.__name__, module.__doc__ or "", further, given[1:])
    else:
        _execute(module, given[1:])


def _execute(command: Any, arguments: Sequence[str]) -> None:
    logging.basicConfig(format="%(message)s")
    if {*_HELP} & {*arguments}:
        _show(_help(command, whole="all" in arguments))
    else:
        command.run(configuration(command, arguments))


def configuration(command: Any, arguments: Sequence[str]) -> Any:
    """A command's `Config` of its arguments; what its `configure` makes of them, where it has one."""
    from keepsight.commands.config import parse  # takes half a second

    overrides = _positional(command, arguments)
    return command.configure(overrides) if hasattr(command, "configure") else parse(command.Config, overrides)


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
    """Run it; what the user can mend ends in one line."""
    try:
        action()
        sys.stdout.flush()
    except UserError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted; what was done is kept: run the same command again to resume")
    except BrokenPipeError:  # whoever read what is printed, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return STOPPED
    except OSError as error:
        return _fail(f"{error}{_advice(error)}")
    except UnicodeError as error:
        return _fail(f"a text that is no Unicode cannot be written or read ({error}); look for lone surrogates in it")
    except Exception as error:
        if _memory_ran_out(error):
            return _fail(f"memory ran out ({error}); lower what is read or answered at a time")
        if type(error).__name__ != "SafetensorError":  # whose module takes a while to import
            raise
        return _fail(f"{error}{_advice(error)}")
    return 0


def _advice(error: Exception) -> str:
    full = getattr(error, "errno", None) in _FULL_DISK or "No space left" in str(error)
    return "; free some space and run the same command again, what was done is kept" if full else ""


def _memory_ran_out(error: Exception) -> bool:
    is_torchs = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    return is_torchs or isinstance(error, MemoryError)


def _fail(message: str) -> int:
    if "tqdm" in sys.modules:
        for bar in [*sys.modules["tqdm"].tqdm._instances]:
            bar.close()  # or it is drawn after the message
    print(f"keepsight: error: {printable(' '.join(message.split()))}", file=sys.stderr)
    return BAD_INPUT


def _show(text: str) -> None:
    """Print help; a reader that closes the pipe early is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _overview(usage: str, about: str, commands: Mapping[str, str]) -> str:
    width = max(map(len, commands))
    rows = "\n".join(f"  {name:<{width}}  {note}" for name, note in commands.items())
    return (
        f"{about}\n\nusage: {usage} COMMAND key=value ...\n\n{rows}\n\n{usage} COMMAND --help shows a command's keys."
    )


def _help(command: Any, whole: bool) -> str:
    """A command's docstring and its own keys, then those that the recipe sets: by group, or all of them."""
    from keepsight.commands.config import Recipe
    from keepsight.commands.config_keys import describe, groups

    is_recipe = issubclass(command.Config, Recipe)
    shared = {key for key, _, _ in describe(Recipe)} if is_recipe else set()
    keys = [(f"{key}={default}", note) for key, default, note in describe(command.Config)]
    own = [(key, note) for key, note in keys if key.partition("=")[0] not in shared]
    parts = [command.__doc__ or "", "keys (key=value) and their defaults:", *_listed(own)]
    if is_recipe and whole:
        parts += ["\nkeys that the recipe sets:", *_listed([key for key in keys if key not in own])]
    elif is_recipe:
        parts += ["\nkeys that the recipe sets (--help all shows each):", *_listed(groups(Recipe))]
    return "\n".join(parts)


def _listed(keys: Iterable[tuple[str, str]]) -> Iterator[str]:
    width = min(shutil.get_terminal_size().columns, 120)
    for key, note in keys:
        yield f"  {key}"
        yield from textwrap.wrap(note, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
