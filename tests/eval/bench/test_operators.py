"""What `keepsight bench ops` counts, and the counts that must not grow again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from keepsight.eval.bench.eviction import STEPS, bench_operators, count, operators_of, operators_of_plain_step
from keepsight.runtime.allocate import Global
from keepsight.runtime.importance import Reduce
from keepsight.runtime.layer import RaggedLayer
from keepsight.runtime.methods import H2O, TOVA, AdaKV, Kivi, LookaheadKV, PyramidKV, SnapKV, SpeCache, StreamingLLM
from keepsight.runtime.state import read
from tests.models.modules import random_module, random_on, save
from tests.tiny import prompt_ids, tiny_model

X, MASK, PLACES = torch.arange(6.0).view(2, 3), torch.tensor([True, False]), torch.tensor([0, 1])
LAYERS = 3

KNOWN: dict[str, tuple[Callable[[], object], int, int]] = {
    "views cost nothing": (lambda: X.t()[1:].unsqueeze(0).expand(2, -1, -1).reshape(2, -1, 2).detach(), 0, 0),
    "two operators": (lambda: (X + 1).relu_(), 2, 0),
    "allocations cost nothing": (lambda: torch.empty(3).copy_(X[0]), 1, 0),
    "item": (lambda: X.sum().item(), 2, 1),
    "a truth value": (lambda: bool((X > 1).all()), 3, 1),
    "a number": (lambda: int(X.max()), 2, 1),
    "tolist": (lambda: X.tolist(), 0, 1),
    "a comparison": (lambda: torch.equal(X, X), 1, 1),
    "nonzero": (lambda: X.nonzero(), 1, 1),
    "a boolean index": (lambda: X[MASK], 1, 1),
    "writing at a boolean index": (lambda: X.clone().index_put_((MASK,), X[0]), 2, 1),
    "an index": (lambda: X[PLACES], 1, 0),
    "a copy by another name": (lambda: X.t().reshape(6), 1, 0),
}


def _copies() -> None:
    """What is a view only where it can be: without gradients these are not taken apart."""
    with torch.inference_mode():
        for each in (X, X.t()):
            each.contiguous()
            each.flatten()
        X.to(torch.float64)
        X.to(torch.float32)


def test_copies_count_in_inference_mode_too() -> None:
    assert count(_copies).operators == 3


@pytest.mark.parametrize("case", KNOWN)
def test_what_counts(case: str) -> None:
    step, operators, syncs = KNOWN[case]
    found = count(step)
    assert (found.operators, found.syncs) == (operators, syncs)


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


@pytest.mark.parametrize("name", ["snapkv", "lookaheadkv", "h2o", "tova", "streamingllm", "pyramidkv"])
def test_a_budget_that_depends_on_no_score_never_waits_for_the_device(counts: dict[str, Any], name: str) -> None:
    assert {step: counts[name][step].syncs for step in STEPS} == dict.fromkeys(STEPS, 0)


@pytest.mark.parametrize("name", ["adakv", "as shipped"])
def test_a_budget_by_score_waits_twice_a_prompt_and_not_in_every_layer(counts: dict[str, Any], name: str) -> None:
    """For the numbers of entries, and in gathering again."""
    assert [counts[name][step].syncs for step in STEPS] == [0, 1, 1, 0]


@pytest.mark.parametrize("during", [None, False])
def test_heads_that_differ_are_padded_for_the_first_token_without_waiting(model: Any, during: bool | None) -> None:
    state, token = AdaKV(64, during_prefill=during).start(model, prompt_ids(300)[0]), prompt_ids(1)[0]
    assert any(isinstance(layer, RaggedLayer) for layer in state.cache.layers)
    assert count(lambda: read(model, state, token)).syncs == 0


# Of the operators that select, most are run once for all three layers: 8 or 9 a layer here are 5 or 6 of 30 layers.
MOST = {"snapkv": (11, 10, 4), "lookaheadkv": (57, 9, 4), "h2o": (1, 9, 7), "streamingllm": (2, 9, 4)}
MOST |= {"pyramidkv": (11, 10, 5), "adakv": (11, 15, 5), "as shipped": (57, 20, 5), "tova": (10, 10, 4)}


@pytest.mark.parametrize("name", MOST)
def test_operators_a_layer(counts: dict[str, Any], name: str) -> None:
    for step, most in zip(STEPS, MOST[name], strict=False):
        assert counts[name][step].operators <= most * LAYERS, step


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "adakv", "as shipped"])
def test_a_decoding_step_is_hardly_more_than_the_models_own(model: Any, counts: dict[str, Any], name: str) -> None:
    step = counts[name]["decode"]
    assert step.syncs == 0
    assert step.operators <= 1.15 * operators_of_plain_step(model, prompt_ids(300)[0]).operators


PACKED = {"kivi": (Kivi(2, 8, 16), 69), "specache": (SpeCache(2, 8, 16, 8), 83)}
PACKED |= {"specache, no guess": (SpeCache(2, 8, 16, 8, speculative=False), 86)}


@pytest.mark.parametrize("name", PACKED)
def test_packed_entries_are_read_by_one_set_of_operators(name: str) -> None:
    """However many there are: 8 packed groups, or 130."""
    (method, most), model = PACKED[name], tiny_model(max_position_embeddings=2048)
    short, long = (operators_of(model, method, prompt_ids(length)[0])["decode"] for length in (90, 1090))
    assert short == long
    assert long.operators <= most * LAYERS and long.syncs == 0


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 54), (torch.bfloat16, 60)])
def test_operators_of_each_layer_that_lookaheadkv_observes(dtype: torch.dtype, most: int, tmp_path: Path) -> None:
    """In bfloat16 the model's norms and softmax cast to float32 and back."""
    observing = []
    for layers in (LAYERS, LAYERS + 1):
        deeper = tiny_model(num_hidden_layers=layers).to(dtype)
        method = LookaheadKV.from_pretrained(save(random_on(deeper), tmp_path / str(layers)), 64)
        observing.append(operators_of(deeper, method, prompt_ids(100)[0])["observe"].operators)
    assert observing[1] - observing[0] <= most


def test_lines(model: Any) -> None:
    methods = {"snapkv 64": SnapKV(64), "kivi": Kivi(2, 8, 16)}
    _, header, plain, evicting, packed = bench_operators(model, methods, 100)
    assert header.split() == ["method", *STEPS]
    assert plain.split()[:2] == ["plain", "model"] and len(plain.split()) == 5
    assert evicting.split()[:2] == ["snapkv", "64"] and len(evicting.split()) == 14
    assert packed.split()[0] == "kivi" and len(packed.split()) == 4
