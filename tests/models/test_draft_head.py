"""Draft heads against slow ones, public folders that load, ours that come back, pickles, and what is refused."""

import copy
import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from keepsight.errors import Code, UserError
from keepsight.models.card import Provenance
from keepsight.models.draft_head import DraftHead, EagleHead, FeatureHead, default_feature_layers
from keepsight.runtime.drafting.speculative import ChainDrafter
from tests.close import assert_close
from tests.models import slow_heads
from tests.models.public_heads import (
    EAGLE1,
    LLAMA3,
    QWEN3,
    VICUNA,
    eagle1_tensors,
    eagle3_tensors,
    write_head,
    write_pickled_head,
)
from tests.models.slow_heads import causal_attend
from tests.refused import refused
from tests.tiny import tiny_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
POSITIONS = torch.arange(6)[None]
EAGLE3_CONFIGS = {
    "llama-3.1": LLAMA3,
    "qwen3": QWEN3,
    "another width": LLAMA3 | {"target_hidden_size": 20},
    "biases": LLAMA3 | {"qkv_bias": True},
    "eagle-3.1 norms": QWEN3 | {"fc_norm": True, "norm_output": True},
}
EAGLE1_CONFIGS = {"llama-3": EAGLE1, "vicuna": VICUNA, "biases": EAGLE1 | {"bias": True, "qkv_bias": True}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_head(tmp_path / "head", LLAMA3, eagle3_tensors(LLAMA3))


def random_inputs(config: dict[str, Any], count: int = 6) -> tuple[Tensor, Tensor]:
    """Embeddings [1, count, hidden] and features [1, count, 3 * hidden of the base model]."""
    generator = torch.Generator().manual_seed(1)
    hidden = config["hidden_size"]
    target_hidden = config.get("target_hidden_size", hidden)
    embeddings = torch.randn(1, count, hidden, generator=generator)
    features = 3 * torch.randn(1, count, 3 * target_hidden, generator=generator)
    return embeddings, features


# The layers


@pytest.mark.parametrize("name", EAGLE3_CONFIGS)
@torch.no_grad()
def test_a_public_eagle3_head_is_the_slow_one(name, tmp_path):
    config = EAGLE3_CONFIGS[name]
    tensors = eagle3_tensors(config)
    unused_embedding = {"embed_tokens.weight": torch.zeros(128, 32)}
    head = DraftHead.load(write_head(tmp_path, config, tensors | unused_embedding))
    assert not head.training
    embeddings, features = random_inputs(config)
    hidden = head(embeddings, head.combine(features), 3 + POSITIONS, causal_attend)
    expected = slow_heads.eagle3(tensors, config, embeddings[0], features[0], start=3)
    expected_logits = slow_heads.eagle3_logits(tensors, config, expected)
    assert_close(head.logits(hidden)[0], expected_logits)
    if config.get("norm_output"):
        normed = [slow_heads.norm(row, tensors["norm.weight"], config["rms_norm_eps"]) for row in expected]
        expected = torch.stack(normed)
    assert_close(hidden[0], expected)
    drafted_ids = tensors["t2d"].nonzero().flatten()
    assert torch.equal(head.target_ids(torch.arange(24)), drafted_ids)


@pytest.mark.parametrize("name", EAGLE1_CONFIGS)
@torch.no_grad()
def test_a_public_eagle1_head_is_the_slow_one(name, tmp_path):
    config = EAGLE1_CONFIGS[name]
    model = tiny_model()
    tensors = eagle1_tensors(config)
    head = EagleHead.load(write_head(tmp_path, config, tensors), model)
    assert isinstance(head, FeatureHead)
    assert "lm_head.weight" not in head.state_dict()
    embeddings, features = torch.randn(2, 1, 6, 32).unbind()
    hidden = head(embeddings, head.combine(features), POSITIONS, causal_attend)
    logits = head.logits(hidden)[0]
    expected = slow_heads.eagle1(tensors, config, embeddings[0], features[0])
    assert_close(hidden[0], expected)
    assert_close(logits, expected @ model.lm_head.weight.T)
    head.to(torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.float32
    with refused("lm_head", "model"):
        EagleHead.load(tmp_path).logits(torch.zeros(1, 1, 32))
    with refused("draft.head", "model"):
        DraftHead.load(tmp_path)


def test_the_feature_layers_are_the_named_ones_or_eagle3s():
    head = DraftHead(LlamaConfig.from_dict(QWEN3))
    assert head.layers_of(tiny_model()) == (0, 1, 2)
    assert default_feature_layers(8) == (1, 3, 4)
    assert default_feature_layers(32) == (1, 15, 28)
    with refused("layers", "model"):
        default_feature_layers(6)


# Folders


@pytest.mark.parametrize(
    ("config", "tensors_of"), [(LLAMA3, eagle3_tensors), (EAGLE1, eagle1_tensors)], ids=["EAGLE-3", "EAGLE-1"]
)
def test_an_embedding_of_its_own_is_kept_and_drafts(tmp_path, config, tensors_of):
    model = tiny_model()
    embedding = model.get_input_embeddings().weight.detach()

    def head_with(embedding: Tensor) -> Any:
        tensors = tensors_of(config) | {"embed_tokens.weight": embedding}
        return EagleHead.load(write_head(tmp_path, config, tensors), model)

    for dtype in (torch.float32, torch.bfloat16):  # the model's own, rounded
        head = head_with(embedding.to(dtype))
        assert head.own_embedding is None
        assert head.embedding(model) is model.get_input_embeddings()

    own_embedding = embedding.clone()
    own_embedding[7] += 0.5
    head = head_with(own_embedding)
    assert torch.equal(head.embedding(model)(torch.tensor([[7, 8]])), own_embedding[[7, 8]][None])
    assert not [parameter for parameter in head.parameters() if parameter.shape == embedding.shape]
    with_models_embedding = copy.copy(head)
    with_models_embedding.own_embedding = None
    features = torch.randn(1, 3, 32 * len(head.layers_of(tiny_model(num_hidden_layers=8))))

    def reads_the_same(token: int) -> bool:
        """As with the model's embedding."""
        ids = torch.full((1, 3), token)
        hidden = ChainDrafter(head, model).read(features, ids)
        return torch.equal(hidden, ChainDrafter(with_models_embedding, model).read(features, ids))

    assert not reads_the_same(7)
    assert reads_the_same(9)
    if isinstance(head, DraftHead):
        head.save(tmp_path / "ours", Provenance("ada/tiny"))
        loaded = DraftHead.load(tmp_path / "ours", model)
        assert loaded.own_embedding is not None
        assert torch.equal(loaded.own_embedding, own_embedding)
        assert json.loads((tmp_path / "ours/config.json").read_text())["target_hidden_size"] == 32  # as EAGLE expects


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"head_dim": 16, "qkv_bias": True, "fc_norm": True, "norm_output": True}, 10000.0),
        ({"target_hidden_size": 20, "rope_theta": 1e6, "rope_scaling": YARN}, 1e6),
        ({"rope_parameters": {"rope_theta": 1e6, **YARN}}, 1e6),
    ],
)
def test_a_saved_head_comes_back_under_public_names(tmp_path, changes, theta):
    """Also one whose layer is numbered, as in vLLM's speculators and newer exports of SpecForge."""
    config = LLAMA3 | {"max_position_embeddings": 8192} | changes
    tensors = eagle3_tensors(config)
    numbered = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    head = DraftHead.load(write_head(tmp_path / "public", config, numbered))
    head.save(tmp_path / "ours", Provenance("ada/tiny"))
    assert load_file(tmp_path / "ours" / "model.safetensors").keys() == tensors.keys()
    loaded = DraftHead.load(tmp_path / "ours")
    embeddings, features = random_inputs(config)
    hidden = head(embeddings, head.combine(features), POSITIONS, causal_attend)
    hidden_of_loaded = loaded(embeddings, loaded.combine(features), POSITIONS, causal_attend)
    assert torch.equal(hidden, hidden_of_loaded)
    assert torch.equal(head.logits(hidden), loaded.logits(hidden_of_loaded))

    saved_config = json.loads((tmp_path / "ours" / "config.json").read_text())
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "draft_vocab_size"):
        assert saved_config[name] == config[name], name
    assert saved_config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert saved_config["torch_dtype"] == "float32"
    assert saved_config["rope_theta"] == theta
    assert saved_config["rope_scaling"] == (None if theta == 10000.0 else YARN)
    # EAGLE's code would read another
    assert ("target_hidden_size" in saved_config) == ("target_hidden_size" in changes)


