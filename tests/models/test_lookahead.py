"""Lookahead modules on tiny random models: they change nothing else, and predict the same when loaded."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor

from keepsight.errors import UserError
from keepsight.files import file_digest, read_json, write_json
from keepsight.models.lookahead import ADAPTER, CONFIG, NO_TOKEN, PEFT_CONFIG, TOKENS, Lookahead, LookaheadAdapter
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.models.lora import PREFIX
from keepsight.runtime.state import prefill
from keepsight.train.importance import ImportanceObjective
from tests.close import assert_close
from tests.models.modules import SHAPE, importance, importance_of, lora_parameters, random_module, save
from tests.tiny import FAMILIES, prompt_ids, tiny_model


def test_an_adapter_that_is_off_leaves_logits_alone_bit_for_bit(family="llama"):
    ids, mask = prompt_ids(30, 17)
    with torch.no_grad():
        expected = tiny_model(family)(ids, attention_mask=mask).logits
        module = random_module(family)
        off = module.model(ids, attention_mask=mask).logits
        with module.active():
            on = module.model(ids, attention_mask=mask).logits
        off_again = module.model(ids, attention_mask=mask).logits
    assert torch.equal(off, expected)
    assert torch.equal(off_again, expected)
    assert not torch.allclose(on, expected, atol=1e-2)


def test_only_tokens_and_lora_are_trainable_and_in_float32():
    module = random_module()
    adapted = {name.split(".lora_")[0].removeprefix(PREFIX) for name in lora_parameters(module)}
    assert len(adapted) == 7 + 7 + 2 and "model.layers.2.self_attn.v_proj" not in adapted
    ImportanceObjective(module)
    trainable = {id(value) for value in module.parameters() if value.requires_grad}
    assert trainable == {id(value) for value in [module.tokens, *lora_parameters(module).values()]}
    module = Lookahead(tiny_model().bfloat16(), SHAPE)
    assert {value.dtype for value in [*lora_parameters(module).values(), module.tokens]} == {torch.float32}
    assert module.observers(3).dtype == torch.bfloat16
    assert module.observers(3).shape == (3, 5, 32)


@pytest.mark.parametrize(("family", "rank"), [*zip(FAMILIES, [0, 2], strict=True)])
def test_a_saved_adapter_predicts_the_same_when_loaded(family, rank, tmp_path):
    module = random_module(family, LookaheadSettings(tokens=5, rank=rank, alpha=8, group="max", kernel=3))
    artifact = LookaheadAdapter.load(save(module, tmp_path / "adapter"))
    assert (artifact.settings, artifact.provenance.base_model) == (module.settings, "ada/tiny")
    model = tiny_model(family)
    prefilled = prefill(model, *prompt_ids(30, 17))
    expected = importance(module, prefill(module.model, *prompt_ids(30, 17)))
    assert_close(importance_of(artifact, model, prefilled), expected)
    with artifact.attached(model) as tokens, artifact.attached(model) as again:
        assert tokens is again and not tokens.requires_grad


def test_plain_peft_loads_it_and_leaves_the_base_model_as_it_is(tmp_path, family="llama"):
    """Also where the user has added tokens, whose first id was once the invocation token."""
    module = random_module(family)
    folder = save(module, tmp_path / "adapter")
    ids, mask = prompt_ids(30, 17)
    ids[:, -3:-1] = torch.tensor([128, 129])
    plain, model = tiny_model(family), tiny_model(family)
    for each in (plain, model):
        torch.manual_seed(0)
        each.resize_token_embeddings(130, mean_resizing=False)
    with torch.no_grad():
        expected = plain(ids, attention_mask=mask).logits
        loaded = PeftModel.from_pretrained(model, str(folder))
        assert torch.equal(loaded(input_ids=ids, attention_mask=mask).logits, expected)
    weights = {name.replace(".default", ""): value for name, value in loaded.named_parameters() if ".lora_" in name}
    saved = module.lora_state()
    assert set(weights) == set(saved)
    assert all(torch.equal(weights[name], saved[name]) for name in saved)
    embeddings = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():  # told how many rows it is for, PEFT applies the same LoRA
        with module.active():
            expected = module.model(inputs_embeds=embeddings).logits
        assert_close(loaded(inputs_embeds=embeddings, alora_offsets=[5]).logits[..., :128], expected)


def test_an_invocation_token_that_the_model_has_is_named(tmp_path, caplog):
    folder = save(random_module(), tmp_path / "adapter")
    assert read_json(folder / PEFT_CONFIG)["alora_invocation_tokens"] == [NO_TOKEN]
    write_json(folder / PEFT_CONFIG, read_json(folder / PEFT_CONFIG) | {"alora_invocation_tokens": [128]})
    reseal(folder)
    model = tiny_model()
    with caplog.at_level(logging.WARNING, "keepsight"):
        LookaheadAdapter.load(folder).check_base(model)
        assert caplog.messages == []
        model.resize_token_embeddings(130)
        LookaheadAdapter.load(folder).check_base(model)
    (said,) = [each.getMessage() for each in caplog.records if each.name == "keepsight"]
    assert "plain PEFT would apply this LoRA where token 128 occurs" in said


@pytest.mark.parametrize("change", [{}, {"rank": 0}, {"alpha": 16}])
def test_two_adapters_on_one_model_are_told_apart(change, tmp_path):
    """Also of rank 0, or trained with another alpha: the LoRA's file is the same, the adapter is not."""
    shape = LookaheadSettings(**{"tokens": 5, "rank": 2, "alpha": 8} | change)
    modules = (
        random_module(settings=SHAPE if shape.rank else shape),
        random_module(settings=shape, seed=7 + (not change)),
    )
    with torch.no_grad():
        modules[1].tokens.mul_(2)
    folders = [save(module, tmp_path / name) for name, module in zip("ab", modules, strict=True)]
    assert (file_digest(folders[0] / ADAPTER) == file_digest(folders[1] / ADAPTER)) == bool(change)
    model, artifacts = tiny_model(), [LookaheadAdapter.load(folder) for folder in folders]
    prefilled = prefill(model, *prompt_ids(30, 17))
    for number in (0, 1, 0):
        expected = importance(modules[number], prefill(modules[number].model, *prompt_ids(30, 17)))
        assert_close(importance_of(artifacts[number], model, prefilled), expected)


