"""The target's readings on disk, divided over processes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from keepsight.errors import UserError
from keepsight.files import file_digest, read_json, write_json
from keepsight.train import draft_head as module
from keepsight.train.draft_head import HiddenStates, StoredStates, write_states

TEXTS = [[number, number + 1] for number in range(100)]  # four files


def read(ids: Tensor) -> HiddenStates:
    return HiddenStates(ids[:, None] * torch.ones(2, 3), ids[:, None] * torch.ones(2, 2))


def test_processes_divide_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other: the second, which is not the main one, then the first, which finds what the second wrote."""
    read_by: list[list[int]] = [[], []]
    told: list[dict[str, str]] = []

    def gathered(own: list[dict[str, str]]) -> list[dict[str, str]]:
        told.extend(own)
        return told

    monkeypatch.setattr(module, "gather_object", gathered)
    for index in (1, 0):

        def reader(ids: Tensor, index: int = index) -> HiddenStates:
            read_by[index].append(int(ids[0]))
            return read(ids)

        fake: Any = SimpleNamespace(
            num_processes=2, process_index=index, is_main_process=index == 0, wait_for_everyone=lambda: None
        )
        monkeypatch.setattr(module, "launched", lambda fake=fake: fake)
        write_states(tmp_path, reader, TEXTS, {"data": "d"})
    assert read_by[1] == [*range(32, 64), *range(96, 100)]
    assert read_by[0] == [*range(32), *range(64, 96)]
    stored = StoredStates(tmp_path)
    for ids in map(torch.tensor, TEXTS):
        assert torch.equal(stored(ids).features, read(ids).features)


@pytest.mark.parametrize("kind", ["removed", "doubled"])
def test_a_reading_that_is_not_whole_is_refused(tmp_path: Path, kind: str) -> None:
    """Whatever its digest says."""
    ids = torch.tensor([3, 5])
    write_states(tmp_path, read, [[3, 5]], {})
    path, manifest = tmp_path / "readings-00000.safetensors", tmp_path / "manifest.json"
    assert StoredStates(tmp_path)(ids).hidden.shape == (2, 2)
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("hidden"))
    tensors |= {name: torch.ones(4, 2)} if kind == "doubled" else {"other": tensors.pop(name)}
    save_file(tensors, path)
    write_json(manifest, read_json(manifest) | {"digests": {path.name: file_digest(path)}})
    with pytest.raises(UserError, match=r"readings-00000\.safetensors: a sample of 2 tokens is incomplete"):
        StoredStates(tmp_path)(ids)
