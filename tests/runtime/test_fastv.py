"""FastV against the model's own eager attention, in which the layers from K on do not see the tokens that left."""

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
    """Section 4.1: masks the tokens that left in layers of index `layer` and more, for every token but themselves."""

    def __init__(self, ids: Tensor, layer: int, stays: int) -> None:
        self.images, self.layer, self.stays = (ids[0] == IMAGE).nonzero()[:, 0].tolist(), layer, stays
        self.left: list[int] = []

    def __call__(self, place: int, weights: Tensor) -> Tensor:
        if place == self.layer - 1:
            last = [(float(weights[:, LENGTH - 1, token].mean()), token) for token in self.images]
            best = sorted(last, key=lambda pair: (-pair[0], pair[1]))[: self.stays]
            self.left = sorted({*self.images} - {token for _, token in best})
        hidden = torch.zeros_like(weights, dtype=torch.bool)
        if place >= self.layer:
            hidden[:, :, self.left] = True
            hidden[:, self.left, self.left] = False
        return hidden


@pytest.mark.parametrize(
    ("budget", "layer", "stays", "loaded"), [(0.5, 1, 4, "sdpa"), (3, 1, 3, "eager"), (0.25, 2, 2, "sdpa")]
)
def test_answers_are_those_of_the_masked_model(budget, layer, stays, loaded):
    model, inputs = fresh_model(QWEN), prompt(QWEN)
    model.set_attn_implementation(loaded)
    slow = SlowFastV(inputs["input_ids"], layer, stays)
    _, expected = slow_pass(model, slow, **longer(inputs, ANSWER))
    state = FastV(budget, layer).start(model, inputs["input_ids"], images=Images.among(inputs))
    assert_close(state.logits, expected[:, LENGTH - 1])
    layers = len(state.layers)
    gone = len(slow.left)
    assert gone == 8 - stays
    assert [each.keys.shape[2] for each in state.layers] == [LENGTH] * layer + [LENGTH - gone] * (layers - layer)
    assert {each.get_seq_length() for each in state.layers} == {LENGTH}
    together = read(model, state.copy(), ANSWER)[1]
    assert_close(together, expected[:, LENGTH:])
    for place in range(ANSWER.shape[1]):
        state, logits = read(model, state, ANSWER[:, place : place + 1])
        assert_close(logits[:, 0], expected[:, LENGTH + place])
    whole = FullCache().start(model, inputs["input_ids"], images=Images.among(inputs))
    assert (read(model, whole, ANSWER)[1] - together).abs().max() > 1e-3, "what left matters"


def test_it_answers_within_generate_and_leaves_the_model_as_it_was():
    model, inputs = family_model(QWEN), prompt(QWEN)
    plain = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    everything: Any = generate(model, method=FastV(1.0), max_new_tokens=4, do_sample=False, **inputs)
    assert torch.equal(everything, plain[:, LENGTH:])
    few = generate(model, method=FastV(1, 1), max_new_tokens=4, do_sample=False, **inputs)
    slow = SlowFastV(inputs["input_ids"], 1, 1)
    tokens: list[int] = []
    for _ in range(4):
        _, logits = slow_pass(model, slow, **longer(inputs, torch.tensor([tokens], dtype=torch.long)))
        tokens.append(int(logits[0, -1].argmax()))
    assert few[0].tolist() == tokens
    assert torch.equal(model.generate(**inputs, max_new_tokens=4, do_sample=False), plain)
    assert not any(layer._forward_pre_hooks for layer in model.model.language_model.layers)


def test_what_it_cannot_prune_is_refused():
    model, inputs = family_model(QWEN), prompt(QWEN)
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
