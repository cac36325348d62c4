"""The retrieval head against its definition: pruning, projections, RoPE, YaRN, and what it fits."""

import math
from itertools import product
from pathlib import Path

import pytest
import torch

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


def rotate(vector, position, frequencies, factor=1.0):
    """Rotate-half RoPE of one vector, pair by pair."""
    half = len(vector) // 2
    rotated = torch.empty_like(vector)
    for pair in range(half):
        angle = position * frequencies[pair]
        cosine = factor * math.cos(angle)
        sine = factor * math.sin(angle)
        rotated[pair] = vector[pair] * cosine - vector[pair + half] * sine
        rotated[pair + half] = vector[pair + half] * cosine + vector[pair] * sine
    return rotated


def rotate_heads(projected, position, frequencies, factor=1.0):
    """RoPE of [heads * 8] -> [heads, 8]."""
    return torch.stack([rotate(head, position, frequencies, factor) for head in projected.view(-1, 8)])


def frequencies(theta=1000.0, width=8):
    return [theta ** (-2 * pair / width) for pair in range(width // 2)]


def slow_projection(draft, projection, embedding, features, position):
    """One token's queries or keys [heads, 8], from the EAGLE-3 layer's formulas; `features` None for a head without."""
    layer = draft.midlayer
    inputs = norm(embedding, layer.input_layernorm.weight, 1e-6)
    weight = getattr(layer.self_attn, projection).weight
    if features is None:
        weight = weight[:, : len(inputs)]
    else:
        normed_features = norm(draft.fc.weight @ features, layer.hidden_norm.weight, 1e-6)
        inputs = torch.cat([inputs, normed_features])
    return rotate_heads(weight @ inputs, position, frequencies())


@pytest.mark.parametrize(("variant", "kv_heads"), [(VARIANTS[0], 2), (VARIANTS[1], 1)])
@torch.no_grad()
def test_queries_and_keys_are_those_of_the_formulas(variant, kv_heads):
    draft = tiny_draft_head(kv_heads=kv_heads)
    head = RetrievalHead.from_draft(draft, variant)
    assert head.config.num_attention_heads == 4
    assert head.kv_heads == kv_heads
    assert head.scaling == pytest.approx(8**-0.5)
    embeddings = torch.randn(2, 5, 32)
    features = torch.randn(2, 5, 96) if variant == "previous-step" else None
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 30, 31, 50]])
    query, key = head.project(embeddings, features, positions)
    assert query.shape == (2, 4, 5, 8)
    assert key.shape == (2, kv_heads, 5, 8)
    for row, column in product(range(2), range(5)):
        embedding = embeddings[row, column]
        features_of_token = None if features is None else features[row, column]
        position = positions[row, column].item()
        expected_query = slow_projection(draft, "q_proj", embedding, features_of_token, position)
        expected_key = slow_projection(draft, "k_proj", embedding, features_of_token, position)
        assert_close(query[row, :, column], expected_query)
        assert_close(key[row, :, column], expected_key)


@pytest.mark.parametrize("shape", [{}, {"fc_norm": True, "qkv_bias": True}])
@torch.no_grad()
def test_a_pruned_head_has_the_draft_heads_own_queries_and_keys(shape):
    draft = tiny_draft_head(**shape)
    embeddings = torch.randn(2, 6, 32)
    features = torch.randn(2, 6, 96)
    positions = torch.arange(6)[None]
    queries_and_keys: list[torch.Tensor] = []

    def note_queries_and_keys(query, key, value):
        queries_and_keys.extend((query, key))
        return torch.zeros(2, 6, 4, 8)

    draft(embeddings, draft.combine(features), positions, note_queries_and_keys)
    head = RetrievalHead.from_draft(draft, "previous-step")
    require_equal(head.project(embeddings, features, positions), queries_and_keys)


def require_equal(projected, expected):
    """Queries and keys of two heads."""
    query, key = projected
    expected_query, expected_key = expected
    assert torch.equal(query, expected_query)
    assert torch.equal(key, expected_key)


