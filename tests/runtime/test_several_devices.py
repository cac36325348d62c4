"""Targets whose layers lie on several (pretended) devices: what comes of them is what comes of whole ones."""

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
OTHERS = ["GPT-OSS", "Granite 4 (Mamba-2)"]


@pytest.fixture(scope="module")
def whole() -> Any:
    return fresh_model(FAMILY)


@pytest.fixture(scope="module")
def halves() -> Any:
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
    rows = slice(0, 1 if type(method).__name__.lower() in UNPADDED else 2)
    ids, mask = (each[rows].to(model.device) for each in (IDS, MASK))
    answered: list[list[int]] = generate(model, ids, method, attention_mask=mask, max_new_tokens=6, **options).tolist()
    return answered


@pytest.mark.parametrize("name", [name for name in NAMES if KINDS.get(name) != {"positions"} or name == "lacache"])
def test_a_method(whole: Any, halves: Any, folder: Path, name: str) -> None:
    expected = answer(whole, method_of(name, FAMILY, folder), prefill_chunk_size=16)
    with several_devices():
        assert answer(halves, method_of(name, FAMILY, folder), prefill_chunk_size=16) == expected


@pytest.mark.parametrize("family", OTHERS)
def test_another_family(folder: Path, family: str) -> None:
    methods = [method_of(name, family, folder) for name in ("lookaheadkv", "h2o", "quest")]
    expected = [answer(fresh_model(family), method) for method in methods]
    with several_devices():
        model = in_halves(fresh_model(family))
        assert [answer(model, method) for method in methods] == expected


def test_further_turns_and_eviction_while_decoding(whole: Any, halves: Any) -> None:
    method, turns = SnapKV(24, window=8, every=4), IDS[:1].split(20, dim=1)

    def answers(model: Any) -> list[list[int]]:
        conversation = Conversation(model, method)
        return [conversation.say(turn.to(model.device), max_new_tokens=6).tolist()[0] for turn in turns]

    expected = answers(whole)
    with several_devices():
        assert answers(halves) == expected


def test_a_saved_state_goes_back_to_the_devices_of_its_layers(halves: Any, tmp_path: Path) -> None:
    method = SnapKV(16, window=8)
    with several_devices():
        state = method.start(halves, IDS.to(FIRST), MASK.to(FIRST))
        loaded = load_state(save_state(state, tmp_path, model=halves), halves).state
        assert [each.keys.device for each in loaded.entries()] == [FIRST, FIRST, SECOND, SECOND]
        assert [each.device for each in recorded(loaded, "queries")] == [FIRST, FIRST, SECOND, SECOND]
        token = IDS[:, :1].to(FIRST)
        assert torch.equal(*(read(halves, each.copy(), token)[1] for each in (state, loaded)))


def test_entries_in_cpu_memory_are_for_one_device(halves: Any) -> None:
    method = SpeContext(16, tiny_retrieval_head("none"), offload=1)
    with (
        several_devices(),
        refused("model.device_map", "model"),
    ):
        generate(halves, IDS[:1].to(FIRST), method, max_new_tokens=2)


def test_a_sparse_prefill_and_features(whole: Any, halves: Any, folder: Path) -> None:
    head = tiny_retrieval_head("previous-step", max_position_embeddings=1024)
    sparse = {"name": "vertical_slash", "vertical": 32, "band": 64}
    methods = [make_method("speckv", 32, DRAFT, window=8, sparse=sparse), SpeContext(48, head)]
    prompt = prompt_ids(200)[0]
    expected = [generate(whole, prompt, each, max_new_tokens=6).tolist() for each in methods]
    with several_devices():
        found = [generate(halves, prompt.to(FIRST), each, max_new_tokens=6).tolist() for each in methods]
    assert found == expected


def test_pretended_devices_refuse_what_cuda_refuses() -> None:
    with several_devices():
        first, second, host = torch.ones(3, device=FIRST), torch.ones(3, device=SECOND), torch.arange(3)
        assert (first + torch.tensor(2.0)).device == first[host].device == (second.to(FIRST) + first).device == FIRST
        refused = [
            lambda: first + second,
            lambda: first + host,
            lambda: first + second.sum(),
            lambda: torch.cat([first, second]),
            lambda: torch.stack([first.sum(), torch.tensor(1.0)]),
            lambda: host[host.to(FIRST)],
            lambda: first[host.to(SECOND)],
        ]
        for mix in refused:
            with pytest.raises(RuntimeError, match="tensors on"):
                mix()
        with pytest.raises(TypeError, match="numpy of a tensor on cpu:0"):
            first.numpy()
