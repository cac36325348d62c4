"""The registry: names of methods and their parts in YAML and on the command line, and styles in plots.

A new method is one file: a class under `@method("name")`. Files in `runtime/methods/` are found by themselves, others
are named as a plugin (`plugins=[my_module]`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from keepsight.errors import as_options

Line = Literal["-", "--", "-.", ":"]
Registered = TypeVar("Registered", bound=type)


@dataclass(frozen=True)
class Style:
    """Colour, marker and line of a method, as matplotlib takes them."""

    colour: str
    marker: str
    line: Line = "-"


METHODS: dict[str, type[Any]] = {}
OBSERVERS: dict[str, type[Any]] = {}
DRAFTERS: dict[str, type[Any]] = {}
ALLOCATIONS: dict[str, type[Any]] = {}
LABELS: dict[str, str] = {}
"""Labels of methods in plots and pages, where they differ from their names."""
STYLES: dict[str, Style] = {}
"""How methods are drawn; methods without a style take the remaining colours."""


def method(
    name: str, *, label: str = "", colour: str = "", marker: str = "", line: Line = "-"
) -> Callable[[Registered], Registered]:
    """Register a method under the name that `methods=` calls it by.

    Plots and pages call it `label`, its name by default, and draw it in the `colour` `#RRGGBB`, one of the remaining
    colours by default, with a `marker` and a `line` of matplotlib.
    """
    if label:
        LABELS[name] = label
    if colour:
        STYLES[name] = Style(colour, marker, line)
    return _into(METHODS, name)


def _into(table: dict[str, type[Any]], name: str) -> Callable[[Registered], Registered]:
    def register(kind: Registered) -> Registered:
        table[name] = as_options(kind)
        return kind

    return register


def observer(name: str) -> Callable[[Registered], Registered]:
    """Register a class by its name, for the option `observer`."""
    return _into(OBSERVERS, name)


def drafter(name: str) -> Callable[[Registered], Registered]:
    """Register a class by its name, for the option `drafter`."""
    return _into(DRAFTERS, name)


def allocation(name: str) -> Callable[[Registered], Registered]:
    """Register a class by its name, for the option `allocate`."""
    return _into(ALLOCATIONS, name)
