"""Fingerprints of a served model's weights, from its files alone, by which prefixes of other models are refused."""

import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import cached_file

from keepsight.models.model_files import FIRST, digest_of_first
from keepsight.models.targets import outline_model

DTYPES = torch.float32, torch.bfloat16, torch.float16


def fingerprints(model: str) -> frozenset[str]:
    """`weights_digest` of a model in each dtype that it may be loaded in; none if its files name weights otherwise.

    Args:
        model: Folder or Hub id, whose files are on this machine.

    Raises:
        UserError: its configuration cannot be read.
    """
    outline = outline_model(model, dtype="float32")
    folder = Path(cached_file(model, "config.json") or model).parent
    try:
        held = _first_values(folder)
        values = [held[name] for name, _ in outline.named_parameters()]
    except (KeyError, OSError, SafetensorError):
        return frozenset()
    return frozenset(digest_of_first([value.to(dtype) for value in values]) for dtype in DTYPES)


def _first_values(folder: Path) -> dict[str, Tensor]:
    found = dict[str, Tensor]()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                part = file.get_slice(name)
                shape = part.get_shape()
                if shape and 0 not in shape:
                    found[name] = part[: math.ceil(FIRST / math.prod(shape[1:]))]
    return found
