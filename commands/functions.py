"""`keepsight.fit` and `keepsight.evaluate`: the commands as functions, with their keys as arguments."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Quote, QuotedString

from keepsight.commands.cli import configuration
from keepsight.commands.config import Eval, Fit
from keepsight.commands.parse import keys_of

if TYPE_CHECKING:
    from keepsight.eval.report.summary import SummaryRows


def fit(*model: str, **keys: Any) -> Path:
    """Train a module for a base model, evaluate it and write its card, as `keepsight fit` does.

    Args:
        model: A Hub id or a folder; none with `recipe=`.
        keys: Keys of the command; a section is a dict, such as `train={"steps": 100}`.

    Returns:
        The folder `out`, in which the command has written everything.

    Raises:
        UserError: a key is unknown, or a value is refused.
    """
    from keepsight.commands import fit as command

    config = configuration("fit", [*model, *_overrides(Fit, keys)])
    command.run(config)
    return Path(config.out)


def evaluate(**keys: Any) -> "SummaryRows":
    """Compare methods and budgets on tasks, as `keepsight eval` does.

    Args:
        keys: Keys of the command, such as `model={"id": ...}`, `tasks=["niah"]`, `methods=["full", "snapkv"]`,
            `budgets=[64]` and `out`.

    Returns:
        The rows of `out`/summary.csv as dicts: means for each task, length, method and budget, with the ends of their
        95 % intervals. Numbers are whole numbers and floats, and None where nothing was measured (also the full cache's
        budget). `.to_pandas()` gives them as a `pandas.DataFrame`.

    Raises:
        UserError: a key is unknown, or a value is refused.
    """
    from keepsight.commands import eval as command
    from keepsight.eval.report.summary import summarize, summary_rows
    from keepsight.eval.results import read_run

    config = configuration("eval", [*_overrides(Eval, keys)])
    command.run(config)
    return summary_rows(summarize(read_run(config.out).rows))


def _overrides(schema: type, keys: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Keys of a command as its arguments: a section's dict becomes dotted names, another dict a value."""
    names = {key.name for key in keys_of(schema)}
    for name, value in keys.items():
        if isinstance(value, Mapping) and f"{prefix}{name}" not in names:
            yield from _overrides(schema, value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={_typed(value)}"


def _typed(value: Any) -> str:
    """A value in the grammar of the command line."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_inner, value))}]"
    if isinstance(value, Mapping):
        entries = [f"{name}: {_inner(entry)}" for name, entry in value.items()]
        return f"{{{','.join(entries)}}}"
    if isinstance(value, (str, Path)):
        return str(value)
    return json.dumps(value)


def _inner(value: Any) -> str:
    """A value within a list or a mapping: texts in quotes."""
    if isinstance(value, (str, Path)):
        return QuotedString(str(value), Quote.double).with_quotes()
    return _typed(value)
