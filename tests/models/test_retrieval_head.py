"""The retrieval head against its definition: pruning, projections, RoPE, YaRN, and what it fits."""

import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from keepsight.files import read_json, write_json
from keepsight.models.card import Provenance
from keepsight.models.decoder import cached_kv_heads
from keepsight.models.identity import Identity
from keepsight.models.retrieval_head import CONFIG, RetrievalHead, of_the_token_before
from keepsight.runtime.methods import SpeContext
from tests.close import assert_close
from tests.models.retrieval_heads import (
    LAYERS,
    grouped_retrieval_head,
    provenance_of,
    target_for,
    tiny_deepseek,
    tiny_draft_head,
    tiny_retrieval_head,
)
from tests.models.slow_heads import norm
from tests.refused import refused
from tests.tiny import tiny_model

VARIANTS = ["previous-step", "none"]
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 2.0}


def rotated(vector, position, frequencies, factor=1.0):
    """Rotate-half RoPE of one vector, pair by pair."""
    half = len(vector) // 2
    result = torch.empty_like(vector)
    for pair in range(half):
        cosine, sine = (factor * turn(position * frequencies[pair]) for turn in (math.cos, math.sin))
        result[pair] = vector[pair] * cosine - vector[pair + half] * sine
        result[pair + half] = vector[pair + half] * cosine + vector[pair] * sine
    return result


def frequencies(theta=1000.0, width=8):
    return [theta ** (-2 * pair / width) for pair in range(width // 2)]


def slow(draft, features_used, embedding, features, position, kind):
    """One token's queries or keys [heads, 8], from the EAGLE-3 layer's formulas."""
    layer = draft.midlayer
    inputs = norm(embedding, layer.input_layernorm.weight, 1e-6)
    weight = getattr(layer.self_attn, kind).weight
    if features_used:
        inputs = torch.cat([inputs, norm(draft.fc.weight @ features, layer.hidden_norm.weight, 1e-6)])
    else:
        weight = weight[:, : len(inputs)]
    return torch.stack([rotated(head, position, frequencies()) for head in (weight @ inputs).view(-1, 8)])


@pytest.mark.parametrize(("variant", "kv_heads"), [(VARIANTS[0], 2), (VARIANTS[1], 1)])
@torch.no_grad()
def test_queries_and_keys_are_those_of_the_formulas(variant, kv_heads):
    draft = tiny_draft_head(kv_heads=kv_heads)
    head = RetrievalHead.from_draft(draft, variant)
    embeddings, features = torch.randn(2, 5, 32), torch.randn(2, 5, 96)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 30, 31, 50]])
    query, key = head.project(embeddings, features if variant == "previous-step" else None, positions)
    assert (query.shape, key.shape) == ((2, 4, 5, 8), (2, kv_heads, 5, 8))
    assert (head.config.num_attention_heads, head.kv_heads, head.scaling) == (4, kv_heads, pytest.approx(8**-0.5))
    for row in range(2):
        for place in range(5):
            token = (variant != "none", embeddings[row, place], features[row, place], positions[row, place].item())
            assert_close(query[row, :, place], slow(draft, *token, "q_proj"))
            assert_close(key[row, :, place], slow(draft, *token, "k_proj"))


@pytest.mark.parametrize("shape", [{}, {"fc_norm": True, "qkv_bias": True}])
@torch.no_grad()
def test_a_pruned_head_has_the_draft_heads_own_queries_and_keys(shape):
    draft = tiny_draft_head(**shape)
    embeddings, features, positions = torch.randn(2, 6, 32), torch.randn(2, 6, 96), torch.arange(6)[None]
    seen: list[torch.Tensor] = []

    def attend(query, key, value):
        seen.extend((query, key))
        return torch.zeros(2, 6, 4, 8)

    draft(embeddings, draft.combine(features), positions, attend)
    head = RetrievalHead.from_draft(draft, "previous-step")
    for own, its in zip(head.project(embeddings, features, positions), seen, strict=True):
        assert torch.equal(own, its)


