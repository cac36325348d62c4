"""Lookahead modules on tiny random models: they change nothing else, and predict the same when loaded."""

import logging
from collections.abc import Callable
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
    assert len(adapted) == 7 + 7 + 2
    assert "model.layers.2.self_attn.v_proj" not in adapted
    ImportanceObjective(module)
    trainable = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    tokens_and_lora = [module.tokens, *lora_parameters(module).values()]
    assert trainable == {id(parameter) for parameter in tokens_and_lora}

    module = Lookahead(tiny_model().bfloat16(), SHAPE)
    tokens_and_lora = [module.tokens, *lora_parameters(module).values()]
    assert {parameter.dtype for parameter in tokens_and_lora} == {torch.float32}
    assert module.observers(3).dtype == torch.bfloat16
    assert module.observers(3).shape == (3, 5, 32)


@pytest.mark.parametrize(("family", "rank"), [*zip(FAMILIES, [0, 2], strict=True)])
def test_a_saved_adapter_predicts_the_same_when_loaded(family, rank, tmp_path):
    module = random_module(family, LookaheadSettings(tokens=5, rank=rank, alpha=8, group="max", kernel=3))
    artifact = LookaheadAdapter.load(save(module, tmp_path / "adapter"))
    assert artifact.settings == module.settings
    assert artifact.provenance.base_model == "ada/tiny"
    model = tiny_model(family)
    state = prefill(model, *prompt_ids(30, 17))
    expected = importance(module, prefill(module.model, *prompt_ids(30, 17)))
    assert_close(importance_of(artifact, model, state), expected)
    with artifact.attached(model) as tokens, artifact.attached(model) as same_tokens:
        assert tokens is same_tokens
        assert not tokens.requires_grad


def test_plain_peft_loads_it_and_leaves_the_base_model_as_it_is(tmp_path, family="llama"):
    """Also where the user has added tokens, whose first id was once the invocation token."""
    module = random_module(family)
    folder = save(module, tmp_path / "adapter")
    ids, mask = prompt_ids(30, 17)
    ids[:, -3:-1] = torch.tensor([128, 129])
    with torch.no_grad():
        expected = resized_model(family)(ids, attention_mask=mask).logits
        peft_model = PeftModel.from_pretrained(resized_model(family), str(folder))
        assert torch.equal(peft_model(input_ids=ids, attention_mask=mask).logits, expected)

    saved = module.lora_state()
    loaded = {name.replace(".default", ""): p for name, p in peft_model.named_parameters() if ".lora_" in name}
    assert loaded.keys() == saved.keys()
    for name, parameter in loaded.items():
        assert torch.equal(parameter, saved[name])

    embeddings = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():  # told how many rows it is for, PEFT applies the same LoRA
        with module.active():
            expected = module.model(inputs_embeds=embeddings).logits
        logits = peft_model(inputs_embeds=embeddings, alora_offsets=[5]).logits
        assert_close(logits[..., :128], expected)


def resized_model(family: str) -> Any:
    """A tiny model to whose vocabulary the user has added two tokens."""
    model = tiny_model(family)
    torch.manual_seed(0)
    model.resize_token_embeddings(130, mean_resizing=False)
    return model


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
    (message,) = [entry.getMessage() for entry in caplog.records if entry.name == "keepsight"]
    assert "plain PEFT would apply this LoRA where token 128 occurs" in message


WITHOUT_LORA = LookaheadSettings(tokens=5, rank=0, alpha=8)


@pytest.mark.parametrize(
    ("settings", "settings_of_other", "seed_of_other"),
    [
        (SHAPE, SHAPE, 8),
        (WITHOUT_LORA, WITHOUT_LORA, 7),
        (SHAPE, LookaheadSettings(tokens=5, rank=2, alpha=16), 7),
    ],
)
def test_two_adapters_on_one_model_are_told_apart(settings, settings_of_other, seed_of_other, tmp_path):
    """Also of rank 0, or trained with another alpha: the LoRA's file is the same, the adapter is not."""
    module = random_module(settings=settings)
    other = random_module(settings=settings_of_other, seed=seed_of_other)
    with torch.no_grad():
        other.tokens.mul_(2)
    folder = save(module, tmp_path / "a")
    folder_of_other = save(other, tmp_path / "b")
    has_same_lora = seed_of_other == 7
    assert (file_digest(folder / ADAPTER) == file_digest(folder_of_other / ADAPTER)) == has_same_lora

    artifact = LookaheadAdapter.load(folder)
    artifact_of_other = LookaheadAdapter.load(folder_of_other)
    model = tiny_model()
    state = prefill(model, *prompt_ids(30, 17))
    expected = importance(module, prefill(module.model, *prompt_ids(30, 17)))
    expected_of_other = importance(other, prefill(other.model, *prompt_ids(30, 17)))
    assert_close(importance_of(artifact, model, state), expected)
    assert_close(importance_of(artifact_of_other, model, state), expected_of_other)
    assert_close(importance_of(artifact, model, state), expected)


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
    require_one_line(lambda: LookaheadAdapter.load(adapter), str(adapter), *changed)


def test_files_of_another_kind_are_named(adapter):
    save_file({"other": torch.zeros(5, 32)}, adapter / TOKENS)
    reseal(adapter)
    require_one_line(lambda: LookaheadAdapter.load(adapter), str(adapter / TOKENS), "lookahead_tokens")
    save(random_module(), adapter)
    for content in ('{"peft_type": "LORA", "alora_invocation_tokens": ["a"]}', "{}", "["):
        (adapter / PEFT_CONFIG).write_text(content)
        reseal(adapter)
        require_one_line(lambda: LookaheadAdapter.load(adapter), PEFT_CONFIG)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 48}, "hidden size 32, but the model's is 48"),
        ({"num_hidden_layers": 4}, "missing or surplus LoRA tensor"),
        ({"intermediate_size": 96}, "shape"),
    ],
)
def test_an_adapter_for_another_shape_is_refused_every_time(adapter, changes, reason):
    model = tiny_model(**changes)
    ids, mask = prompt_ids(30, 17)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
    for _ in range(2):
        require_one_line(lambda: attach(adapter, model), str(adapter), reason, "model")
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask).logits, expected)


def test_an_adapter_for_another_hub_model_is_refused(adapter):
    model = tiny_model()
    model.config.name_or_path = "bob/other"
    require_one_line(lambda: attach(adapter, model), str(adapter), "'ada/tiny'", "'bob/other'")
    model.config.name_or_path = "ada/tiny"
    assert attach(adapter, model).shape == (5, 32)


def attach(folder: Path, model: Any) -> Tensor:
    with LookaheadAdapter.load(folder).attached(model) as tokens:
        return tokens


def require_one_line(action: Callable[[], object], *words: str) -> None:
    """The action ends in an error of one line that has all these words."""
    with pytest.raises(UserError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == [], message
