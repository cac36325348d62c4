"""The folder of a retrieval head: what it holds, and what is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from keepsight.errors import UserError
from keepsight.files import file_digest, read_json, write_json
from keepsight.models.card import CardBasics, Provenance
from keepsight.models.retrieval_head import CONFIG, WEIGHTS, RetrievalHead, comparison
from keepsight.train.retrieval_head import MEASURES
from tests.models.retrieval_heads import provenance_of, tiny_retrieval_head
from tests.tiny import tiny_model

ORIGIN = Provenance("ada/tiny", "v1", "sha256:t", "sha256:d", {"steps": 3}, "0.1.0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_retrieval_head().save(tmp_path / "head", ORIGIN, "# A card\n")
    return tmp_path / "head"


def write_weights(folder: Path, tensors: dict) -> None:
    """Other tensors, with a digest that fits them."""
    save_file(tensors, folder / WEIGHTS)
    edit(folder, digests={WEIGHTS: file_digest(folder / WEIGHTS)})


def edit(folder: Path, **changes: object) -> None:
    write_json(folder / CONFIG, read_json(folder / CONFIG) | changes)


def edit_head(folder: Path, **changes: object) -> None:
    edit(folder, head=read_json(folder / CONFIG)["head"] | changes)


@pytest.mark.parametrize("variant", ["previous-step", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_comes_back_as_it_was_saved(tmp_path, variant, dtype):
    head = tiny_retrieval_head(variant, fc_norm=True, qkv_bias=True).to(dtype)
    for saved in (head, head.extended(500)):
        saved.save(tmp_path, ORIGIN, "# A card\n")
        loaded = RetrievalHead.load(tmp_path)
        assert loaded.config == saved.config
        inputs = torch.randn(1, 4, 32), torch.randn(1, 4, 96), torch.arange(4)[None]
        for own, its in zip(loaded.project(*inputs), saved.project(*inputs), strict=True):
            assert torch.equal(own, its)
        assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert provenance_of(tmp_path) == ORIGIN


def test_a_head_takes_its_targets_dtype(folder):
    assert RetrievalHead.load(folder, tiny_model().bfloat16()).q_proj.weight.dtype == torch.bfloat16


def refused(folder: Path, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        RetrievalHead.load(folder, tiny_model())
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v_proj.weight": torch.zeros(2, 2)}, "'v_proj.weight' is surplus"),
        ({"fc.weight": None}, "'fc.weight' is missing"),
        (
            {"q_proj.weight": torch.zeros(3, 64)},
            r"'q_proj.weight' has shape \[3, 64\], the configuration beside it needs \[32, 64\]",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder, change, message):
    tensors = load_file(folder / WEIGHTS) | change
    write_weights(folder, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    refused(folder, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": "all"}, "features='all' is unknown; choose one of previous-step, none"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        ({"num_key_value_heads": 0}, "head.num_key_value_heads: expected greater than or equal to 1, got 0"),
        ({"surprise": 1}, "head.surprise: "),
        ({"hidden_size": "wide"}, "head.hidden_size: expected a valid integer, got 'wide'"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, "no head can be made of it"),
        ({"rope_parameters": {}}, "rope_parameters={} must name rope_type and rope_theta"),
    ],
)
def test_a_configuration_that_makes_no_head_is_refused(folder, changes, message):
    edit_head(folder, **changes)
    refused(folder, message)


def test_another_target_is_refused(folder):
    with pytest.raises(UserError, match=f"{folder}: this retrieval head is for another model"):
        RetrievalHead.load(folder, tiny_model(num_key_value_heads=1))


def test_the_card_says_what_was_measured():
    first = {"eval_kl": 2.0} | {f"eval_{name}_64": 0.25 for name in MEASURES}
    first["eval_samples_64"] = 3
    last = first | {"eval_kl": 0.5, "eval_hit_64": 0.75, "eval_window_hit_64": 0.4}
    table = comparison(first, last, "pruned only")
    assert "| 64 | 3 | 0.250 | 0.750 | 0.400 | 0.250 | 0.250 | 0.250 | 0.250 | 0.250 | 0.250 |" in table
    assert "pruned only 2.000, distilled 0.500" in table
    assert comparison({}, {}, "pruned only") == "Not measured."
    head = tiny_retrieval_head("none")
    card = head.card(CardBasics("Title", ORIGIN, {"needles": 7}, "From nowhere.", "mit"), table)
    for text in ("# Title", "license: mit", "1,568 parameters", "token embeddings alone", "up to 64 tokens", table):
        assert text in card
    assert "| needles | 7 |" in card
    assert "- steps: 3" in card
