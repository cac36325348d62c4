"""DropKV against its definition: each entry is taken out of the softmax, and the outputs are computed again."""

from typing import Any

import torch

from keepsight.runtime.methods import DropKV
from keepsight.runtime.state import prefill
from tests.close import assert_close
from tests.refused import refused
from tests.runtime.test_training_free import dot, layers_of, softmax
from tests.tiny import prompt_ids, tiny_model

LENGTH = 36
WINDOW = 4
BUDGET = 12


def attention_output(logits: list[float], values: torch.Tensor) -> torch.Tensor:
    return torch.tensor(softmax(logits)).double() @ values


def slow_scores(head: int, query: Any, key: Any, value: Any) -> list[float]:
    """The mean over two query heads of the squared change of four outputs without each entry."""
    scores = [0.0] * LENGTH
    for query_head in (2 * head, 2 * head + 1):
        for row in range(LENGTH - WINDOW, LENGTH):
            visible = range(row + 1)
            logits = [dot(query[query_head][row], key[head][entry]) / 8**0.5 for entry in visible]
            full_output = attention_output(logits, value[head][: row + 1])
            for dropped in visible:
                remaining = [entry for entry in visible if entry != dropped]
                remaining_logits = [logits[entry] for entry in remaining]
                output = attention_output(remaining_logits, value[head][remaining])
                scores[dropped] += float((output - full_output).square().sum()) / 2
    return scores


def test_scores_are_the_change_of_the_outputs_without_an_entry() -> None:
    model = tiny_model()
    ids = prompt_ids(LENGTH)[0]
    method = DropKV(BUDGET, window=WINDOW)
    state = prefill(model, ids, needs=method.needs())
    kept = method.select(state, method.importance(model, state))
    for layer, (query, key, value, _) in enumerate(layers_of(model, ids)):
        expected = torch.tensor([slow_scores(head, query, key, value) for head in range(2)])
        scores = method.bound_observer(model, state, method.reduce)[layer][0]
        torch.testing.assert_close(scores, expected, rtol=2e-3, atol=1e-5)  # epsilon, where one entry has all attention
        before_window = expected[:, : LENGTH - WINDOW]
        smoothed = torch.nn.functional.avg_pool1d(before_window[None], 7, stride=1, padding=3)[0]
        window = range(LENGTH - WINDOW, LENGTH)
        for head in range(2):
            best = smoothed[head].topk(BUDGET - WINDOW).indices.tolist()
            kept_positions = kept[layer][0, head].nonzero()[:, 0].tolist()
            assert {*kept_positions} == {*best, *window}


def test_batches_and_chunks_keep_the_same() -> None:
    model = tiny_model()
    ids, mask = prompt_ids(LENGTH, 29)
    method = DropKV(BUDGET, window=WINDOW)
    batch = method.compress_state(model, prefill(model, ids, mask, needs=method.needs()))
    for state in (method.start(model, ids, mask), method.start(model, ids, mask, chunk=11)):
        for layer, batch_layer in zip(state.entries(), batch.entries(), strict=True):
            assert_close(layer.keys, batch_layer.keys)
    alone = method.start(model, ids[1:, LENGTH - 29 :])
    for layer, batch_layer in zip(alone.entries(), batch.entries(), strict=True):
        assert_close(layer.keys, batch_layer.keys[1:])


def test_a_window_is_needed_and_fits_the_budget() -> None:
    with refused("window", "range"):
        DropKV(BUDGET, window=0)
    with refused("budget", "range"):
        DropKV(BUDGET, window=12)
