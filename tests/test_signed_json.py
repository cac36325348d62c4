"""JSON that says when it was changed, and what is no JSON of the expected type."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from typing_extensions import TypedDict

from keepsight.errors import UserError
from keepsight.files import append_lines, read_json, read_jsonl, sound_lines, write_csv, write_json


@dataclass(frozen=True)
class Point:
    name: str
    at: list[int]


class Named(TypedDict):
    name: str


VALUE = {"name": "a", "at": [1, 2]}


@pytest.mark.parametrize(("old", "new"), [(b"1", b"7"), (b'"a"', b'"b"'), (b"at", b"to"), (b"]", b", 3]")])
def test_a_change_is_noticed(tmp_path: Path, old: bytes, new: bytes) -> None:
    write_json(tmp_path / "one.json", VALUE)
    append_lines(tmp_path / "many.jsonl", [VALUE, VALUE])
    assert read_json(tmp_path / "one.json") == VALUE == next(read_jsonl(tmp_path / "many.jsonl"))
    for name in ("one.json", "many.jsonl"):
        text = (tmp_path / name).read_bytes()
        place = text.rindex(old)
        (tmp_path / name).write_bytes(text[:place] + new + text[place + len(old) :])
    with pytest.raises(UserError, match=r"one\.json: changed or cut off since it was written"):
        read_json(tmp_path / "one.json")
    sound, (fault,) = sound_lines(tmp_path / "many.jsonl")
    assert sound == [VALUE] and "many.jsonl:2: changed or cut off" in str(fault)


def test_json_of_others_has_no_digest_and_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(VALUE))
    assert read_json(tmp_path / "a.json", Point) == Point("a", [1, 2])
    assert read_json(tmp_path / "a.json", Named) == VALUE


@pytest.mark.parametrize(("old", "new"), [(b"_sha", b"_rha"), (b'256": "', b'256": "x')])
def test_a_change_of_the_digest_itself_is_noticed(tmp_path: Path, old: bytes, new: bytes) -> None:
    write_json(tmp_path / "one.json", VALUE)
    text = (tmp_path / "one.json").read_bytes()
    (tmp_path / "one.json").write_bytes(text.replace(old, new, 1))
    with pytest.raises(UserError, match=r"one\.json: changed"):
        read_json(tmp_path / "one.json")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"name": "\\ud800", "at": []}', "not valid JSON"),
        ("[]", "expected an object, got list"),
        ('{"name": "a"}', "at: Field required"),
        ('{"name": "a", "at": [1.5]}', "at.0: expected a valid integer, got 1.5"),
        ('{"name": 7, "at": []}', "name: expected a valid string, got 7"),
        ('{"name": "a", "at": [], "more": 1}', "more: "),
    ],
)
def test_what_is_not_of_the_type_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError) as caught:
        read_json(tmp_path / "a.json", Point)
    assert said in str(caught.value) and str(tmp_path / "a.json") in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_table_runs_no_formula(tmp_path: Path) -> None:
    cells = ["=1+1", "@x", "-x", "+x", "\tx", "-0.5", "+3", "-.5", "a=b"]
    write_csv(tmp_path / "a.csv", ["text"], [{"text": cell} for cell in cells])
    lines = (tmp_path / "a.csv").read_text().splitlines()[1:]
    assert lines == ["'=1+1", "'@x", "'-x", "'+x", "'\tx", "-0.5", "+3", "-.5", "a=b"]
