"""Files are written whole or not at all; torn and mistyped JSON is found; one process at a time writes."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from typing_extensions import TypedDict

from keepsight.errors import Code, UserError
from keepsight.files import (
    append_lines,
    at_home,
    atomic_files,
    atomic_folder,
    bytes_digest,
    file_digest,
    hex_digest,
    json_digest,
    one_writer,
    read_bytes,
    read_json,
    read_jsonl,
    read_yaml,
    require_writable,
    whole_lines,
    write_csv,
    write_json,
    write_lines,
    write_text,
)
from tests.refused import refused


def tree(folder: Path) -> dict[str, str]:
    """Every file under a folder, hidden ones too, with its text."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_takes_its_name_when_it_is_complete(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "model"
    with atomic_folder(folder) as unfinished:
        (unfinished / "weights").write_text("x")
        assert not folder.exists() or tree(folder) == {}
    with atomic_folder(folder) as unfinished:
        (unfinished / "config").write_text("x")
        assert tree(folder) == {"weights": "x"}
    with pytest.raises(KeyboardInterrupt), atomic_folder(folder) as unfinished:
        (unfinished / "weights").write_text("half")
        raise KeyboardInterrupt
    assert tree(tmp_path) == {"new/model/config": "x"}
    assert os.listdir(tmp_path / "new") == ["model"]


def test_files_move_into_a_folder_beside_others(tmp_path: Path) -> None:
    for name in ("config", "weights", "notes"):
        (tmp_path / name).write_text("old")
    with atomic_files(tmp_path, last="config") as unfinished:
        (unfinished / "config").write_text("new")
        (unfinished / "weights").write_text("new")
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


def test_a_folder_removed_while_files_are_written_to_it_gets_none_of_the_others(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    with refused("out", "file"), atomic_files(folder, last="config") as unfinished:
        write_text(unfinished / "weights", "1")
        shutil.rmtree(folder)
        write_text(unfinished / "config", "1")
    assert not folder.exists()


def test_content_is_synced_before_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = list[str]()
    replace = Path.replace

    def note_sync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append(path.name)

    def note_and_replace(path: Path, target: Path) -> Path:
        events.append(f"{path.name} named")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_and_replace)
    append_lines(tmp_path / "lines", [{"a": 1}])
    with atomic_files(tmp_path, last="config") as unfinished:
        for name in ("config", "weights"):
            (unfinished / name).write_text("new")
    assert events == ["lines", "weights", "config", "weights named", "config named", tmp_path.name]


def test_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    """Not those of a process that still runs, or of another machine."""
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    host = socket.gethostname()
    of_killed = f".unfinished-{host}-{killed.pid}-x"
    of_running = f".unfinished-{host}-{os.getpid()}-x"
    of_other_host = f".unfinished-not-{host}-{killed.pid}-x"
    for name in (of_killed, of_running, of_other_host):
        (tmp_path / name).mkdir()
    write_text(tmp_path / "file", "größer\n")
    assert set(os.listdir(tmp_path)) == {"file", of_running, of_other_host}
    assert (tmp_path / "file").read_bytes() == "größer\n".encode()


def test_devices_and_pipes_are_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (Path("/dev/null"), pipe):
        for folder in (True, False):
            with refused("out", "file"):
                require_writable(path, folder)
        for write in (
            lambda path: write_text(path, "text"),
            lambda path: append_lines(path, [{"a": 1}]),
            lambda path: atomic_folder(path).__enter__(),
            lambda path: atomic_files(path, "a").__enter__(),
            lambda path: atomic_files(path.parent, path.name).__enter__(),
        ):
            with refused(path.name, "file"):
                write(path)
        assert path.exists()
        assert not path.is_file()
        with refused(path.name, "file"):
            read_json(path)


def test_yaml_in_any_encoding_but_no_bomb(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        path.write_text("a: é\n", encoding=encoding)
        assert read_yaml(path) == "a: é\n"
    bomb = "a0: &a0 [x]\n"
    for level in range(1, 9):
        aliases = ", ".join([f"*a{level - 1}"] * 9)
        bomb += f"a{level}: &a{level} [{aliases}]\n"
    codes: dict[str, Code] = {"a: &a [*a]": "memory", bomb: "memory", "[" * 9000: "file", "a" * (2 << 20): "memory"}
    for text, code in codes.items():
        path.write_text(text)
        with refused("a.yaml", code):
            read_yaml(path)


def test_unwritable_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    require_writable(tmp_path / "a" / "b")
    require_writable(tmp_path / "file", folder=False)
    for path, folder in ((tmp_path / "file", True), (tmp_path, False), (tmp_path / "file" / "x", True)):
        with refused("out", "file"):
            require_writable(path, folder)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "gone", tmp_path / "gone" / "x" / "y", tmp_path / "loop"):
        with refused("out", "file"):
            require_writable(path)


