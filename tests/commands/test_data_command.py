"""`keepsight data`, with sources that are broken, a disk that fills up, and an interruption; and data for training."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from keepsight.data_gen import store
from keepsight.files import append_lines, one_writer, read_json, write_lines
from keepsight.models import model_files
from tests.commands.commands import DATA, CommandLine, last_of_each_key, samples_of, tree
from tests.launch import launch

pytestmark = pytest.mark.usefixtures("here")
ROOT = Path(__file__).parents[2]
TINY = ("model.id=tiny", "model.device=cpu")


def test_a_local_source_with_a_cut_line(keepsight: CommandLine, here: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = (here / "rows.jsonl").read_bytes()
    (here / "rows.jsonl").write_bytes(rows[:-6])
    message = keepsight.refuses("", "type", "data", *TINY, *DATA, "skip=0", "limit=30")
    assert "rows.jsonl:9: " in message
    assert message.endswith("raise skip=0")
    assert keepsight("data", *TINY, *DATA, "limit=30").startswith("2")
    skipped = read_json(here / "data" / "manifest.json")["skipped"]
    assert skipped
    assert f"{len(skipped)} of 30 samples were skipped, such as {skipped[0]['index']}: " in caplog.text


def test_a_mixture_that_is_no_mixture(keepsight: CommandLine, here: Path) -> None:
    path = here / "mixture.yaml"
    mixture = path.read_text()
    path.write_text("sources: [")
    keepsight.refuses("mixture.yaml", "file", "data", *TINY, *DATA)
    path.write_text(mixture.replace("local_jsonl", "local_json"))
    keepsight.refuses("local_json", "unknown", "data", *TINY, *DATA)

    lists_of_lists = ["a: &a [x]"]
    for inner, outer in pairwise("abcdefgh"):
        aliases = ", ".join(9 * [f"*{inner}"])
        lists_of_lists.append(f"{outer}: &{outer} [{aliases}]")
    path.write_text("\n".join(lists_of_lists))
    keepsight.refuses("mixture.yaml", "memory", "data", *TINY, *DATA)
    path.write_text("a: &a [*a]")
    keepsight.refuses("mixture.yaml", "memory", "data", *TINY, *DATA)

    path.write_text("- 1")
    keepsight.refuses("mixture", "type", "data", *TINY, *DATA)


def test_nucleus_sampling_needs_a_temperature(keepsight: CommandLine) -> None:
    keepsight.refuses("top_p", "conflict", "data", *TINY, *DATA, "top_p=0.9")
    keepsight.refuses("top_p", "conflict", "eval", *TINY, "tasks=niah_single", "out=out", "top_p=0.9")


def test_answers_are_the_models_or_the_sources(keepsight: CommandLine, here: Path) -> None:
    """Of three rows, two have a response."""
    rows = [
        {"prompt": "Say 0.", "response": "A response."},
        {"prompt": "Say 1.", "response": "A response."},
        {"prompt": "Say 9."},
    ]
    write_lines(here / "rows.jsonl", rows)
    (here / "rows.yaml").write_text(
        "min_tokens: 100\nmax_tokens: 400\nsources: [{kind: local_jsonl, path: rows.jsonl}]\n"
    )
    data = ("data", *TINY, *DATA, "mixture=rows.yaml", "limit=12")
    is_response: dict[str, list[bool]] = {}
    for answers in ("mixture", "model", "source"):
        keepsight(*data, f"answers={answers}", f"out={answers}")
        is_response[answers] = [sample.answer.startswith("A resp") for sample in samples_of(here / answers)]
    assert len(is_response["model"]) == 12
    assert not any(is_response["model"])
    assert len(is_response["source"]) < 12
    assert all(is_response["source"])
    assert len(is_response["mixture"]) == 12
    assert sum(is_response["mixture"]) == len(is_response["source"])
    keepsight.refuses("answers", "conflict", *data, "out=source")


def test_a_mixture_may_have_aliases(keepsight: CommandLine, here: Path) -> None:
    aliased = "sources:\n  - &rows {kind: local_jsonl, path: rows.jsonl}\n  - *rows\n"
    (here / "aliased.yaml").write_text(f"min_tokens: 100\nmax_tokens: 400\n{aliased}")
    assert keepsight("data", *TINY, *DATA, "mixture=aliased.yaml").startswith("6 samples")


def test_a_mixture_reads_no_environment(keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    mixture = (here / "mixture.yaml").read_text()
    (here / "mixture.yaml").write_text(mixture + "notes: ${oc.env:SECRET}\n")
    message = keepsight.fails("data", *TINY, *DATA)
    assert "notes" in message
    assert "hunter2" not in message
    (here / "mixture.yaml").write_text(mixture.replace("rows.jsonl", "'${oc.env:SECRET}.jsonl'"))
    assert "${oc.env:SECRET}.jsonl" in keepsight.fails("data", *TINY, *DATA)
    assert not (here / "data").exists()


@pytest.mark.slow
def test_two_processes_share_the_shards(keepsight: CommandLine, here: Path) -> None:
    """As `torchrun --nproc-per-node=2` starts them: what they make is what one makes."""
    result = launch(here, "-m", "keepsight", "data", *TINY, *DATA)
    assert result.returncode == 0, result.stderr[-2000:]
    keepsight("data", *TINY, *DATA, "out=one")
    assert samples_of(here / "one") == samples_of(here / "data")
    assert len([*(here / "data").glob("*.arrow")]) == 3
    assert read_json(here / "one" / "manifest.json") == read_json(here / "data" / "manifest.json")


def test_one_process_makes_the_data_of_a_folder_at_a_time(keepsight: CommandLine, here: Path) -> None:
    printed = keepsight("data", *TINY, *DATA)
    assert printed.endswith("\nnext: keepsight train data=data out=runs/adapter model.id=tiny\n")
    with one_writer(here / "data"):
        keepsight.refuses("out", "conflict", "data", *TINY, *DATA, "limit=9")


def test_a_full_disk_keeps_what_is_done(keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_that_fit = 3

    def append_while_there_is_room(path: Path, rows: Any) -> None:
        nonlocal rows_that_fit
        for row in rows:
            if rows_that_fit == 0:
                with path.open("a") as stream:
                    stream.write(json.dumps(row)[:40])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            rows_that_fit -= 1
            append_lines(path, [row])

    with monkeypatch.context() as patch:
        patch.setattr(store, "append_lines", append_while_there_is_room)
        message = keepsight.fails("data", *TINY, *DATA)
    assert "No space left on device: 'data/shard-00001.jsonl.partial'; free some space and run the same" in message
    (finished_shard,) = (here / "data").glob("*.arrow")
    assert finished_shard.name.startswith("shard-00000")

    keepsight("data", *TINY, *DATA)
    resumed_samples = samples_of(here / "data")
    shutil.rmtree(here / "data")
    keepsight("data", *TINY, *DATA)
    assert samples_of(here / "data") == resumed_samples


def test_an_interrupted_process_says_so_and_goes_on(keepsight: CommandLine, here: Path) -> None:
    command = last_of_each_key(["data", *TINY, *DATA, "limit=24", "max_new_tokens=60"])
    process = subprocess.Popen(
        [sys.executable, "-m", "keepsight", *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # background jobs ignore it
    )
    deadline = time.monotonic() + 90
    while process.poll() is None and time.monotonic() < deadline:
        if list((here / "data").glob("shard-00001*")):
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "Traceback" not in errors
    last_line = errors.rstrip("\n").splitlines()[-1]
    assert last_line == "keepsight: error: interrupted; what was done is kept: run the same command again to resume"
    assert len([*(here / "data").glob("shard-00000-*.arrow")]) == 1
    assert read_json(here / "data" / "manifest.json")["complete"] is False

    assert keepsight(*command).startswith("24 samples in data: ")
    assert [sample.index for sample in samples_of(here / "data")] == list(range(24))


@pytest.mark.parametrize("command", ["data", "eval", "plan"])
def test_a_packaged_file_stands_for_its_own_id_alone(
    command: str, keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model's answers would be written under the name that was asked for."""
    files = tree(here)
    monkeypatch.setattr(model_files, "hub_answers", lambda: False)
    keys = {"data": ["out=data"], "eval": ["out=eval", "methods=[snapkv]"], "plan": ["memory=24GiB"]}[command]
    keepsight.refuses("model.id", "missing", command, "model.id=ada/other", *keys)
    assert tree(here) == files
