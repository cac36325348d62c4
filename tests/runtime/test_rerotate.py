"""Keys at consecutive positions after an eviction: what a model would hold that had never read the evicted tokens.

A key of the first layer depends on its token and its position alone. So it is compared with the one of a prompt of the
kept tokens; with a model of one layer, what is read next as well.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from keepsight import generate, load_state, save_state
from keepsight.errors import UserError
from keepsight.models.decoder import full_attention_layers
from keepsight.runtime.allocate import Adaptive, Allocation, Global, Uniform
from keepsight.runtime.methods import TOVA, ExpectedAttention, Kivi, SnapKV, StreamingLLM
from keepsight.runtime.observe import PromptWindow
from keepsight.runtime.state import State, prefill, read
from tests.close import assert_close
from tests.families import FAMILIES, family_model
from tests.refused import refused
from tests.tiny import prompt_ids, tiny_model

LENGTH = 41
BUDGET = 16
SINKS = 4
TURN = prompt_ids(7, seed=5)[0]
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}


def shortened(ids: Tensor, budget: int = BUDGET) -> Tensor:
    """The tokens that StreamingLLM keeps of a prompt [1, N]."""
    return torch.cat([ids[:, :SINKS], ids[:, SINKS - budget :]], dim=1)


def one_layer_model() -> Any:
    return tiny_model(num_hidden_layers=1)


def next_positions(state: State) -> list[int]:
    """The position of the next token of each row."""
    return (state.lengths + state.rope_offset).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_of_the_first_layer_are_those_of_the_kept_tokens(family: str) -> None:
    model = family_model(family)
    ids, _ = prompt_ids(LENGTH)
    method = StreamingLLM(BUDGET, rerotate=True)
    plain = StreamingLLM(BUDGET)
    try:
        method.check_model(model)
    except UserError as error:
        assert str(error).startswith("rerotate:"), error
        assert str(error).endswith("set rerotate to false"), error
        with refused("model", "model"):
            method.start(model, ids)
        return
    state = method.start(model, ids)
    expected = prefill(model, shortened(ids))
    if 0 in full_attention_layers(model.config):
        assert_close(state.layers[0].keys, expected.layers[0].keys)
    for layer, unmoved in zip(state.layers, plain.start(model, ids).layers, strict=True):
        assert torch.equal(layer.values, unmoved.values)
    if state.layers:
        assert next_positions(state) == [BUDGET]


def test_some_families_are_taken_and_some_refused() -> None:
    refused_families = []
    for family in [*FAMILIES, "GPT-2"]:
        try:
            StreamingLLM(BUDGET, rerotate=True).check_model(family_model(family))
        except UserError:
            refused_families.append(family)
    assert {"Gemma 3 (text)", "GPT-2", "DeepSeek-V3"} <= {*refused_families}
    assert len(refused_families) < len(FAMILIES) - 6


def test_the_text_goes_on_as_if_evicted_tokens_had_not_been_read() -> None:
    model = one_layer_model()
    ids, _ = prompt_ids(LENGTH)
    state = StreamingLLM(BUDGET, rerotate=True).start(model, ids)
    after, logits = read(model, state, TURN)
    expected, expected_logits = read(model, prefill(model, shortened(ids)), TURN)
    assert_close(logits, expected_logits)
    assert_close(after.layers[0].keys, expected.layers[0].keys)
    _, unmoved_logits = read(model, StreamingLLM(BUDGET).start(model, ids), TURN)
    assert (logits - unmoved_logits).abs().max() > 0.01, "positions make a difference"


def test_further_turns_are_renumbered_again() -> None:
    model = one_layer_model()
    ids, _ = prompt_ids(LENGTH)
    method = StreamingLLM(BUDGET, rerotate=True)
    state = method.resume(model, method.start(model, ids), TURN)
    text = torch.cat([ids, TURN], dim=1)
    assert_close(state.layers[0].keys, prefill(model, shortened(text)).layers[0].keys)
    assert next_positions(state) == [BUDGET]


def test_eviction_while_decoding_renumbers_too() -> None:
    model = one_layer_model()
    ids, _ = prompt_ids(LENGTH)
    answer = generate(model, ids, StreamingLLM(BUDGET, rerotate=True, every=3), **GREEDY)
    text = ids
    short = shortened(ids, BUDGET - 3)
    logits = prefill(model, ids).logits
    since_eviction = 0
    for index in range(GREEDY["max_new_tokens"]):
        token = logits.argmax(dim=-1)[:, None]
        assert int(token) == int(answer[0, index])
        text = torch.cat([text, token], dim=1)
        if since_eviction == 3:
            short = shortened(short, BUDGET - 3)
            since_eviction = 0
        short = torch.cat([short, token], dim=1)
        logits = prefill(model, short).logits
        since_eviction += 1


def test_recorded_queries_move_with_the_keys() -> None:
    model = one_layer_model()
    ids, _ = prompt_ids(LENGTH)
    method = TOVA(BUDGET, observer=PromptWindow(), window=4, rerotate=True)
    state = method.start(model, ids)
    unmoved = TOVA(BUDGET, observer=PromptWindow(), window=4).start(model, ids)
    full_keys = prefill(model, ids).layers[0].keys[0, 0]
    kept = torch.cdist(unmoved.layers[0].keys[0, 0], full_keys).argmin(dim=1)
    short = prefill(model, ids[:, kept], needs=method.needs())
    assert_close(state.layers[0].keys, short.layers[0].keys)
    recorded: Any = state.layers[0].recorded
    expected: Any = short.layers[0].recorded
    assert recorded.queries.shape[2] == 4
    assert_close(recorded.queries, expected.queries[:, :, -4:])


def slow_rotated(key: Tensor, distance: int, theta: float = 10000.0) -> list[float]:
    """A key [d] that RoPE moves on by a distance, pair by pair."""
    width = len(key)
    rotated = [0.0] * width
    for pair in range(width // 2):
        angle = torch.tensor(distance * theta ** (-2 * pair / width), dtype=torch.float64)
        real = float(key[pair])
        imaginary = float(key[pair + width // 2])
        rotated[pair] = real * float(angle.cos()) - imaginary * float(angle.sin())
        rotated[pair + width // 2] = imaginary * float(angle.cos()) + real * float(angle.sin())
    return rotated


@pytest.mark.parametrize("allocate", [Uniform(), Adaptive(), Global()])
def test_heads_of_different_lengths_end_at_the_same_position(allocate: Allocation) -> None:
    model = tiny_model()
    ids, mask = prompt_ids(LENGTH, 33)
    method = SnapKV(BUDGET, window=6, allocate=allocate, rerotate=True)
    state = method.start(model, ids, mask)
    full_cache = prefill(model, ids, mask, needs=method.needs())
    selected = method.select(full_cache, method.importance(model, full_cache))
    ends = next_positions(state)
    for layer, full_layer, mask_of_kept in zip(state.entries(), full_cache.entries(), selected, strict=True):
        for row, length in enumerate((LENGTH, 33)):
            for head in range(2):
                kept = mask_of_kept[row, head].nonzero()[:, 0].tolist()
                assert len(kept) <= ends[row]
                for from_end, column in enumerate(reversed(kept), start=1):
                    old_position = column - (LENGTH - length)
                    new_position = ends[row] - from_end
                    expected = slow_rotated(full_layer.keys[row, head, column], new_position - old_position)
                    assert_close(layer.keys[row, head, -from_end], torch.tensor(expected))
    counts = state.counts()
    assert ends == counts.amax(dim=(0, 2)).tolist()
    for row, length in enumerate((LENGTH, 33)):
        alone = method.start(model, ids[row : row + 1, LENGTH - length :])
        assert next_positions(alone) == [ends[row]]


def test_renumbered_states_are_saved_packed_and_left_alone_within_the_budget(tmp_path: Any) -> None:
    model = tiny_model()
    ids, _ = prompt_ids(LENGTH)
    method = SnapKV(BUDGET, window=6, rerotate=True)
    state = method.start(model, ids)
    loaded = load_state(save_state(state, tmp_path, model=model), model)
    assert torch.equal(generate(model, TURN, loaded, **GREEDY), generate(model, TURN, state, **GREEDY))
    packed = Kivi(bits=4, group=8, residual=16, inner=method).start(model, ids)
    assert next_positions(packed) == [BUDGET]
    fits = SnapKV(LENGTH, rerotate=True).start(model, ids)
    assert torch.equal(fits.layers[0].keys, prefill(model, ids).layers[0].keys)
    assert not fits.rope_offset


def test_what_cannot_be_renumbered_is_refused() -> None:
    model = tiny_model()
    ids, _ = prompt_ids(LENGTH)
    with refused("during_prefill", "conflict"):
        SnapKV(BUDGET, window=6, rerotate=True, during_prefill=True)
    with refused("rerotate", "conflict"):
        ExpectedAttention(BUDGET, rerotate=True)
    with refused("rerotate", "type"):
        SnapKV(BUDGET, window=6, rerotate=1)  # type: ignore[arg-type]
    for earlier in (SnapKV(30, window=6), SnapKV(30, window=6, allocate=Adaptive())):
        with refused("rerotate", "state"):
            SnapKV(BUDGET, window=6, rerotate=True).compress_state(model, earlier.start(model, ids))
    moved = SnapKV(30, window=6, rerotate=True).start(model, ids)
    with refused("crop", "state"):  # which of the last tokens' entries stayed would leave gaps
        moved.without_last(2)
