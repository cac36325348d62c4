"""ShadowKV against loops over a dense cache, in batches, and through turns and copies."""

from typing import Any

import pytest
import torch
from torch import Tensor

from keepsight.errors import Code
from keepsight.runtime.attention import run
from keepsight.runtime.generate import FullCache
from keepsight.runtime.sparse_read.shadowkv import ShadowKV
from keepsight.runtime.state import prefill, read
from tests.close import assert_close
from tests.models.retrieval_heads import tiny_deepseek
from tests.refused import refused
from tests.runtime.asked import answer_with, asking
from tests.runtime.sparse_read.slow_selection import turned
from tests.tiny import prompt_ids, tiny_model

LENGTH, CHUNK, LOCAL, RANK, BUDGET, OUTLIERS = 43, 4, 2, 7, 26, 0.16
ANSWER = prompt_ids(9, seed=1)[0]


def method_of(budget: int = BUDGET, **options: Any) -> ShadowKV:
    return ShadowKV(budget, **{"chunk": CHUNK, "local": LOCAL, "rank": RANK, "outliers": OUTLIERS} | options)


def low_rank(model: Any, layer: int, inputs: list[Tensor]) -> Tensor:
    """[K, N, d]: the prompt's keys after RoPE, from a truncated decomposition of what k_proj returned."""
    base = model.config.rope_parameters["rope_theta"]
    left, sizes, right = torch.linalg.svd(inputs[layer][0], full_matrices=False)
    plain = left[:, :RANK] @ torch.diag(sizes[:RANK]) @ right[:RANK]
    heads = plain.unflatten(1, (model.config.num_key_value_heads, -1))
    return torch.stack(
        [torch.stack([turned(key, place, base) for place, key in enumerate(head)]) for head in heads.transpose(0, 1)]
    )


