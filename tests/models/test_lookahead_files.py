"""The folder of a lookahead adapter: what it holds, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from keepsight.errors import UserError
from keepsight.files import file_digest, read_json, write_json
from keepsight.models.hub import plan_upload
from keepsight.models.lookahead import ADAPTER, CONFIG, TOKENS, LookaheadAdapter
from tests.models.modules import random_module, save
from tests.tiny import prompt_ids, tiny_model

FILES = LookaheadAdapter.files


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return save(random_module(), tmp_path / "adapter")


def edit_config(folder: Path, **changes: object) -> None:
    write_json(folder / CONFIG, read_json(folder / CONFIG) | changes)


def test_the_folder_holds_the_documented_files_and_nothing_pickled(adapter):
    assert {path.name for path in adapter.iterdir()} == {*FILES, "README.md"}
    assert set(FILES) == {"adapter_config.json", ADAPTER, TOKENS, CONFIG}
    assert load_file(adapter / TOKENS)["lookahead_tokens"].shape == (5, 32)
    assert len(load_file(adapter / ADAPTER)) == 2 * (7 + 7 + 2)
    config = read_json(adapter / CONFIG)
    assert set(config) == {"settings", "provenance", "digests"}
    assert config["digests"] == {name: file_digest(adapter / name) for name in (ADAPTER, TOKENS, "adapter_config.json")}


def test_saving_again_replaces_the_adapter_and_keeps_what_lies_beside_it(adapter):
    (adapter / "training.png").write_bytes(b"picture")
    other = random_module(seed=8)
    save(other, adapter)
    assert torch.equal(LookaheadAdapter.load(adapter).tokens, other.tokens)
    assert (adapter / "training.png").read_bytes() == b"picture"


def test_a_write_that_fails_leaves_no_adapter_that_loads(adapter, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    before = {path.name: path.read_bytes() for path in adapter.iterdir()}
    monkeypatch.setattr("keepsight.models.lookahead.write_json", full)
    with pytest.raises(OSError, match="No space left"):
        save(random_module(seed=8), adapter)
    assert {path.name: path.read_bytes() for path in adapter.iterdir()} == before


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(adapter, name):
    (adapter / name).unlink()
    refused(adapter, str(adapter), f"{name} is missing")


@pytest.mark.parametrize("name", [ADAPTER, TOKENS])
def test_a_truncated_file_is_named(adapter, name):
    (adapter / name).write_bytes((adapter / name).read_bytes()[:-40])
    refused(adapter, str(adapter / name), "digest", "fetch it again")


@pytest.mark.parametrize("name", [ADAPTER, TOKENS])
def test_one_changed_bit_is_noticed(adapter, name):
    content = bytearray((adapter / name).read_bytes())
    content[-1] ^= 1
    (adapter / name).write_bytes(content)
    refused(adapter, str(adapter / name), "its digest is sha256:", file_digest(adapter / name))


@pytest.mark.parametrize("name", [ADAPTER, TOKENS])
def test_a_file_that_is_no_safetensors_is_named(adapter, name):
    """With a digest that fits, as when a bad file was saved to begin with."""
    (adapter / name).write_bytes(b"\x80\x04N.")
    edit_config(adapter, digests={each: file_digest(adapter / each) for each in (ADAPTER, TOKENS)})
    refused(adapter, str(adapter / name), "not a safetensors file")


def test_a_file_without_the_soft_tokens_is_named(adapter):
    save_file({"other": torch.zeros(5, 32)}, adapter / TOKENS)
    edit_config(adapter, digests={each: file_digest(adapter / each) for each in (ADAPTER, TOKENS)})
    refused(adapter, str(adapter / TOKENS), "lookahead_tokens")


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"settings": {"token": 5}, "provenance": {}, "digests": {}}', '{"settings": 3}'],
)
def test_a_configuration_that_is_none_is_named(adapter, content):
    (adapter / CONFIG).write_text(content)
    refused(adapter, str(adapter / CONFIG))


@pytest.mark.parametrize(
    "changed",
    [
        {"tokens": 10**13},
        {"rank": 10**9},
        {"tokens": -1},
        {"alpha": 0.0},
        {"floor": 2.0},
        {"sharing": "head"},
        {"sharing": "model"},
        {"value_norm": "no"},
    ],
)
def test_settings_out_of_bounds_allocate_nothing(adapter, changed):
    edit_config(adapter, settings=read_json(adapter / CONFIG)["settings"] | changed)
    refused(adapter, str(adapter / CONFIG), *changed)


def test_settings_that_the_tensors_differ_from_are_named(adapter):
    edit_config(adapter, settings=read_json(adapter / CONFIG)["settings"] | {"tokens": 1000})
    refused(adapter, str(adapter / TOKENS), "1000")


@pytest.mark.parametrize("name", [ADAPTER, TOKENS])
def test_weights_that_are_not_finite_are_neither_loaded_nor_pushed(adapter, name):
    tensors = load_file(adapter / name)
    first = next(iter(tensors.values()))
    first.view(-1)[0] = torch.nan
    save_file(tensors, adapter / name)
    edit_config(adapter, digests={each: file_digest(adapter / each) for each in (ADAPTER, TOKENS)})
    refused(adapter, str(adapter / name), "holds NaN or infinity")
    one_line(lambda: plan_upload(adapter, "ada/x"), str(adapter / name), "holds NaN or infinity")


def test_a_peft_configuration_that_is_none_is_named(adapter):
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r":')
    refused(adapter, str(adapter), "adapter_config.json")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 48}, "hidden size 32, but the model's is 48"),
        ({"num_hidden_layers": 4}, "missing or surplus LoRA tensor"),
        ({"num_hidden_layers": 2}, "missing or surplus LoRA tensor"),
        ({"intermediate_size": 96}, "shape"),
        ({"num_attention_heads": 8}, "shape"),
    ],
)
def test_an_adapter_for_another_shape_is_refused(adapter, changes, said):
    model = tiny_model(**changes)
    ids, mask = prompt_ids(30, 17)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
    one_line(lambda: attach(adapter, model), str(adapter), said, "model")
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask).logits, expected)


def test_an_adapter_for_another_hub_model_is_refused(adapter):
    model = tiny_model()
    model.config.name_or_path = "bob/other"
    one_line(lambda: attach(adapter, model), str(adapter), "'ada/tiny'", "'bob/other'")
    model.config.name_or_path = "ada/tiny"
    assert attach(adapter, model).shape == (5, 32)


def test_a_refused_adapter_is_refused_again(adapter):
    model = tiny_model(num_hidden_layers=4)
    for _ in range(2):
        one_line(lambda: attach(adapter, model), str(adapter))


def attach(folder: Path, model: Any) -> Tensor:
    with LookaheadAdapter.load(folder).attached(model) as tokens:
        return tokens


def refused(folder: Path, *said: str) -> None:
    one_line(lambda: LookaheadAdapter.load(folder), *said)


def one_line(action, *said: str) -> None:
    with pytest.raises(UserError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    assert all(each in message for each in said), message
