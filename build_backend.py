"""setuptools' build backend, with editable installs that work beside the clone.

A clone is a folder named keepsight without an `__init__.py`. Python that is started in the folder above takes it for a
namespace package, before it asks the finder of an editable install. So the editable wheel also gets a finder that comes
first and steps in only there.
"""

import base64
import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (  # the other hooks of a backend, as they are
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

MODULE = "_keepsight_beside_clone"  # no name with "editable", which griffe reads as that of another tool
FINDER = '''"""Finds keepsight where a folder of that name would be taken for a namespace package."""

import sys
from importlib.machinery import PathFinder
from importlib.util import spec_from_file_location


class Finder:
    """Goes before the finder that looks through the folders of sys.path."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """The clone's package, if the first one that sys.path has is only a folder."""
        if name != "keepsight":
            return None
        spec = PathFinder.find_spec(name)
        if spec is not None and spec.origin is not None:
            return spec
        return spec_from_file_location(name, INIT)


INIT = {init!r}
sys.meta_path.insert(0, Finder)
'''
"""The module that the editable wheel gets."""


def build_editable(
    wheel_directory: str, config_settings: Mapping[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Build the editable wheel with the finder; see PEP 660."""
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    init = Path(__file__).parent / "keepsight" / "__init__.py"
    added = {
        f"{MODULE}.py": FINDER.replace("{init!r}", repr(str(init))).encode(),
        f"{MODULE}.pth": f"import {MODULE}\n".encode(),
    }
    _add_files(Path(wheel_directory) / name, added)
    return name


def _add_files(wheel: Path, added: Mapping[str, bytes]) -> None:
    """Write a wheel anew with further files, which its RECORD lists."""
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    record = next(name for name in contents if name.endswith(".dist-info/RECORD"))

    for name, content in added.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        contents[name] = content
        contents[record] += f"{name},sha256={digest},{len(content)}\n".encode()

    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
