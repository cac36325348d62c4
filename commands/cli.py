"""The command line: `keepsight COMMAND key=value ...`, its help, and errors in one line."""

import errno
import functools
import importlib
import inspect
import json
import logging
import operator
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any

from keepsight import __version__
from keepsight.errors import UserError, print_any_text, printable

BAD_INPUT, STOPPED = 2, 141
"""Exit statuses: an error the user can fix, and what a shell reports when a pipe's reader is gone."""
_HELP = {"-h", "--help"}
_FULL_DISK = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `keepsight COMMAND ...`; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    print_any_text()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # warns every command about slow paths on a CPU
    return _guard(lambda: _dispatch(given))


def _dispatch(given: list[str]) -> None:
    if given[:1] == ["--version"]:
        print(f"keepsight {__version__}")
    elif not given or given[0] in _HELP:
        print(_overview(bench=False))
    elif given[0] == "bench" and (len(given) == 1 or given[1] in _HELP):
        print(_overview(bench=True))
    else:
        name, arguments = command_of(given)
        if _HELP & {*arguments}:
            others = [each for each in arguments if each not in _HELP and each != "all"]
            print(_help(name, others, whole="all" in arguments))
        else:
            execute(name, arguments)
    sys.stdout.flush()


def command_of(given: Sequence[str]) -> tuple[str, list[str]]:
    """The command that the first or the first two words name, and the other arguments; UserError if there is none."""
    from keepsight.commands.config import COMMANDS  # imported here, so that Ctrl-C meanwhile ends in one line too

    words = [word.replace("-", "_") for word in given[:2]]
    if words[0] == "demo":
        return "fit", ["recipe=demo", *given[1:]]
    for count in (2, 1):
        if (name := " ".join(words[:count])) in COMMANDS:
            return name, list(given[count:])
    known = [name.removeprefix("bench ") for name in COMMANDS if (words[0] == "bench") == name.startswith("bench ")]
    named = f"{given[1]!r} is not a benchmark" if words[0] == "bench" else f"{given[0]!r} is not a command"
    raise UserError(f"{named}; choose one of {', '.join(known)}")


def execute(name: str, arguments: Sequence[str]) -> None:
    """Run a command, and say how long it took."""
    from keepsight.commands.config import COMMANDS
    from keepsight.commands.recipe import table_of

    logging.basicConfig(format="%(message)s")
    start, config = time.perf_counter(), configuration(name, arguments)
    module, _, function = COMMANDS[name][1].partition(":")
    getattr(importlib.import_module(f"keepsight.commands.{module}"), function)(config)
    seconds = time.perf_counter() - start
    if (table := table_of(config)) and os.environ.get("RANK", "0") == "0":
        print(f"table: {table}")
    if seconds > 5 and os.environ.get("RANK", "0") == "0":
        took = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"
        print(f"keepsight {name} took {took}", file=sys.stderr)


def configuration(name: str, arguments: Sequence[str]) -> Any:
    """A command's configuration, or for an ablation those of all combinations of its values."""
    from keepsight.commands.config import COMMANDS
    from keepsight.commands.parse import keys_of, overrides_of, parse, parse_cells

    schema = COMMANDS[name][0]
    overrides = overrides_of(schema, [*keys_of(schema)], arguments)
    return (hasattr(schema, "VARIED") and parse_cells(schema, overrides)) or parse(schema, overrides)


# Errors


def _guard(action: Callable[[], None]) -> int:
    """Run an action; returns the exit status. An error that the user can fix is printed in one line."""
    try:
        action()
    except UserError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted; what was done is kept: run the same command again to resume")
    except BrokenPipeError:  # the reader of the output, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return STOPPED
    except UnicodeError as error:
        if isinstance(error, UnicodeEncodeError) and error.encoding != "utf-8":  # such as a file's name in ASCII
            return _fail(f"{error}: the locale's encoding lacks this character; set PYTHONUTF8=1, or LC_ALL=C.UTF-8")
        return _fail(f"a text is not valid Unicode ({error}); look for lone surrogates in it")
    except Exception as error:
        kind = type(error).__name__
        if kind == "OutOfMemoryError" or "can't allocate memory" in str(error) or isinstance(error, MemoryError):
            return _fail(f"memory ran out ({error}); lower the batch size or the lengths")
        if not isinstance(error, OSError) and kind != "SafetensorError":  # whose module takes a while to import
            raise
        full = getattr(error, "errno", None) in _FULL_DISK or "No space left" in str(error)
        return _fail(f"{error}{'; free some space and run the same command again, what was done is kept' * full}")
    return 0


