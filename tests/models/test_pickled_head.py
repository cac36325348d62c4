"""Heads that are pickles are converted on request, by a reader that makes tensors and runs nothing."""

import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from keepsight.errors import UserError
from keepsight.models.draft_head import EagleHead
from tests.models.public_heads import LLAMA3, eagle3_tensors, write_pickled_head
from tests.tiny import tiny_model


class Trap:
    """Makes a folder when it is unpickled by pickle itself."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("trapped",)


@pytest.fixture
def pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_pickled_head(tmp_path / "head")


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickled_head_is_read_and_can_be_saved(pickled: Path, tmp_path: Path, caplog: Any, legacy: bool) -> None:
    tensors = eagle3_tensors(LLAMA3)
    torch.save(tensors, pickled / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    head = EagleHead.load(pickled)
    assert [f"{pickled / 'pytorch_model.bin'}: a pickle" in line for line in caplog.messages] == [True]
    head.save_pretrained(tmp_path / "out")
    for folder in (pickled, tmp_path / "out"):
        state = EagleHead.load(folder, tiny_model()).state_dict()
        assert state.keys() == tensors.keys()
        assert all(torch.equal(value, tensors[name]) for name, value in state.items())


@pytest.mark.parametrize("write", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_a_pickle_that_runs_something_does_not(pickled: Path, write: Any) -> None:
    write({"fc.weight": Trap()}, pickled / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model.bin: not a pickle of tensors alone") as caught:
        EagleHead.load(pickled)
    assert "\n" not in str(caught.value)
    assert not Path("trapped").exists()
    torch.load(pickled / "pytorch_model.bin", weights_only=False) if write is torch.save else None
    assert Path("trapped").exists() == (write is torch.save), "the trap is none"


@pytest.mark.parametrize("content", [b"", b"\x80\x04N.", b"PK\x03\x04", b"no pickle"])
def test_what_is_no_pickle_is_named(pickled: Path, content: bytes) -> None:
    (pickled / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"pytorch_model.bin: "):
        EagleHead.load(pickled)


@pytest.mark.parametrize("value", [[torch.zeros(2)], {"fc.weight": 3}, torch.zeros(2)])
def test_tensors_without_names_are_refused(pickled: Path, value: Any) -> None:
    torch.save(value, pickled / "pytorch_model.bin")
    with pytest.raises(UserError, match="expected tensors by name"):
        EagleHead.load(pickled)


def test_tensors_that_are_no_head_are_named(pickled: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, pickled / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"head/pytorch_model.bin: no EAGLE head"):
        EagleHead.load(pickled)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("legacy", [False, True])
def test_whatever_a_damaged_pickle_raises_is_one_line(pickled: Path, legacy: bool) -> None:
    path, rng = pickled / "pytorch_model.bin", random.Random(0)
    torch.save({"a": torch.ones(3, 4), "b.c": torch.ones(2)}, path, _use_new_zipfile_serialization=not legacy)
    whole = path.read_bytes()
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 3, 20))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(bytes(damaged[: rng.choice((len(damaged), rng.randrange(len(damaged))))]))
        with pytest.raises(UserError) as refused:
            EagleHead.load(pickled)
        assert "\n" not in str(refused.value)