def test_features_move_on_by_one_token_and_padding_gives_none():
    features = torch.randn(2, 4, 3)
    mask = torch.tensor([[True] * 4, [False, False, True, True]])
    full_row, padded_row = of_the_token_before(features, mask)
    assert torch.equal(full_row, torch.cat([torch.zeros(1, 3), features[0, :3]]))
    assert torch.equal(padded_row, torch.cat([torch.zeros(3, 3), features[1, 2:3]]))
    _, row_without_mask = of_the_token_before(features)
    assert torch.equal(row_without_mask, torch.cat([torch.zeros(1, 3), features[1, :3]]))


def yarn_frequencies(theta, width, factor, trained):
    """YaRN (arXiv 2309.00071), section 3.2: below one turn interpolate, above 32 leave, in between a ramp."""

    def pair_that_turns(turns):
        return width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(32)), 0)
    high = min(math.ceil(pair_that_turns(1)), width - 1)
    stretched = []
    for pair, frequency in enumerate(frequencies(theta, width)):
        interpolated = min(max((pair - low) / (high - low), 0), 1)
        stretched.append(frequency / factor * interpolated + frequency * (1 - interpolated))
    return stretched


@pytest.mark.parametrize("context", [65, 2000])
@torch.no_grad()
def test_yarn_beyond_the_trained_length(context):
    head = tiny_retrieval_head("none")
    longer = head.extended(context)
    factor = context / 64
    scaling = 0.1 * math.log(factor) + 1
    expected_frequencies = yarn_frequencies(1000.0, 8, factor, 64)
    assert_close(longer.rotary_emb.inv_freq, torch.tensor(expected_frequencies))
    assert longer.rotary_emb.attention_scaling == pytest.approx(scaling)
    assert longer.config.rope_parameters["factor"] == factor
    assert longer.config.trained == 64
    assert longer.config.max_position_embeddings == context

    embedding = torch.randn(32)
    position = context - 1
    query, key = longer.project(embedding[None, None], None, torch.tensor([[position]]))
    inputs = norm(embedding, head.input_layernorm.weight, 1e-6)
    for projected, weight in ((query, head.q_proj.weight), (key, head.k_proj.weight)):
        expected = rotate_heads(weight @ inputs, position, expected_frequencies, scaling)
        assert_close(projected[0, :, 0], expected)


def test_extending_shares_weights_and_goes_on():
    head = tiny_retrieval_head()
    assert head.extended(64) is head
    longer = head.extended(300)
    assert longer.q_proj.weight.data_ptr() == head.q_proj.weight.data_ptr()
    assert longer.extended(300) is longer
    assert longer.extended(600).config == head.extended(600).config
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}
    scaled = tiny_retrieval_head(rope_parameters=linear, rope_theta=None)
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
    inputs = random_inputs(2, 5)
    for of_four, of_two in zip(split.project(*inputs), head.project(*inputs), strict=True):
        lower, upper = of_two.chunk(2, dim=1)
        assert not torch.equal(lower, upper)
        assert_close(of_four, torch.cat([lower, lower, upper, upper], dim=1))
    split.q_proj.weight.zero_()
    assert head.q_proj.weight.any(), "its weights are its own"
    with refused("retrieval_head.groups", "range"):
        head.grouped(3)
    for layers in (4, 7, 30):
        for layer in range(layers):
            assert split.config.group_of(layer, layers) // 2 == head.config.group_of(layer, layers)


def random_inputs(rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embeddings, features and positions."""
    embeddings = torch.randn(rows, tokens, 32)
    features = torch.randn(rows, tokens, 96)
    return embeddings, features, torch.arange(tokens)[None]


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
        inputs = random_inputs(1, 4)
        require_equal(loaded.project(*inputs), saved.project(*inputs))
        assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert provenance_of(tmp_path) == ORIGIN


def test_a_draft_head_is_pruned_as_it_is_read(tmp_path):
    draft = tiny_draft_head()
    draft.save(tmp_path, ORIGIN, "# A card\n")
    loaded = RetrievalHead.load(tmp_path, tiny_model())
    pruned = RetrievalHead.from_draft(draft, "previous-step")
    assert loaded.config == pruned.config
    assert loaded.config.feature_layers == LAYERS
    inputs = random_inputs(1, 4)
    require_equal(loaded.project(*inputs), pruned.project(*inputs))
    assert loaded.provenance == ORIGIN
    assert not loaded.training
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
