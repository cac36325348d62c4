"""What is built and installed under the name keepsight, and that every tool sees the same package."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import keepsight
from keepsight.runtime.methods import METHODS
from tests.package_files import FOLDERS, PROJECT, ROOT, files_in, imports, package_files, package_modules

RELEASE = f"keepsight-{keepsight.__version__}"
AT_ROOT = {
    *(path.name for path in ROOT.glob("*.py")),
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "MANIFEST.in",
    "Makefile",
    "README.md",
    "RESULTS.md",
    "constraints.txt",
    "mkdocs.yml",
    "pyproject.toml",
}
BESIDE = (".ci", "docs", "examples", "results", "tests")
BUILD = """
import build_backend
build_backend.build_sdist("dist")
build_backend.build_wheel("dist")
build_backend.build_editable("editable")
"""
USE = """
import contextlib, importlib, importlib.util, io, json, pkgutil, runpy, sys
import keepsight
names = [module.name for module in pkgutil.walk_packages(keepsight.__path__, "keepsight.")]
engine = () if importlib.util.find_spec("vllm") else ("connector", "ragged", "ragged_triton", "record")
left_out = ("keepsight.__main__", *(f"keepsight.serving.vllm.{name}" for name in engine))
modules = [importlib.import_module(name) for name in names if name not in left_out]
from keepsight.models.artifacts import fetch
shipped = str(fetch("shipped:smollm2-135m-lookahead"))
script, *sys.argv = sys.argv[1], *sys.argv[1:]
with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
    runpy.run_path(script, run_name="__main__")
print(json.dumps({
    "names": names,
    "files": [module.__file__ for module in modules],
    "search_path": list(keepsight.__path__),
    "printed": printed.getvalue(),
    "shipped": shipped,
}))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel, built in a copy: nothing is left in the checkout, nothing old gets in."""
    copy = tmp_path_factory.mktemp("copy")
    for folder in (*FOLDERS.values(), *BESIDE):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in AT_ROOT:
        shutil.copy(ROOT / name, copy)
    (copy / "typings").mkdir()  # links, through which a builder would pack every file again
    (copy / "typings" / "keepsight").symlink_to(copy / "keepsight")
    _run([sys.executable, "-c", BUILD], cwd=copy)
    return copy / "dist"


@pytest.mark.parametrize("where", ["the clone", "its parent", "elsewhere"])
def test_an_editable_install_is_found_in_every_folder(built: Path, tmp_path: Path, where: str) -> None:
    """The clone has the package's name, and is no package itself."""
    site = tmp_path / "site"
    (wheel,) = (built.parent / "editable").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    clone = tmp_path / "src" / "keepsight"
    clone.parent.mkdir()
    clone.symlink_to(built.parent)
    folder = {"the clone": clone, "its parent": clone.parent, "elsewhere": tmp_path}[where]
    code = f"import site; site.addsitedir({str(site)!r}); import keepsight; print(keepsight.__file__)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "-c", code]
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    file = Path(process.stdout.split()[-1])
    assert file.resolve() == built.parent / "keepsight" / "__init__.py"


def _run(command: list[str], cwd: Path, **environment: str) -> str:
    """What a command prints."""
    process = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_the_sdist_holds_each_file_once(built: Path) -> None:
    with tarfile.open(built / f"{RELEASE}.tar.gz") as archive:
        names = [member.name.removeprefix(f"{RELEASE}/") for member in archive if not member.isdir()]
    assert len(names) == len(set(names))
    expected = set(AT_ROOT)
    for folder in {*FOLDERS.values(), *BESIDE}:
        expected |= {path.relative_to(ROOT).as_posix() for path in files_in(ROOT / folder)}
    generated = {name for name in names if name.startswith("keepsight.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert set(names) - generated == expected


def test_the_wheel_holds_each_file_of_the_package_once(built: Path) -> None:
    wheel = zipfile.ZipFile(built / f"{RELEASE}-py3-none-any.whl")
    names = [name for name in wheel.namelist() if not name.endswith("/")]
    assert len(names) == len(set(names))
    metadata = {name for name in names if name.startswith(f"{RELEASE}.dist-info/")}
    assert set(names) - metadata == {name for name, _ in package_files()}


@pytest.mark.parametrize(
    "archive", [pytest.param(f"{RELEASE}.tar.gz", marks=pytest.mark.slow), f"{RELEASE}-py3-none-any.whl"]
)
def test_what_is_built_installs_and_works_from_another_folder(built: Path, tmp_path: Path, archive: str) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-build-isolation"]
    _run([*pip, "--no-index", "--target", str(site), str(built / archive)], cwd=tmp_path)
    use = [sys.executable, "-c", USE, str(site / "bin" / "keepsight"), "eval", "--help"]
    report = json.loads(_run(use, cwd=tmp_path, PYTHONPATH=str(site)))
    package = site / "keepsight"
    assert {"keepsight", *report["names"]} == package_modules().keys()
    assert report["search_path"] == [str(package)]
    assert all(Path(file).is_relative_to(site) for file in report["files"])
    assert {path.relative_to(site).as_posix() for path in files_in(package)} == dict(package_files()).keys()
    assert report["printed"].startswith("keepsight eval:")
    assert Path(report["shipped"]) == package / "checkpoints" / "smollm2-135m-lookahead"


@pytest.mark.skipif(not (ROOT / "typings").is_dir(), reason="the sdist leaves typings/ out")
def test_type_checkers_see_every_module() -> None:
    package = ROOT / "keepsight"
    targets = {path.name: path for path in package.glob("*.py")}
    targets |= {path.parent.name: path.parent for path in package.glob("*/__init__.py")}
    for name, folder in FOLDERS.items():
        if "." in name:
            path = ROOT / folder
            targets[path.name] = path
    links = {path.name: path.resolve() for path in (ROOT / "typings" / "keepsight").iterdir()}
    assert links == targets


def test_errors_advise_what_a_wheel_has_too() -> None:
    """Who installed a wheel has no clone to run `pip install -e .` in."""
    for name, file in package_files():
        if name.endswith(".py"):
            assert "pip install -e" not in Path(file).read_text("utf-8"), name


def test_exports_exist() -> None:
    exports: Any = keepsight.__all__
    for name in exports:
        assert callable(getattr(keepsight, name)), name
        assert name in dir(keepsight)
    assert {method.__name__ for method in METHODS.values()} <= {*exports}
    with pytest.raises(AttributeError, match="no attribute 'Snapkv'"):
        keepsight.Snapkv  # noqa: B018


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, keepsight; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    assert _run([sys.executable, "-c", code], cwd=ROOT, PYTHONPATH=str(ROOT)) == "[]\n"


def test_what_is_imported_is_declared() -> None:
    requirements = [*PROJECT["project"]["dependencies"]]
    for extra in PROJECT["project"]["optional-dependencies"].values():
        requirements += extra
    declared = {_normal(re.split(r"[^\w.-]", requirement)[0]) for requirement in requirements}
    imported = set()
    for path in package_modules().values():
        imported |= {module.split(".")[0] for module in imports(path)}
    distributions = importlib.metadata.packages_distributions()
    undeclared = set()
    for name in imported - set(sys.stdlib_module_names) - {"keepsight"}:
        providers = {_normal(distribution) for distribution in distributions.get(name, [name])}
        if not providers & declared:
            undeclared.add(name)
    assert undeclared == set()


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
