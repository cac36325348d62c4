"""The folder of a draft head: public ones load, ours come back as they were, and what is wrong is named."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from keepsight.errors import UserError
from keepsight.files import file_digest, write_json
from keepsight.models.card import Provenance
from keepsight.models.draft_head import DraftHead, EagleHead, FeatureHead
from keepsight.runtime.drafting.eagle import ChainDrafter
from tests.close import assert_close
from tests.models import slow_heads
from tests.models.public_heads import EAGLE1, LLAMA3, QWEN3, VICUNA, eagle1_tensors, eagle3_tensors, write_head
from tests.models.slow_heads import causal_attend
from tests.tiny import tiny_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
POSITIONS = torch.arange(6)[None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_head(tmp_path / "head", LLAMA3, eagle3_tensors(LLAMA3))


def loaded_eagle3(folder: Path, target: Any = None) -> DraftHead:
    head = EagleHead.load(folder, target)
    assert isinstance(head, DraftHead)
    return head


def change(folder: Path, **tensors: Tensor | None) -> None:
    """Replace tensors of a head's file, `__` in the name standing for a dot; None removes one."""
    changes = {name.replace("__", "."): value for name, value in tensors.items()}
    state = load_file(folder / "model.safetensors") | changes
    kept = {name: value for name, value in state.items() if value is not None}
    save_file(kept, folder / "model.safetensors")


def configure(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({name: each for name, each in values.items() if each != "absent"}))


def refused(folder: Path, *said: str, target: Any = None) -> None:
    with pytest.raises(UserError) as caught:
        EagleHead.load(folder, target)
    message = str(caught.value)
    assert "\n" not in message
    assert all(each in message for each in said), message


@pytest.mark.parametrize("config", [LLAMA3, QWEN3], ids=["llama-3.1", "qwen3"])
@pytest.mark.parametrize("with_target", [False, True])
def test_a_public_eagle3_head_computes_what_its_tensors_say(tmp_path, config, with_target):
    tensors = eagle3_tensors(config)
    repeated = {"embed_tokens.weight": torch.zeros(128, 32)}
    head = loaded_eagle3(write_head(tmp_path, config, tensors | repeated), tiny_model() if with_target else None)
    torch.manual_seed(1)
    embeddings, taps = torch.randn(1, 6, 32), torch.randn(1, 6, 96)
    with torch.no_grad():
        hidden = head(embeddings, head.combine(taps), POSITIONS, causal_attend)
        logits = head.logits(hidden)[0]
    expected = slow_heads.eagle3(tensors, config, embeddings[0], taps[0])
    assert_close(hidden[0], expected)
    assert_close(logits, slow_heads.eagle3_logits(tensors, config, expected))
    assert head.target_ids(torch.arange(24)).tolist() == tensors["t2d"].nonzero().flatten().tolist()
    assert not head.training


def test_an_eagle3_head_whose_layer_is_numbered_loads(tmp_path):
    """As vLLM's speculators and SpecForge's newer exports name it."""
    tensors = eagle3_tensors(LLAMA3)
    numbered = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    assert numbered.keys() != tensors.keys()
    state = loaded_eagle3(write_head(tmp_path, LLAMA3, numbered)).state_dict()
    assert state.keys() == tensors.keys()
    assert all(torch.equal(value, tensors[name]) for name, value in state.items())


