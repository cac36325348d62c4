"""The resolved configuration of a command, saved beside what it makes."""

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from keepsight.files import write_text
from keepsight.models.distributed import launched

CONFIG_FILE = "config.yaml"
"""Name of the file in a command's `out`: every key with the value that the last run had."""


def save_config(config: Any) -> None:
    """Write a command's configuration into its `out`; only the main process of a launch does.

    It is written beside what the command has made, so that a run that is refused leaves the file as it is. No key holds
    a secret: keys of APIs are read from environment variables, which the configuration names.
    """
    if launched().is_main_process:
        write_text(Path(config.out) / CONFIG_FILE, yaml_of(asdict(config)))


def published_config(folder: Path) -> dict[str, Any] | None:
    """The configuration saved in a folder without the paths of this machine; None if there is none."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        return None
    published: dict[str, Any] = _without_paths(yaml.safe_load(path.read_text(encoding="utf-8")))
    return published


def yaml_of(values: Mapping[str, Any]) -> str:
    """Plain values as YAML, in their order."""
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=120)


def _without_paths(value: Any) -> Any:
    """A value with DIR for folders, and the names of files for their paths."""
    if isinstance(value, list):
        return [_without_paths(element) for element in value]
    if isinstance(value, dict):
        return {key: _without_paths(element) for key, element in value.items()}
    if not isinstance(value, str) or not os.path.exists(value):  # also of a text that is too long for a path
        return value
    return "DIR" if os.path.isdir(value) else os.path.basename(value)
