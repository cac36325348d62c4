"""A target's readings of the training texts, written once and read in every epoch in place of running the target."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from keepsight.errors import UserError
from keepsight.files import atomic_files, read_json, write_json
from keepsight.train.draft_head.teacher import TargetReader, TargetReading

_SHARD = 32
"""Texts per file: about 150 MB for a small target and texts of 1K tokens."""


class StoredReadings:
    """Reads from a folder that `write_readings` filled; texts are found by their token ids."""

    def __init__(self, folder: Path) -> None:
        self._shards: dict[str, Path] = {}
        for path in sorted(folder.glob("readings-*.safetensors")):
            try:
                with safe_open(path, framework="pt") as tensors:
                    names = list(tensors.keys())
            except SafetensorError as error:
                raise UserError(f"{path}: not a safetensors file ({error}); delete it to have it made again") from None
            self._shards |= {name.partition(".")[0]: path for name in names}

    def __call__(self, ids: Tensor) -> TargetReading:
        """[n] int64 -> its reading, on the device of `ids`.

        Raises:
            UserError: the folder does not hold this text.
        """
        key = _key(ids.tolist())
        if key not in self._shards:
            raise UserError(f"a sample of {len(ids)} tokens is not in features=; delete that folder to make it again")
        with safe_open(self._shards[key], framework="pt", device=str(ids.device)) as tensors:
            return TargetReading(tensors.get_tensor(f"{key}.features"), tensors.get_tensor(f"{key}.hidden"))


def write_readings(folder: Path, reader: TargetReader, texts: Sequence[list[int]], made_of: Mapping[str, Any]) -> None:
    """Write the readings of all texts that the folder lacks, so that a run that was killed resumes.

    Args:
        folder: Folder for the files; created if absent.
        reader: Runs the target.
        texts: Token ids of each text.
        made_of: What determines the readings, by name: data, target, layers.

    Raises:
        UserError: the folder holds readings of something else.
    """
    manifest = folder / "manifest.json"
    if not manifest.exists():
        write_json(manifest, dict(made_of))
    found = read_json(manifest)
    for name, value in made_of.items():
        if found.get(name) != value:
            raise UserError(
                f"{folder}: these features were made with {name}={found.get(name)!r}, now it is {value!r}; "
                "choose another features=, or delete the folder"
            )
    for start in tqdm(range(0, len(texts), _SHARD), desc="features", unit="shard", disable=None):
        name = f"readings-{start // _SHARD:05d}.safetensors"
        if not (folder / name).exists():
            with atomic_files(folder, last=name) as unfinished:
                save_file(_tensors(reader, texts[start : start + _SHARD]), unfinished / name)


def _tensors(reader: TargetReader, texts: Sequence[list[int]]) -> dict[str, Tensor]:
    tensors = {}
    for ids in texts:
        reading = reader(torch.tensor(ids))
        tensors[f"{_key(ids)}.features"] = reading.features.cpu().contiguous()
        tensors[f"{_key(ids)}.hidden"] = reading.hidden.cpu().contiguous()
    return tensors


def _key(ids: list[int]) -> str:
    return hashlib.sha256(str(ids).encode()).hexdigest()[:32]
