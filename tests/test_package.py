"""What is installed under the name keepsight, and that every tool sees the same package."""

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from setuptools.config.pyprojecttoml import load_file

import keepsight

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = load_file(ROOT / "pyproject.toml")
FOLDERS: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]

# Which folders each folder may import from, beside itself and what is shared by all.
SHARED = {"keepsight.corpus", "keepsight.errors", "keepsight.files"}
BELOW: dict[str, set[str]] = {
    "keepsight.runtime": set(),
    "keepsight.models": set(),
    "keepsight.runtime.methods": {"keepsight.runtime", "keepsight.models"},
    "keepsight.data_gen": {"keepsight.models"},
    "keepsight.train": {"keepsight.data_gen", "keepsight.models", "keepsight.runtime"},
    "keepsight.eval": {"keepsight.runtime", "keepsight.runtime.methods", "keepsight.models"},
}


def _files() -> Iterator[tuple[str, Path]]:
    """Each file of the package: its path in the wheel and in the checkout."""
    for name, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*")):
            inside = path.relative_to(ROOT / folder)
            if path.is_file() and "__pycache__" not in inside.parts and not path.name.startswith("."):
                yield f"{name.replace('.', '/')}/{inside.as_posix()}", path


def _imports(path: Path) -> set[str]:
    """The modules that a file imports, `from a.b import c` counted as a.b."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    froms = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    return froms | {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}


def _layer(module: str) -> str:
    """The longest name of a layer that begins a dotted module; the module itself when it belongs to none."""
    return max((name for name in BELOW if f"{module}.".startswith(f"{name}.")), key=len, default=module)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built in a copy so that nothing is left in the checkout and nothing old gets in."""
    copy = tmp_path_factory.mktemp("copy")
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    _pip("wheel", str(copy), "--no-deps", "--no-build-isolation", "--wheel-dir", str(copy / "dist"))
    (built,) = (copy / "dist").glob("*.whl")
    return built


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    metadata = {name for name in names if name.startswith(f"keepsight-{keepsight.__version__}.dist-info/")}
    assert names - metadata == {name for name, _ in _files()}


def test_the_wheel_works_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    _pip("install", "--no-deps", "--quiet", "--target", str(tmp_path / "site"), str(wheel))
    code = """
import json, keepsight, keepsight.recipes, pathlib
names = sorted(path.name for path in pathlib.Path(keepsight.recipes.__file__).parent.rglob("*.yaml"))
print(json.dumps([keepsight.__file__, keepsight.recipes.__file__, list(keepsight.__path__), names]))
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    output = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, env=environment, text=True)
    package, recipes, search_path, names = json.loads(output)
    site = tmp_path / "site" / "keepsight"
    assert [Path(package), Path(recipes)] == [site / "__init__.py", site / "recipes" / "__init__.py"]
    assert search_path == [str(site)]
    assert names == sorted(path.name for path in (ROOT / "recipes").rglob("*.yaml")) != []


def test_every_package_is_listed() -> None:
    found = {name.rpartition("/")[0].replace("/", ".") for name, _ in _files() if name.endswith(".py")}
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


def test_type_checkers_see_every_module() -> None:
    top = {*(ROOT / "keepsight").glob("*.py"), *(path.parent for path in (ROOT / "keepsight").glob("*/__init__.py"))}
    top |= {ROOT / folder for name, folder in FOLDERS.items() if "." in name}
    links = {path.name: path.resolve() for path in (ROOT / "typings" / "keepsight").iterdir()}
    assert links == {path.name: path for path in top}


@pytest.mark.parametrize("name", keepsight.__all__)
def test_exports_exist(name: str) -> None:
    assert callable(getattr(keepsight, name))
    assert name in dir(keepsight)


def test_an_unknown_export_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Snapkv'"):
        keepsight.Snapkv  # noqa: B018


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, keepsight; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True) == "[]\n"


def test_what_is_imported_is_declared() -> None:
    extras = PROJECT["project"]["optional-dependencies"].values()
    requirements = [*PROJECT["project"]["dependencies"], *(name for extra in extras for name in extra)]
    declared = {_normal(re.split(r"[^\w.-]", requirement)[0]) for requirement in requirements}
    installed = importlib.metadata.packages_distributions()
    modules = {module.split(".")[0] for name, path in _files() if name.endswith(".py") for module in _imports(path)}
    foreign = modules - set(sys.stdlib_module_names) - {"keepsight"}
    assert not {name for name in foreign if not {_normal(dist) for dist in installed.get(name, [name])} & declared}


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_folders_import_only_what_is_below_them() -> None:
    upward = set()
    for name, path in _files():
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        layer = _layer(module)
        if not name.endswith(".py") or layer not in BELOW.keys() | SHARED:
            continue
        allowed = SHARED | {layer} | BELOW.get(layer, set())
        ours = {imported for imported in _imports(path) if imported.split(".")[0] == "keepsight"}
        upward |= {f"{name} imports {imported}" for imported in ours if _layer(imported) not in allowed}
    assert not upward
