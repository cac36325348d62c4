"""The files of the package, as pyproject.toml maps its folders to import names."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from setuptools.config.pyprojecttoml import load_file

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = load_file(ROOT / "pyproject.toml")
FOLDERS: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]


def files_in(folder: Path) -> Iterator[Path]:
    """Files below a folder, but for compiled ones and what file managers leave."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith("."):
            yield path


def package_files() -> Iterator[tuple[str, Path]]:
    """Each file of the package: its path in the wheel and in the checkout."""
    for name, folder in FOLDERS.items():
        for path in files_in(ROOT / folder):
            yield f"{name.replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}", path


@cache
def package_modules() -> dict[str, Path]:
    """The file of each module, by its dotted name."""
    modules = {}
    for name, path in package_files():
        if path.suffix == ".py":
            module = name.removesuffix(".py").removesuffix("/__init__")
            modules[module.replace("/", ".")] = path
    return modules


def imports(path: Path) -> set[str]:
    """The modules that a file imports, in functions too; `from a import b` is a.b where that is a module, else a."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                modules.add(submodule if submodule in package_modules() else node.module)
    return modules
