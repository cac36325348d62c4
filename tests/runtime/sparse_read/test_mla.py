"""Methods that read a few entries a step on a tiny DeepSeek-V3, whose heads share latents; see also `test_reader`."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers.cache_utils import Cache

from keepsight.errors import UserError
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.retrieval.specontext import retrieval_cache
from keepsight.runtime.sparse_read.cache import expanded
from keepsight.runtime.state import cache_bytes, prefill, read
from tests.close import assert_close
from tests.models.retrieval_heads import tiny_deepseek
from tests.runtime.retrieval.test_reader import answer_of, method_of
from tests.tiny import prompt_ids

HEADS, NOPE, ROPE, VALUE, RANK, LAYERS = 4, 8, 4, 6, 16, 3


@pytest.mark.parametrize("name", ["specontext", "specontext of embeddings", "quest with dense layers", "exact"])
def test_rows_and_turns_are_read_as_one_prompt_each(name: str) -> None:
    """Rows of different lengths, one of them shorter than the budget; a turn in one pass over latents."""
    model, method, lengths = tiny_deepseek(), method_of(name, 16, HEADS), (35, 11, 30)
    (ids, mask), reader = prompt_ids(*lengths), method.reader(model)
    turn, answer = prompt_ids(25, 25, 25, seed=2)[0], answer_of(9, 9, 9)
    state = read(method.turn_reader(model), method.start(model, ids, mask), turn)[0]
    whole = method.start(model, torch.cat([ids, turn], 1), functional.pad(mask, (0, 25), value=1))
    assert_close(state.logits, whole.logits)
    together = read(reader, state, answer)[1]
    assert_close(together, read(reader, whole, answer)[1])
    for row, length in enumerate(lengths):
        alone = method.start(model, torch.cat([ids[row : row + 1, -length:], turn[row : row + 1]], 1))
        assert_close(together[row : row + 1], read(reader, alone, answer[row : row + 1])[1])


def test_bytes_are_those_of_the_latents() -> None:
    model, method = tiny_deepseek(), method_of("specontext of embeddings", 8, HEADS)
    ids, mask = prompt_ids(30, 20)
    state, _ = read(method.reader(model), method.start(model, ids, mask), answer_of(5, 5))
    tokens = 2 * (30 + 5)
    latents = LAYERS * tokens * (RANK + ROPE) * 4
    assert sum(layer.nbytes for layer in retrieval_cache(state.cache).selected_layers) == latents
    assert state.kv_bytes == latents + tokens * HEADS * 8 * 4  # and the retrieval head's keys
    whole = expanded(prefill(model, ids, mask))
    assert cache_bytes(whole.cache) == LAYERS * 60 * HEADS * (NOPE + ROPE + VALUE) * 4


def test_what_cannot_be_is_refused() -> None:
    model, ids = tiny_deepseek(), prompt_ids(10)[0]
    with pytest.raises(UserError, match="offload 1 does not apply to deepseek_v3: all heads share its latents"):
        method_of("specontext", 8, HEADS, offload=1).start(model, ids)
    whole = prefill(model, ids)
    shorter: list[Any] = [KeptLayer(each.keys[:, :, :5], each.values[:, :, :5], 10) for each in whole.entries()]
    with pytest.raises(UserError, match="the cache holds 5 of them"):
        method_of("specontext of embeddings", 8, HEADS).compress(model, replace(whole, cache=Cache(layers=shorter)))
    projection = model.model.layers[0].self_attn.kv_b_proj
    projection.weight = torch.nn.Parameter(projection.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(UserError, match=r"kv_b_proj of layer 0 is a Linear of torch.float8_e4m3fn"):
        prefill(model, ids)
    model = tiny_deepseek()  # with an indexer in each layer, as DeepSeek-V3.2 has
    model.model.layers[0].self_attn.indexer = torch.nn.Identity()
    with pytest.raises(UserError, match="deepseek_v3 selects itself what its latent attention reads"):
        method_of("specontext", 8, HEADS).start(model, ids)
