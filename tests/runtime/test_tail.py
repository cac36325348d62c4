"""Observers that are read in one pass with the prompt score it as those of a second pass do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keepsight.models.decoder import FULL, layer_kinds
from keepsight.models.lookahead import LookaheadAdapter
from keepsight.runtime.allocate import Adaptive, Global
from keepsight.runtime.drafting.observer import DraftIds, DraftObserver, FixedDraft
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import generate
from keepsight.runtime.importance import NO_POOL, Pool, Reduce
from keepsight.runtime.methods.drafts import ConstantText, DapQ, PromptEnds
from keepsight.runtime.methods.lookaheadkv import LookaheadKV, SoftTokens
from keepsight.runtime.rope_length import length_limit
from keepsight.runtime.state import PassRecorder, State, prefill
from tests.close import assert_close
from tests.families import FAMILIES, MORE, family_model
from tests.models.modules import SHAPE, random_on, save
from tests.runtime.family_methods import REFUSED
from tests.runtime.test_layer_eviction import Layers
from tests.tiny import prompt_ids, tiny_model

DRAFT = torch.randint(3, 99, (1, 5), generator=torch.Generator().manual_seed(1))
DRAFT_MASK = torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [True] * 5])
DRAFTED = DraftIds(DRAFT.expand(3, -1), DRAFT_MASK)
"""A draft that ends early in the second row."""


@pytest.fixture
def adapter(tmp_path: Path) -> LookaheadAdapter:
    return LookaheadAdapter.load(save(random_on(tiny_model()), tmp_path / "adapter"))


def methods(adapter: LookaheadAdapter) -> dict[str, Evict]:
    soft_tokens = SoftTokens(adapter)
    return {
        "lookaheadkv": LookaheadKV(20, soft_tokens, reduce=Reduce("max", "max"), value_norm=True, pool=NO_POOL),
        "by the paper": LookaheadKV(20, soft_tokens, pool=Pool("max", 7)),
        "with a window": LookaheadKV(20, SoftTokens(adapter, window=4), reduce=Reduce("max", "mean")),
        "shared by all layers": LookaheadKV(20, soft_tokens, allocate=Global(0.2)),
        "shared by a layer": LookaheadKV(20, soft_tokens, allocate=Adaptive(0.2, blend=False)),
        "of a ratio": LookaheadKV(0.4, soft_tokens),
        "dapq": DapQ(20, DraftObserver(PromptEnds(2, 6))),
        "constant text": DapQ(20, DraftObserver(ConstantText([5, 6, 7]))),
        "draft and window": Evict(20, DraftObserver(FixedDraft(DRAFTED), window=None), window=6),
    }


NAMES = [*methods(Any)]  # type: ignore[arg-type]


def passes_of(model: Any) -> list[int]:
    """The number of tokens of each forward pass of a model from now on."""
    counts: list[int] = []
    model.model.layers[0].register_forward_pre_hook(lambda module, inputs: counts.append(inputs[0].shape[1]))
    return counts


def assert_kept_alike(one_pass: State, two_passes: State) -> None:
    """Two states have the same entries, and the first no longer has what was observed."""
    for layer, expected in zip(one_pass.entries(), two_passes.entries(), strict=True):
        assert_close(layer.keys, expected.keys)
        assert_close(layer.values, expected.values)
    assert_close(one_pass.logits, two_passes.logits)
    assert torch.equal(one_pass.counts(), two_passes.counts())
    assert torch.equal(one_pass.lengths, two_passes.lengths)
    assert all(layer.recorded is None or layer.recorded.observed is None for layer in one_pass.layers)
    assert [layer.seen for layer in one_pass.layers] == [layer.seen for layer in two_passes.layers]


@pytest.mark.parametrize(("lengths", "chunk"), [((70, 41, 25), 16), ((70, 70, 70), None)])
@pytest.mark.parametrize("name", NAMES)
def test_the_entries_that_stay_are_those_of_two_passes(
    adapter: LookaheadAdapter, name: str, lengths: tuple[int, ...], chunk: int | None
) -> None:
    model = tiny_model()
    method = methods(adapter)[name]
    ids, mask = prompt_ids(*lengths)
    full_cache = prefill(model, ids, mask, needs=method.needs())
    passes = passes_of(model)
    one_pass = method.start(model, ids, mask, chunk=chunk)
    assert sum(passes) == 70 + method.bound_observer.positions()
    assert_kept_alike(one_pass, method.compress_state(model, full_cache))


@pytest.mark.parametrize("family", [family for family in (*FAMILIES, *MORE) if (family, "lookaheadkv") not in REFUSED])
def test_every_family_keeps_what_two_passes_keep(family: str, tmp_path: Path) -> None:
    """Families with windows or recurrent states, which would take in the observers, read them in a second pass."""
    model = family_model(family)
    adapter = LookaheadAdapter.load(save(random_on(model), tmp_path / "adapter"))
    method = LookaheadKV(16, SoftTokens(adapter), pool=NO_POOL)
    ids = prompt_ids(41)[0]
    full_cache = prefill(model, ids, needs=method.needs())
    weights_before = [parameter.clone() for parameter in model.parameters()]
    passes: list[int] = []
    record = PassRecorder.__call__

    def record_and_count(self: PassRecorder, index: int, query: Tensor, *states: Any) -> None:
        passes.append(query.shape[2])
        record(self, index, query, *states)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PassRecorder, "__call__", record_and_count)
        state = method.start(model, ids)
    joined_rows = 41 + method.observer.positions()
    is_joined = set(layer_kinds(model.config)) == {FULL} and length_limit(model.config) is None
    assert (joined_rows in passes) == is_joined
    assert_kept_alike(state, method.compress_state(model, full_cache))
    for before, after in zip(weights_before, model.parameters(), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scores_are_close(adapter: LookaheadAdapter, dtype: torch.dtype) -> None:
    model = tiny_model().to(dtype)
    method = LookaheadKV(20, SoftTokens(adapter), during_prefill=False)
    ids = prompt_ids(60)[0]
    full_cache = prefill(model, ids, needs=method.needs())
    expected = method.bound_observer(model, full_cache, method.reduce)
    tail = method.observer.tail(model, ids, None, method.reduce)
    state = prefill(model, ids, needs=method.needs(), tail=tail)
    for layer, scores in zip(state.layers, expected, strict=True):
        assert layer.recorded is not None
        assert layer.recorded.observed is not None
        assert torch.allclose(layer.recorded.observed, scores, atol=0.02)


def test_only_one_layer_is_full_where_heads_share_no_budget(adapter: LookaheadAdapter) -> None:
    model = tiny_model()
    ids = prompt_ids(200)[0]
    watched = Layers(model)
    LookaheadKV(20, SoftTokens(adapter)).start(model, ids)
    assert watched.full == watched.alive == [0, 0, 0]
    during_prefill = LookaheadKV(20, SoftTokens(adapter), during_prefill=True)
    assert during_prefill.start(tiny_model(), ids).length == 20


def test_a_prompt_within_the_budget_is_read_alone(adapter: LookaheadAdapter) -> None:
    model = tiny_model()
    passes = passes_of(model)
    state = LookaheadKV(20, SoftTokens(adapter)).start(model, prompt_ids(18)[0])
    assert passes == [18]
    assert state.length == 18


def test_the_owner_s_hooks_and_answers_stay(adapter: LookaheadAdapter) -> None:
    """The adapter changes the observers' rows alone, and nothing after the pass."""
    model = tiny_model()
    ids = prompt_ids(60)[0]
    logits_before = model(ids).logits
    method = LookaheadKV(59, SoftTokens(adapter))
    one_pass = generate(model, ids, method, max_new_tokens=4)
    two_passes = generate(model, ids, replace(method, during_prefill=False), max_new_tokens=4)
    assert torch.equal(one_pass, two_passes)
    assert torch.equal(model(ids).logits, logits_before)
    assert SHAPE.tokens == method.observer.positions()


def test_a_model_that_returns_all_logits_goes_on_from_the_prompt_s_last_token(adapter: LookaheadAdapter) -> None:
    """VideoLLaMA 3 looks at no `logits_to_keep`: the last row would be that of a soft token."""
    model = tiny_model()
    ids = prompt_ids(60)[0]
    method = LookaheadKV(20, SoftTokens(adapter))
    expected = method.start(model, ids)
    answer = generate(model, ids, method, max_new_tokens=4)

    def keep_all(module: Any, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return inputs, {**options, "logits_to_keep": 0}

    with model.register_forward_pre_hook(keep_all, with_kwargs=True):
        assert_close(method.start(model, ids).logits, expected.logits)
        assert torch.equal(generate(model, ids, method, max_new_tokens=4), answer)
