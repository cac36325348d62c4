"""Draft heads that were published as a pickle, converted to safetensors."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from keepsight.errors import UserError
from keepsight.files import atomic_files
from keepsight.models.draft_head_files import CONFIG, PICKLE, WEIGHTS, load_draft_head
from keepsight.models.weight_files import one_line


def convert_head(folder: Path, out: Path) -> list[str]:
    """Write a pickled head as one that `load_draft_head` reads, and read it.

    torch reads the pickle with `weights_only`: it makes tensors and runs nothing.

    Args:
        folder: Holds config.json and pytorch_model.bin.
        out: Gets config.json and model.safetensors; may be the same.

    Returns:
        The tensors' names.

    Raises:
        UserError: a file is missing, the pickle holds anything but tensors by name, or they are no EAGLE head's.
    """
    for name in (CONFIG, PICKLE):
        if not (folder / name).is_file():
            raise UserError(f"{folder}: {name} is missing; a head to convert has {CONFIG} and {PICKLE}")
    tensors = _unpickled(folder / PICKLE)
    with atomic_files(out, last=CONFIG) as unfinished:
        save_file(tensors, unfinished / WEIGHTS, metadata={"format": "pt"})
        shutil.copyfile(folder / CONFIG, unfinished / CONFIG)
        try:
            load_draft_head(unfinished)
        except UserError as error:
            said = str(error).replace(str(unfinished / WEIGHTS), str(folder / PICKLE))
            raise UserError(said.replace(str(unfinished), str(folder))) from None
    return sorted(tensors)


def _unpickled(path: Path) -> dict[str, Tensor]:
    try:
        # Tensors alone: nothing that the file names is called. Heads are published so, and become safetensors here.
        read: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of a damaged pickle any is raised
        raise UserError(f"{path}: not a pickle of tensors alone ({one_line(error)}); it was not converted") from None
    if not isinstance(read, dict) or not all(isinstance(each, Tensor) for each in read.values()):
        raise UserError(f"{path}: expected tensors by name, as a state_dict has them; it was not converted")
    return {str(name): tensor.contiguous().clone() for name, tensor in read.items()}
