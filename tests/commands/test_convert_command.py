"""`keepsight convert`: a pickled head here or on the Hub, and what draws on it afterwards."""

from pathlib import Path

from tests.commands.commands import CommandLine
from tests.models.public_heads import write_pickled_head


def test_a_folder_is_converted_beside_or_elsewhere(keepsight: CommandLine, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_pickled_head(tmp_path / "head")
    assert keepsight("convert", "head", "out=made") == "15 tensors in made; use it as draft.head=made\n"
    assert {path.name for path in Path("made").iterdir()} == {"config.json", "model.safetensors"}
    assert "in head;" in keepsight("convert", "head")
    assert {path.name for path in Path("head").iterdir()} == {"config.json", "model.safetensors", "pytorch_model.bin"}


def test_bad_input_ends_in_one_line(keepsight: CommandLine, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert keepsight.fails("convert") == "head= is required; see --help"
    assert keepsight.fails("convert", "ada/head").startswith("out= is required: ada/head is no folder here")
    assert "neither a folder nor a Hub id" in keepsight.fails("convert", "a b", "out=made")
    (tmp_path / "empty").mkdir()
    assert keepsight.fails("convert", "empty").startswith("empty: config.json is missing; ")
