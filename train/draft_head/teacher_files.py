"""A target's readings of the training texts, written once and read in every epoch in place of running the target."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from keepsight.errors import UserError, require_same
from keepsight.files import atomic_file, file_digest, one_writer, read_json, write_json
from keepsight.models.distributed import launched
from keepsight.train.draft_head.teacher import TargetReader, TargetReading

_MANIFEST, _SHARD = "manifest.json", 32
"""The second: texts per file, about 150 MB for a small target and texts of 1K tokens."""


@dataclass(frozen=True)
class _Manifest:
    """What manifest.json holds.

    Attributes:
        made_of: What determines the readings, by name.
        digests: `sha256:...` of the files that are complete, by name.
    """

    made_of: dict[str, Any]
    digests: dict[str, str] = field(default_factory=dict)


class StoredReadings:
    """Reads from a folder that `write_readings` filled; texts are found by their token ids."""

    def __init__(self, folder: Path) -> None:
        self._shards: dict[str, Path] = {}
        made: _Manifest = read_json(folder / _MANIFEST, _Manifest)
        for name, digest in made.digests.items():
            path = folder / Path(name).name
            if file_digest(path) != digest:
                raise UserError(f"{path}: changed since it was written; delete it to have it made again")
            with safe_open(path, framework="pt") as tensors:
                self._shards |= {key.partition(".")[0]: path for key in tensors.keys()}  # noqa: SIM118

    def __call__(self, ids: Tensor) -> TargetReading:
        """[n] int64 -> its reading, on the device of `ids`.

        Raises:
            UserError: the folder does not hold this text, or not all of its reading.
        """
        key = _key(ids.tolist())
        if key not in self._shards:
            raise UserError(f"a sample of {len(ids)} tokens is not in features=; delete that folder to make it again")
        path, names = self._shards[key], (f"{key}.features", f"{key}.hidden")
        with safe_open(path, framework="pt", device=str(ids.device)) as tensors:
            held = [tensors.get_tensor(name) for name in names if name in tensors.keys()]  # noqa: SIM118
        if [len(each) for each in held] != [len(ids)] * 2:
            raise UserError(f"{path}: the reading of a sample of {len(ids)} tokens is not whole; delete that file")
        return TargetReading(*held)


def write_readings(folder: Path, reader: TargetReader, texts: Sequence[list[int]], made_of: Mapping[str, Any]) -> None:
    """Write the readings of all texts that the folder lacks, so that a run that was killed resumes.

    Several processes of one launch divide the files among themselves.

    Args:
        folder: Folder for the files; created if absent.
        reader: Runs the target.
        texts: Token ids of each text.
        made_of: What determines the readings, by name: data, target, layers.

    Raises:
        UserError: the folder holds readings of something else.
    """
    made = _Manifest(dict(made_of))
    if (folder / _MANIFEST).exists():
        made = read_json(folder / _MANIFEST, _Manifest)
        advice = "choose another features=, or delete the folder"
        require_same(f"{folder}: these features were made", made.made_of, made_of, advice)

    def write(start: int) -> dict[str, str]:
        path = folder / _name(start)
        with atomic_file(path) as unfinished:
            save_file(_tensors(reader, texts[start : start + _SHARD]), unfinished)
        return {path.name: file_digest(path)}

    processes = launched()
    with one_writer(folder) if processes.is_main_process else nullcontext():
        starts = range(0, len(texts), _SHARD)
        lacking = [each for each in starts if _name(each) not in made.digests or not (folder / _name(each)).is_file()]
        processes.wait_for_everyone()
        for first in tqdm(range(0, len(lacking), processes.num_processes), desc="features", unit="round", disable=None):
            own = lacking[first : first + processes.num_processes][processes.process_index :][:1]
            for written in gather_object([write(start) for start in own]):
                made.digests.update(written)
            if processes.is_main_process:
                write_json(folder / _MANIFEST, asdict(made))
        processes.wait_for_everyone()


def _name(start: int) -> str:
    return f"readings-{start // _SHARD:05d}.safetensors"


def _tensors(reader: TargetReader, texts: Sequence[list[int]]) -> dict[str, Tensor]:
    tensors = {}
    for ids in texts:
        reading = reader(torch.tensor(ids))
        tensors[f"{_key(ids)}.features"] = reading.features.cpu().contiguous()
        tensors[f"{_key(ids)}.hidden"] = reading.hidden.cpu().contiguous()
    return tensors


def _key(ids: list[int]) -> str:
    return hashlib.sha256(str(ids).encode()).hexdigest()[:32]
