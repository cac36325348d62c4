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
from keepsight.progress import quiet_libraries

BAD_INPUT = 2
"""Exit status of an error that the user can fix."""
STOPPED = 141
"""Exit status that a shell reports when a pipe's reader is gone."""
_HELP = {"-h", "--help"}
_FULL_DISK = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `keepsight COMMAND ...`; returns the exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    return guarded(lambda: _dispatch(words))


def _dispatch(words: list[str]) -> None:
    if words[:1] == ["--version"]:
        print(f"keepsight {__version__}")
    elif not words or words[0] in _HELP:
        print(_overview(bench=False))
    elif words[0] == "methods":
        if words[1:] and words[1] not in _HELP:
            raise UserError(
                f"keepsight methods: {words[1]!r} is not a key; the command takes none", field=words[1], code="unknown"
            )
        print(_list_of_methods())
    elif words[0] == "help":
        print(_help_on(words[1:]))
    elif words[0] == "bench" and (len(words) == 1 or words[1] in _HELP):
        print(_overview(bench=True))
    else:
        name, arguments = command_of(words)
        if _HELP.intersection(arguments):
            overrides = [argument for argument in arguments if argument not in _HELP and argument != "all"]
            print(_help(name, overrides, all_keys="all" in arguments))
        else:
            execute(name, arguments)
    sys.stdout.flush()


def command_of(words: Sequence[str]) -> tuple[str, list[str]]:
    """The command that the first or the first two words name, and the other arguments; UserError if there is none."""
    from keepsight.commands.config import COMMANDS  # imported here, so that Ctrl-C meanwhile ends in one line too

    if words[0] == "demo":
        return "fit", ["recipe=demo", *words[1:]]
    for length in (2, 1):
        name = " ".join(words[:length]).replace("-", "_")
        if name in COMMANDS:
            return name, list(words[length:])

    if words[0] == "bench":
        benchmarks = [name.removeprefix("bench ") for name in COMMANDS if name.startswith("bench ")]
        raise UserError(
            f"{words[1]!r} is not a benchmark; choose one of {', '.join(benchmarks)}", field="command", code="unknown"
        )
    commands = [name for name in COMMANDS if not name.startswith("bench ")] + ["bench", "demo", "methods", "help"]
    raise UserError(
        f"{words[0]!r} is not a command; choose one of {', '.join(commands)}", field="command", code="unknown"
    )


def execute(name: str, arguments: Sequence[str]) -> None:
    """Run a command, and say what to do next and how long it took."""
    from keepsight.commands.config import COMMANDS
    from keepsight.commands.recipe import table_of

    logging.basicConfig(format="%(message)s")
    start = time.perf_counter()
    config = configuration(name, arguments)
    module, _, function = COMMANDS[name][1].partition(":")
    run = getattr(importlib.import_module(f"keepsight.commands.{module}"), function)
    following = run(config)
    seconds = time.perf_counter() - start

    if os.environ.get("RANK", "0") != "0":
        return
    table = table_of(config)
    if following:
        print(printable(f"next: {following}"))
    if table:
        print(f"table: {table}")
    if seconds > 5:
        duration = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"
        print(f"keepsight {name} took {duration}", file=sys.stderr)


def configuration(name: str, arguments: Sequence[str]) -> Any:
    """A command's configuration, or for an ablation those of all combinations of its values."""
    from keepsight.commands.config import COMMANDS
    from keepsight.commands.parse import keys_of, overrides_of, parse, parse_cells

    schema = COMMANDS[name][0]
    overrides = overrides_of(schema, [*keys_of(schema)], arguments)
    if hasattr(schema, "VARIED"):
        cells: dict[str, Any] = parse_cells(schema, overrides)
        if cells:
            return cells
    return parse(schema, overrides)


# Errors


def guarded(command: Callable[[], None]) -> int:
    """Run a command; returns the exit status. An error that the user can fix is printed in one line."""
    quiet_libraries()
    print_any_text()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # warns every command about slow paths on a CPU
    try:
        command()
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
        message = str(error)
        if getattr(error, "errno", None) in _FULL_DISK or "No space left" in message:
            message += "; free some space and run the same command again, what was done is kept"
        return _fail(message)
    return 0


def _fail(message: str) -> int:
    if "tqdm" in sys.modules:
        for bar in [*sys.modules["tqdm"].tqdm._instances]:
            bar.close()  # or it is drawn after the message
    print(f"keepsight: error: {printable(' '.join(message.split()), lines=True)}", file=sys.stderr)
    return BAD_INPUT


# Help


def _help_on(words: Sequence[str]) -> str:
    """What `keepsight help` prints: the commands; the help of the command that follows; the recipes; or the methods."""
    if not words:
        return _overview(bench=False)
    if list(words) == ["recipes"]:
        return _list_of_recipes()
    if list(words) == ["methods"]:
        return _list_of_methods()
    if list(words) == ["bench"]:
        return _overview(bench=True)
    name, arguments = command_of(words)
    return _help(name, [argument for argument in arguments if argument != "all"], all_keys="all" in arguments)


def _list_of_recipes() -> str:
    """Every recipe with its model."""
    from keepsight.commands.recipe import recipes

    models = {name: recipe.model.id for name, recipe in recipes().items() if "model" in recipe}
    width = max(map(len, models))
    table = "\n".join(f"  {name:<{width}}  {model_id}" for name, model_id in models.items())
    return f"recipes: models with settings of their own\n\n{table}\n\nusage: keepsight COMMAND recipe=NAME"


