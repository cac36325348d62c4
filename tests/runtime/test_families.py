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
    model, method = family_model(family), method_of(name, family, folder)
    if (family, name) in REFUSED:
        with pytest.raises(UserError, match=REFUSED[family, name]) as caught:
            method.start(model, PROMPT)
        assert "\n" not in str(caught.value)
        return
    prompt, hide = PROMPT, None
    if isinstance(method, ShortenPrompt | SpecKVPC):
        state = method.start(model, PROMPT)
        prompt = state.tokens
        assert prompt.shape[1] <= BUDGET
    elif isinstance(method, Evict):
        whole = prefill(model, PROMPT, needs=method.needs())
        fits = method.fits(whole)
        kept = whole.select_all() if fits else method.select(whole, method.importance(model, whole))
        state = method.compress_state(model, whole)
        assert state.length == (0 if kept == [] else int(torch.stack(kept).sum(-1).max())), "what was counted is held"
        assert sum(int(each.sum()) for each in kept) == BUDGET * sum(each.shape[1] for each in kept)
        hide = hiding(kept)
    else:
        state = method.start(model, PROMPT)
        hide = below_top(LENGTH, BUDGET, kv_heads_of(family)) if name == "exact_topk" else None
    if name in ("kivi", "think"):
        _compare_packed(model, state)
        return
    _, expected = slow_pass(model, hide, input_ids=torch.cat([prompt, ANSWER], dim=1))
    assert_close(state.logits, expected[:, prompt.shape[1] - 1])
    reader = method.reader(model)
    for place in range(ANSWER.shape[1]):
        state, logits = read(reader, state, ANSWER[:, place : place + 1])
        assert_close(logits[:, 0], expected[:, prompt.shape[1] + place])


def _compare_packed(model: Any, state: State) -> None:
    """One token over what transformers' cache would hold of the packed entries."""
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        positions = torch.arange(LENGTH + 1)[None]  # Qwen2.5-VL's own would go on from the prompt that it read last
        model(PROMPT, past_key_values=plain, position_ids=positions[:, :-1])
        for layer, packed in zip(full_layers(plain), full_layers(state.cache), strict=True):
            layer.keys, layer.values, _ = packed.entries()
        expected = model(ANSWER[:, :1], past_key_values=plain, position_ids=positions[:, -1:]).logits[:, 0]
    _, logits = read(model, state, ANSWER[:, :1])
    assert_close(logits[:, 0], expected)


@pytest.mark.parametrize(
    ("family", "name"),
    grid(["snapkv", "h2o", "dapq", "lookaheadkv"], [name for name in ALL if name != "Mistral with a window"]),
)
def test_observers_score_by_the_models_own_attention(family, name, folder):
    model, method = family_model(family), method_of(name, family, folder)
    state = prefill(model, PROMPT, needs=method.needs())
    if (family, name) in REFUSED:
        with pytest.raises(UserError, match=REFUSED[family, name]):
            observed_by_query_head(model, method, state)
        return
    expected = _slow_scores(name, model, method)
    scores = observed_by_query_head(model, method, state)
    assert len(scores) == len(expected) == len(full_attention_layers(model.config))
    for score, each in zip(scores, expected, strict=True):
        assert_close(score[0], each)


def _slow_scores(name: str, model: Any, method: Evict) -> list[Tensor]:
    if name == "lookaheadkv":
        return soft_token_attention(random_on(model), model.get_input_embeddings()(PROMPT), method.reduce.queries)
    seen = PROMPT if name != "dapq" else torch.cat([PROMPT, PROMPT[:, :4], PROMPT[:, -28:]], dim=1)
    rows = {"snapkv": slice(LENGTH - 8, LENGTH), "h2o": slice(None), "dapq": slice(LENGTH, None)}[name]
    weights = [each[0, :, rows, :LENGTH] for each in slow_pass(model, input_ids=seen)[0]]
    return [each.sum(dim=1) if name == "h2o" else each.mean(dim=1) for each in weights]
