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

BUDGET = 14
EVERY = 4
TOKENS = 11
PROMPT = 30
ALLOCATIONS = [Uniform(), Pyramid(beta=4), Adaptive(), Global()]
METHODS = ["snapkv", "streamingllm", "oracle", "lookaheadkv"]
PAIRS = [*zip(METHODS, ALLOCATIONS, strict=True), *zip(METHODS, reversed(ALLOCATIONS), strict=True)]
with_every_allocation = pytest.mark.parametrize(
    ("name", "allocate"), PAIRS, ids=lambda value: value if isinstance(value, str) else type(value).__name__
)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {family: LookaheadAdapter.load(save(random_module(family), folder / family)) for family in FAMILIES}


@pytest.fixture
def make(artifacts):
    """Makes a method by its name, with a small window and a short draft."""

    def make_by_name(name, allocate, family="llama"):
        options: dict[str, Any] = {"every": EVERY, "allocate": allocate}
        if name == "streamingllm":
            return StreamingLLM(BUDGET, sinks=2, **options)
        options["pool"] = Pool(kernel=3)
        if name == "snapkv":
            return SnapKV(BUDGET, window=3, **options)
        if name == "oracle":
            return Oracle(BUDGET, DraftObserver(OwnAnswer(3)), **options)
        return LookaheadKV(BUDGET, SoftTokens(artifacts[family]), **options)

    return make_by_name


def answer(model, method, ids, mask=None, tokens=TOKENS):
    """As `generate`, whatever the end token: the answer's ids and the state after it."""
    state = method.start(model, ids, mask)
    return decode(model, state, stop_after(tokens, None), pad_token=0, eviction=method.periodic_eviction(model))


@pytest.fixture
def recorded_counts(monkeypatch):
    """The cache's counts, [L, B, K], after each token that decoding reads."""
    counts = []
    read = keepsight.runtime.generate.read

    def read_and_record(*args, **options):
        state, logits = read(*args, **options)
        counts.append(state.counts())
        return state, logits

    monkeypatch.setattr(keepsight.runtime.generate, "read", read_and_record)
    return counts


@with_every_allocation
def test_the_budget_is_never_exceeded_and_always_used(make, recorded_counts, name, allocate):
    """Steps of the oracle's own draft are read too: they belong to a copy that is dropped, and are not counted here."""
    model = tiny_model()
    method = make(name, allocate)
    ids, mask = prompt_ids(PROMPT, 21)
    state = method.start(model, ids, mask)
    recorded_counts.clear()
    eviction = method.periodic_eviction(model)

    def compress(before):
        steps = len(recorded_counts)
        after = eviction.compress(before)
        del recorded_counts[steps:]
        return after

    eviction_without_drafts = type(eviction)(eviction.interval, compress)
    decode(model, state, stop_after(TOKENS, None), pad_token=0, eviction=eviction_without_drafts)
    mean_counts = [counts.double().mean(dim=(0, 2)).tolist() for counts in recorded_counts]
    expected = [BUDGET - EVERY + step % EVERY + 1 for step in range(TOKENS - 1)]
    assert mean_counts == [[count, count] for count in expected]
    assert max(expected) == BUDGET
    if type(allocate) is Uniform:
        for counts in recorded_counts:
            assert len(counts.unique()) == 1


@pytest.mark.parametrize(
    ("name", "allocate", "family"), [(*pair, FAMILIES[index // 4]) for index, pair in enumerate(PAIRS)]
)
def test_decoding_equals_a_model_that_hides_what_was_evicted(make, name, allocate, family):
    model = tiny_model(family)
    method = make(name, allocate, family)
    ids, _ = prompt_ids(PROMPT)
    slow = Slow(model, method)
    slow.read(ids)
    # The first token comes from the prompt's own logits.
    first_token = slow.logits().argmax(-1)
    slow.evict()
    expected = slow.answer(TOKENS, EVERY)
    decoded = answer(model, method, ids)
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None}
    assert torch.equal(generate(model, ids, method, **options), decoded.ids)
    assert decoded.ids[0, 0] == first_token[0]
    assert decoded.ids.tolist() == expected.tolist()
    assert_close(decoded.state.logits, slow.logits())
    expected_counts = torch.stack([alive.sum(1) for alive in slow.alive])
    assert torch.equal(decoded.state.counts()[:, 0], expected_counts)


@pytest.mark.parametrize("every", [2, 5])
def test_queries_whose_entries_may_be_evicted_no_longer_observe(every):
    """An observing window of 8 of which none is kept: after an eviction only the queries read since observe."""
    model = tiny_model()
    ids, _ = prompt_ids(PROMPT)
    method = SnapKV(BUDGET, PromptWindow(8), window=0, pool=NO_POOL, every=every)
    slow = Slow(model, method)
    slow.read(ids)
    slow.evict()
    expected = slow.answer(TOKENS, every)
    decoded = answer(model, method, ids)
    assert decoded.ids.tolist() == expected.tolist()
    assert_close(decoded.state.logits, slow.logits())


@with_every_allocation
def test_batches_equal_singles(make, name, allocate):
    """Rows of 30, 19 and 7 tokens: the last one is shorter than what is kept, and is first evicted from later."""
    model = tiny_model()
    method = make(name, allocate)
    ids, mask = prompt_ids(PROMPT, 19, 7)
    batch = answer(model, method, ids, mask)
    for row, length in enumerate([PROMPT, 19, 7]):
        alone = answer(model, method, ids[row : row + 1, -length:])
        assert batch.ids[row].tolist() == alone.ids[0].tolist()
        assert_close(batch.state.logits[row], alone.state.logits[0])
