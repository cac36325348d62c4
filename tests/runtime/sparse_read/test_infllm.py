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
from tests.runtime.sparse_read.slow_selection import ranked, rotate
from tests.tiny import prompt_ids, tiny_model

LENGTH = 61
BLOCK = 3
SINKS = 3
WINDOW = 12
TOP = 2
"""Blocks that a step reads."""
STEP = 6
"""Tokens that look up blocks at a time."""
REPRESENTATIVES = 2
METHOD = InfLLM(SINKS + WINDOW + TOP * BLOCK, block=BLOCK, sinks=1, window=4, step=2, representatives=REPRESENTATIVES)
ANSWER = prompt_ids(9, seed=1)[0]


@dataclass
class Memory:
    """What one layer knows of the tokens before the window.

    Attributes:
        far: How many of the first tokens are sinks or in blocks.
        blocks: The positions of each block.
        means: For each block and query head, the mean of its representatives' keys.
        scores: The attention that a token got within the window, by query head and position.
    """

    far: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    means: list[list[Tensor]] = field(default_factory=list)
    scores: dict[tuple[int, int], float] = field(default_factory=dict)

    def look_up(self, queries: list[list[Tensor]]) -> list[int]:
        """The sinks and the blocks that fit the queries of one step best, of each head; a list of positions."""
        fits = []
        for block_means in self.means:
            fit = 0.0
            for head_queries, mean in zip(queries, block_means, strict=True):
                fit += float(torch.stack(head_queries).mean(dim=0) @ mean)
            fits.append(fit)
        positions = list(range(min(self.far, SINKS)))
        for index in ranked(fits)[:TOP]:
            positions += self.blocks[index]
        return positions

    def store(self, keys: list[list[Tensor]], heads: int) -> None:
        """Turn what has left the window into sinks, then into blocks. `keys` [K][S] have no positions."""
        count = len(keys[0])
        group = heads // len(keys)
        while self.far < SINKS and count - self.far > WINDOW:
            self.far += 1
        while self.far >= SINKS and count - self.far - BLOCK >= WINDOW:
            start = self.far
            means = []
            for head in range(heads):
                by_score = ranked([self.scores[head, position] for position in range(start, start + BLOCK)])
                representatives = [keys[head // group][start + index] for index in by_score[:REPRESENTATIVES]]
                means.append(torch.stack(representatives).mean(dim=0))
            self.blocks.append(list(range(start, start + BLOCK)))
            self.means.append(means)
            self.far += BLOCK


def slow_step(memory: Memory, query: Tensor, keys: Tensor, values: Tensor, scaling: float, base: float) -> Tensor:
    """Queries [H, e, d] of the last tokens, keys and values [K, S, d] up to them -> [e, H, d]."""
    heads, rows, _ = query.shape
    group = heads // keys.shape[0]
    start = keys.shape[1] - rows
    plain_keys = []
    for head_keys in keys:
        plain_keys.append([rotate(key, -position, base) for position, key in enumerate(head_keys)])
    far_queries = []
    for head_query in query:
        far_queries.append([rotate(vector, WINDOW - start - row, base) for row, vector in enumerate(head_query)])
    looked_up = memory.look_up(far_queries)
    output = torch.zeros(rows, heads, values.shape[2])
    for row in range(rows):
        position = start + row
        near = list(range(max(position - WINDOW + 1, 0), position + 1))
        far = looked_up + list(range(memory.far, near[0]))
        for head in range(heads):
            kv_head = head // group
            far_logits = [float(far_queries[head][row] @ plain_keys[kv_head][index]) * scaling for index in far]
            near_logits = [float(query[head, row] @ keys[kv_head, index]) * scaling for index in near]
            weights = torch.softmax(torch.tensor(far_logits + near_logits), dim=0)
            output[row, head] = weights @ values[kv_head, far + near]
            for index, weight in zip(near, weights[len(far) :].tolist(), strict=True):
                memory.scores[head, index] = memory.scores.get((head, index), 0.0) + weight
    memory.store(plain_keys, heads)
    return output


def slow_logits(model: Any, ids: Tensor, answer: Tensor) -> tuple[Tensor, list[Memory]]:
    """Logits of the prompt's last token and of an answer [n + 1, V], and what the layers know then."""
    config = model.config
    base = config.rope_parameters["rope_theta"]
    empty = torch.zeros(1, config.num_key_value_heads, 0, config.head_dim)
    cache = Cache(layers=[AskingLayer(index, empty, empty) for index in range(config.num_hidden_layers)])
    memories = [Memory() for _ in cache.layers]

    def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        before = keys.shape[2] - query.shape[2]
        outputs = []
        for start in range(0, query.shape[2], STEP):
            step = query[0, :, start : start + STEP]
            end = before + start + step.shape[1]
            outputs.append(slow_step(memories[layer], step, keys[0, :, :end], values[0, :, :end], scaling, base))
        return torch.cat(outputs)[None]

    answer_with(cache, attend)
    logits = []
    read_before = 0
    for part in (ids[:, :-1], ids[:, -1:], *answer.split(1, dim=1)):
        positions = torch.arange(read_before, read_before + part.shape[1])[None]
        with torch.no_grad():
            output = run(model, cache, input_ids=part, position_ids=positions)
        read_before += part.shape[1]
        logits.append(output.logits[0, -1])
    return torch.stack(logits[1:]), memories


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_it_equals_slow_loops(kv_heads: int) -> None:
    model = tiny_model(num_key_value_heads=kv_heads, num_hidden_layers=2)
    ids = prompt_ids(LENGTH)[0]
    expected, memories = slow_logits(model, ids, ANSWER)

    state = METHOD.start(model, ids)
    assert_close(state.logits[0], expected[0])
    answer_logits = []
    for token in ANSWER.split(1, dim=1):
        state, logits = read(model, state, token)
        answer_logits.append(logits[0, 0])
    assert_close(torch.stack(answer_logits), expected[1:])

    blocks = (LENGTH + ANSWER.shape[1] - WINDOW - SINKS) // BLOCK
    assert len(memories[0].blocks) == blocks > TOP
    dense = prefill(model, ids)
    assert not torch.allclose(dense.logits[0], expected[0], atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_window_for_all_tokens_gives_full_attention(family: str) -> None:
    model = tiny_model(family)
    ids = prompt_ids(50, 50)[0]
    answer = prompt_ids(6, 6, seed=1)[0]
    full = FullCache().start(model, ids)
    state = InfLLM(34 * 2, block=2).start(model, ids)
    assert_close(state.logits, full.logits)
    assert_close(read(model, state, answer)[1], read(model, full, answer)[1])


def test_pieces_rows_turns_and_copies_go_on_alike() -> None:
    model = tiny_model()
    ids = prompt_ids(LENGTH, LENGTH)[0]
    turn = prompt_ids(20, 20, seed=2)[0]
    answer = prompt_ids(6, 6, seed=1)[0]
    state = METHOD.start(model, ids)
    assert_close(METHOD.start(model, ids, chunk=13).logits, state.logits)

    state = METHOD.resume(model, state, turn)
    copy = state.copy()
    logits = read(model, state, answer)[1]
    assert copy.kv_bytes < state.kv_bytes
    assert_close(read(model, copy, answer)[1], logits)
    for row in (0, 1):
        alone = METHOD.start(model, ids[row : row + 1])
        alone = METHOD.resume(model, alone, turn[row : row + 1])
        assert_close(read(model, alone, answer[row : row + 1])[1], logits[row : row + 1])


def test_bytes_positions_and_prompts_beyond_the_context() -> None:
    """3 layers, 2 KV heads and 4 query heads of 8 dimensions; the model's context is 256 tokens."""
    model = tiny_model()
    state = METHOD.start(model, prompt_ids(LENGTH)[0])
    blocks = (LENGTH - WINDOW - SINKS) // BLOCK
    unblocked = LENGTH - SINKS - blocks * BLOCK
    keys_and_values = 2 * 2 * LENGTH * 8
    block_means = 4 * blocks * 8
    scores = 4 * unblocked
    assert state.kv_bytes == 3 * 4 * (keys_and_values + block_means + scores)
    assert int(state.counts().min()) == state.length == LENGTH

    full = prefill(model, prompt_ids(WINDOW)[0])
    window = METHOD.start(model, prompt_ids(WINDOW)[0])
    assert_close([layer.keys for layer in window.entries()], [layer.keys for layer in full.entries()])

    beyond_context = prompt_ids(300)[0]
    answer = generate(model, beyond_context, METHOD, max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert answer.shape == (1, 3)


def test_unsupported_options_and_inputs_are_refused() -> None:
    model = tiny_model()
    ids, mask = prompt_ids(40, 30)
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