@pytest.mark.parametrize("make", [eagle3_tensors, eagle1_tensors], ids=["EAGLE-3", "EAGLE-1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_embedding_that_repeats_the_targets_is_left_out(tmp_path, make, dtype):
    target, config = tiny_model(), LLAMA3 if make is eagle3_tensors else EAGLE1
    repeated = {"embed_tokens.weight": target.get_input_embeddings().weight.detach().to(dtype)}
    head = EagleHead.load(write_head(tmp_path, config, make(config) | repeated), target)
    assert head.own_embedding is None
    assert head.embedding(target) is target.get_input_embeddings()


@pytest.mark.parametrize("make", [eagle3_tensors, eagle1_tensors], ids=["EAGLE-3", "EAGLE-1"])
def test_an_embedding_of_its_own_is_kept_and_drafts(tmp_path, make):
    target, config = tiny_model(), LLAMA3 if make is eagle3_tensors else EAGLE1
    own = target.get_input_embeddings().weight.detach().clone()
    own[7] += 0.5
    head = EagleHead.load(write_head(tmp_path, config, make(config) | {"embed_tokens.weight": own}), target)
    assert torch.equal(head.embedding(target)(torch.tensor([[7, 8]])), own[[7, 8]][None])
    assert not [each for each in head.parameters() if each.shape == own.shape]
    features = torch.randn(1, 3, 32 * len(head.layers_of(tiny_model(num_hidden_layers=8))))
    drafts = []
    for token in (7, 9):
        drafter = ChainDrafter(head, target)
        hidden = drafter.read(features, torch.tensor([[token, token, token]]))
        head.own_embedding, kept = None, head.own_embedding
        drafts.append((hidden, ChainDrafter(head, target).read(features, torch.tensor([[token, token, token]]))))
        head.own_embedding = kept
    assert not torch.equal(*drafts[0])
    assert torch.equal(*drafts[1])


def test_an_embedding_of_its_own_is_saved(tmp_path):
    target, own = tiny_model(), torch.randn(128, 32)
    head = loaded_eagle3(write_head(tmp_path, LLAMA3, eagle3_tensors(LLAMA3) | {"embed_tokens.weight": own}), target)
    head.save(tmp_path / "ours", Provenance("ada/tiny"), "# Card\n")
    again = loaded_eagle3(tmp_path / "ours", target)
    assert again.own_embedding is not None and torch.equal(again.own_embedding, own)
    assert json.loads((tmp_path / "ours/config.json").read_text())["target_hidden_size"] == 32  # EAGLE's code reads it


def test_an_embedding_of_another_vocabulary_is_refused(folder):
    change(folder, embed_tokens__weight=torch.zeros(96, 32))
    refused(folder, "tensor 'embed_tokens.weight' has shape [96, 32], the model's is [128, 32]", target=tiny_model())


@pytest.mark.parametrize("config", [EAGLE1, VICUNA], ids=["without bias", "with bias"])
def test_a_public_eagle1_head_computes_what_its_tensors_say(tmp_path, config):
    tensors, target = eagle1_tensors(config), tiny_model()
    head = EagleHead.load(write_head(tmp_path, config, tensors), target)
    assert isinstance(head, FeatureHead)
    torch.manual_seed(1)
    embeddings, features = torch.randn(2, 1, 6, 32).unbind()
    with torch.no_grad():
        hidden = head(embeddings, head.combine(features), POSITIONS, causal_attend)
        logits = head.logits(hidden)[0]
    expected = slow_heads.eagle1(tensors, config, embeddings[0], features[0])
    assert_close(hidden[0], expected)
    assert_close(logits, expected @ target.lm_head.weight.T)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_theta": 1e6, "rope_scaling": YARN}, {"rope_theta": 1e6, **YARN}),
        ({"rope_parameters": {"rope_theta": 1e6, **YARN}}, {"rope_theta": 1e6, **YARN}),
    ],
    ids=["none", "base", "scaling", "parameters"],
)
def test_every_way_to_state_rope_is_read_and_comes_back(tmp_path, rope, expected):
    config = LLAMA3 | {"max_position_embeddings": 8192} | rope
    head = loaded_eagle3(write_head(tmp_path / "public", config, eagle3_tensors(config)))
    assert head.config.rope_parameters == expected
    head.save(tmp_path / "ours", Provenance("ada/tiny"), "# Card\n")
    again = loaded_eagle3(tmp_path / "ours")
    assert again.config.rope_parameters == expected
    ours, theirs = (each.rotary_emb(torch.zeros(1), POSITIONS) for each in (again, head))
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["rope_theta"] == expected["rope_theta"]
    assert written["rope_scaling"] == (YARN if "factor" in expected else None)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},
        {"head_dim": 16, "qkv_bias": True, "fc_norm": True, "norm_output": True},
        {"target_hidden_size": 20, "draft_vocab_size": 128},
    ],
    ids=["plain", "layers", "norms", "widths"],
)
def test_a_saved_head_comes_back_as_it_was(tmp_path, changes):
    config = LLAMA3 | changes
    head = DraftHead(LlamaConfig.from_dict(config))
    head.load_state_dict(eagle3_tensors(config))
    head.save(tmp_path, Provenance("ada/tiny", training={"steps": 3}), "# Card\n")
    again = loaded_eagle3(tmp_path)
    state = head.state_dict()
    assert again.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())
    assert again.feature_layers == head.feature_layers
    torch.manual_seed(1)
    embeddings, taps = torch.randn(1, 6, 32), torch.randn(1, 6, head.fc.in_features)
    with torch.no_grad():
        outputs = [each(embeddings, each.combine(taps), POSITIONS, causal_attend) for each in (head, again)]
        assert torch.equal(*outputs)
        assert torch.equal(head.logits(outputs[0]), again.logits(outputs[1]))