def parts_of(keys: Tensor) -> tuple[list[list[int]], Tensor, set[int]]:
    """Chunks of a head's prompt keys [N, d], their means, and which of them are outliers."""
    chunks = [list(range(CHUNK * each, CHUNK * (each + 1))) for each in range(len(keys) // CHUNK - LOCAL)]
    means = torch.stack([keys[own].mean(dim=0) for own in chunks])
    worst = [
        min(float(torch.cosine_similarity(keys[place], mean, dim=0)) for place in own)
        for own, mean in zip(chunks, means, strict=True)
    ]
    count = int(OUTLIERS * BUDGET) // CHUNK
    return chunks, means, set(sorted(range(len(chunks)), key=lambda each: worst[each])[:count])


def slow_logits(model: Any, ids: Tensor, answer: Tensor) -> tuple[Tensor, set[int]]:
    """Logits [n, V] of an answer read token by token, and how many entries a head read at a step."""
    inputs: list[Tensor] = []
    projections = [layer.self_attn.k_proj for layer in model.model.layers]
    hooks = [each.register_forward_hook(lambda _m, _i, output: inputs.append(output)) for each in projections]
    state = prefill(model, ids)
    for hook in hooks:
        hook.remove()
    rebuilt = [low_rank(model, layer, inputs) for layer in range(len(hooks))]
    cache, logits, counts = asking(state.cache), [], set()

    def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        group, outputs = query.shape[1] // keys.shape[1], []
        for kv_head in range(keys.shape[1]):
            own, rows = keys[0, kv_head], query[0, kv_head * group : (kv_head + 1) * group, 0]
            chunks, means, outliers = parts_of(own[:LENGTH])
            free = [each for each in range(len(chunks)) if each not in outliers]
            weights = torch.softmax(rows @ means[free].T * scaling, dim=-1).amax(dim=0).tolist()
            exact = [place for each in sorted(outliers) for place in chunks[each]]
            exact += range(len(chunks) * CHUNK, len(own))
            room = BUDGET - len(outliers) * CHUNK - (LENGTH - len(chunks) * CHUNK)
            best = sorted(range(len(free)), key=lambda each: -weights[each])[: room // CHUNK]
            chosen = [place for each in best for place in chunks[free[each]]]
            counts.add(len(chosen) + len(exact) - (len(own) - LENGTH))
            read_keys = torch.cat([rebuilt[layer][kv_head][chosen], own[exact]])
            read_values = values[0, kv_head, chosen + exact]
            outputs.append(torch.softmax(rows @ read_keys.T * scaling, dim=-1) @ read_values)
        return torch.cat(outputs)[None, None]

    answer_with(cache, attend)
    for place, token in enumerate(answer.split(1, dim=1)):
        with torch.no_grad():
            output = run(model, cache, input_ids=token, position_ids=torch.tensor([[LENGTH + place]]))
        logits.append(output.logits[0, 0])
    return torch.stack(logits), counts


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_few_entries_equal_slow_loops(kv_heads: int) -> None:
    model, ids = tiny_model(num_key_value_heads=kv_heads), prompt_ids(LENGTH, seed=5)[0]
    expected, counts = slow_logits(model, ids, ANSWER)
    assert max(counts) <= BUDGET < max(counts) + CHUNK
    logits = read(model, method_of().start(model, ids), ANSWER)[1][0]
    assert_close(logits, expected)
    dense = read(model, FullCache().start(model, ids), ANSWER)[1][0]
    assert not torch.allclose(logits, dense, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_all_ranks_and_chunks_give_full_attention(family: str) -> None:
    """Also of rows of different lengths, one of them without a chunk before its local part, and of other keys."""
    model = tiny_model(family)
    ids, mask = prompt_ids(50, 9, 41)
    answer = prompt_ids(6, 6, 6, seed=1)[0]
    expected = read(model, FullCache().start(model, ids, mask), answer)[1]
    assert_close(read(model, method_of(100, rank=1000).start(model, ids, mask), answer)[1], expected)


def test_rows_turns_and_copies_are_read_as_one_prompt_each() -> None:
    model, method, lengths = tiny_model(), method_of(), (43, 17, 30)
    ids, mask = prompt_ids(*lengths)
    turn, answer = prompt_ids(5, 5, 5, seed=2)[0], prompt_ids(6, 6, 6, seed=1)[0]
    state = read(method.turn_reader(model), method.start(model, ids, mask), turn)[0]
    copy, one = state.copy(), read(model, state, answer)[1]
    assert_close(read(model, copy, answer)[1], one)
    for row, length in enumerate(lengths):
        own = method.start(model, ids[row : row + 1, -length:])
        own = read(method.turn_reader(model), own, turn[row : row + 1])[0]
        assert_close(one[row : row + 1], read(model, own, answer[row : row + 1])[1])


def test_bytes_are_those_on_the_device() -> None:
    """3 layers, 2 KV heads of 8 dimensions: values of all chunks are on the CPU."""
    model = tiny_model()
    state = method_of().start(model, prompt_ids(LENGTH)[0])
    chunks, local, outliers = 8, 11, 1
    factors = 4 * (chunks * CHUNK * RANK + 2 * RANK * 8)
    landmarks = 2 * chunks * (4 * 8 + 1)
    exact = 2 * (2 * 4 * 8 * (local + outliers * CHUNK) + 8 * outliers * CHUNK)
    assert state.kv_bytes == 3 * (factors + landmarks + exact)
    state.copy()
    assert int(state.counts().min()) == state.length == LENGTH
    layer: Any = state.layers[0]
    assert layer.prompt.values.traffic.offloaded == 3 * 2 * chunks * CHUNK * 8 * 4
    read(model, state, ANSWER)
    with refused("crop", "state"):
        layer.crop(-10)


def longrope() -> Any:
    model = tiny_model()
    model.config.rope_parameters = model.config.rope_parameters | {"rope_type": "longrope"}
    return model


REFUSED: list[tuple[Any, str, Code]] = [
    (lambda: ShadowKV(50), "budget", "range"),
    (lambda: ShadowKV(64, outliers=1.0), "outliers", "range"),
    (lambda: ShadowKV(64, rank=0), "rank", "range"),
    (lambda: method_of().start(tiny_deepseek(), prompt_ids(40)[0]), "model", "model"),
    (lambda: method_of().start(longrope(), prompt_ids(40)[0]), "model", "model"),
]


@pytest.mark.parametrize(("make", "field", "code"), REFUSED)
def test_what_cannot_be_is_refused(make: Any, field: str, code: Code) -> None:
    with refused(field, code):
        make()
