"""RestoreKV: learned entries against PEFT's pass over the whole cache, and what is kept beside them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from keepsight.errors import UserError
from keepsight.runtime.methods import Resources, RestoreKV, make_method
from keepsight.runtime.methods.reconstruction import Reconstruction
from keepsight.runtime.methods.restore import RestoreWeights
from keepsight.runtime.state import Needs, prefill, read
from tests.close import assert_close
from tests.families import family_model
from tests.models.scorers import save_restore, tiny_restore
from tests.refused import refused
from tests.runtime.test_reconstruction import TOKENIZER
from tests.tiny import SmallVocabulary, prompt_ids, tiny_model

LENGTH = 40
BUDGET = 16
ADDED = 3
"""Learned entries."""


@pytest.fixture(scope="module")
def tiny():
    return tiny_model("qwen3", vocab_size=512, pad_token_id=511)


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_restore(tmp_path_factory.mktemp("restore"), tiny, ADDED)


def method_from(folder: Path, budget: int | float = BUDGET, **options) -> RestoreKV:
    method = make_method("restorekv", budget, Resources(tokenizer=TOKENIZER, scorer=folder), **options)
    assert isinstance(method, RestoreKV)
    return method


def next_positions(state) -> list[int]:
    """The position of the next token of each row."""
    return (state.lengths + state.rope_offset).tolist()


def test_learned_entries_are_those_of_pefts_pass_over_the_whole_cache(tiny, folder):
    ids, mask = prompt_ids(LENGTH, 29)
    state = method_from(folder).start(tiny, ids, mask)
    adapted = PeftModel.from_pretrained(copy.deepcopy(tiny), str(folder))
    tokens = load_file(folder / "restore_embeddings.safetensors")["restore_embeddings"]
    for row, length in enumerate((LENGTH, 29)):
        with torch.no_grad():
            cache = tiny(ids[row : row + 1, LENGTH - length :], use_cache=True).past_key_values
            positions = torch.arange(length, length + ADDED)[None]
            adapted(inputs_embeds=tokens[None], past_key_values=cache, position_ids=positions)
        for layer, expected in zip(state.entries(), cache.layers, strict=True):
            assert_close(layer.keys[row, :, -ADDED:], expected.keys[0, :, -ADDED:])
            assert_close(layer.values[row, :, -ADDED:], expected.values[0, :, -ADDED:])


def test_they_are_in_the_budget_and_what_follows_stands_behind_them(tiny, folder):
    ids, mask = prompt_ids(LENGTH)
    method = method_from(folder)
    state = method.start(tiny, ids, mask)
    assert int(state.counts().sum()) == state.counts().numel() * BUDGET
    kvzip = make_method("kvzip", BUDGET - ADDED, Resources(tokenizer=TOKENIZER))
    kvzip_state = kvzip.start(tiny, ids, mask)
    assert torch.equal(kvzip_state.counts() + ADDED, state.counts())
    assert next_positions(state) == [LENGTH + ADDED]
    assert state.lengths.tolist() == [LENGTH]

    of_ratio = method_from(folder, 0.4).start(tiny, ids, mask)
    assert torch.equal(of_ratio.counts(), state.counts())
    after, _ = read(tiny, state, torch.tensor([[5, 9]]))
    assert torch.equal(after.counts(), method.start(tiny, ids, mask).counts() + 2)


def test_a_token_after_them_attends_to_all(tiny):
    """With every entry of the prompt kept, and plain tokens as learned ones: as if these had been read."""
    ids, mask = prompt_ids(LENGTH)
    tokens = tiny.get_input_embeddings()(torch.tensor([7, 8])).detach()
    method = RestoreKV(BUDGET, Reconstruction(TOKENIZER), weights=RestoreWeights("plain tokens", tokens, {}))
    state = prefill(tiny, ids, mask, needs=method.needs())
    all_entries = [torch.ones(1, layer.kv_heads, LENGTH, dtype=torch.bool) for layer in state.layers]
    restored = method.keep(tiny, state, all_entries)
    logits = read(tiny, restored, torch.tensor([[9]]))[1]
    with torch.no_grad():
        expected = tiny(torch.cat([ids, torch.tensor([[7, 8, 9]])], dim=1)).logits[:, -1:]
    assert_close(logits, expected)


@pytest.mark.parametrize("family", ["Gemma 2", "Llama 4 (text)", "DeepSeek-V3", "Qwen3-Next"])
def test_entries_in_layers_of_any_kind_are_those_of_tokens_read(family):
    model = family_model(family)
    ids, mask = prompt_ids(LENGTH, 29)
    token_ids = torch.tensor([[7, 8]])
    tokens = model.get_input_embeddings()(token_ids)[0].detach()
    tokenizer: Any = SmallVocabulary()
    method = RestoreKV(BUDGET, Reconstruction(tokenizer), weights=RestoreWeights("plain tokens", tokens, {}))
    state = method.start(model, ids, mask)
    full_cache, _ = read(model, prefill(model, ids, mask, needs=Needs()), token_ids.expand(2, -1))
    assert [layer.keys.shape[-1] for layer in state.layers]
    assert next_positions(state) == [LENGTH + 2, 31]
    for layer, expected in zip(state.entries(), full_cache.entries(), strict=True):
        assert_close(layer.keys[:, :, -2:], expected.keys[:, :, -2:])
        assert_close(layer.values[:, :, -2:], expected.values[:, :, -2:])


def test_a_prompt_within_the_budget_is_left_alone(tiny, folder):
    ids, mask = prompt_ids(BUDGET)
    state = method_from(folder).start(tiny, ids, mask)
    assert next_positions(state) == [BUDGET]
    assert torch.equal(state.logits, prefill(tiny, ids, mask).logits)


def test_they_are_added_again_only_to_a_turn_that_exceeds_the_budget(tiny, folder):
    method = method_from(folder)
    ids, mask = prompt_ids(LENGTH)
    state = method.start(tiny, ids, mask)
    after_empty_turn = method.resume(tiny, state, ids[:, :0])
    assert torch.equal(after_empty_turn.counts(), state.counts())
    assert next_positions(after_empty_turn) == [LENGTH + ADDED]

    after_turn = method.resume(tiny, state, torch.tensor([[5, 9]]))
    assert after_turn.counts().sum() == state.counts().sum()
    assert next_positions(after_turn) == [LENGTH + 2 + 2 * ADDED]


def test_an_observer_of_single_layers_gets_them_too(tiny, folder):
    ids, mask = prompt_ids(LENGTH)
    state = method_from(folder, observer="prompt_window", allocate="uniform", window=4).start(tiny, ids, mask)
    assert next_positions(state) == [LENGTH + ADDED]
    assert int(state.counts().max()) == BUDGET
    with refused("during_prefill", "conflict"):
        method_from(folder, observer="prompt_window", allocate="uniform", during_prefill=True)


def test_what_does_not_fit_is_one_line(tiny, folder, tmp_path):
    with refused("budget", "range"):
        method_from(folder, 7)
    with refused("every", "conflict"):
        method_from(folder, every=4)
    wide = tiny_model(hidden_size=64)
    with refused("scorer", "model"):
        RestoreWeights("narrow", tiny_restore(tiny).tokens, {}).bound(wide)
    with pytest.raises(UserError) as error:
        RestoreWeights.from_pretrained(folder).bound(tiny_model("qwen3", intermediate_size=16))
    assert "up_proj" in error.value.field
    assert error.value.code == "model"
    save_file({"other": torch.ones(2)}, tmp_path / "a.safetensors")
    with refused("scorer", "file"):
        RestoreWeights.from_pretrained(tmp_path)
    for name in ("b.safetensors", "c.safetensors"):
        save_file({"restore_embeddings": torch.ones(2, 8)}, tmp_path / name)
    with refused("scorer", "conflict"):
        RestoreWeights.from_pretrained(tmp_path)
    with refused("scorer", "missing"):
        make_method("restorekv", BUDGET, Resources(tokenizer=TOKENIZER))


def test_weights_of_kvzip_plus_are_known_by_their_name(tiny, tmp_path):
    resources = Resources(tokenizer=TOKENIZER)
    for name, plus in (("RestoreKV-Tiny", False), ("RestoreKV-Tiny_plus", True)):
        folder = save_restore(tmp_path / name, tiny)
        method: Any = make_method("restorekv", BUDGET, resources, scorer=str(folder))
        assert method.weights.plus == method.observer.normalized == plus
        overridden: Any = make_method(
            "restorekv", BUDGET, resources, scorer=str(folder), observer={"normalized": not plus}
        )
        assert overridden.observer.normalized != plus
    torch.save({"embeddings": tiny_restore(tiny).tokens}, tmp_path / "qwen_plus.pt")
    assert RestoreWeights.from_pretrained(tmp_path / "qwen_plus.pt").plus


def test_the_authors_pickle_is_read_as_tensors(tiny, tmp_path):
    generator = torch.Generator().manual_seed(1)
    down = torch.randn(2, 32, generator=generator)
    up = torch.randn(32, 2, generator=generator)
    name = "model.layers.0.self_attn.q_proj"
    tokens = tiny_restore(tiny).tokens
    published = {
        "restore": {"state_dict": {"embeddings": tokens}},
        "trainable_model_state": {f"{name}.lora_a": down, f"{name}.lora_b": up},
    }
    torch.save(published, tmp_path / "a.pt")
    weights = RestoreWeights.from_pretrained(tmp_path / "a.pt")
    assert torch.equal(weights.tokens, tokens)
    assert weights.alpha == 16

    bound, lora = weights.bound(tiny)
    assert torch.equal(bound, tokens)
    assert lora is not None
    hidden = torch.randn(1, 3, 32, generator=generator)
    linear = tiny.model.layers[0].self_attn.q_proj
    with torch.no_grad(), lora.attached():
        adapted = linear(hidden)
    assert_close(adapted, linear(hidden) + hidden @ down.T @ up.T * 8)
