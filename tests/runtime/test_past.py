"""A past that is used in other ways than by its method: refused before it changes, and the right call still right."""

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from keepsight import Conversation, generate, load_state, save_state
from keepsight.errors import Code
from keepsight.runtime.generate import FullCache
from keepsight.runtime.importance import Pool
from keepsight.runtime.methods import SnapKV, StreamingLLM, Truncation
from keepsight.runtime.state import read
from tests.families import family_model
from tests.refused import refused
from tests.runtime.family_methods import NAMES, PROMPT, method_of
from tests.tiny import prompt_ids, tiny_model

SMALL = SnapKV(12, window=4, pool=Pool(kernel=3))
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
TURN = prompt_ids(5, seed=1)[0]
LONGER = torch.cat([PROMPT, TURN], dim=1)
_CACHES = "ignore:.*cache.*"


@pytest.mark.parametrize("name", NAMES)
def test_a_plain_generate_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    model = family_model("Llama 3")
    method = method_of(name, "Llama 3", tmp_path)
    past = method.compress(model, input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT))
    expected = generate(model, LONGER, method, past_key_values=past, **GREEDY)
    plain: dict[str, Any] = {"past_key_values": past, **GREEDY}
    for use in (
        lambda: model.generate(LONGER, **plain),
        lambda: model.generate(TURN, num_beams=2, **plain),
        lambda: model.generate(LONGER, **plain | {"past_key_values": copy.deepcopy(past)}),
        lambda: model(TURN, past_key_values=past),
        lambda: model(TURN, past_key_values=past.state.cache),
        lambda: past.crop(-2),
        lambda: past.reset(),
    ):
        with refused("past_key_values", "state"):
            use()
    assert torch.equal(generate(model, LONGER, method, past_key_values=past, **GREEDY), expected)


@pytest.mark.parametrize(
    "family",
    [
        "Gemma 3 (text)",
        "Qwen3-Next",
        "Granite 4 (Mamba-2)",
        "DeepSeek-V3",
        "Falcon-H1",
        "Gemma 4 E2B, E4B",
        "GPT-2",
        "Inkling",
    ],
)
def test_layers_of_every_kind_stay_as_they_are(family: str) -> None:
    """Layers with a window or a recurrent state may come before the first with full attention."""
    model = family_model(family)
    method = StreamingLLM(12)
    past = method.compress(model, input_ids=PROMPT)
    expected = generate(model, LONGER, method, past_key_values=past, **GREEDY)
    for cache in (past, past.state.cache):
        with refused("past_key_values", "state"):
            model.generate(LONGER, past_key_values=cache, **GREEDY)
    assert torch.equal(generate(model, LONGER, method, past_key_values=past, **GREEDY), expected)


def test_a_conversation_and_a_saved_state_stay_as_they_are(tmp_path: Path) -> None:
    model = tiny_model()
    conversation = Conversation(model, SMALL)
    undisturbed = Conversation(model, SMALL)
    conversation.say(PROMPT, **GREEDY)
    undisturbed.say(PROMPT, **GREEDY)
    assert conversation.state is not None
    with refused("past_key_values", "state"):
        ids = torch.cat([conversation.ids, TURN], dim=1)
        model.generate(ids, past_key_values=conversation.state.cache, **GREEDY)
    assert torch.equal(conversation.say(TURN, **GREEDY), undisturbed.say(TURN, **GREEDY))

    saved = load_state(save_state(SMALL.start(model, PROMPT), tmp_path, model=model), model)
    expected = generate(model, TURN, saved, **GREEDY)
    with refused("past_key_values", "state"):
        model.generate(LONGER, past_key_values=saved.state.cache, **GREEDY)
    assert torch.equal(generate(model, TURN, saved, **GREEDY), expected)


def test_a_state_whose_cache_has_grown_is_refused() -> None:
    model = tiny_model()
    state = SMALL.start(tiny_model(), PROMPT)
    after, _ = read(model, state, TURN)
    for use in (
        lambda: read(model, state, TURN),
        state.copy,
        lambda: Conversation(model, SMALL, state).say(TURN, **GREEDY),
        lambda: SMALL.resume(model, state, TURN),
    ):
        with refused("state", "state"):
            use()
    assert read(model, after, TURN)[0].tokens.shape == (1, 51)
    past = SMALL.compress(model, input_ids=PROMPT)
    past.state.cache.layers[0].update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8))
    with refused("state", "state"):
        generate(model, LONGER, SMALL, past_key_values=past, **GREEDY)


