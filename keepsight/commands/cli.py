"""The command line: `keepsight COMMAND key=value ...`, its help, and errors in one line."""

import errno
import importlib
import inspect
import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence

from keepsight import __version__
from keepsight.errors import UserError, printable

BAD_INPUT, STOPPED = 2, 141
"""Exit statuses: an error the user can fix, and what a shell reports when a pipe's reader is gone."""
MOVED = {
    "ablate": "train, with several values for a key, such as 'lookahead.tokens=[8,16]'",
    "convert": "draft.head=, which converts a pickled head when it is loaded",
    "draft": "bench draft",
    "hits": "bench hits",
}
"""Commands of before, and what does their work now."""
_HELP = ("-h", "--help")
_FULL_DISK = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `keepsight COMMAND ...`; returns the exit status.

    Commands are imported inside, so that Ctrl-C during the imports ends in one line too.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # tells every command what is slow on a CPU
    return _guard(lambda: _dispatch(given))


def _dispatch(given: list[str]) -> None:
    if given[:1] == ["--version"]:
        print(f"keepsight {__version__}", flush=True)
    elif not given or given[0] in _HELP:
        print(_overview("keepsight"), flush=True)
    elif given[0] == "bench" and (len(given) == 1 or given[1] in _HELP):
        print(_overview("keepsight bench"), flush=True)
    else:
        name, arguments = command_of(given)
        if {*_HELP} & {*arguments}:
            print(_help(name, [each for each in arguments if "=" in each], whole="all" in arguments), flush=True)
        else:
            execute(name, arguments)


def command_of(given: Sequence[str]) -> tuple[str, list[str]]:
    """The command that the first or the first two words name, and the other arguments.

    Raises:
        UserError: there is no such command.
    """
    from keepsight.commands.config import COMMANDS

    words = [word.replace("-", "_") for word in given[:2]]
    if words[0] == "demo":
        return "fit", ["recipe=demo", *given[1:]]
    for count in (2, 1):
        if (name := " ".join(words[:count])) in COMMANDS:
            return name, list(given[count:])
    if words[0] in MOVED:
        raise UserError(f"keepsight {words[0]} is now {MOVED[words[0]]}")
    known = [name.removeprefix("bench ") for name in COMMANDS if (words[0] == "bench") == name.startswith("bench ")]
    named = f"{given[1]!r} is no command of keepsight bench" if words[0] == "bench" else f"{given[0]!r} is no command"
    raise UserError(f"{named}; choose one of {', '.join(known)}")


def execute(name: str, arguments: Sequence[str]) -> None:
    """Run a command."""
    from keepsight.commands.config import COMMANDS

    logging.basicConfig(format="%(message)s")
    config = configuration(name, arguments)
    module, _, function = COMMANDS[name][1].partition(":")
    getattr(importlib.import_module(f"keepsight.commands.{module}"), function)(config)


def configuration(name: str, arguments: Sequence[str]) -> object:
    """A command's configuration, or the cells of an ablation: those of all combinations of several values."""
    from keepsight.commands.config import COMMANDS
    from keepsight.commands.parse import parse, parse_cells

    schema = COMMANDS[name][0]
    overrides = _as_keys(schema, arguments)
    cells: object = hasattr(schema, "VARIED") and parse_cells(schema, overrides)
    return cells or parse(schema, overrides)


def _as_keys(schema: type, arguments: Sequence[str]) -> list[str]:
    """Arguments without `=` as the schema's POSITIONAL keys, or its POSITIONAL_LIST; `--dry-run` is `dry_run=true`."""
    keys, many = iter(getattr(schema, "POSITIONAL", ())), getattr(schema, "POSITIONAL_LIST", None)
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
    """Run it; what the user can fix ends in one line."""
    try:
        action()
        sys.stdout.flush()
    except UserError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted; what was done is kept: run the same command again to resume")
    except BrokenPipeError:  # whoever read the output, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return STOPPED
    except OSError as error:
        return _fail(f"{error}{_advice(error)}")
    except UnicodeError as error:
        return _fail(f"a text that is no Unicode cannot be written or read ({error}); look for lone surrogates in it")
    except Exception as error:
        kind = type(error).__name__
        if kind == "OutOfMemoryError" or "can't allocate memory" in str(error) or isinstance(error, MemoryError):
            return _fail(f"memory ran out ({error}); lower what is read or answered at a time")
        if kind != "SafetensorError":  # whose module takes a while to import
            raise
        return _fail(f"{error}{_advice(error)}")
    return 0


def _advice(error: Exception) -> str:
    full = getattr(error, "errno", None) in _FULL_DISK or "No space left" in str(error)
    return "; free some space and run the same command again, what was done is kept" if full else ""


def _fail(message: str) -> int:
    if "tqdm" in sys.modules:
        for bar in [*sys.modules["tqdm"].tqdm._instances]:
            bar.close()  # or it is drawn after the message
    print(f"keepsight: error: {printable(' '.join(message.split()))}", file=sys.stderr)
    return BAD_INPUT


def _overview(usage: str) -> str:
    """The commands, each with the first line of its docstring."""
    from keepsight.commands.config import COMMANDS

    about = "keepsight keeps the KV-cache entries that a language model's coming answer will read."
    rows = {
        name: (schema.__doc__ or "").partition("\n")[0].partition(": ")[2] for name, (schema, _) in COMMANDS.items()
    }
    if usage.endswith("bench"):
        about = "Benchmarks of speed, memory and choices on this machine."
        rows = {name.removeprefix("bench "): note for name, note in rows.items() if name.startswith("bench ")}
    else:
        rows = {name: note for name, note in rows.items() if " " not in name}
        rows |= {"bench": "measure speed and memory; keepsight bench --help lists the benchmarks"}
        rows |= {"demo": "data, training and evaluation on a small model: keepsight fit recipe=demo"}
    width = max(map(len, rows))
    listed = "\n".join(f"  {name:<{width}}  {note}" for name, note in rows.items())
    return (
        f"{about}\n\nusage: {usage} COMMAND key=value ...\n\n{listed}\n\n{usage} COMMAND --help shows a command's keys."
    )


def _help(name: str, arguments: list[str], whole: bool) -> str:
    """A command's docstring, its keys with the values that it would use, and its sections, or all keys of these."""
    from omegaconf import OmegaConf

    from keepsight.commands.config import COMMANDS
    from keepsight.commands.parse import compose_config, keys_of, notes_of

    schema = COMMANDS[name][0]
    composed = compose_config(schema, arguments)
    missing = OmegaConf.missing_keys(composed)
    keys = [
        (f"{key.name}={'required' if key.name in missing else OmegaConf.select(composed, key.name)}", key.note)
        for key in keys_of(schema)
    ]
    own = [row for row in keys if whole or "." not in row[0].partition("=")[0]]
    sections = dict.fromkeys(key.name.partition(".")[0] for key in keys_of(schema) if "." in key.name)
    parts = [inspect.cleandoc(schema.__doc__ or "").partition("\nAttributes:")[0]]
    parts += ["keys (key=value) and the values they have now:", *_listed(own)]
    if sections and not whole:
        notes = notes_of(schema)
        parts += [
            "\nsections (--help all shows their keys):",
            *_listed((f"{each}.*", notes[each]) for each in sections),
        ]
    return "\n".join(parts)


def _listed(keys: Iterable[tuple[str, str]]) -> Iterator[str]:
    width = min(shutil.get_terminal_size().columns, 120)
    for key, note in keys:
        yield f"  {key}"
        yield from textwrap.wrap(note, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
