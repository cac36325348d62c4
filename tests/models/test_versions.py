"""Which weights an artifact was trained on, and what is said when it is used on others."""

import logging
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from keepsight.files import read_json, write_json
from keepsight.models.card import Provenance
from keepsight.models.chat import template_digest, vocabulary_digest
from keepsight.models.lookahead import Lookahead, LookaheadAdapter
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.models.model_files import folder_version, record_version, version_of
from keepsight.models.targets import load_target
from keepsight.runtime.methods import LookaheadKV, make_method
from keepsight.runtime.methods.resources import Later, Resources, ResourcesLater, bind
from tests.tiny import save_tiny_target, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(saved, tmp_path / "target"))


def test_a_version_is_of_the_content(saved, folder):
    assert folder_version(folder) == folder_version(saved)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name] + 1e-4}, folder / "model.safetensors", metadata={"format": "pt"})
    assert (folder / "model.safetensors").stat().st_size == (saved / "model.safetensors").stat().st_size
    assert folder_version(folder) != folder_version(saved)


def test_a_version_is_of_the_configuration_too(saved, folder):
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", config | {"transformers_version": "0", "dtype": "bfloat16"})
    assert folder_version(folder) == folder_version(saved)
    write_json(folder / "config.json", config | {"rms_norm_eps": 0.5})
    assert folder_version(folder) != folder_version(saved)


def test_a_quantised_model_is_another():
    model = tiny_model()
    record_version(model, "sha256:1")
    assert version_of(model) == "sha256:1"
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    assert version_of(model) == "sha256:1 quantised by bitsandbytes 4bit"


def test_an_adapter_on_other_weights_gets_one_line_that_names_both(folder, tmp_path, caplog):
    target = load_target(str(folder), device="cpu")
    module = Lookahead(target.model, LookaheadSettings(tokens=4, rank=2))
    module.adapter().save(tmp_path / "adapter", Provenance(target.name, target.version), "# Card\n")
    artifact = LookaheadAdapter.load(tmp_path / "adapter")
    same = load_target(str(folder), device="cpu").model
    with caplog.at_level(logging.WARNING, "keepsight"), artifact.attached(same):
        pass
    assert caplog.messages == []
    other = save_tiny_target(tmp_path / "other")
    tensors = {name: tensor * 1.01 for name, tensor in load_file(other / "model.safetensors").items()}
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    changed = load_target(str(other), device="cpu")
    for _ in range(2):
        with artifact.attached(changed.model):
            pass
    (said,) = caplog.messages
    assert said.startswith(f"{tmp_path / 'adapter'} was trained on {target.name} ({target.version}), and this model is")
    assert f" {changed.name} ({changed.version}): " in said


def with_token(tokenizer):
    tokenizer.add_tokens(["<|extra|>"])


def with_template(tokenizer):
    tokenizer.chat_template = "{{ messages }}"


@pytest.mark.parametrize(
    ("way", "spoil", "said"),
    [
        ("from_pretrained", with_token, "another tokenizer"),
        ("resources", with_template, "another chat template"),
        ("bind", with_token, "another tokenizer"),
        ("bind", lambda tokenizer: None, None),
    ],
)
def test_prompts_made_in_another_way_get_one_line(tmp_path, caplog, spoil, said, way):
    tokenizer = tiny_tokenizer()
    made = Provenance("ada/tiny", "", template_digest(tokenizer), vocabulary_digest=vocabulary_digest(tokenizer))
    folder = tmp_path / "adapter"
    Lookahead(tiny_model(), LookaheadSettings(tokens=4, rank=2)).adapter().save(folder, made, "# Card\n")
    spoil(tokenizer)
    with caplog.at_level(logging.WARNING, "keepsight"):
        for budget in (8, 9):
            if way == "from_pretrained":
                LookaheadKV.from_pretrained(folder, budget, tokenizer=tokenizer)
            elif way == "resources":
                make_method("lookaheadkv", budget, Resources(folder, tokenizer=tokenizer))
            else:
                later = make_method("lookaheadkv", budget, ResourcesLater(folder, tokenizer=Later("tokenizer")))
                bind(later, Resources(folder, tokenizer=tokenizer))
    found = [f"{folder} was trained with {said} (sha256:" in message for message in caplog.messages]
    assert found == [True] * bool(said)