def test_several_threads_continue_from_one_past() -> None:
    model = tiny_model()
    turns = [torch.cat([PROMPT, prompt_ids(4 + seed, seed=seed)[0]], dim=1) for seed in range(6)]
    for method in (SMALL, FullCache(), SnapKV(12, window=4, every=2)):
        past = method.compress(model, input_ids=PROMPT)

        def answer(ids: Any, method: Any = method, past: Any = past) -> list[int]:
            return list(generate(model, ids, method, past_key_values=past, **GREEDY)[0].tolist())

        expected = [answer(ids) for ids in turns]
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(answer, turns)) == expected


def test_a_past_of_another_model_or_another_state_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    past = SMALL.compress(model, input_ids=PROMPT)
    with refused("model", "conflict"):
        generate(tiny_model(seed=1), LONGER, SMALL, past_key_values=past, **GREEDY)
    expected = generate(model, LONGER, SMALL, past_key_values=past, **GREEDY)
    assert torch.equal(generate(tiny_model(), LONGER, SMALL, past_key_values=past, **GREEDY), expected)
    saved = load_state(save_state(SMALL.start(model, TURN.repeat(1, 4)), tmp_path, model=model), model)
    with refused("past_key_values", "state"):
        generate(model, LONGER, saved, past_key_values=past, **GREEDY)


LENGTH = LONGER.shape[1]
OPTIONS: dict[str, tuple[dict[str, Any], str, Code]] = {
    "a hole": ({"attention_mask": (torch.arange(LENGTH) != 4).long()[None]}, "attention_mask", "conflict"),
    "padding": ({"attention_mask": (torch.arange(LENGTH) > 2).long()[None]}, "attention_mask", "conflict"),
    "a short mask": ({"attention_mask": (torch.arange(9) > 2).long()[None]}, "attention_mask", "data"),
    "positions": ({"position_ids": torch.arange(LENGTH)[None] + 1}, "position_ids", "data"),
    "positions of the turn": ({"position_ids": torch.arange(5)[None]}, "position_ids", "data"),
    "no cache": ({"use_cache": False}, "use_cache", "conflict"),
    "no cache, configured": (
        {"generation_config": GenerationConfig(use_cache=False, max_new_tokens=6)},
        "use_cache",
        "conflict",
    ),
    "two answers": ({"num_return_sequences": 2, "do_sample": True}, "input_ids", "range"),
    "beams": ({"num_beams": 2}, "num_beams", "conflict"),
    "attentions": ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states", "conflict"),
}


@pytest.mark.filterwarnings(_CACHES)
@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_contradict_a_past_are_refused(case: str) -> None:
    model = tiny_model()
    options, field, code = OPTIONS[case]
    past = SMALL.compress(model, input_ids=PROMPT)
    greedy = {} if "generation_config" in options else GREEDY
    with refused(field, code):
        model.generate(LONGER, custom_generate=SMALL, past_key_values=past, **greedy | options)


@pytest.mark.parametrize("method", [SMALL, FullCache(), Truncation(20)], ids=lambda method: type(method).__name__)
def test_options_that_agree_with_a_past_are_honoured(method: Any) -> None:
    """A mask and positions that say what was read, padding included, and a prefill in chunks."""
    model = tiny_model()
    unpadded_past = method.compress(model, input_ids=PROMPT)
    expected = generate(model, LONGER, method, past_key_values=unpadded_past, **GREEDY)

    padded = torch.cat([PROMPT.new_zeros(1, 3), PROMPT], dim=1)
    mask = torch.ones(1, 44).long()
    mask[:, :3] = 0
    past = method.compress(model, input_ids=padded, attention_mask=mask)
    ids = torch.cat([padded, TURN], dim=1)
    mask_with_turn = torch.cat([mask, torch.ones_like(TURN)], dim=1)
    positions = (mask_with_turn.cumsum(1) - 1).clamp(min=0)
    for options in (
        {},
        {"attention_mask": mask_with_turn},
        {"attention_mask": mask_with_turn, "position_ids": positions},
        {"attention_mask": mask_with_turn.bool(), "prefill_chunk_size": 2},
    ):
        answer = generate(model, ids, method, past_key_values=past, **options, **GREEDY)
        assert torch.equal(answer, expected)
