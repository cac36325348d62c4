"""Answers from `transformers serve`, started on the loopback with a tiny model; it is killed, and started again."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from keepsight.data_gen.answers import AnsweredPrompts, Rendered, answer
from keepsight.data_gen.generate import generate_data
from keepsight.data_gen.mixture import Mixture
from keepsight.data_gen.server import Server, ServerSettings
from keepsight.errors import UserError
from keepsight.files import read_jsonl
from keepsight.models.outline import outline_target
from keepsight.models.targets import load_target
from tests.tiny import save_tiny_target

for package in ("fastapi", "openai", "uvicorn"):
    pytest.importorskip(package, reason="transformers[serving] is not installed")
pytestmark = pytest.mark.slow
MIXTURE = {"min_tokens": 100, "max_tokens": 140, "sources": [{"kind": "key_values"}]}


@contextmanager
def serving(folder: Path, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder), "--device", "cpu"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "--dtype", "float32", "--port", str(port)], env=environment)
    try:
        deadline = time.monotonic() + 180
        while process.poll() is None and time.monotonic() < deadline:
            try:
                urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            except (URLError, OSError):
                time.sleep(0.3)
        yield process
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_real_server_that_is_killed_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepsight.endpoint.FIRST_WAIT", 0.05)
    folder, port = save_tiny_target(tmp_path / "tiny"), free_port()
    outline = outline_target(str(folder))
    backend = Server(outline, ServerSettings(url=f"http://127.0.0.1:{port}/v1", parallel=2, tries=3))
    killed: list[subprocess.Popen[bytes]] = []

    def until_it_is_killed(prompts: list[Rendered], max_new_tokens: int) -> Iterator[AnsweredPrompts]:
        for number, ready in enumerate(backend(prompts, max_new_tokens)):
            yield ready
            if number == 3:
                killed[0].kill()

    def make(answering: Any) -> dict[str, Any]:
        mixture = Mixture.from_config(MIXTURE)
        settings: dict[str, Any] = {"limit": 12, "seed": 0, "max_new_tokens": 6, "shard_size": 12}
        return generate_data(outline, mixture, MIXTURE, tmp_path / "data", backend=answering, **settings)

    with serving(folder, port) as process:
        killed.append(process)
        with pytest.raises(UserError, match=r"no answer .*run the same command again to go on"):
            make(until_it_is_killed)
    (partial,) = (tmp_path / "data").glob("shard-*.partial")
    assert 4 <= len(list(read_jsonl(partial))) < 12
    with serving(folder, port):
        assert make(backend)["samples"] == 12
    rows = list(read_jsonl(tmp_path / "data" / "shard-00000.jsonl"))
    assert [row["index"] for row in rows] == list(range(12))
    target = load_target(str(folder), dtype="float32", device="cpu")
    for row in rows:  # the server gives texts, whose ids may differ from those that were generated
        ids = answer(target, [Rendered(0, "", row["prompt_ids"], None)], 6)[0]
        text = target.tokenizer.decode(ids, skip_special_tokens=True)
        assert row["answer_ids"] == target.tokenizer(text)["input_ids"][:6]
