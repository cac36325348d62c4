"""FastV against the model's own eager attention, in which the layers from K on do not see pruned tokens."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from keepsight import generate
from keepsight.runtime.generate import FullCache
from keepsight.runtime.images import Images
from keepsight.runtime.methods import FastV
from keepsight.runtime.state import read
from tests.close import assert_close
from tests.families import family_model, fresh_model
from tests.refused import refused
from tests.runtime.slow_families import slow_pass
from tests.runtime.test_images import ANSWER, GEMMA, IMAGE, LENGTH, QWEN, longer, prompt


class SlowFastV:
    """Section 4.1: masks the pruned tokens in layers of index `layer` and more, for every token but themselves."""

    def __init__(self, ids: Tensor, layer: int, stays: int) -> None:
        self.image_positions: list[int] = (ids[0] == IMAGE).nonzero()[:, 0].tolist()
        self.layer = layer
        self.stays = stays
        self.pruned: list[int] = []

    def __call__(self, layer: int, weights: Tensor) -> Tensor:
        if layer == self.layer - 1:
            attention = weights[:, LENGTH - 1].mean(dim=0)
            ranking = sorted(self.image_positions, key=lambda position: (-float(attention[position]), position))
            self.pruned = sorted(ranking[self.stays :])
        hidden = torch.zeros_like(weights, dtype=torch.bool)
        if layer >= self.layer:
            hidden[:, :, self.pruned] = True
            hidden[:, self.pruned, self.pruned] = False
        return hidden


@pytest.mark.parametrize(
    ("budget", "layer", "stays", "attention"), [(0.5, 1, 4, "sdpa"), (3, 1, 3, "eager"), (0.25, 2, 2, "sdpa")]
)
def test_answers_are_those_of_the_masked_model(budget, layer, stays, attention):
    model = fresh_model(QWEN)
    model.set_attn_implementation(attention)
    inputs = prompt(QWEN)
    images = Images.among(inputs)
    slow = SlowFastV(inputs["input_ids"], layer, stays)
    _, expected = slow_pass(model, slow, **longer(inputs, ANSWER))
    state = FastV(budget, layer).start(model, inputs["input_ids"], images=images)
    assert_close(state.logits, expected[:, LENGTH - 1])
    pruned = len(slow.pruned)
    assert pruned == 8 - stays
    pruned_layers = len(state.layers) - layer
    entries = [cache_layer.keys.shape[2] for cache_layer in state.layers]
    assert entries == [LENGTH] * layer + [LENGTH - pruned] * pruned_layers
    assert {cache_layer.get_seq_length() for cache_layer in state.layers} == {LENGTH}
    together = read(model, state.copy(), ANSWER)[1]
    assert_close(together, expected[:, LENGTH:])
    for index in range(ANSWER.shape[1]):
        state, logits = read(model, state, ANSWER[:, index : index + 1])
        assert_close(logits[:, 0], expected[:, LENGTH + index])
    full_state = FullCache().start(model, inputs["input_ids"], images=images)
    unpruned = read(model, full_state, ANSWER)[1]
    assert (unpruned - together).abs().max() > 1e-3, "pruned tokens matter"


def test_it_answers_within_generate_and_leaves_the_model_as_it_was():
    model = family_model(QWEN)
    inputs = prompt(QWEN)
    greedy: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    plain = model.generate(**inputs, **greedy)
    unpruned: Any = generate(model, method=FastV(1.0), **greedy, **inputs)
    assert torch.equal(unpruned, plain[:, LENGTH:])
    pruned = generate(model, method=FastV(1, 1), **greedy, **inputs)
    slow = SlowFastV(inputs["input_ids"], 1, 1)
    expected: list[int] = []
    for _ in range(4):
        answer = torch.tensor([expected], dtype=torch.long)
        _, logits = slow_pass(model, slow, **longer(inputs, answer))
        expected.append(int(logits[0, -1].argmax()))
    assert pruned[0].tolist() == expected
    assert torch.equal(model.generate(**inputs, **greedy), plain)
    assert not any(layer._forward_pre_hooks for layer in model.model.language_model.layers)


def test_what_it_cannot_prune_is_refused():
    model = family_model(QWEN)
    inputs = prompt(QWEN)
    images = Images.among(inputs)
    ids = inputs["input_ids"]
    with refused("pixel_values", "missing"):
        FastV(0.5).start(model, ids)
    with refused("input_ids", "range"):
        FastV(0.5).start(model, ids.expand(2, -1), images=images)
    with refused("attention_mask", "data"):
        FastV(0.5).start(model, ids, torch.arange(ids.shape[1])[None] > 1, images=images)
    with refused("layer", "range"):
        FastV(0.5, 40).start(model, ids, images=images)
    gemma = prompt(GEMMA)
    with refused("model", "model"):
        FastV(0.5).start(family_model(GEMMA), gemma["input_ids"], images=Images.among(gemma))
    with refused("layer", "range"):
        FastV(0.5, 0)
    with refused("budget", "range"):
        replace(FastV(0.5), budget=1.5)
