"""Files are there whole or not at all, and what a kill has torn is found."""

import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from keepsight.atomic import atomic_files, atomic_folder
from keepsight.errors import UserError
from keepsight.files import (
    append_lines,
    file_digest,
    read_json,
    read_jsonl,
    text_digest,
    whole_lines,
    write_json,
    write_lines,
    write_text,
)


def tree(folder: Path) -> dict[str, str]:
    """Every file under a folder, hidden ones too, with its text."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_takes_its_name_when_it_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "model"
    with atomic_folder(folder) as unfinished:
        (unfinished / "weights").write_text("1")
        assert not folder.exists()
    with atomic_folder(folder) as unfinished:
        (unfinished / "config").write_text("2")
        assert tree(folder) == {"weights": "1"}
    assert tree(tmp_path) == {"new/model/config": "2"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_folder_that_fails_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("old")
    for name in ("model", "other"):
        with pytest.raises(error), atomic_folder(tmp_path / name) as unfinished:
            (unfinished / "weights").write_text("half")
            raise error
    assert tree(tmp_path) == {"model/weights": "old"}
    assert os.listdir(tmp_path) == ["model"]


def test_files_move_into_a_folder_beside_others(tmp_path: Path) -> None:
    for name in ("config", "weights", "notes"):
        (tmp_path / name).write_text("old")
    with atomic_files(tmp_path, last="config") as unfinished:
        (unfinished / "config").write_text("new")
        (unfinished / "weights").write_text("new")
    assert tree(tmp_path) == {"config": "new", "weights": "new", "notes": "old"}
    with pytest.raises(ValueError), atomic_files(tmp_path, last="config") as unfinished:
        (unfinished / "weights").write_text("half")
        raise ValueError
    assert tree(tmp_path) == {"config": "new", "weights": "new", "notes": "old"}
    assert sorted(os.listdir(tmp_path)) == ["config", "notes", "weights"]


def test_files_that_fail_to_move_do_not_pass_for_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text("old")
    replace = Path.replace

    def full_disk(path: Path, target: Path) -> Path:
        if path.name == "weights":
            raise OSError("No space left on device")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(OSError), atomic_files(tmp_path, last="config") as unfinished:
        for name in ("config", "card", "weights"):
            (unfinished / name).write_text("new")
    assert tree(tmp_path) == {"card": "new"}


def test_what_gets_its_name_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a file is named its content is synced, and after it the folder."""
    done, replace = list[str](), Path.replace
    monkeypatch.setattr(os, "fsync", lambda opened: done.append(Path(os.readlink(f"/proc/self/fd/{opened}")).name))

    def named(path: Path, to: Path) -> Path:
        done.append(f"{path.name} named")
        return replace(path, to)

    monkeypatch.setattr(Path, "replace", named)
    write_text(tmp_path / "file", "text")
    append_lines(tmp_path / "lines", [{"a": 1}])
    with atomic_files(tmp_path, last="config") as unfinished:
        for name in ("config", "weights"):
            (unfinished / name).write_text("new")
    single = ["file", "file named", tmp_path.name, "lines"]
    assert done == [*single, "weights", "config", "weights named", "config named", tmp_path.name]


def test_what_killed_runs_left_unfinished_goes_with_the_next(tmp_path: Path) -> None:
    """Not what a process that still runs, or one of another machine, is writing."""
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    names = {"killed": f"{socket.gethostname()}-{killed.pid}", "alive": f"{socket.gethostname()}-{os.getpid()}"}
    names["elsewhere"] = f"not-{socket.gethostname()}-{killed.pid}"
    for name in names.values():
        (tmp_path / f".unfinished-{name}-x").mkdir()
        (tmp_path / f".unfinished-{name}-x" / "weights").write_text("half")
    write_text(tmp_path / "file", "whole")
    left = {f".unfinished-{names[name]}-x" for name in ("alive", "elsewhere")}
    assert set(os.listdir(tmp_path)) == {"file", *left}


def test_a_text_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "report.html"
    write_text(path, "größer\n")
    assert path.read_bytes() == "größer\n".encode()

    def full_disk(path: Path, text: str, **_options: str) -> int:
        path.write_bytes(text.encode()[:3])
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(OSError):
        write_text(path, "other")
    assert path.read_bytes() == "größer\n".encode()
    assert os.listdir(path.parent) == ["report.html"]


def test_json_comes_back(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"ä": [1, None, 0.5]})
    assert read_json(tmp_path / "a.json") == {"ä": [1, None, 0.5]}
    (tmp_path / "b.json").write_text('{"a": ')
    with pytest.raises(UserError, match=r"b\.json: not valid JSON .*; restore the file"):
        read_json(tmp_path / "b.json")
    with pytest.raises(UserError, match=r"c\.json: no such file"):
        read_json(tmp_path / "c.json")


ROWS = [{"text": "grün"}, {"text": "日本\u2028語"}, {"text": "c"}]


def test_lines_come_back(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_lines(path, ROWS[:1])
    append_lines(path, ROWS[1:])
    assert list(read_jsonl(path)) == whole_lines(path) == ROWS
    assert len(path.read_bytes().split(b"\n")) == 4
    path.write_bytes(b"\n" + path.read_bytes() + b"  \n")
    assert list(read_jsonl(path)) == ROWS


@pytest.mark.parametrize("cut", range(1, len(json.dumps(ROWS[1], ensure_ascii=False).encode())))
def test_a_torn_line_is_named_and_cut_off(tmp_path: Path, cut: int) -> None:
    """At every byte, those inside a character of several bytes among them."""
    path = tmp_path / "a.jsonl"
    write_lines(path, ROWS[:1])
    whole = path.read_bytes()
    path.write_bytes(b"\n" + whole + json.dumps(ROWS[1], ensure_ascii=False).encode()[:cut])
    with pytest.raises(UserError, match=r"a\.jsonl:3: not valid JSON .*cut off") as caught:
        list(read_jsonl(path))
    assert "\n" not in str(caught.value)
    assert whole_lines(path) == ROWS[:1]
    assert path.read_bytes() == b"\n" + whole
    append_lines(path, ROWS[2:])
    assert whole_lines(path) == [ROWS[0], ROWS[2]]


def test_a_torn_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:2: "):
        whole_lines(path)
    path.write_text('{"a": 1}\n[2]\n')
    with pytest.raises(UserError, match=r"a\.jsonl:2: expected an object, got "):
        list(read_jsonl(path))


def test_a_file_that_never_got_a_whole_line_is_empty(tmp_path: Path) -> None:
    assert whole_lines(tmp_path / "missing.jsonl") == []
    (tmp_path / "a.jsonl").write_text('{"a"')
    assert whole_lines(tmp_path / "a.jsonl") == []
    assert (tmp_path / "a.jsonl").read_bytes() == b""


def test_digests(tmp_path: Path) -> None:
    content = os.urandom((1 << 20) + 17)
    (tmp_path / "a").write_bytes(content)
    assert file_digest(tmp_path / "a") == f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert text_digest("ä") == f"sha256:{hashlib.sha256('ä'.encode()).hexdigest()}"