def test_features_move_on_by_one_token_and_padding_gives_none():
    features = torch.randn(2, 4, 3)
    mask = torch.tensor([[True] * 4, [False, False, True, True]])
    moved = of_the_token_before(features, mask)
    assert torch.equal(moved[0], torch.cat([torch.zeros(1, 3), features[0, :3]]))
    assert torch.equal(moved[1], torch.cat([torch.zeros(3, 3), features[1, 2:3]]))
    assert torch.equal(of_the_token_before(features)[1], functional.pad(features[1, :3], (0, 0, 1, 0)))


def yarn_frequencies(theta, width, factor, trained, fast=32, slow_beta=1):
    """YaRN (arXiv 2309.00071), section 3.2: below one turn interpolate, above 32 leave, in between a ramp."""

    def pair_that_turns(turns):
        return width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair_that_turns(fast)), 0), min(math.ceil(pair_that_turns(slow_beta)), width - 1)
    result = []
    for pair, frequency in enumerate(frequencies(theta, width)):
        interpolated = min(max((pair - low) / (high - low), 0), 1)
        result.append(frequency / factor * interpolated + frequency * (1 - interpolated))
    return result


@pytest.mark.parametrize("context", [65, 2000])
@torch.no_grad()
def test_yarn_beyond_the_trained_length(context):
    head = tiny_retrieval_head("none")
    longer = head.extended(context)
    factor = context / 64
    expected = yarn_frequencies(1000.0, 8, factor, 64)
    assert_close(longer.rotary_emb.inv_freq, torch.tensor(expected))
    assert longer.rotary_emb.attention_scaling == pytest.approx(0.1 * math.log(factor) + 1)
    assert longer.config.rope_parameters["factor"] == factor
    assert (longer.config.trained, longer.config.max_position_embeddings) == (64, context)
    embedding, position = torch.randn(32), context - 1
    query, key = longer.project(embedding[None, None], None, torch.tensor([[position]]))
    inputs = norm(embedding, head.input_layernorm.weight, 1e-6)
    for projected, weight in ((query, head.q_proj.weight), (key, head.k_proj.weight)):
        heads = (weight @ inputs).view(-1, 8)
        slow_heads = [rotated(each, position, expected, 0.1 * math.log(factor) + 1) for each in heads]
        assert_close(projected[0, :, 0], torch.stack(slow_heads))


def test_extending_shares_weights_and_goes_on():
    head = tiny_retrieval_head()
    assert head.extended(64) is head
    longer = head.extended(300)
    assert longer.q_proj.weight.data_ptr() == head.q_proj.weight.data_ptr()
    assert longer.extended(300) is longer
    assert longer.extended(600).config == head.extended(600).config
    scaled = tiny_retrieval_head(
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}, rope_theta=None
    )
    assert scaled.extended(1000) is scaled


def test_a_head_fits_a_target_with_as_many_kv_heads():
    head = tiny_retrieval_head(kv_heads=2)
    head.check_model(target_for(2))
    with refused("retrieval", "model"):
        head.check_model(target_for(1))
    with refused("retrieval", "model"):
        head.check_model(tiny_model(hidden_size=16, vocab_size=99))
    tiny_retrieval_head(kv_heads=4).check_model(tiny_deepseek())  # with latent attention, keys of every head
    with refused("retrieval", "model"):
        head.check_model(tiny_deepseek())
    grouped_retrieval_head(3).check_model(tiny_model())
    with refused("retrieval", "model"):
        grouped_retrieval_head(4).check_model(tiny_model())


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_untrained_head_has_the_targets_shape(variant):
    for target in (tiny_model(num_hidden_layers=8), tiny_deepseek()):
        head = RetrievalHead.untrained(target, variant, 512)
        if variant == "none" or target.config.num_hidden_layers > 6:
            head.check_model(target)
        assert head.config.trained == 512
        assert head.kv_heads == cached_kv_heads(target)