HOLD = """
import sys, time, pathlib
from keepsight.files import one_writer
with one_writer(pathlib.Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_another_process_is_named_and_kept_out_until_it_is_gone(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "locked\n"
        with refused("out", "conflict"), one_writer(tmp_path):
            pass
        writer.kill()
    with one_writer(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_folder_that_is_removed_meanwhile(tmp_path: Path, error: type[BaseException] | None) -> None:
    """It is named, and never hides an error from within."""
    with pytest.raises(error or UserError), one_writer(tmp_path / "out"):
        shutil.rmtree(tmp_path / "out")
        if error:
            raise error
    assert not (tmp_path / "out").exists()


ROWS = [{"text": "grün"}, {"text": "日本\u2028語"}, {"text": "c"}]
SECOND = json.dumps(ROWS[1], ensure_ascii=False).encode()


def test_lines_come_back(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert whole_lines(path) == []
    write_lines(path, ROWS[:1])
    append_lines(path, ROWS[1:])
    assert list(read_jsonl(path)) == ROWS
    assert whole_lines(path) == ROWS
    path.write_bytes(b"\n" + path.read_bytes() + b"  \n")
    assert list(read_jsonl(path)) == ROWS


@pytest.mark.parametrize("cut", [1, SECOND.index("日".encode()) + 1, len(SECOND) - 1])
def test_a_torn_line_is_named_and_cut_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.jsonl"
    write_lines(path, ROWS[:1])
    first_line = path.read_bytes()
    path.write_bytes(b"\n" + first_line + SECOND[:cut])
    with refused("a.jsonl", "file"):
        list(read_jsonl(path))
    assert list(read_jsonl(path, skip_torn=True)) == ROWS[:1]
    assert whole_lines(path) == ROWS[:1]
    assert path.read_bytes() == b"\n" + first_line
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with refused("a.jsonl", "file"):  # torn in the middle: not by a kill
        whole_lines(path)
    with refused("a.jsonl", "file"):
        list(read_jsonl(path, skip_torn=True))


@dataclass(frozen=True)
class Point:
    name: str
    at: list[int]


class Named(TypedDict):
    name: str


VALUE = {"name": "a", "at": [1, 2]}


def test_json_is_written_as_it_is(tmp_path: Path) -> None:
    one = tmp_path / "one.json"
    write_json(one, VALUE)
    assert json.loads(one.read_text()) == VALUE
    assert read_json(one) == VALUE
    two = tmp_path / "two.jsonl"
    append_lines(two, [VALUE, VALUE])
    assert [json.loads(line) for line in two.read_text().splitlines()] == [VALUE, VALUE]
    assert list(read_jsonl(two)) == [VALUE, VALUE]


def test_digests_are_sha256_of_all_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    expected = hashlib.sha256(b"abc").hexdigest()
    path.write_bytes(b"abc")
    assert hex_digest([b"a", memoryview(b"bc")]) == expected
    assert bytes_digest([b"abc"]) == f"sha256:{expected}"
    assert file_digest(path) == f"sha256:{expected}"
    large = b"x" * (3 << 20)
    path.write_bytes(large)
    assert file_digest(path) == f"sha256:{hashlib.sha256(large).hexdigest()}"


def test_the_digest_of_json_does_not_depend_on_the_order_of_keys() -> None:
    assert json_digest({"a": 1, "b": [None, "\u00e9"]}) == json_digest({"b": [None, "\u00e9"], "a": 1})
    assert json_digest([1, 2]) != json_digest([2, 1])


def test_json_of_others_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(VALUE))
    assert read_json(tmp_path / "a.json", Point) == Point("a", [1, 2])
    assert read_json(tmp_path / "a.json", Named) == VALUE
    with refused("c.json", "missing"):
        read_json(tmp_path / "c.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"name": "\\ud800", "at": []}', "not valid JSON"),
        ("[]", "expected an object, got list"),
        ('{"name": "a"}', "at: Field required"),
        ('{"name": "a", "at": [1.5]}', "at.0: expected a valid integer, got 1.5"),
        ('{"name": "a", "at": [], "more": 1}', "more: "),
    ],
)
def test_json_of_another_type_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_json(path, Point)
    error = str(caught.value)
    assert message in error
    assert str(path) in error
    assert "\n" not in error
    assert len(error) < 400


def test_a_table_runs_no_formula(tmp_path: Path) -> None:
    cells = ["=1+1", "@x", "-x", "+x", "\tx", "-0.5", "+3", "-.5", "a=b"]
    write_csv(tmp_path / "a.csv", ["text"], [{"text": cell} for cell in cells])
    lines = (tmp_path / "a.csv").read_text().splitlines()[1:]
    assert lines == ["'=1+1", "'@x", "'-x", "'+x", "'\tx", "-0.5", "+3", "-.5", "a=b"]
    write_csv(tmp_path / "a.csv", ["=title"], [{"=title": "a\r=1+1"}])  # a bare carriage return would begin a row
    assert (tmp_path / "a.csv").read_bytes() == b'\'=title\n"a\n=1+1"\n'


def test_amounts_of_memory() -> None:
    assert read_bytes("24GiB") == 24 << 30
    assert read_bytes("24 GB") == 24 * 10**9
    assert read_bytes("1.5GiB") == 3 << 29
    assert read_bytes("17") == 17
    for text in ("", "0", "-1GB", "24 X", "24gb", "1e9", "0.1B", "nan"):
        with refused("memory", "type"):
            read_bytes(text)


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("x/~", "a~", "/~/x", "~nobody-9/x", "x/~/y", ""):
        assert at_home(path) == path
    for path in ("~", "~/x", "~/x y/~"):
        assert at_home(path) == path.replace("~", str(tmp_path), 1)
    with atomic_folder(Path("~/folder")) as unfinished:
        (unfinished / "a").touch()
    assert (tmp_path / "folder" / "a").is_file()
    assert not Path("~").exists()
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda _: dict[int, str]()[0])
    with refused("HOME", "missing"):
        at_home("~/x")