def test_a_saved_head_has_public_names(tmp_path):
    head = DraftHead(LlamaConfig.from_dict(LLAMA3)).to(torch.bfloat16)
    head.save(tmp_path, Provenance("ada/tiny", training={"steps": 3}), "# Card\n")
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json", "model.safetensors", "keepsight.json", "README.md"
    }  # fmt: skip
    assert load_file(tmp_path / "model.safetensors").keys() == eagle3_tensors(LLAMA3).keys()
    config = json.loads((tmp_path / "config.json").read_text())
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    for name in (*names, "rms_norm_eps", "vocab_size", "draft_vocab_size", "max_position_embeddings", "hidden_act"):
        assert config[name] == LLAMA3[name], name
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["torch_dtype"] == "bfloat16"
    assert "target_hidden_size" not in config  # EAGLE's own code would leave the embedding random
    origin = json.loads((tmp_path / "keepsight.json").read_text())
    assert origin["provenance"]["base_model"] == "ada/tiny"
    assert origin["provenance"]["training"] == {"steps": 3}
    assert origin["digests"] == {"model.safetensors": file_digest(tmp_path / "model.safetensors")}


def test_a_write_that_fails_leaves_the_head_as_it_was(tmp_path, monkeypatch):
    head = DraftHead(LlamaConfig.from_dict(LLAMA3))
    head.save(tmp_path, Provenance("ada/tiny"), "# Card\n")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("keepsight.models.draft_head.write_json", full)
    with pytest.raises(OSError, match="No space left"):
        DraftHead(LlamaConfig.from_dict(LLAMA3)).save(tmp_path, Provenance("ada/tiny"), "# Other\n")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_takes_its_targets_dtype_and_else_its_files(folder, dtype):
    half = {name: each.half() for name, each in eagle3_tensors(LLAMA3).items() if name not in ("d2t", "t2d")}
    save_file(half | {name: eagle3_tensors(LLAMA3)[name] for name in ("d2t", "t2d")}, folder / "model.safetensors")
    assert {each.dtype for each in EagleHead.load(folder).parameters()} == {torch.float16}
    head = loaded_eagle3(folder, tiny_model().to(dtype))
    assert {each.dtype for each in head.parameters()} == {dtype}
    assert (head.d2t.dtype, head.t2d.dtype) == (torch.int64, torch.bool)
    assert all(each.requires_grad for each in head.parameters())


def test_a_vocabulary_as_large_as_the_targets_needs_no_maps(folder):
    config = LLAMA3 | {"draft_vocab_size": 128}
    tensors = eagle3_tensors(config)
    del tensors["d2t"], tensors["t2d"]
    head = loaded_eagle3(write_head(folder, config, tensors))
    assert head.target_ids(torch.arange(128)).tolist() == list(range(128))
    assert head.t2d.all()
    del config["draft_vocab_size"]
    assert loaded_eagle3(write_head(folder, config, tensors)).lm_head.out_features == 128


@pytest.mark.parametrize("name", [name for name in eagle3_tensors(LLAMA3) if name != "fc.weight"])
def test_a_missing_tensor_is_named(folder, name):
    change(folder, **{name: None})
    refused(folder, str(folder / "model.safetensors"), f"tensor '{name}' is missing;")


def test_missing_and_surplus_tensors_are_counted(folder):
    change(folder, norm__weight=None, fc__weight=None, lm_head__weight=None)
    refused(folder, "tensor 'fc.weight' is missing, and 2 more;")
    write_head(folder, LLAMA3, eagle3_tensors(LLAMA3))
    change(folder, midlayer__self_attn__q_proj__bias=torch.zeros(32), fc__bias=torch.zeros(32))
    refused(folder, "tensor 'fc.bias' is surplus, and 1 more;")


@pytest.mark.parametrize("bias", [True, False])
def test_a_bias_that_the_configuration_does_not_name_is_an_error(folder, bias):
    write_head(folder, EAGLE1 | {"bias": not bias}, eagle1_tensors(EAGLE1 | {"bias": bias}))
    refused(folder, f"tensor 'fc.bias' is {'surplus' if bias else 'missing'};")