def _list_of_methods() -> str:
    """Every method: its name, what it does, what it costs, and its paper."""
    from keepsight.runtime.catalogue import describe, descriptions
    from keepsight.runtime.generate import SECTIONS

    importlib.import_module("keepsight.runtime.methods")  # registers them
    width = min(shutil.get_terminal_size().columns, 110)
    lines = ["methods: what each does, what it costs beyond a prefill, and its paper", ""]
    for section, title in SECTIONS.items():
        methods = descriptions(section)
        if section == "prompt":
            methods = [describe("full"), *methods]
        lines.append(title)
        for method in methods:
            name = f"  {method.name:<20} "
            margin = " " * len(name)
            lines += textwrap.wrap(method.summary, width, initial_indent=name, subsequent_indent=margin)
            cost = f"{margin}cost: "
            lines += textwrap.wrap(method.cost, width, initial_indent=cost, subsequent_indent=" " * len(cost))
            if method.paper:
                lines.append(margin + method.paper)
        lines.append("")
    lines.append("usage: keepsight eval methods=NAME,NAME; in Python:")
    lines.append("       keepsight.make_method(NAME, budget)")
    return "\n".join(lines)


def _overview(bench: bool) -> str:
    """The commands, or the benchmarks, each with the first line of its docstring."""
    from keepsight.commands.config import COMMANDS

    rows = {}
    for name, (schema, _) in COMMANDS.items():
        if name.startswith("bench ") == bench:
            first_line = str(schema.__doc__).partition("\n")[0]
            rows[name.removeprefix("bench ")] = first_line.partition(": ")[2]
    usage = "keepsight bench COMMAND"
    if not bench:
        usage = "keepsight COMMAND"
        rows["bench"] = "measure speed and memory; keepsight bench --help lists the benchmarks."
        rows["demo"] = "generate data, train and evaluate a small model: keepsight fit recipe=demo."
        rows["methods"] = "list all methods: what they do, what they cost, their papers."
        rows["help"] = "this page; keepsight help COMMAND; keepsight help recipes lists the models with settings."
    about = "keepsight predicts which KV entries a language model's answer will need, and evicts the rest."
    width = max(map(len, rows))
    table = "\n".join(f"  {name:<{width}}  {note}" for name, note in rows.items())
    return f"{about}\n\nusage: {usage} key=value ...\n\n{table}\n\n{usage} --help shows a command's keys."


def _help(name: str, arguments: list[str], all_keys: bool) -> str:
    """A command's docstring, and its common keys, or all, with the values that it would use."""
    from omegaconf import OmegaConf

    from keepsight.commands.config import COMMANDS
    from keepsight.commands.parse import compose_config, keys_of, overrides_of
    from keepsight.commands.recipe import presets_of

    schema = COMMANDS[name][0]
    notes = {key.name: key.note for key in keys_of(schema)}
    overrides = overrides_of(schema, [*keys_of(schema)], arguments)
    composed, choice = compose_config(schema, overrides)
    values: Any = OmegaConf.to_container(composed)
    plain_keys = [key for key in notes if "." not in key]
    shown = [*notes] if all_keys else [*getattr(schema, "COMMON", plain_keys)]
    hidden = dict[str, None]()  # each once
    for key in notes:
        if key not in shown:
            section, dot, _ = key.partition(".")
            shown_name = f"{section}.*" if dot else key
            hidden[shown_name] = None
    if "model.id" in notes:
        index = shown.index("model.id") if "model.id" in shown else len(shown)
        shown.insert(index, "recipe")
        values["recipe"] = choice.name or "none"
        notes["recipe"] = "A model with its settings."

    width = min(shutil.get_terminal_size().columns, 100)
    lines = list[str]()
    description = inspect.cleandoc(str(schema.__doc__)).partition("\nAttributes:")[0].strip()
    for paragraph in description.split("\n\n"):
        if paragraph.startswith("    "):  # examples
            lines += paragraph.splitlines()
        else:
            lines += textwrap.wrap(" ".join(paragraph.split()), width)
        lines.append("")
    lines.append("keys (key=value), with the values that will be used:")
    for key in shown:
        value = functools.reduce(operator.getitem, key.split("."), values)
        note = notes[key] if all_keys else notes[key].partition(". ")[0].removesuffix(".")
        lines += _entry(f"{key}={_written(value)}", note, width)
    if hidden:
        lines += textwrap.wrap(f"--help all shows these too: {', '.join(hidden)}", width, subsequent_indent="  ")
    if "recipe" in shown:
        lines += ["The first word after the command can be a recipe or a model.", "keepsight help recipes lists them."]
    if "preset" in notes:
        presets = ", ".join(presets_of(schema)) or "none for this command"
        lines += textwrap.wrap(f"presets: {presets}", width, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def _entry(key: str, note: str, width: int) -> list[str]:
    """Lines of a key, and of its note beside it."""
    lines = textwrap.wrap(note, width - 30, break_on_hyphens=False)
    entry = [" " * 30 + line for line in lines]
    if len(key) > 27:
        return [f"  {key}", *entry]
    if lines:
        entry[0] = f"  {key:<27} {lines[0]}"
    return entry


def _written(value: Any) -> str:
    """A value as typed on the command line."""
    if value == "???":
        return "required"
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":")).replace('"', "")
