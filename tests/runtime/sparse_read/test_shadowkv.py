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
from tests.runtime.sparse_read.slow_selection import ranked, rotate
from tests.tiny import prompt_ids, tiny_model

LENGTH = 43
CHUNK = 4
LOCAL = 2
RANK = 7
BUDGET = 26
OUTLIERS = 0.16
ANSWER = prompt_ids(9, seed=1)[0]


def shadowkv(budget: int = BUDGET, **options: Any) -> ShadowKV:
    defaults = {"chunk": CHUNK, "local": LOCAL, "rank": RANK, "outliers": OUTLIERS}
    return ShadowKV(budget, **(defaults | options))


def low_rank(model: Any, projected: Tensor) -> Tensor:
    """[K, N, d]: the prompt's keys after RoPE, from a truncated decomposition of what k_proj returned [1, N, K * d]."""
    base = model.config.rope_parameters["rope_theta"]
    left, sizes, right = torch.linalg.svd(projected[0], full_matrices=False)
    plain = left[:, :RANK] @ torch.diag(sizes[:RANK]) @ right[:RANK]
    by_head = plain.unflatten(1, (model.config.num_key_value_heads, -1)).transpose(0, 1)
    rotated = []
    for head_keys in by_head:
        rotated.append(torch.stack([rotate(key, position, base) for position, key in enumerate(head_keys)]))
    return torch.stack(rotated)


def chunks_of(keys: Tensor) -> tuple[list[list[int]], Tensor, set[int]]:
    """Chunks of a head's prompt keys [N, d], their means, and which of them are outliers."""
    count = len(keys) // CHUNK - LOCAL
    chunks = [list(range(CHUNK * index, CHUNK * (index + 1))) for index in range(count)]
    means = torch.stack([keys[positions].mean(dim=0) for positions in chunks])
    distances = []
    for positions, mean in zip(chunks, means, strict=True):
        cosines = [float(torch.cosine_similarity(keys[position], mean, dim=0)) for position in positions]
        distances.append(-min(cosines))
    outliers = ranked(distances)[: int(OUTLIERS * BUDGET) // CHUNK]
    return chunks, means, set(outliers)


def slow_logits(model: Any, ids: Tensor, answer: Tensor) -> tuple[Tensor, set[int]]:
    """Logits [n, V] of an answer read token by token, and how many entries a head read at a step."""
    projected: list[Tensor] = []
    hooks = []
    for layer in model.model.layers:
        hook = layer.self_attn.k_proj.register_forward_hook(lambda _module, _inputs, output: projected.append(output))
        hooks.append(hook)
    state = prefill(model, ids)
    for hook in hooks:
        hook.remove()
    rebuilt = [low_rank(model, output) for output in projected]
    cache = asking(state.cache)
    counts: set[int] = set()

    def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        group = query.shape[1] // keys.shape[1]
        outputs = []
        for kv_head in range(keys.shape[1]):
            queries = query[0, kv_head * group : (kv_head + 1) * group, 0]
            head_keys = keys[0, kv_head]
            chunks, means, outliers = chunks_of(head_keys[:LENGTH])
            exact = []
            for index in sorted(outliers):
                exact += chunks[index]
            exact += range(len(chunks) * CHUNK, len(head_keys))

            candidates = [index for index in range(len(chunks)) if index not in outliers]
            weights = torch.softmax(queries @ means[candidates].T * scaling, dim=-1).amax(dim=0)
            local = LENGTH - len(chunks) * CHUNK
            room = BUDGET - len(outliers) * CHUNK - local
            selected = []
            for index in ranked(weights.tolist())[: room // CHUNK]:
                selected += chunks[candidates[index]]

            answered = len(head_keys) - LENGTH
            counts.add(len(selected) + len(exact) - answered)
            read_keys = torch.cat([rebuilt[layer][kv_head][selected], head_keys[exact]])
            read_values = values[0, kv_head, selected + exact]
            outputs.append(torch.softmax(queries @ read_keys.T * scaling, dim=-1) @ read_values)
        return torch.cat(outputs)[None, None]

    answer_with(cache, attend)
    logits = []
    for index, token in enumerate(answer.split(1, dim=1)):
        with torch.no_grad():
            output = run(model, cache, input_ids=token, position_ids=torch.tensor([[LENGTH + index]]))
        logits.append(output.logits[0, 0])
    return torch.stack(logits), counts


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_few_entries_equal_slow_loops(kv_heads: int) -> None:
    model = tiny_model(num_key_value_heads=kv_heads)
    ids = prompt_ids(LENGTH, seed=5)[0]
    expected, counts = slow_logits(model, ids, ANSWER)
    assert max(counts) <= BUDGET < max(counts) + CHUNK
    logits = read(model, shadowkv().start(model, ids), ANSWER)[1][0]
    assert_close(logits, expected)
    dense = read(model, FullCache().start(model, ids), ANSWER)[1][0]
    assert not torch.allclose(logits, dense, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_all_ranks_and_chunks_give_full_attention(family: str) -> None:
    """Also for rows of different lengths, one of them without a chunk before its local part, and for other keys."""
    model = tiny_model(family)
    ids, mask = prompt_ids(50, 9, 41)
    answer = prompt_ids(6, 6, 6, seed=1)[0]
    expected = read(model, FullCache().start(model, ids, mask), answer)[1]
    logits = read(model, shadowkv(100, rank=1000).start(model, ids, mask), answer)[1]
    assert_close(logits, expected)


def test_rows_turns_and_copies_are_read_as_one_prompt_each() -> None:
    model = tiny_model()
    method = shadowkv()
    lengths = (43, 17, 30)
    ids, mask = prompt_ids(*lengths)
    turn = prompt_ids(5, 5, 5, seed=2)[0]
    answer = prompt_ids(6, 6, 6, seed=1)[0]
    state = read(method.turn_reader(model), method.start(model, ids, mask), turn)[0]
    copy = state.copy()
    logits = read(model, state, answer)[1]
    assert_close(read(model, copy, answer)[1], logits)
    for row, length in enumerate(lengths):
        alone = method.start(model, ids[row : row + 1, -length:])
        alone = read(method.turn_reader(model), alone, turn[row : row + 1])[0]
        assert_close(logits[row : row + 1], read(model, alone, answer[row : row + 1])[1])


def test_bytes_are_those_on_the_device() -> None:
    """3 layers, 2 KV heads of 8 dimensions: values of all chunks are on the CPU."""
    model = tiny_model()
    state = shadowkv().start(model, prompt_ids(LENGTH)[0])
    chunks = 8
    local = 11
    outliers = 1
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


def longrope_model() -> Any:
    model = tiny_model()
    model.config.rope_parameters = model.config.rope_parameters | {"rope_type": "longrope"}
    return model


REFUSED: list[tuple[Any, str, Code]] = [
    (lambda: ShadowKV(50), "budget", "range"),
    (lambda: ShadowKV(64, outliers=1.0), "outliers", "range"),
    (lambda: ShadowKV(64, rank=0), "rank", "range"),
    (lambda: shadowkv().start(tiny_deepseek(), prompt_ids(40)[0]), "model", "model"),
    (lambda: shadowkv().start(longrope_model(), prompt_ids(40)[0]), "model", "model"),
]


@pytest.mark.parametrize(("make", "field", "code"), REFUSED)
def test_unsupported_options_and_models_are_refused(make: Any, field: str, code: Code) -> None:
    with refused(field, code):
        make()
