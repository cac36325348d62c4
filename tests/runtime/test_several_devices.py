"""Targets whose layers lie on several (pretended) devices: they answer as models on one device do."""

from pathlib import Path
from typing import Any

import pytest
import torch

from keepsight import SnapKV, SpeContext, generate
from keepsight.runtime.conversation import Conversation
from keepsight.runtime.methods import make_method
from keepsight.runtime.saved import load_state, save_state
from keepsight.runtime.state import read
from tests.devices import FIRST, SECOND, in_halves, several_devices
from tests.families import fresh_model
from tests.models.retrieval_heads import tiny_retrieval_head
from tests.refused import refused
from tests.runtime.family_methods import DRAFT, KINDS, NAMES, method_of
from tests.runtime.scoring import recorded
from tests.tiny import prompt_ids

FAMILY = "Llama 3"
IDS, MASK = prompt_ids(60, 44)
UNPADDED = {"infllm", "kivi", "specache", "think"}
"""Methods that take no padding."""


@pytest.fixture(scope="module")
def one_device_model() -> Any:
    return fresh_model(FAMILY)


@pytest.fixture(scope="module")
def halved_model() -> Any:
    with several_devices():
        return in_halves(fresh_model(FAMILY))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draft: Any = DRAFT.draft
    with several_devices():
        draft.model.to(FIRST)
    return tmp_path_factory.mktemp("adapters")


def answer(model: Any, method: Any, **options: Any) -> list[list[int]]:
    """To two prompts, one of them padded; to one, from a method that takes no padding."""
    rows = 1 if type(method).__name__.lower() in UNPADDED else 2
    ids = IDS[:rows].to(model.device)
    mask = MASK[:rows].to(model.device)
    answers: list[list[int]] = generate(model, ids, method, attention_mask=mask, max_new_tokens=6, **options).tolist()
    return answers


@pytest.mark.parametrize("name", [name for name in NAMES if KINDS.get(name) != {"positions"} or name == "lacache"])
def test_a_method(one_device_model: Any, halved_model: Any, folder: Path, name: str) -> None:
    expected = answer(one_device_model, method_of(name, FAMILY, folder), prefill_chunk_size=16)
    with several_devices():
        assert answer(halved_model, method_of(name, FAMILY, folder), prefill_chunk_size=16) == expected


@pytest.mark.parametrize("family", ["GPT-OSS", "Granite 4 (Mamba-2)"])
def test_another_family(folder: Path, family: str) -> None:
    methods = [method_of(name, family, folder) for name in ("lookaheadkv", "h2o", "quest")]
    expected = [answer(fresh_model(family), method) for method in methods]
    with several_devices():
        model = in_halves(fresh_model(family))
        assert [answer(model, method) for method in methods] == expected


def test_further_turns_and_eviction_while_decoding(one_device_model: Any, halved_model: Any) -> None:
    method = SnapKV(24, window=8, every=4)

    def answers_to_turns(model: Any) -> list[list[int]]:
        conversation = Conversation(model, method)
        answers = []
        for turn in IDS[:1].split(20, dim=1):
            answers.append(conversation.say(turn.to(model.device), max_new_tokens=6)[0].tolist())
        return answers

    expected = answers_to_turns(one_device_model)
    with several_devices():
        assert answers_to_turns(halved_model) == expected


def test_a_saved_state_goes_back_to_the_devices_of_its_layers(halved_model: Any, tmp_path: Path) -> None:
    method = SnapKV(16, window=8)
    with several_devices():
        state = method.start(halved_model, IDS.to(FIRST), MASK.to(FIRST))
        loaded = load_state(save_state(state, tmp_path, model=halved_model), halved_model).state
        assert [layer.keys.device for layer in loaded.entries()] == [FIRST, FIRST, SECOND, SECOND]
        assert [queries.device for queries in recorded(loaded, "queries")] == [FIRST, FIRST, SECOND, SECOND]
        token = IDS[:, :1].to(FIRST)
        _, expected = read(halved_model, state.copy(), token)
        _, logits = read(halved_model, loaded.copy(), token)
        assert torch.equal(logits, expected)


def test_entries_in_cpu_memory_are_for_one_device(halved_model: Any) -> None:
    method = SpeContext(16, tiny_retrieval_head("none"), offload=1)
    with several_devices(), refused("model.device_map", "model"):
        generate(halved_model, IDS[:1].to(FIRST), method, max_new_tokens=2)


def test_a_sparse_prefill_and_features(one_device_model: Any, halved_model: Any, folder: Path) -> None:
    head = tiny_retrieval_head("previous-step", max_position_embeddings=1024)
    sparse = {"name": "vertical_slash", "vertical": 32, "band": 64}
    methods = [make_method("speckv", 32, DRAFT, window=8, sparse=sparse), SpeContext(48, head)]
    prompt = prompt_ids(200)[0]
    expected = [generate(one_device_model, prompt, method, max_new_tokens=6).tolist() for method in methods]
    with several_devices():
        on_first = prompt.to(FIRST)
        answers = [generate(halved_model, on_first, method, max_new_tokens=6).tolist() for method in methods]
    assert answers == expected


def test_pretended_devices_refuse_what_cuda_refuses() -> None:
    with several_devices():
        on_first = torch.ones(3, device=FIRST)
        on_second = torch.ones(3, device=SECOND)
        on_host = torch.arange(3)
        assert (on_first + torch.tensor(2.0)).device == FIRST
        assert on_first[on_host].device == FIRST
        assert (on_second.to(FIRST) + on_first).device == FIRST
        mixtures = [
            lambda: on_first + on_second,
            lambda: on_first + on_host,
            lambda: on_first + on_second.sum(),
            lambda: torch.cat([on_first, on_second]),
            lambda: torch.stack([on_first.sum(), torch.tensor(1.0)]),
            lambda: on_host[on_host.to(FIRST)],
            lambda: on_first[on_host.to(SECOND)],
        ]
        for mix in mixtures:
            with pytest.raises(RuntimeError, match="tensors on"):
                mix()
        with pytest.raises(TypeError, match="numpy of a tensor on cpu:0"):
            on_first.numpy()