@pytest.mark.parametrize("shape", [{}, {"qkv_bias": True}])
@torch.no_grad()
def test_groups_are_split_into_groups_that_select_for_the_same_layers(shape):
    head = grouped_retrieval_head(2, **shape)
    split = head.grouped(4)
    inputs = torch.randn(2, 5, 32), torch.randn(2, 5, 96), torch.arange(5)[None]
    for own, before in zip(split.project(*inputs), head.project(*inputs), strict=True):
        lower, upper = before.chunk(2, dim=1)
        assert_close(own, torch.cat([lower, lower, upper, upper], dim=1))
        assert not torch.equal(lower, upper)
    split.q_proj.weight.zero_()
    assert head.q_proj.weight.any(), "its weights are its own"
    with refused("retrieval_head.groups", "range"):
        head.grouped(3)
    for layers in (4, 7, 30):
        for place in range(layers):
            assert split.config.group_of(place, layers) // 2 == head.config.group_of(place, layers)


ORIGIN = Provenance("ada/tiny", Identity("v1", "sha256:t", None, "sha256:d"), {"steps": 3}, "0.1.0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_retrieval_head().save(tmp_path / "head", ORIGIN, "# A card\n")
    return tmp_path / "head"


@pytest.mark.parametrize(("variant", "dtype"), [("previous-step", torch.bfloat16), ("none", torch.float32)])
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


def test_a_draft_head_is_pruned_as_it_is_read(tmp_path):
    draft = tiny_draft_head()
    draft.save(tmp_path, ORIGIN, "# A card\n")
    loaded = RetrievalHead.load(tmp_path, tiny_model())
    pruned = RetrievalHead.from_draft(draft, "previous-step")
    assert loaded.config == pruned.config and loaded.config.feature_layers == LAYERS
    inputs = torch.randn(1, 4, 32), torch.randn(1, 4, 96), torch.arange(4)[None]
    for of_loaded, of_pruned in zip(loaded.project(*inputs), pruned.project(*inputs), strict=True):
        assert torch.equal(of_loaded, of_pruned)
    assert loaded.provenance == ORIGIN and not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_a_draft_head_for_another_model_or_with_another_embedding_is_not_pruned(tmp_path):
    tiny_draft_head(kv_heads=4).save(tmp_path / "heads", ORIGIN, "# A card\n")
    with refused("retrieval", "model"):
        RetrievalHead.load(tmp_path / "heads", tiny_model())
    draft = tiny_draft_head()
    draft.own_embedding = torch.randn(128, 32)
    draft.save(tmp_path / "embedding", ORIGIN, "# A card\n")
    with refused("head", "model"):
        RetrievalHead.load(tmp_path / "embedding", tiny_model())
    with refused("model", "missing"):  # without a model it cannot be compared
        SpeContext.from_pretrained(tmp_path / "embedding", 64)


@pytest.mark.parametrize(
    ("changes", "field", "code"),
    [
        ({"features": "all"}, "retrieval_config.json", "file"),
        ({"num_key_value_heads": 3}, "retrieval_config.json", "file"),
        ({"num_key_value_heads": 0}, "retrieval_config.json", "file"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, "retrieval_config.json", "file"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}}, "retrieval_config.json", "file"),
        ({"rope_parameters": {**YARN, "original_max_position_embeddings": "x"}}, "retrieval_config.json", "file"),
        ({"rms_norm_eps": float("inf")}, "retrieval_config.json", "file"),
    ],
)
def test_a_configuration_that_makes_no_head_is_refused(folder, changes, field, code):
    config = read_json(folder / CONFIG)
    write_json(folder / CONFIG, config | {"head": config["head"] | changes})
    with refused(field, code) as error:
        RetrievalHead.load(folder, tiny_model())
    assert str(folder) in str(error.value)
