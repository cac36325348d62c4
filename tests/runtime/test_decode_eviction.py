"""Eviction while decoding: `every`, with every allocation, against a model that hides what was evicted."""

from typing import Any

import pytest
import torch

import keepsight.runtime.generate
from keepsight import generate
from keepsight.models.lookahead import LookaheadAdapter
from keepsight.runtime.allocate import Adaptive, Global, Pyramid, Uniform
from keepsight.runtime.drafting.observer import DraftObserver
from keepsight.runtime.generate import decode, stop_after
from keepsight.runtime.importance import NO_POOL, Pool
from keepsight.runtime.methods import LookaheadKV, Oracle, SnapKV, StreamingLLM
from keepsight.runtime.methods.drafts import OwnAnswer
from keepsight.runtime.methods.lookaheadkv import SoftTokens
from keepsight.runtime.methods.window import PromptWindow
from tests.close import assert_close
from tests.models.modules import random_module, save
from tests.runtime.slow import Slow
from tests.tiny import FAMILIES, prompt_ids, tiny_model

BUDGET, EVERY, TOKENS, PROMPT = 14, 4, 11, 30
ALLOCATIONS = [Uniform(), Pyramid(beta=4), Adaptive(), Global()]
METHODS = ["snapkv", "streamingllm", "oracle", "lookaheadkv"]
PAIRS = [*zip(METHODS, ALLOCATIONS, strict=True), *zip(METHODS, reversed(ALLOCATIONS), strict=True)]
each_pair = pytest.mark.parametrize(
    ("name", "allocate"), PAIRS, ids=lambda part: part if isinstance(part, str) else type(part).__name__
)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {family: LookaheadAdapter.load(save(random_module(family), folder / family)) for family in FAMILIES}


@pytest.fixture
def make(artifacts):
    """A method by name, with small parts."""

    def made(name, budget=BUDGET, every=EVERY, family="llama", **parts):
        if name == "snapkv":
            return SnapKV(budget, window=3, pool=Pool(kernel=3), every=every, **parts)
        if name == "streamingllm":
            return StreamingLLM(budget, sinks=2, every=every, **parts)
        if name == "oracle":
            return Oracle(budget, DraftObserver(OwnAnswer(3)), pool=Pool(kernel=3), every=every, **parts)
        return LookaheadKV(budget, SoftTokens(artifacts[family]), pool=Pool(kernel=3), every=every, **parts)

    return made


def answer(model, method, ids, mask=None, tokens=TOKENS):
    """As `generate`, whatever the end token: the answer's ids and the state after it."""
    state = method.start(model, ids, mask)
    return decode(model, state, stop_after(tokens, None), pad_token=0, eviction=method.periodic_eviction(model))


@pytest.fixture
def held(monkeypatch):
    """[L, B, K] of the cache after each token that decoding reads."""
    seen, read = [], keepsight.runtime.generate.read

    def spied(*args, **options):
        state, logits = read(*args, **options)
        seen.append(state.counts())
        return state, logits

    monkeypatch.setattr(keepsight.runtime.generate, "read", spied)
    return seen


@each_pair
def test_the_budget_is_never_exceeded_and_always_used(make, held, name, allocate):
    """Steps of the oracle's own draft are read too: they belong to a copy that is dropped, and are left out here."""
    model, method = tiny_model(), make(name, allocate=allocate)
    ids, mask = prompt_ids(PROMPT, 21)
    state = method.start(model, ids, mask)
    held.clear()
    eviction = method.periodic_eviction(model)

    def compress(before):
        count = len(held)
        after = eviction.compress(before)
        del held[count:]
        return after

    quiet = type(eviction)(eviction.interval, compress)
    decode(model, state, stop_after(TOKENS, None), pad_token=0, eviction=quiet)
    totals = [each.double().mean(dim=(0, 2)).tolist() for each in held]
    cycle = [BUDGET - EVERY + step % EVERY + 1 for step in range(TOKENS - 1)]
    assert totals == [[total, total] for total in cycle]
    assert max(cycle) == BUDGET
    if type(allocate) is Uniform:
        assert all(len(each.unique()) == 1 for each in held)


@pytest.mark.parametrize(
    ("name", "allocate", "family"), [(*pair, FAMILIES[place // 4]) for place, pair in enumerate(PAIRS)]
)
def test_decoding_equals_a_model_that_hides_what_was_evicted(make, name, allocate, family):
    model, method, ids = tiny_model(family), make(name, family=family, allocate=allocate), prompt_ids(PROMPT)[0]
    slow = Slow(model, method)
    slow.read(ids)
    # The first token comes from the prompt's own logits.
    first = slow.logits().argmax(-1)
    slow.evict()
    expected = slow.answer(TOKENS, EVERY)
    decoded = answer(model, method, ids)
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None}
    assert torch.equal(generate(model, ids, method, **options), decoded.ids)
    assert decoded.ids[0, 0] == first[0]

    assert decoded.ids.tolist() == expected.tolist()
    assert_close(decoded.state.logits, slow.logits())
    kept = torch.stack([layer.sum(1) for layer in slow.alive])
    assert torch.equal(decoded.state.counts()[:, 0], kept)


@pytest.mark.parametrize("every", [2, 5])
def test_queries_whose_entries_may_be_evicted_no_longer_observe(every):
    """An observing window of 8 of which none is kept: after an eviction only the queries read since observe."""
    model, ids = tiny_model(), prompt_ids(PROMPT)[0]
    method = SnapKV(BUDGET, PromptWindow(8), window=0, pool=NO_POOL, every=every)
    slow = Slow(model, method)
    slow.read(ids)
    slow.evict()
    expected = slow.answer(TOKENS, every)
    decoded = answer(model, method, ids)
    assert decoded.ids.tolist() == expected.tolist()
    assert_close(decoded.state.logits, slow.logits())


@each_pair
def test_batches_equal_singles(make, name, allocate):
    """Rows of 30, 19 and 7 tokens: the last one is shorter than what is kept, and is first evicted from later."""
    model, method = tiny_model(), make(name, allocate=allocate)
    ids, mask = prompt_ids(PROMPT, 19, 7)
    batch = answer(model, method, ids, mask)
    for row, length in enumerate([PROMPT, 19, 7]):
        alone = answer(model, method, ids[row : row + 1, -length:])
        assert batch.ids[row].tolist() == alone.ids[0].tolist()
        assert_close(batch.state.logits[row], alone.state.logits[0])