# What is refused; `test_artifacts.py` has what all artifacts refuse


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return save(random_module(), tmp_path / "adapter")


def reseal(folder: Path, **changes: object) -> None:
    digests = {name: file_digest(folder / name) for name in (ADAPTER, TOKENS, PEFT_CONFIG)}
    write_json(folder / CONFIG, read_json(folder / CONFIG) | {"digests": digests} | changes)


@pytest.mark.parametrize(
    "changed", [{"tokens": 10**13}, {"alpha": 0.0}, {"alpha": float("nan")}, {"sharing": "model"}, {"tokens": 1000}]
)
def test_settings_out_of_bounds_allocate_nothing(adapter, changed):
    reseal(adapter, settings=read_json(adapter / CONFIG)["settings"] | changed)
    one_line(lambda: LookaheadAdapter.load(adapter), str(adapter), *changed)


def test_files_of_another_kind_are_named(adapter):
    save_file({"other": torch.zeros(5, 32)}, adapter / TOKENS)
    reseal(adapter)
    one_line(lambda: LookaheadAdapter.load(adapter), str(adapter / TOKENS), "lookahead_tokens")
    save(random_module(), adapter)
    for content in ('{"peft_type": "LORA", "alora_invocation_tokens": ["a"]}', "{}", "["):
        (adapter / PEFT_CONFIG).write_text(content)
        reseal(adapter)
        one_line(lambda: LookaheadAdapter.load(adapter), PEFT_CONFIG)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 48}, "hidden size 32, but the model's is 48"),
        ({"num_hidden_layers": 4}, "missing or surplus LoRA tensor"),
        ({"intermediate_size": 96}, "shape"),
    ],
)
def test_an_adapter_for_another_shape_is_refused_every_time(adapter, changes, said):
    model = tiny_model(**changes)
    ids, mask = prompt_ids(30, 17)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
    for _ in range(2):
        one_line(lambda: attach(adapter, model), str(adapter), said, "model")
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask).logits, expected)


def test_an_adapter_for_another_hub_model_is_refused(adapter):
    model = tiny_model()
    model.config.name_or_path = "bob/other"
    one_line(lambda: attach(adapter, model), str(adapter), "'ada/tiny'", "'bob/other'")
    model.config.name_or_path = "ada/tiny"
    assert attach(adapter, model).shape == (5, 32)


def attach(folder: Path, model: Any) -> Tensor:
    with LookaheadAdapter.load(folder).attached(model) as tokens:
        return tokens


def one_line(action: Any, *said: str) -> None:
    with pytest.raises(UserError) as caught:
        action()
    assert "\n" not in str(caught.value)
    assert all(each in str(caught.value) for each in said), str(caught.value)
