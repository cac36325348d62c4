"""A bias by the distance of query and key (Inkling), against transformers' own eager attention without a cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from keepsight import generate
from keepsight.errors import UserError
from keepsight.models.decoder import embedding_std
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.runtime.distance_bias import CHANNELS, DistanceBias, positions_in, with_positions, without_positions
from keepsight.runtime.generate import decode, stop_after
from keepsight.runtime.methods import LookaheadKV, SnapKV, make_method
from keepsight.runtime.methods.lookaheadkv import adapter_fields
from keepsight.runtime.observe import observe
from keepsight.runtime.saved import load_state, save_state
from keepsight.runtime.state import full_layers, prefill, read
from keepsight.train.replay import ReplayBuffer, TeacherOutputs
from keepsight.train.settings import ReplaySettings
from tests.close import assert_close
from tests.families import family_model, fresh_model
from tests.models.modules import random_on
from tests.runtime.slow_families import hiding, slow_pass
from tests.tiny import prompt_ids

FAMILIES = ["Inkling", "Inkling 2"]
LENGTH = 41
BUDGET = 16
PROMPT = prompt_ids(LENGTH)[0]
ANSWER = prompt_ids(5, seed=1)[0]
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
ALL_ALLOCATIONS = pytest.mark.parametrize("allocate", ["uniform", "adakv", {"name": "global", "floor": 0.2}])


def snapkv(**options: Any) -> Any:
    return make_method("snapkv", BUDGET, window=8, **options)


def positions_of_layers(state: Any) -> list[list[list[int]]]:
    """The positions of the entries that each head of each layer keeps."""
    positions_by_layer = []
    for layer in state.layers:
        keys, _, real = layer.entries()
        if real is None:
            real = torch.ones(keys.shape[:3], dtype=torch.bool)
        real_by_head = real.expand(keys.shape[:3])[0]
        positions_by_head = positions_in(keys)[0]
        heads = zip(positions_by_head, real_by_head, strict=True)
        positions_by_layer.append([positions[is_real].tolist() for positions, is_real in heads])
    return positions_by_layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_positions_are_exact_in_every_dtype(dtype: torch.dtype) -> None:
    positions = torch.tensor([[0, 1, 255, 256, 70_000, 1_048_575, 2**24 - 1]])
    heads = torch.randn(1, 2, 7, 4, dtype=dtype)
    marked = with_positions(heads, positions)
    assert positions_in(marked).tolist() == [[positions[0].tolist()] * 2]
    assert torch.equal(without_positions(marked), heads)


def test_the_bias_is_that_of_a_slow_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    bank = torch.randn(3, 5, generator=generator)
    key_positions = [0, 4, 9, 300]
    query_positions = [4, 301]
    states = torch.randn(1, 1, 2, 3, generator=generator)
    keys = with_positions(torch.zeros(1, 1, 4, 2), torch.tensor([key_positions]))
    queries = with_positions(torch.zeros(1, 1, 2, 2), torch.tensor([query_positions]))
    bias = DistanceBias(bank)(torch.cat([queries, states], dim=-1), keys)[0, 0]
    for row, query_position in enumerate(query_positions):
        for column, key_position in enumerate(key_positions):
            distance = query_position - key_position
            expected = float(states[0, 0, row] @ bank[:, distance]) if 0 <= distance < 5 else 0.0
            assert bias[row, column].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_full_cache_answers_as_the_model_does(family: str) -> None:
    model = family_model(family)
    expected = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **GREEDY)[:, LENGTH:]
    assert torch.equal(generate(model, PROMPT, **GREEDY), expected)
    assert torch.equal(generate(model, PROMPT, SnapKV(LENGTH + 9, window=8), **GREEDY), expected)
    assert torch.equal(generate(model, PROMPT, prefill_chunk_size=9, **GREEDY), expected)
    assert_close(prefill(model, PROMPT).logits, slow_pass(model, input_ids=PROMPT)[1][:, -1])
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@ALL_ALLOCATIONS
@pytest.mark.parametrize("chunk", [None, 9])
@pytest.mark.parametrize("family", FAMILIES)
def test_kept_entries_have_the_bias_of_their_old_positions(family: str, chunk: int | None, allocate: Any) -> None:
    """Token by token and several at once, also where heads keep different entries, and different numbers of them."""
    model = family_model(family)
    method = snapkv(allocate=allocate)
    state = prefill(model, PROMPT, needs=method.needs(), chunk=chunk)
    kept = method.select(state, method.importance(model, state))
    expected_positions = [[head.nonzero()[:, 0].tolist() for head in layer[0]] for layer in kept]
    evicted = method.compress_state(model, state)
    assert positions_of_layers(evicted) == expected_positions
    _, expected = slow_pass(model, hiding(kept), input_ids=torch.cat([PROMPT, ANSWER], dim=1))
    for index in range(ANSWER.shape[1]):
        evicted, logits = read(model, evicted, ANSWER[:, index : index + 1])
        assert_close(logits[:, 0], expected[:, LENGTH + index])
    together = read(model, method.compress_state(model, state), ANSWER)[1]
    assert_close(together, expected[:, LENGTH:])
    after_answer = [[*positions, *range(LENGTH, LENGTH + 5)] for positions in expected_positions[0]]
    assert positions_of_layers(evicted)[0] == after_answer


def test_logits_are_scaled_by_the_length_of_the_text_and_not_of_the_cache() -> None:
    """Also in a pass of soft tokens over an evicted cache."""
    model = fresh_model("Inkling", log_scaling_n_floor=20, log_scaling_alpha=0.5)
    method = snapkv()
    state = prefill(model, PROMPT, needs=method.needs())
    kept = method.select(state, method.importance(model, state))
    evicted = method.compress_state(model, state)
    text = torch.cat([PROMPT, ANSWER], dim=1)
    weights, expected = slow_pass(model, hiding(kept), input_ids=text)
    embedded = model.get_input_embeddings()(ANSWER)
    attention = observe(model, evicted.cache, None, embedded, first=evicted.lengths)
    for layer, layer_kept, layer_weights in zip(attention, kept, weights, strict=True):
        for head in range(4):
            to_prompt = layer_weights[0, head, LENGTH:, :LENGTH]
            to_kept = to_prompt[:, layer_kept[0, head // 2]]
            assert_close(layer[0, head], to_kept.mean(dim=0))
    assert_close(read(model, evicted, ANSWER)[1], expected[:, LENGTH:])
    _, unscaled = slow_pass(family_model("Inkling"), hiding(kept), input_ids=text)
    assert not torch.allclose(expected, unscaled, atol=1e-3), "the scale matters"


def test_a_bias_at_other_positions_changes_logits_measurably() -> None:
    """Were kept entries numbered anew, logits would differ by far more than rounding."""
    model = family_model("Inkling")
    evicted = snapkv().start(model, PROMPT)
    expected = read(model, evicted.copy(), ANSWER[:, :1])[1]
    for layer in evicted.layers:
        new_positions = torch.arange(LENGTH - layer.longest, LENGTH)[None]
        layer.keys = with_positions(without_positions(layer.keys), new_positions)
    renumbered = read(model, evicted, ANSWER[:, :1])[1]
    rounding = torch.finfo(torch.float32).eps * expected.abs().max()
    assert (renumbered - expected).abs().max() > 100 * rounding


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_padded_batch_answer_as_they_do_alone(family: str) -> None:
    model = family_model(family)
    ids, mask = prompt_ids(LENGTH, 29, seed=3)
    adapter = adapter_fields(random_on(model).adapter())
    for method in (None, snapkv(), snapkv(allocate="adakv"), LookaheadKV(BUDGET, **adapter)):
        rows = generate(model, ids, method, attention_mask=mask, **GREEDY)
        for row, row_ids, row_mask in zip(rows, ids, mask, strict=True):
            alone = generate(model, row_ids[row_mask.bool()][None], method, **GREEDY)
            assert row.tolist() == alone[0].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_that_all_rows_share_changes_nothing(family: str) -> None:
    """Columns of padding are no distance, neither within a window nor for the scale by the length of a row's text."""
    model = fresh_model(family, log_scaling_n_floor=20, log_scaling_alpha=0.5)
    ids, mask = prompt_ids(LENGTH, 29, seed=3)
    lookaheadkv = LookaheadKV(BUDGET, **adapter_fields(random_on(model).adapter()))
    for method in (SnapKV(LENGTH, window=8), snapkv(allocate="adakv"), lookaheadkv):
        for padding in (0, 9):
            padded_mask = functional.pad(mask, (padding, 0))
            batch = method.start(model, functional.pad(ids, (padding, 0), value=2), padded_mask)
            _, logits = read(model, batch.copy(), ANSWER.expand(2, -1))
            for row in range(2):
                alone = method.start(model, ids[row : row + 1, mask[row].bool()])
                assert_close(batch.logits[row], alone.logits[0])
                assert_close(logits[row], read(model, alone, ANSWER)[1][0])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_that_is_evicted_from_again_keeps_positions(family: str) -> None:
    """While an answer is decoded, and by soft tokens that look at an evicted cache."""
    model = family_model(family)
    method = snapkv(every=3)
    state = method.start(model, PROMPT)
    before = positions_of_layers(state)
    decoded = decode(model, state, stop_after(7, None), pad_token=0, eviction=method.periodic_eviction(model))
    for layer_before, layer in zip(before, positions_of_layers(decoded.state), strict=True):
        for head_before, head in zip(layer_before, layer, strict=True):
            assert {*head} < {*head_before, *range(LENGTH, LENGTH + 7)}
            assert head == sorted(head)
            assert head[-1] == LENGTH + 5

    lookaheadkv = LookaheadKV(10, **adapter_fields(random_on(model).adapter()))
    evicted = snapkv(allocate="adakv").start(model, PROMPT)
    evicted_again = lookaheadkv.compress_state(model, evicted)
    kept = positions_of_layers(evicted_again)
    kept_masks = [torch.zeros(1, len(layer), LENGTH, dtype=torch.bool) for layer in kept]
    for layer_before, layer, mask in zip(positions_of_layers(evicted), kept, kept_masks, strict=True):
        for index, (positions_before, positions) in enumerate(zip(layer_before, layer, strict=True)):
            assert {*positions} <= {*positions_before}
            mask[0, index, positions] = True
    _, expected = slow_pass(model, hiding(kept_masks), input_ids=torch.cat([PROMPT, ANSWER], dim=1))
    assert_close(read(model, evicted_again, ANSWER)[1], expected[:, LENGTH:])


