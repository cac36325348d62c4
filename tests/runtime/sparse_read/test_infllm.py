"""InfLLM against loops over single queries, heads and tokens, in pieces, and through turns and copies."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from keepsight import generate
from keepsight.errors import Code
from keepsight.runtime.attention import run
from keepsight.runtime.generate import FullCache
from keepsight.runtime.sparse_read.infllm import InfLLM, MemoryLayer
from keepsight.runtime.state import prefill, read
from tests.close import assert_close
from tests.models.retrieval_heads import tiny_deepseek
from tests.refused import refused
from tests.runtime.asked import AskingLayer, answer_with
from tests.runtime.sparse_read.slow_selection import turned
from tests.tiny import prompt_ids, tiny_model

LENGTH, BLOCK, SINKS, WINDOW, TOP, STEP, BEST = 61, 3, 3, 12, 2, 6, 2
METHOD = InfLLM(SINKS + WINDOW + TOP * BLOCK, block=BLOCK, sinks=1, window=4, step=2, representatives=BEST)
ANSWER = prompt_ids(9, seed=1)[0]


@dataclass
class Memory:
    """What one layer knows of the tokens before the window."""

    far: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    means: list[list[Tensor]] = field(default_factory=list)
    scores: dict[tuple[int, int], float] = field(default_factory=dict)


def slow_step(memory: Memory, query: Tensor, keys: Tensor, values: Tensor, scaling: float, base: float) -> Tensor:
    """Queries [H, e, d] of the last tokens, keys and values [K, S, d] up to them -> [e, H, d]."""
    heads, rows, count = query.shape[0], query.shape[1], keys.shape[1]
    group, start = heads // keys.shape[0], keys.shape[1] - query.shape[1]
    plain = [[turned(key, -place, base) for place, key in enumerate(head)] for head in keys]
    far_query = [[turned(own, WINDOW - start - row, base) for row, own in enumerate(head)] for head in query]
    means = [torch.stack(own).mean(dim=0) for own in far_query]
    fits = [sum(float(mean @ own) for mean, own in zip(means, block, strict=True)) for block in memory.means]
    chosen = sorted(range(len(fits)), key=lambda block: -fits[block])[:TOP]
    far = [*range(min(memory.far, SINKS)), *(place for block in chosen for place in memory.blocks[block])]
    output = torch.zeros(rows, heads, values.shape[2])
    for row in range(rows):
        place = start + row
        near = list(range(max(place - WINDOW + 1, 0), place + 1))
        away = far + list(range(memory.far, near[0]))
        for head in range(heads):
            own = head // group
            logits = [float(far_query[head][row] @ plain[own][each]) * scaling for each in away]
            logits += [float(query[head, row] @ keys[own, each]) * scaling for each in near]
            weights = torch.softmax(torch.tensor(logits), dim=0)
            output[row, head] = weights @ values[own, away + near]
            for each, weight in zip(near, weights[len(away) :].tolist(), strict=True):
                memory.scores[head, each] = memory.scores.get((head, each), 0.0) + weight
    while memory.far < SINKS and count - memory.far > WINDOW:
        memory.far += 1
    while memory.far >= SINKS and count - memory.far - BLOCK >= WINDOW:
        block = list(range(memory.far, memory.far + BLOCK))
        best = [sorted(block, key=lambda each: -memory.scores[head, each])[:BEST] for head in range(heads)]
        memory.blocks.append(block)
        memory.means.append(
            [torch.stack([plain[head // group][each] for each in own]).mean(dim=0) for head, own in enumerate(best)]
        )
        memory.far += BLOCK
    return output


def slow_logits(model: Any, ids: Tensor, answer: Tensor) -> tuple[Tensor, list[Memory]]:
    """Logits of the prompt's last token and of an answer [n + 1, V], and what the layers know then."""
    config = model.config
    empty = torch.zeros(1, config.num_key_value_heads, 0, config.head_dim)
    cache = Cache(layers=[AskingLayer(index, empty, empty) for index in range(config.num_hidden_layers)])
    memories = [Memory() for _ in cache.layers]
    base = config.rope_parameters["rope_theta"]

    def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        before, outputs = keys.shape[2] - query.shape[2], []
        for start in range(0, query.shape[2], STEP):
            step = query[0, :, start : start + STEP]
            end = before + start + step.shape[1]
            outputs.append(slow_step(memories[layer], step, keys[0, :, :end], values[0, :, :end], scaling, base))
        return torch.cat(outputs)[None]

    answer_with(cache, attend)
    logits, read_before = [], 0
    for part in (ids[:, :-1], ids[:, -1:], *answer.split(1, dim=1)):
        positions = torch.arange(read_before, read_before + part.shape[1])[None]
        with torch.no_grad():
            output = run(model, cache, input_ids=part, position_ids=positions)
        read_before += part.shape[1]
        logits.append(output.logits[0, -1])
    return torch.stack(logits[1:]), memories


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_it_equals_slow_loops(kv_heads: int) -> None:
    model, ids = tiny_model(num_key_value_heads=kv_heads, num_hidden_layers=2), prompt_ids(LENGTH)[0]
    expected, memories = slow_logits(model, ids, ANSWER)
    state = METHOD.start(model, ids)
    assert_close(state.logits[0], expected[0])
    found = []
    for token in ANSWER.split(1, dim=1):
        state, logits = read(model, state, token)
        found.append(logits[0, 0])
    assert_close(torch.stack(found), expected[1:])
    assert len(memories[0].blocks) == (LENGTH + ANSWER.shape[1] - WINDOW - SINKS) // BLOCK > TOP
    dense = prefill(model, ids)
    assert not torch.allclose(dense.logits[0], expected[0], atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_window_for_all_tokens_gives_full_attention(family: str) -> None:
    model, ids, answer = tiny_model(family), prompt_ids(50, 50)[0], prompt_ids(6, 6, seed=1)[0]
    whole, method = FullCache().start(model, ids), InfLLM(34 * 2, block=2)
    state = method.start(model, ids)
    assert_close(state.logits, whole.logits)
    assert_close(read(model, state, answer)[1], read(model, whole, answer)[1])


def test_pieces_rows_turns_and_copies_go_on_alike() -> None:
    model, ids, turn = tiny_model(), prompt_ids(LENGTH, LENGTH)[0], prompt_ids(20, 20, seed=2)[0]
    state, answer = METHOD.start(model, ids), prompt_ids(6, 6, seed=1)[0]
    assert_close(METHOD.start(model, ids, chunk=13).logits, state.logits)
    state = METHOD.resume(model, state, turn)
    copy, one = state.copy(), read(model, state, answer)[1]
    assert copy.kv_bytes < state.kv_bytes
    assert_close(read(model, copy, answer)[1], one)
    for row in (0, 1):
        own = METHOD.resume(model, METHOD.start(model, ids[row : row + 1]), turn[row : row + 1])
        assert_close(read(model, own, answer[row : row + 1])[1], one[row : row + 1])


def test_bytes_positions_and_prompts_beyond_the_context() -> None:
    """3 layers, 2 KV heads and 4 query heads of 8 dimensions; the model's context is 256 tokens."""
    model = tiny_model()
    state = METHOD.start(model, prompt_ids(LENGTH)[0])
    blocks = (LENGTH - WINDOW - SINKS) // BLOCK
    rest = LENGTH - SINKS - blocks * BLOCK
    assert state.kv_bytes == 3 * 4 * (2 * 2 * LENGTH * 8 + 4 * blocks * 8 + 4 * rest)
    assert int(state.counts().min()) == state.length == LENGTH
    whole = prefill(model, prompt_ids(WINDOW)[0])
    window = METHOD.start(model, prompt_ids(WINDOW)[0])
    assert_close([each.keys for each in window.entries()], [each.keys for each in whole.entries()])
    ids = prompt_ids(300)[0]
    assert generate(model, ids, METHOD, max_new_tokens=3, do_sample=False, eos_token_id=None).shape == (1, 3)


def test_what_cannot_be_is_refused() -> None:
    model, (ids, mask) = tiny_model(), prompt_ids(40, 30)
    layer = METHOD.start(model, ids[:1]).layers[0]
    assert isinstance(layer, MemoryLayer)
    refusals: list[tuple[str, Code, Callable[[], object]]] = [
        ("budget", "range", lambda: InfLLM(48)),
        ("budget", "range", lambda: InfLLM(60, block=2)),
        ("step", "range", lambda: InfLLM(64, window=4, step=5)),
        ("prompt", "data", lambda: METHOD.start(model, ids, mask)),
        ("state", "state", lambda: METHOD.compress_state(model, prefill(model, ids))),
        ("model", "model", lambda: METHOD.start(tiny_deepseek(), ids)),
        ("crop", "state", lambda: layer.crop(-1)),
    ]
    for name, code, make in refusals:
        with refused(name, code):
            make()
