"""The methods: a file a family, here or beside the mechanism of a family; each registers itself by name.

All modules of these rooms are imported, so that a new file is a new method, and the classes of all registered methods,
plugins' too, are exported. `python docs/tables.py` writes their names to `__init__.pyi`, for type checkers.
"""

from importlib import import_module as _import_module
from pathlib import Path as _Path
from pkgutil import iter_modules as _iter_modules
from typing import Any as _Any

from keepsight.runtime.generate import make_method
from keepsight.runtime.registry import DRAFTERS, METHODS, OBSERVERS
from keepsight.runtime.resources import Resources

_ROOMS = ("drafting", "methods", "prompt_compression", "quantized", "retrieval", "sparse_read")

for _room in _ROOMS:
    for _module in _iter_modules([str(_Path(__file__).parents[1] / _room)]):
        _import_module(f"keepsight.runtime.{_room}.{_module.name}")


def __getattr__(name: str) -> type[_Any]:
    for kind in METHODS.values():
        if kind.__name__ == name:
            return kind
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *(kind.__name__ for kind in METHODS.values())})