@pytest.mark.parametrize("name", ["fc.weight", "midlayer.self_attn.k_proj.weight", "norm.weight", "d2t", "t2d"])
def test_a_tensor_of_another_shape_is_named_with_both(folder, name):
    given = eagle3_tensors(LLAMA3)[name]
    change(folder, **{name: torch.cat([given, given[:1]])})
    shape = list(given.shape)
    refused(
        folder, f"tensor '{name}' has shape {[shape[0] + 1, *shape[1:]]}, the configuration beside it needs {shape}"
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(folder, value):
    weight = eagle3_tensors(LLAMA3)["midlayer.mlp.up_proj.weight"].index_fill(0, torch.tensor([5]), value)
    change(folder, midlayer__mlp__up_proj__weight=weight)
    refused(folder, "tensor 'midlayer.mlp.up_proj.weight' holds NaN or infinity in torch.float32")


def test_weights_too_large_for_the_targets_dtype_are_refused(folder):
    change(folder, norm__weight=torch.full((32,), 1e6))
    assert loaded_eagle3(folder).norm.weight.max() == 1e6
    refused(folder, "tensor 'norm.weight' holds NaN or infinity in torch.float16", target=tiny_model().half())


def test_weights_that_are_quantized_are_refused(folder):
    change(folder, lm_head__weight=torch.zeros(24, 32, dtype=torch.int8))
    refused(folder, "tensor 'lm_head.weight' is torch.int8; expected float32, bfloat16 or float16")


@pytest.mark.parametrize("spoil", [lambda d2t: d2t + 1, lambda d2t: d2t.flip(0), lambda d2t: d2t - 1000])
def test_maps_that_disagree_are_refused(folder, spoil: Callable[[Tensor], Tensor]):
    change(folder, d2t=spoil(eagle3_tensors(LLAMA3)["d2t"]))
    refused(folder, "d2t and t2d name different tokens")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 48}, "hidden size 32, but that of LlamaForCausalLM is 48"),
        ({"vocab_size": 96}, "vocabulary 128, but that of LlamaForCausalLM is 96"),
    ],
)
def test_a_head_for_another_target_is_refused(folder, changes, said):
    refused(folder, str(folder), said, "choose the model's own head", target=tiny_model(**changes))


def test_a_head_for_features_of_another_width_is_refused(folder):
    config = LLAMA3 | {"target_hidden_size": 20}
    write_head(folder, config, eagle3_tensors(config))
    refused(folder, "feature width 20, but that of LlamaForCausalLM is 32", target=tiny_model())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    refused(folder, f"{name} is missing; a draft head needs model.safetensors, config.json")


@pytest.mark.parametrize("content", [b"\x80\x04N.", b""])
def test_a_file_that_is_no_safetensors_is_named(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, str(folder / "model.safetensors"), "not a safetensors file")


def test_one_changed_bit_of_our_own_head_is_noticed(tmp_path):
    DraftHead(LlamaConfig.from_dict(LLAMA3)).save(tmp_path, Provenance("ada/tiny"), "# Card\n")
    content = bytearray((tmp_path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(content)
    refused(tmp_path, str(tmp_path / "model.safetensors"), "its digest is sha256:", "keepsight.json says sha256:")
    (tmp_path / "keepsight.json").write_text("[]")
    refused(tmp_path, str(tmp_path / "keepsight.json"), "expected an object, got list")
    write_json(tmp_path / "keepsight.json", {"provenance": asdict(Provenance("ada/tiny")), "digests": {}})
    refused(tmp_path, str(tmp_path / "model.safetensors"), "keepsight.json says missing")


def test_another_model_is_no_head(folder):
    model = tiny_model(num_hidden_layers=1)
    save_file(model.state_dict(), folder / "model.safetensors")
    refused(folder, "no EAGLE head, which has tensors called midlayer.* or layers.0.*", "'lm_head.weight'")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": "absent"}, "hidden_size is missing or no possible size"),
        ({"vocab_size": "many"}, "vocab_size is missing or no possible size"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3; an EAGLE head has 1"),
        ({"norm_before_residual": True}, "norm_before_residual=True is not supported"),
        ({"eagle_config": 3}, "eagle_config=3: expected three whole numbers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, "expected three whole numbers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": 7}}, "expected three whole numbers"),
        ({"num_attention_heads": 5}, "not a Llama layer's configuration"),
        ({"num_attention_heads": 0}, "num_attention_heads is missing or no possible size"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "not a Llama layer's configuration"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "no layer can be made of it"),
        ({"hidden_act": "sigh"}, "no layer can be made of it"),
        ({"draft_vocab_size": "many"}, "no layer can be made of it"),
    ],
)
def test_a_configuration_that_is_none_is_named(folder, changes, said):
    configure(folder, **changes)
    refused(folder, str(folder / "config.json"), said)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_configuration_that_is_no_object_is_named(folder, content):
    (folder / "config.json").write_text(content)
    refused(folder, str(folder / "config.json"))
