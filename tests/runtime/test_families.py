"""Every method on a tiny random model of every family, against transformers' own eager attention."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from keepsight.errors import UserError
from keepsight.models.decoder import full_attention_layers
from keepsight.runtime.evict import Evict
from keepsight.runtime.prompt_compression.method import ShortenPrompt
from keepsight.runtime.prompt_compression.specpc import SpecKVPC
from keepsight.runtime.state import State, full_layers, prefill, read
from tests.close import assert_close
from tests.families import FAMILIES, MORE, family_model
from tests.models.modules import random_on
from tests.runtime.family_methods import (
    BUDGET,
    LENGTH,
    PROMPT,
    REFUSED,
    grid,
    kv_heads_of,
    method_of,
)
from tests.runtime.scoring import observed_by_query_head
from tests.runtime.slow_families import below_top, hiding, slow_pass, soft_token_attention
from tests.tiny import prompt_ids

ANSWER = prompt_ids(6, seed=1)[0]
ALL = [*FAMILIES, *MORE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.mark.parametrize(("family", "name"), grid(families=ALL))
def test_a_method_answers_as_masked_eager_attention_does(family, name, folder):
    model = family_model(family)
    method = method_of(name, family, folder)
    if (family, name) in REFUSED:
        with pytest.raises(UserError, match=REFUSED[family, name]) as caught:
            method.start(model, PROMPT)
        assert "\n" not in str(caught.value)
        return
    prompt = PROMPT
    hide = None
    if isinstance(method, Evict):
        state, kept = _evicted(model, method)
        hide = hiding(kept)
    else:
        state = method.start(model, PROMPT)
    if isinstance(method, ShortenPrompt | SpecKVPC):
        prompt = state.tokens
        assert prompt.shape[1] <= BUDGET
    if name == "exact_topk":
        hide = below_top(LENGTH, BUDGET, kv_heads_of(family))
    if name in ("kivi", "think"):
        _assert_answers_from_packed_entries(model, state)
        return
    prompt_length = prompt.shape[1]
    _, expected = slow_pass(model, hide, input_ids=torch.cat([prompt, ANSWER], dim=1))
    assert_close(state.logits, expected[:, prompt_length - 1])
    reader = method.reader(model)
    for index in range(ANSWER.shape[1]):
        state, logits = read(reader, state, ANSWER[:, index : index + 1])
        assert_close(logits[:, 0], expected[:, prompt_length + index])


def _evicted(model: Any, method: Evict) -> tuple[State, list[Tensor]]:
    """The state after eviction, and which entries of each layer were kept, [1, K, N] bool: exactly the budget."""
    full_state = prefill(model, PROMPT, needs=method.needs())
    if method.fits(full_state):
        kept = full_state.select_all()
    else:
        kept = method.select(full_state, method.importance(model, full_state))
    state = method.compress_state(model, full_state)
    longest = int(torch.stack(kept).sum(-1).max()) if kept else 0
    assert state.length == longest
    kept_count = sum(int(layer.sum()) for layer in kept)
    kv_heads = sum(layer.shape[1] for layer in kept)
    assert kept_count == BUDGET * kv_heads
    return state, kept


def _assert_answers_from_packed_entries(model: Any, state: State) -> None:
    """One token over what transformers' cache would hold of the packed entries."""
    plain_cache = DynamicCache(config=model.config)
    positions = torch.arange(LENGTH + 1)[None]  # Qwen2.5-VL's own would go on from the prompt that it read last
    with torch.no_grad():
        model(PROMPT, past_key_values=plain_cache, position_ids=positions[:, :-1])
        for layer, packed in zip(full_layers(plain_cache), full_layers(state.cache), strict=True):
            layer.keys, layer.values, _ = packed.entries()
        output = model(ANSWER[:, :1], past_key_values=plain_cache, position_ids=positions[:, -1:])
    expected = output.logits[:, 0]
    _, logits = read(model, state, ANSWER[:, :1])
    assert_close(logits[:, 0], expected)


OBSERVERS = ["snapkv", "h2o", "dapq", "lookaheadkv"]
OBSERVED_FAMILIES = [family for family in ALL if family != "Mistral with a window"]


@pytest.mark.parametrize(("family", "name"), grid(OBSERVERS, OBSERVED_FAMILIES))
def test_observers_score_by_the_models_own_attention(family, name, folder):
    model = family_model(family)
    method = method_of(name, family, folder)
    state = prefill(model, PROMPT, needs=method.needs())
    if (family, name) in REFUSED:
        with pytest.raises(UserError, match=REFUSED[family, name]):
            observed_by_query_head(model, method, state)
        return
    expected = _slow_scores(name, model, method)
    scores = observed_by_query_head(model, method, state)
    assert len(scores) == len(expected) == len(full_attention_layers(model.config))
    for layer_scores, layer_expected in zip(scores, expected, strict=True):
        assert_close(layer_scores[0], layer_expected)


def _slow_scores(name: str, model: Any, method: Evict) -> list[Tensor]:
    """[H, N] of each layer: attention that the prompt's entries get from the queries that a method observes."""
    if name == "lookaheadkv":
        embedded = model.get_input_embeddings()(PROMPT)
        return soft_token_attention(random_on(model), embedded, method.reduce.queries)
    if name == "dapq":
        ids = torch.cat([PROMPT, PROMPT[:, :4], PROMPT[:, -28:]], dim=1)
        weights, _ = slow_pass(model, input_ids=ids)
        return [layer[0, :, LENGTH:, :LENGTH].mean(dim=1) for layer in weights]
    weights, _ = slow_pass(model, input_ids=PROMPT)
    if name == "h2o":
        return [layer[0].sum(dim=1) for layer in weights]
    return [layer[0, :, LENGTH - 8 :].mean(dim=1) for layer in weights]
