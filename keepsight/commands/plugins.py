"""Your own code, which a command imports first: it may add methods to `keepsight.runtime.methods.METHODS`."""

import importlib
import os
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points

from keepsight.errors import UserError

GROUP = "keepsight"


def import_plugins(names: Iterable[str]) -> None:
    """Import modules, found in the working folder too, or what entry points of the group `keepsight` name.

    Raises:
        UserError: one cannot be imported.
    """
    for name in names:
        points = entry_points(group=GROUP, name=name)
        sys.path.append(os.getcwd())
        try:
            for point in points:
                point.load()
            if not points:
                importlib.import_module(name)
        except Exception as error:  # whatever that code does
            said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise UserError(f"plugins={name} cannot be imported ({said}); name a module or an entry point") from error
        finally:
            sys.path.remove(os.getcwd())