@pytest.mark.parametrize("allocate", ["uniform", "adakv"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_state_has_positions_and_what_scores_need(family: str, allocate: Any, tmp_path: Path) -> None:
    model = family_model(family)
    method = snapkv(allocate=allocate)
    state = method.start(model, PROMPT)
    save_state(state, tmp_path, model=model)
    loaded = load_state(tmp_path, model).state
    assert positions_of_layers(loaded) == positions_of_layers(state)
    assert torch.equal(read(model, loaded.copy(), ANSWER)[1], read(model, state.copy(), ANSWER)[1])
    smaller = SnapKV(12, window=8)
    scores = smaller.importance(model, loaded)
    for layer_scores, expected in zip(scores, smaller.importance(model, state), strict=True):
        assert torch.equal(layer_scores, expected)


def test_entries_that_teachers_store_in_int8_keep_positions() -> None:
    model = family_model("Inkling")
    state = prefill(model, PROMPT)
    outputs = TeacherOutputs.of_cache(state.cache)
    buffer = ReplayBuffer(ReplaySettings(dtype="int8"))
    cache = buffer.rounded(outputs).cache(model, LENGTH)
    for layer, stored in zip(state.layers, full_layers(cache), strict=True):
        assert torch.equal(positions_in(stored.keys), positions_in(layer.keys))
        keys: Tensor = without_positions(layer.keys)
        assert (without_positions(stored.keys) - keys).abs().max() < keys.abs().max() / 127


def test_positions_are_kept_in_bfloat16() -> None:
    model = fresh_model("Inkling").bfloat16()
    state = snapkv(allocate="adakv").start(model, PROMPT)
    assert state.layers[0].keys.dtype == torch.bfloat16
    assert read(model, state, ANSWER)[1].isfinite().all()
    last_positions = [head[-1] for layer in positions_of_layers(state) for head in layer]
    assert last_positions == [LENGTH + 4] * 4


def test_keys_are_measured_without_their_positions() -> None:
    model = family_model("Inkling")
    for name in ("key_norm", "keydiff", "curdkv", "lagkv", "rkv", "compactor"):
        method: Any = make_method(name, BUDGET)
        state = prefill(model, PROMPT, needs=method.needs())
        scores = method.importance(model, state)
        for layer in state.layers:
            layer.keys = with_positions(without_positions(layer.keys), torch.arange(LENGTH)[None] + 4096)
            recorded: Any = layer.recorded
            queries = recorded.queries
            if queries is not None:  # both move: distances stay
                width = layer.keys.shape[-1]
                positions = torch.arange(LENGTH - queries.shape[2], LENGTH)[None] + 4096
                queries[..., :width] = with_positions(queries[..., : width - CHANNELS], positions)
        for layer_scores, expected in zip(method.importance(model, state), scores, strict=True):
            assert_close(layer_scores.nan_to_num(posinf=0), expected.nan_to_num(posinf=0))


def test_soft_tokens_begin_as_large_as_normalised_embeddings() -> None:
    model = family_model("Inkling")
    embedded = model.get_input_embeddings()(torch.arange(100))
    assert embedding_std(model).item() == pytest.approx(embedded.std().item(), rel=0.05)
    tokens = Lookahead(model, LookaheadSettings(tokens=64, rank=0)).tokens
    assert tokens.std().item() == pytest.approx(1.0, rel=0.1)


def test_methods_that_would_leave_the_bias_out_are_refused_in_one_line() -> None:
    model = family_model("Inkling")
    budgets = {"kivi": BUDGET, "think": BUDGET, "quest": 64, "expected_attention": BUDGET, "triattention": BUDGET}
    for name, budget in budgets.items():
        method = make_method(name, budget)
        with pytest.raises(UserError, match="adds a bias by distance to its attention") as caught:
            method.start(model, PROMPT)
        assert "\n" not in str(caught.value)
