"""Drafts against models built layer by layer, and the drafts that are refused."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from keepsight.commands.config_shared import DraftConfig, ModelConfig, UsesMethods
from keepsight.commands.from_recipe import draft_of
from keepsight.errors import UserError
from keepsight.models.draft_sources import LayerSubset, NamedDraft, named_draft
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.models.targets import Target, load_target
from tests.close import assert_close
from tests.refused import refused
from tests.tiny import prompt_ids, save_tiny_target, tiny_model, tiny_tokenizer

DEPTH = 5
KEPT = (0, 2, 4)
IDS, _ = prompt_ids(24)


@pytest.fixture
def target() -> PreTrainedModel:
    return deep_model("qwen3")


def deep_model(family: str = "llama") -> PreTrainedModel:
    return tiny_model(family, num_hidden_layers=DEPTH)


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor = IDS) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits


def copy_of_layers(target: PreTrainedModel, layers: tuple[int, ...]) -> Any:
    """A new model that holds copies of these layers."""
    model = tiny_model(target.config.model_type, seed=1, num_hidden_layers=len(layers))
    model.model.embed_tokens = copy.deepcopy(target.model.embed_tokens)
    model.model.norm = copy.deepcopy(target.model.norm)
    model.lm_head = copy.deepcopy(target.lm_head)
    for position, layer in enumerate(layers):
        model.model.layers[position].load_state_dict(target.model.layers[layer].state_dict())
    return model


def random_lookahead(target: PreTrainedModel) -> Lookahead:
    """A lookahead module whose LoRA changes what the target computes."""
    lookahead = Lookahead(target, LookaheadSettings(tokens=4, rank=2))
    with torch.no_grad():
        for name, weight in lookahead.lora_state().items():
            if "lora_B" in name:
                weight.normal_()
    return lookahead


def addresses(model: PreTrainedModel) -> set[int]:
    """Where a model's tensors lie."""
    return {tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]}


def test_a_draft_is_a_subset_of_layers_over_the_targets_weights(target: PreTrainedModel) -> None:
    for layers in (KEPT, (4,)):
        draft = LayerSubset(layers).of(target)
        assert torch.equal(logits(draft), logits(copy_of_layers(target, layers)))
        assert addresses(draft) <= addresses(target)


@torch.no_grad()
def test_decoding_with_a_cache_is_decoding_without(target: PreTrainedModel) -> None:
    draft = LayerSubset(KEPT).of(target)
    cache = DynamicCache()
    steps: list[Tensor] = []
    for ids in (IDS[:, :20], IDS[:, 20:21], IDS[:, 21:22]):
        steps.append(draft(input_ids=ids, past_key_values=cache, use_cache=True).logits)
    assert len(cache.layers) == len(KEPT)
    assert_close(torch.cat(steps, dim=1), logits(draft)[:, :22])


def test_adapters_stay_with_the_target(target: PreTrainedModel) -> None:
    expected = logits(copy_of_layers(target, KEPT))
    before = LayerSubset(KEPT).of(target)
    lookahead = random_lookahead(target)
    after = LayerSubset((0, 1)).of(target)
    logits_off = logits(target)
    with lookahead.active():
        logits_on = logits(target)
        assert torch.equal(logits(before), expected)
        while_on = LayerSubset((1, 2)).of(target)
    assert not torch.equal(logits_on, logits_off)
    for draft in (before, after, while_on):
        assert not any("lora" in name for name, _ in draft.named_parameters())
    assert torch.equal(logits(before), expected)
    without_adapter = deep_model(target.config.model_type)
    assert torch.equal(logits(after), logits(copy_of_layers(without_adapter, (0, 1))))
    assert torch.equal(logits(while_on), logits(copy_of_layers(without_adapter, (1, 2))))
    assert torch.equal(logits(target), logits_off)
    with lookahead.active():
        assert torch.equal(logits(target), logits_on)


WRONG_LAYERS: dict[tuple[Any, ...], str] = {
    (): "draft layers [] keep nothing; ",
    (0, 1.5): "draft layers [0, 1.5] must be whole numbers, counted from 0",
    (2, 1): "draft layers [2, 1] must ascend, each named once",
    (0, 5): "draft layer 5 is out of range: the base model's layers are 0 to 4",
}


@pytest.mark.parametrize("layers", WRONG_LAYERS)
def test_layers_that_are_refused(layers: tuple[int, ...]) -> None:
    model = deep_model()
    model.forward = lambda **_: pytest.fail("a model ran")
    recipe = UsesMethods(model=ModelConfig(id="tiny"), draft=DraftConfig(layers=list(layers)))
    target = Target(model, tiny_tokenizer(), "tiny", "1")
    with pytest.raises(UserError) as caught:
        draft_of(recipe, target)
    message = str(caught.value)
    assert message.startswith(WRONG_LAYERS[layers])
    assert "\n" not in message


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Target:
    return load_target(str(folder), device="cpu")


def test_another_model_with_the_same_vocabulary(tmp_path: Path, loaded: Target) -> None:
    path = str(save_tiny_target(tmp_path / "small", "qwen3"))
    draft = named_draft(path, loaded, device="cpu")
    model = draft.of(loaded.model)
    assert model.config.model_type == "qwen3"
    assert model is draft.of(deep_model())
    assert len({draft, named_draft(path, loaded, device="cpu")}) == 1
    assert draft != NamedDraft(path, "another version", {})


def test_vocabularies_are_compared_token_by_token(folder: Path, loaded: Target) -> None:
    size = len(loaded.tokenizer)
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.add_tokens(["<|think|>"], special_tokens=True)
    other = replace(loaded, tokenizer=tokenizer, name="big")
    with pytest.raises(UserError) as caught:
        named_draft(str(folder), other, device="cpu")
    assert str(caught.value) == (
        f"draft {str(folder)!r} has another vocabulary than the base model 'big': token '<|think|>' is missing "
        f"there and id {size} in the base model; choose a draft of its family"
    )


def test_the_draft_of_a_recipe(folder: Path, loaded: Target) -> None:
    recipe = UsesMethods(model=ModelConfig(id=str(folder), device="cpu", dtype="bfloat16"))
    assert draft_of(recipe, loaded) is None
    subset = draft_of(replace(recipe, draft=DraftConfig(layers=[0, 2])), loaded)
    assert subset == LayerSubset((0, 2))
    draft = draft_of(replace(recipe, draft=DraftConfig(id=str(folder))), loaded)
    assert isinstance(draft, NamedDraft)
    assert draft.model.dtype == torch.bfloat16
    with refused("draft.layers", "conflict"):
        draft_of(replace(recipe, draft=DraftConfig(layers=[0], id=str(folder))), loaded)
