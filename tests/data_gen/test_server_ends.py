"""A server that dies in the middle of the data, and a client that is killed: nothing is lost or doubled."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from keepsight.data_gen.backends import Rendered, answer
from keepsight.data_gen.generate import generate_data
from keepsight.data_gen.mixture import Mixture
from keepsight.errors import UserError
from keepsight.files import read_json, read_jsonl
from keepsight.models.targets import Target, outline_target
from tests.data_gen.served import Heard, Reply, client, server, speaks

pytestmark = pytest.mark.usefixtures("no_waiting")
ROOT = Path(__file__).parents[2]
MIXTURE = {"min_tokens": 100, "max_tokens": 200, "sources": [{"kind": "key_values"}]}


def make(outline: Target, heard: Heard, out: Path) -> dict[str, Any]:
    backend = client(outline, heard, parallel=3)
    mixture = Mixture.from_config(MIXTURE)
    return generate_data(
        outline, mixture, MIXTURE, out, limit=20, seed=3, max_new_tokens=8, shard_size=8, backend=backend
    )


def samples(out: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(out.glob("shard-*.jsonl")) for row in read_jsonl(path)]


def test_a_server_that_dies_ends_the_run_clearly_and_nothing_is_lost_or_doubled(
    target: Target, folder: Path, tmp_path: Path
) -> None:
    """The target's weights are never loaded: its outline has none."""
    outline = outline_target(str(folder))
    assert outline.model.device.type == "meta"
    assert (outline.version, outline.template_digest) == (target.version, target.template_digest)
    assert (outline.end_tokens, outline.pad_token) == (target.end_tokens, target.pad_token)
    say, left = speaks(target), [11]

    def dies(body: dict[str, Any]) -> Reply:
        left[0] -= 1
        return say(body) if left[0] >= 0 else None

    with server(dies) as heard:
        with pytest.raises(UserError, match=r"no answer .*what was answered is kept: run the same command again"):
            make(outline, heard, tmp_path / "data")
        assert read_json(tmp_path / "data" / "manifest.json")["complete"] is False
    kept = sum(path.read_bytes().count(b"\n") for path in (tmp_path / "data").glob("shard-*"))
    assert kept == 11
    with server(say) as heard:
        manifest = make(outline, heard, tmp_path / "data")
        assert len(heard.bodies) == 9
        assert make(outline, heard, tmp_path / "once")["digest"] == manifest["digest"]
    assert [row["index"] for row in samples(tmp_path / "data")] == list(range(20))
    for row in samples(tmp_path / "data"):
        assert row["answer_ids"] == answer(target, [Rendered(0, "", row["prompt_ids"], None)], 8)[0]


def test_a_client_that_is_killed_goes_on(target: Target, folder: Path, tmp_path: Path) -> None:
    mixture, out = tmp_path / "mixture.yaml", tmp_path / "data"
    mixture.write_text(yaml.safe_dump(MIXTURE))
    say = speaks(target)

    def slowly(body: dict[str, Any]) -> Reply:
        time.sleep(0.05)
        return say(body)

    def start(url: str) -> "subprocess.Popen[bytes]":
        given = ["data", f"model.id={folder}", f"mixture={mixture}", f"out={out}", "limit=20", "seed=3"]
        given += ["max_new_tokens=8", "shard_size=8", "backend=server", f"server.url={url}", "server.model=served"]
        given += ["server.parallel=3"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([sys.executable, "-m", "keepsight", *given], env=environment)

    with server(slowly) as heard:
        process = start(heard.url)
        deadline = time.monotonic() + 90
        while process.poll() is None and len(heard.bodies) < 10 and time.monotonic() < deadline:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
    outline = outline_target(str(folder))
    with server(say) as heard:
        make(outline, heard, out)
        assert 0 < len(heard.bodies) < 20
        make(outline, heard, tmp_path / "once")
    assert [row["index"] for row in samples(out)] == list(range(20))
    assert samples(out) == samples(tmp_path / "once")
