"""What `keepsight bench ops` counts, and the counts that must not grow again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from keepsight.eval.bench.eviction import STEPS, count, operators_of, operators_of_plain_step
from keepsight.runtime.allocate import Global
from keepsight.runtime.importance import Reduce
from keepsight.runtime.layer import RaggedLayer
from keepsight.runtime.methods import (
    H2O,
    TOVA,
    AdaKV,
    ClusterKV,
    ExactTopK,
    Kivi,
    LookaheadKV,
    PyramidKV,
    Quest,
    SnapKV,
    SpeCache,
    StreamingLLM,
)
from keepsight.runtime.state import read
from tests.models.modules import random_module, save
from tests.tiny import prompt_ids, tiny_model

X = torch.arange(6.0).view(2, 3)
MASK = torch.tensor([True, False])
INDICES = torch.tensor([0, 1])
LAYERS = 3


def _copies() -> None:
    """What is a view only where it can be: without gradients these are not taken apart."""
    with torch.inference_mode():
        for tensor in (X, X.t()):
            tensor.contiguous()
            tensor.flatten()
        X.to(torch.float64)
        X.to(torch.float32)


STEPS_AND_COUNTS: dict[str, tuple[Callable[[], object], int, int]] = {
    "views cost nothing": (lambda: X.t()[1:].unsqueeze(0).expand(2, -1, -1).reshape(2, -1, 2).detach(), 0, 0),
    "two operators": (lambda: (X + 1).relu_(), 2, 0),
    "allocations cost nothing": (lambda: torch.empty(3).copy_(X[0]), 1, 0),
    "item": (lambda: X.sum().item(), 2, 1),
    "a truth value": (lambda: bool((X > 1).all()), 3, 1),
    "a number": (lambda: int(X.max()), 2, 1),
    "tolist": (lambda: X.tolist(), 0, 1),
    "a comparison": (lambda: torch.equal(X, X), 1, 1),
    "nonzero": (lambda: X.nonzero(), 1, 1),
    "numbers copied to a device": (lambda: torch.tensor([1, 2], device="cpu"), 0, 1),
    "numbers that become a tensor like another": (lambda: INDICES.new_tensor([1, 2]), 0, 1),
    "numbers that stay on the CPU": (lambda: torch.tensor([1, 2]), 0, 0),
    "no numbers": (lambda: torch.tensor([], device="cpu"), 0, 0),
    "a boolean index": (lambda: X[MASK], 1, 1),
    "writing at a boolean index": (lambda: X.clone().index_put_((MASK,), X[0]), 2, 1),
    "an index": (lambda: X[INDICES], 1, 0),
    "a copy by another name": (lambda: X.t().reshape(6), 1, 0),
    "copies in inference mode": (_copies, 3, 0),
}


def test_what_counts() -> None:
    for case, (step, operators, syncs) in STEPS_AND_COUNTS.items():
        counted = count(step)
        assert (counted.operators, counted.syncs) == (operators, syncs), case


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(max_position_embeddings=512)


@pytest.fixture(scope="module")
def counts(model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    adapter = save(random_module(), tmp_path_factory.mktemp("adapter"))
    methods = {
        "snapkv": SnapKV(64),
        "lookaheadkv": LookaheadKV.from_pretrained(adapter, 64),
        "as shipped": LookaheadKV.from_pretrained(
            adapter, 64, reduce=Reduce("max"), allocate=Global(), value_norm=True
        ),
        "h2o": H2O(64),
        "tova": TOVA(64),
        "streamingllm": StreamingLLM(64),
        "pyramidkv": PyramidKV(64),
        "adakv": AdaKV(64),
    }
    return {name: operators_of(model, method, prompt_ids(300)[0]) for name, method in methods.items()}


def test_only_a_budget_by_score_waits_for_the_device_and_not_in_every_layer(counts: dict[str, Any]) -> None:
    """For the numbers of entries, and in gathering again."""
    for name, by_step in counts.items():
        expected = [0, 1, 1, 0] if name in ("adakv", "as shipped") else [0, 0, 0, 0]
        assert [by_step[step].syncs for step in STEPS] == expected, name


@pytest.mark.parametrize("during", [None, False])
def test_heads_that_differ_are_padded_for_the_first_token_without_waiting(model: Any, during: bool | None) -> None:
    state = AdaKV(64, during_prefill=during).start(model, prompt_ids(300)[0])
    token, _ = prompt_ids(1)
    assert any(isinstance(layer, RaggedLayer) for layer in state.cache.layers)
    assert count(lambda: read(model, state, token)).syncs == 0


# Of the operators that select, most are run once for all three layers: 8 or 9 a layer here are 5 or 6 of 30 layers.
LIMITS = {
    "snapkv": (11, 10, 4),
    "lookaheadkv": (57, 9, 4),
    "as shipped": (57, 20, 6),
    "h2o": (1, 9, 7),
    "tova": (10, 10, 4),
    "streamingllm": (2, 9, 4),
    "pyramidkv": (11, 10, 5),
    "adakv": (11, 15, 6),
}
"""Most operators a layer of the first three `STEPS`."""


def test_operators_a_layer(model: Any, counts: dict[str, Any]) -> None:
    """And a decoding step is hardly more than the model's own."""
    for name, limits in LIMITS.items():
        for step, limit in zip(STEPS, limits, strict=False):
            assert counts[name][step].operators <= limit * LAYERS, (name, step)
    plain = operators_of_plain_step(model, prompt_ids(300)[0]).operators
    for name in ("snapkv", "pyramidkv", "adakv", "as shipped"):
        assert counts[name]["decode"].operators <= 1.15 * plain, name


PACKED = {
    "kivi": (Kivi(2, 8, 16), 69),
    "specache": (SpeCache(2, 8, 16, 8), 83),
    "specache, not speculative": (SpeCache(2, 8, 16, 8, speculative=False), 86),
}
"""Methods, and the most operators a layer of a step."""


@pytest.mark.parametrize("name", PACKED)
def test_packed_entries_are_read_by_one_set_of_operators(name: str) -> None:
    """However many there are: 8 packed groups, or 130."""
    method, limit = PACKED[name]
    model = tiny_model(max_position_embeddings=2048)
    after_short = operators_of(model, method, prompt_ids(90)[0])["decode"]
    after_long = operators_of(model, method, prompt_ids(1090)[0])["decode"]
    assert after_short == after_long
    assert after_long.operators <= limit * LAYERS
    assert after_long.syncs == 0


SPARSE = {
    "exact_topk": (ExactTopK(64), 16),
    "quest": (Quest(64, dense_layers=0), 20),
    "clusterkv": (ClusterKV(64, dense_layers=0), 33),
}
"""Methods, and the most operators a layer that a step runs beside the model's own."""


@pytest.mark.parametrize("name", SPARSE)
def test_a_step_that_reads_few_entries_waits_for_nothing_and_runs_few_operators(model: Any, name: str) -> None:
    """Also in a batch of padded rows, which read entries of their own; at most so many operators a layer more."""
    method, limit = SPARSE[name]
    plain = operators_of_plain_step(model, prompt_ids(300)[0]).operators
    step = operators_of(model, method, prompt_ids(300)[0])["decode"]
    assert step.syncs == 0
    assert step.operators <= plain + limit * LAYERS

    ids, mask = prompt_ids(300, 211)
    state, _ = read(model, method.start(model, ids, mask).unrecorded(), ids[:, -1:])  # reads the padding once
    assert count(lambda: read(model, state, ids[:, -1:])).syncs == 0
