"""Answers from `transformers serve`, started on the loopback with a tiny model, which is killed and started again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepsight.data_gen.backends import Answers, Decoding, Rendered, Server, answer
from keepsight.data_gen.generate import generate_data
from keepsight.data_gen.store import finished_manifest, finished_samples
from keepsight.endpoint import ServerSettings
from keepsight.files import read_jsonl
from keepsight.models.targets import load_target, outline_target
from tests.data_gen.served import free_port, serving
from tests.refused import refused
from tests.tiny import save_tiny_target

for package in ("fastapi", "uvicorn"):
    pytest.importorskip(package, reason="transformers[serving] is not installed")
pytestmark = pytest.mark.slow
MIXTURE = {"min_tokens": 100, "max_tokens": 140, "sources": [{"kind": "key_values"}]}
SETTINGS: dict[str, Any] = {"limit": 16, "seed": 0, "max_new_tokens": 6, "shard_size": 16}


def test_a_real_server_that_is_killed_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepsight.endpoint.FIRST_WAIT", 0.05)
    folder = save_tiny_target(tmp_path / "tiny")
    data = tmp_path / "data"
    port = free_port()
    outline = outline_target(str(folder))
    backend = Server(outline, ServerSettings(url=f"http://127.0.0.1:{port}/v1", parallel=2, tries=3))
    with serving(folder, port) as process:

        def kill_the_server_after_four(prompts: list[Rendered], decoding: Decoding) -> Iterator[Answers]:
            for position, ready in enumerate(backend(prompts, decoding)):
                yield ready
                if position == 3:
                    process.kill()

        with refused("server.url", "service"):
            generate_data(outline, MIXTURE, data, backend=kill_the_server_after_four, **SETTINGS)
    (partial,) = data.glob("shard-*.partial")
    assert 4 <= len(list(read_jsonl(partial))) < 16
    with serving(folder, port):
        assert generate_data(outline, MIXTURE, data, backend=backend, **SETTINGS)["samples"] == 16
    samples = list(finished_samples(data, finished_manifest(data)))
    assert [sample.index for sample in samples] == list(range(16))
    target = load_target(str(folder), dtype="float32", device="cpu")
    for sample in samples:  # the server gives texts, whose ids may differ from those that were generated
        (ids,) = answer(target, [Rendered(0, "", sample.prompt_ids, None)], Decoding(6))
        text = target.tokenizer.decode(ids, skip_special_tokens=True)
        assert sample.answer_ids == target.tokenizer(text)["input_ids"][:6]