def test_a_head_takes_its_models_dtype_or_its_files_and_angles_stay_exact(folder):
    far = torch.zeros(1, 1, 32), torch.tensor([[39_999]])
    cosine, sine = DraftHead.load(folder).rotary_emb(*far)
    tensors = eagle3_tensors(LLAMA3)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor.half()
    save_file(tensors, folder / "model.safetensors")
    assert {parameter.dtype for parameter in DraftHead.load(folder).parameters()} == {torch.float16}
    head = DraftHead.load(folder, tiny_model().bfloat16())
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}
    assert head.d2t.dtype == torch.int64
    assert head.t2d.dtype == torch.bool
    cosine_of_bfloat16, sine_of_bfloat16 = head.rotary_emb(*far)
    assert torch.equal(cosine_of_bfloat16, cosine)
    assert torch.equal(sine_of_bfloat16, sine)


# Refusals; `test_artifacts.py` has those of all artifacts


def cannot_be_loaded(folder: Path, field: str, code: Code, model: Any = None) -> None:
    with refused(field, code) as error:
        EagleHead.load(folder, model)
    assert str(folder) in str(error.value)


D2T = eagle3_tensors(LLAMA3)["d2t"]


@pytest.mark.parametrize(
    ("changes", "field", "code"),
    [
        ({"norm.weight": None, "fc.weight": None}, "fc.weight", "file"),
        ({"fc.bias": torch.zeros(32)}, "fc.bias", "file"),
        ({"fc.weight": torch.zeros(33, 96)}, "fc.weight", "file"),
        ({"d2t": torch.cat([D2T, D2T[:1]])}, "d2t", "file"),
        ({"d2t": D2T.flip(0)}, "d2t", "file"),
        ({"d2t": D2T - 1000}, "d2t", "file"),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder, changes, field, code):
    tensors = eagle3_tensors(LLAMA3) | changes
    write_head(folder, LLAMA3, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    cannot_be_loaded(folder, field, code)


@pytest.mark.parametrize(
    ("changes", "field", "code"),
    [
        ({"hidden_size": None}, "hidden_size", "type"),
        ({"norm_before_residual": True}, "norm_before_residual", "unknown"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, "eagle_config", "type"),
        ({"num_attention_heads": 5}, "config.json", "file"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "config.json", "file"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps", "range"),
        ({"rope_theta": float("inf")}, "config.json", "file"),
        ({"rope_theta": float("nan")}, "config.json", "file"),
        ({"vocab_size": 96}, "vocabulary", "model"),
        ({"target_hidden_size": 20}, "feature width", "model"),
    ],
)
def test_a_configuration_that_makes_no_head_for_the_model_is_refused(folder, changes, field, code):
    (folder / "config.json").write_text(json.dumps(LLAMA3 | changes))
    cannot_be_loaded(folder, field, code, model=tiny_model())


# Pickles


class Trap:
    """Makes a folder when it is unpickled by pickle itself."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("trapped",)


@pytest.fixture
def pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_pickled_head(tmp_path / "pickled")


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickled_head_is_read_and_can_be_saved(pickled, tmp_path, caplog, legacy):
    tensors = eagle3_tensors(LLAMA3)
    torch.save(tensors, pickled / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    head = EagleHead.load(pickled)
    (message,) = caplog.messages
    assert f"{pickled / 'pytorch_model.bin'}: a pickle" in message
    head.save_pretrained(tmp_path / "out")
    for folder in (pickled, tmp_path / "out"):
        state = EagleHead.load(folder, tiny_model()).state_dict()
        assert state.keys() == tensors.keys()
        for name, tensor in state.items():
            assert torch.equal(tensor, tensors[name])


def test_a_pickle_that_runs_something_or_stands_for_any_size_is_not_read(pickled):
    path = pickled / "pytorch_model.bin"
    torch.save({"fc.weight": torch.zeros(1).expand(10**6, 10**6)}, path)
    cannot_be_loaded(pickled, "pytorch_model.bin", "file")
    path.write_bytes(pickle.dumps({"fc.weight": Trap()}))
    cannot_be_loaded(pickled, "pytorch_model.bin", "file")
    torch.save({"fc.weight": Trap()}, path)
    cannot_be_loaded(pickled, "pytorch_model.bin", "file")
    assert not Path("trapped").exists()
    torch.load(path, weights_only=False)
    assert Path("trapped").exists(), "the trap works"


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("legacy", [False, True])
def test_whatever_a_damaged_pickle_raises_is_one_line(pickled, legacy):
    path = pickled / "pytorch_model.bin"
    torch.save({"a": torch.ones(3, 4), "b.c": torch.ones(2)}, path, _use_new_zipfile_serialization=not legacy)
    content = path.read_bytes()
    rng = random.Random(0)
    for _ in range(60):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 3, 20))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        length = rng.choice((len(damaged), rng.randrange(len(damaged))))
        path.write_bytes(bytes(damaged[:length]))
        with pytest.raises(UserError) as error:
            EagleHead.load(pickled)
        assert error.value.code == "file"
        assert "\n" not in str(error.value)
