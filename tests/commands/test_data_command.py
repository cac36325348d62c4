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
    assert "rows.jsonl:9: " in message and message.endswith("raise skip=0")
    assert keepsight("data", *TINY, *DATA, "limit=30").startswith("2")
    skipped = read_json(here / "data" / "manifest.json")["skipped"]
    assert skipped and f"{len(skipped)} of 30 samples were skipped, such as {skipped[0]['index']}: " in caplog.text


def test_a_mixture_that_is_no_mixture(keepsight: CommandLine, here: Path) -> None:
    mixture = (here / "mixture.yaml").read_text()
    (here / "mixture.yaml").write_text("sources: [")
    keepsight.refuses("mixture.yaml", "file", "data", *TINY, *DATA)
    (here / "mixture.yaml").write_text(mixture.replace("local_jsonl", "local_json"))
    keepsight.refuses("local_json", "unknown", "data", *TINY, *DATA)
    lists = [f"{name}: &{name} [{', '.join(9 * ['*' + before])}]" for before, name in pairwise("abcdefgh")]
    for aliases in (["a: &a [x]", *lists], ["a: &a [*a]"]):
        (here / "mixture.yaml").write_text("\n".join(aliases))
        keepsight.refuses("mixture.yaml", "memory", "data", *TINY, *DATA)
    (here / "mixture.yaml").write_text("- 1")
    keepsight.refuses("mixture", "type", "data", *TINY, *DATA)


def test_nucleus_sampling_needs_a_temperature(keepsight: CommandLine) -> None:
    keepsight.refuses("top_p", "conflict", "data", *TINY, *DATA, "top_p=0.9")
    keepsight.refuses("top_p", "conflict", "eval", *TINY, "tasks=niah_single", "out=out", "top_p=0.9")


def test_answers_are_the_models_or_the_sources(keepsight: CommandLine, here: Path) -> None:
    """Of three rows, two have a response."""
    rows = [{"prompt": f"Say {number}.", "response": "A response."} for number in range(2)] + [{"prompt": "Say 9."}]
    write_lines(here / "rows.jsonl", rows)
    (here / "rows.yaml").write_text(
        "min_tokens: 100\nmax_tokens: 400\nsources: [{kind: local_jsonl, path: rows.jsonl}]\n"
    )
    answers = {}
    for whose in ("mixture", "model", "source"):
        keepsight("data", *TINY, *DATA, "mixture=rows.yaml", "limit=12", f"answers={whose}", f"out={whose}")
        answers[whose] = [sample.answer.startswith("A resp") for sample in samples_of(here / whose)]
    assert len(answers["mixture"]) == len(answers["model"]) == 12 and not any(answers["model"])
    assert sum(answers["mixture"]) == len(answers["source"]) < 12 and all(answers["source"])
    keepsight.refuses("answers", "conflict", "data", *TINY, *DATA, "mixture=rows.yaml", "limit=12", "out=source")


def test_a_mixture_may_have_aliases(keepsight: CommandLine, here: Path) -> None:
    aliased = "sources:\n  - &rows {kind: local_jsonl, path: rows.jsonl}\n  - *rows\n"
    (here / "aliased.yaml").write_text(f"min_tokens: 100\nmax_tokens: 400\n{aliased}")
    assert keepsight("data", *TINY, *DATA, "mixture=aliased.yaml").startswith("6 samples")


def test_a_mixture_reads_no_environment(keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    mixture = (here / "mixture.yaml").read_text()
    (here / "mixture.yaml").write_text(mixture + "notes: ${oc.env:SECRET}\n")
    message = keepsight.fails("data", *TINY, *DATA)
    assert "notes" in message and "hunter2" not in message
    (here / "mixture.yaml").write_text(mixture.replace("rows.jsonl", "'${oc.env:SECRET}.jsonl'"))
    assert "${oc.env:SECRET}.jsonl" in keepsight.fails("data", *TINY, *DATA)
    assert not (here / "data").exists()


@pytest.mark.slow
def test_two_processes_share_the_shards(keepsight: CommandLine, here: Path) -> None:
    """As `torchrun --nproc-per-node=2` starts them: what they make is what one makes."""
    result = launch(here, "-m", "keepsight", "data", *TINY, *DATA)
    assert result.returncode == 0, result.stderr[-2000:]
    keepsight("data", *TINY, *DATA, "out=one")
    assert samples_of(here / "one") == samples_of(here / "data") and len([*(here / "data").glob("*.arrow")]) == 3
    assert read_json(here / "one" / "manifest.json") == read_json(here / "data" / "manifest.json")


def test_one_process_makes_the_data_of_a_folder_at_a_time(keepsight: CommandLine, here: Path) -> None:
    printed = keepsight("data", *TINY, *DATA)
    assert printed.endswith("\nnext: keepsight train data=data out=runs/adapter model.id=tiny\n")
    with one_writer(here / "data"):
        keepsight.refuses("out", "conflict", "data", *TINY, *DATA, "limit=9")


def test_a_full_disk_keeps_what_is_done(keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = [3]

    def limited(path: Path, rows: Any) -> None:
        for row in rows:
            room[0] -= 1
            if room[0] < 0:
                with path.open("a") as stream:
                    stream.write(json.dumps(row)[:40])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            append_lines(path, [row])

    with monkeypatch.context() as patch:
        patch.setattr(store, "append_lines", limited)
        message = keepsight.fails("data", *TINY, *DATA)
    assert "No space left on device: 'data/shard-00001.jsonl.partial'; free some space and run the same" in message
    assert [path.name[:11] for path in (here / "data").glob("*.arrow")] == ["shard-00000"]
    keepsight("data", *TINY, *DATA)
    stopped = samples_of(here / "data")
    shutil.rmtree(here / "data")
    keepsight("data", *TINY, *DATA)
    assert samples_of(here / "data") == stopped


def test_an_interrupted_process_says_so_and_goes_on(keepsight: CommandLine, here: Path) -> None:
    given = last_of_each_key(["data", *TINY, *DATA, "limit=24", "max_new_tokens=60"])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "keepsight", *given]
    process = subprocess.Popen(
        command,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # background jobs ignore it
    )
    deadline = time.monotonic() + 90
    while process.poll() is None and not list((here / "data").glob("shard-00001*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and "Traceback" not in errors
    last = errors.rstrip("\n").splitlines()[-1]
    assert last == "keepsight: error: interrupted; what was done is kept: run the same command again to resume"
    assert len([*(here / "data").glob("shard-00000-*.arrow")]) == 1
    assert read_json(here / "data" / "manifest.json")["complete"] is False
    assert keepsight(*given).startswith("24 samples in data: ")
    assert [row.index for row in samples_of(here / "data")] == list(range(24))


@pytest.mark.parametrize("command", ["data", "eval", "plan"])
def test_a_packaged_file_stands_for_its_own_id_alone(
    command: str, keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model's answers would be written under the name that was asked for."""
    before = tree(here)
    monkeypatch.setattr(model_files, "hub_answers", lambda: False)
    keys = {"data": ["out=data"], "eval": ["out=eval", "methods=[snapkv]"], "plan": ["memory=24GiB"]}[command]
    keepsight.refuses("model.id", "missing", command, "model.id=ada/other", *keys)
    assert tree(here) == before