def _fail(message: str) -> int:
    if "tqdm" in sys.modules:
        for bar in [*sys.modules["tqdm"].tqdm._instances]:
            bar.close()  # or it is drawn after the message
    print(f"keepsight: error: {printable(' '.join(message.split()), lines=True)}", file=sys.stderr)
    return BAD_INPUT


# Help


def _overview(bench: bool) -> str:
    """The commands, or the benchmarks, each with the first line of its docstring."""
    from keepsight.commands.config import COMMANDS

    rows = {
        name.removeprefix("bench "): str(schema.__doc__).partition("\n")[0].partition(": ")[2]
        for name, (schema, _) in COMMANDS.items()
        if name.startswith("bench ") == bench
    }
    if not bench:
        rows["bench"] = "measure speed and memory; keepsight bench --help lists the benchmarks."
        rows["demo"] = "generate data, train and evaluate a small model: keepsight fit recipe=demo."
    about = "keepsight predicts which KV entries a language model's answer will need, and evicts the rest."
    usage, width = f"keepsight{' bench' * bench} COMMAND", max(map(len, rows))
    listed = "\n".join(f"  {name:<{width}}  {note}" for name, note in rows.items())
    return f"{about}\n\nusage: {usage} key=value ...\n\n{listed}\n\n{usage} --help shows a command's keys."


def _help(name: str, arguments: list[str], whole: bool) -> str:
    """A command's docstring, and its common keys, or all, with the values that it would use."""
    from omegaconf import OmegaConf

    from keepsight.commands.config import COMMANDS
    from keepsight.commands.parse import compose_config, keys_of, overrides_of
    from keepsight.commands.recipe import presets_of, recipe_files

    schema = COMMANDS[name][0]
    notes = {key.name: key.note for key in keys_of(schema)}
    overrides = overrides_of(schema, [*keys_of(schema)], arguments)
    composed, choice = compose_config(schema, overrides)
    values: Any = OmegaConf.to_container(composed)
    shown = [*notes] if whole else [*getattr(schema, "COMMON", [each for each in notes if "." not in each])]
    hidden = [each if "." not in each else f"{each.partition('.')[0]}.*" for each in notes if each not in shown]
    if "model.id" in notes:
        shown.insert(shown.index("model.id") if "model.id" in shown else len(shown), "recipe")
        values["recipe"], notes["recipe"] = choice.name or "none", "A model with its settings, see below."
    width, lines = min(shutil.get_terminal_size().columns, 100), list[str]()
    for part in inspect.cleandoc(str(schema.__doc__)).partition("\nAttributes:")[0].strip().split("\n\n"):
        example = part.startswith("    ")
        lines += [*(part.splitlines() if example else textwrap.wrap(" ".join(part.split()), width)), ""]
    lines += ["keys (key=value), with the values that will be used:"]
    for key in shown:
        value = functools.reduce(operator.getitem, key.split("."), values)
        note = notes[key] if whole else notes[key].partition(". ")[0].removesuffix(".")
        lines += _entry(f"{key}={_written(value)}", note, width)
    if hidden:
        listed = f"--help all shows these too: {', '.join(dict.fromkeys(hidden))}"
        lines += textwrap.wrap(listed, width, subsequent_indent="  ")
    if "preset" in notes:
        listed = ", ".join(presets_of(schema)) or "none for this command"
        lines += textwrap.wrap(f"presets: {listed}", width, subsequent_indent="  ", break_on_hyphens=False)
    if "recipe" in shown:
        lines += textwrap.wrap(f"recipes: {', '.join(recipe_files('recipe'))}", width, subsequent_indent="  ")
    return "\n".join(lines)


def _entry(key: str, note: str, width: int) -> list[str]:
    """Lines of a key, and of its note beside it."""
    lines = textwrap.wrap(note, width - 30, break_on_hyphens=False)
    if len(key) > 27:
        return [f"  {key}", *(" " * 30 + line for line in lines)]
    return [f"  {name:<27} {line}" for name, line in zip([key, *[""] * len(lines)], lines, strict=False)]


def _written(value: Any) -> str:
    """A value as typed on the command line."""
    if value == "???":
        return "required"
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":")).replace('"', "")
