"""Answers from `transformers serve`, started on the loopback with a tiny model; either side is killed and goes on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from keepsight.data_gen.backends import Answers, Decoding, Rendered, Server, answer
from keepsight.data_gen.generate import generate_data
from keepsight.data_gen.store import finished_manifest, finished_samples
from keepsight.endpoint import ServerSettings
from keepsight.errors import UserError
from keepsight.files import read_jsonl
from keepsight.models.targets import load_target, outline_target
from tests.data_gen.served import free_port, serving
from tests.tiny import save_tiny_target

for package in ("fastapi", "openai", "uvicorn"):
    pytest.importorskip(package, reason="transformers[serving] is not installed")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
MIXTURE = {"min_tokens": 100, "max_tokens": 140, "sources": [{"kind": "key_values"}]}
MADE: dict[str, Any] = {"limit": 16, "seed": 0, "max_new_tokens": 6, "shard_size": 16}


def kill_a_client(folder: Path, port: int, out: Path) -> int:
    """Start `keepsight data`, and kill it when two answers are there; how many there are in the end."""
    mixture = out.with_name("mixture.yaml")
    mixture.write_text(yaml.safe_dump(MIXTURE))
    given = [f"model.id={folder}", f"mixture={mixture}", f"out={out}", *(f"{key}={MADE[key]}" for key in MADE)]
    given += ["backend=server", f"server.url=http://127.0.0.1:{port}/v1", "server.parallel=1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "keepsight", "data", *given], env=environment)
    partial, deadline = out / "shard-00000.jsonl.partial", time.monotonic() + 180
    while process.poll() is None and answered(partial) < 2 and time.monotonic() < deadline:
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    return answered(partial)


def answered(partial: Path) -> int:
    return partial.read_bytes().count(b"\n") if partial.exists() else 0


def test_a_real_server_and_a_client_that_are_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepsight.endpoint.FIRST_WAIT", 0.05)
    folder, port = save_tiny_target(tmp_path / "tiny"), free_port()
    outline = outline_target(str(folder))
    backend = Server(outline, ServerSettings(url=f"http://127.0.0.1:{port}/v1", parallel=2, tries=3))
    killed: list[subprocess.Popen[bytes]] = []

    def until_it_is_killed(prompts: list[Rendered], decoding: Decoding) -> Iterator[Answers]:
        for number, ready in enumerate(backend(prompts, decoding)):
            yield ready
            if number == 3:
                killed[0].kill()

    def make(answering: Any) -> dict[str, Any]:
        return generate_data(outline, MIXTURE, tmp_path / "data", backend=answering, **MADE)

    with serving(folder, port) as process:
        before = kill_a_client(folder, port, tmp_path / "data")
        assert 2 <= before < 10
        killed.append(process)
        with pytest.raises(UserError, match=r"no answer .*run the same command again to go on"):
            make(until_it_is_killed)
    (partial,) = (tmp_path / "data").glob("shard-*.partial")
    assert before + 4 <= len(list(read_jsonl(partial))) < 16
    with serving(folder, port):
        assert make(backend)["samples"] == 16
    rows = [*finished_samples(tmp_path / "data", finished_manifest(tmp_path / "data"))]
    assert [row.index for row in rows] == list(range(16))
    target = load_target(str(folder), dtype="float32", device="cpu")
    for row in rows:  # the server gives texts, whose ids may differ from those that were generated
        ids = answer(target, [Rendered(0, "", row.prompt_ids, None)], Decoding(6))[0]
        text = target.tokenizer.decode(ids, skip_special_tokens=True)
        assert row.answer_ids == target.tokenizer(text)["input_ids"][:6]
