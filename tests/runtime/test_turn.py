"""A further turn is read like a prompt: in passes over many tokens, which attend to all entries before them."""

from typing import Any

import pytest
import torch

from keepsight.runtime.generate import Conversation, Method
from keepsight.runtime.methods import Kivi, SpeCache, SpeContext
from keepsight.runtime.retrieval.specontext import retrieval_cache
from keepsight.runtime.state import read
from tests.close import assert_close
from tests.models.retrieval_heads import tiny_retrieval_head
from tests.runtime.retrieval.test_reader import FEATURES, NAMES, method_of
from tests.tiny import prompt_ids, tiny_model

METHODS: dict[str, Any] = {name: method_of(name, 12) for name in NAMES} | {
    "specontext on the CPU": method_of("specontext", 12, offload=2),
    "specache": SpeCache(1, 8, 16, 6),
    "specache without a guess": SpeCache(1, 8, 16, 6, speculative=False),
    "specache without slots": SpeCache(1, 8, 16, 0),
}
each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def passes(model: Any) -> list[int]:
    """The tokens of each forward pass from here on."""
    seen: list[int] = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, options: seen.append(options["input_ids"].shape[1]), with_kwargs=True
    )
    return seen


@pytest.mark.parametrize(
    ("method", "chunk"), [*((each, 128) for each in METHODS.values()), (METHODS["quest"], None), (Kivi(2, 8, 16), None)]
)
def test_a_turn_of_300_tokens_is_few_passes(method: Method, chunk: int | None) -> None:
    model = tiny_model(max_position_embeddings=512)
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    conversation = Conversation(model, method)
    conversation.say(prompt_ids(40)[0], **options)
    seen = passes(model)
    conversation.say(prompt_ids(300, seed=2)[0], **options, prefill_chunk_size=chunk)
    turn = [301] if chunk is None else [128, 128, 45]
    assert seen[: len(turn)] == turn
    assert max(seen[len(turn) :]) <= 2 and len(seen) <= len(turn) + 3  # the guess of SpeCache takes one more


@each_method
def test_a_prompt_in_two_turns_is_the_same_prompt(method: Method, chunk: int = 12) -> None:
    model, (ids, _), answer = tiny_model(), prompt_ids(75), prompt_ids(12, seed=1)[0]
    state = method.start(model, ids[:, :50])
    before = state.copy()
    for part in ids[:, 50:].split(chunk, dim=1):
        state = read(method.turn_reader(model), state, part, logits_to_keep=1)[0]
    whole = method.start(model, ids)
    assert_close(state.logits, whole.logits)
    expected = read(method.reader(model), whole, answer)[1]
    assert_close(read(method.reader(model), state, answer)[1], expected)
    assert (state.length, state.kv_bytes) == (whole.length, whole.kv_bytes)
    first = read(method.reader(model), method.start(model, ids[:, :50]), answer)[1]
    assert_close(read(method.reader(model), before, answer)[1], first)


@pytest.mark.parametrize("name", NAMES)
def test_turns_of_a_batch(name: str) -> None:
    model, method = tiny_model(), method_of(name, 12)
    ids, mask = prompt_ids(50, 33, 41)
    turn, answer = prompt_ids(20, 20, 20, seed=2)[0], prompt_ids(9, 9, 9, seed=1)[0]
    state, _ = read(method.turn_reader(model), method.start(model, ids, mask), turn)
    whole = method.start(model, torch.cat([ids, turn], 1), torch.nn.functional.pad(mask, (0, 20), value=1))
    assert_close(read(method.reader(model), state, answer)[1], read(method.reader(model), whole, answer)[1])


@pytest.mark.parametrize(("turn", "features"), [*zip([1, 100], FEATURES, strict=True)], ids=["answer", "turn"])
def test_a_head_is_extended_while_the_answer_grows(turn: int, features: str) -> None:
    """Made for 64 positions, it is then what it would have been for the whole, and so are its keys."""
    model, (ids, mask), more = tiny_model(), prompt_ids(50, 33), prompt_ids(200, 200, seed=1)[0]
    method = SpeContext(1000, tiny_retrieval_head(features, max_position_embeddings=64))
    reader = method.reader(model) if turn == 1 else method.turn_reader(model)
    state, factors = method.start(model, ids, mask), list[float]()
    early = state.copy()
    for part in more.split(turn, dim=1):
        state = read(reader, state, part)[0]
        factors.append(retrieval_cache(state.cache).selector.head.config.rope_parameters.get("factor", 1.0))
    assert sorted({*factors}) == ([1.0, 2.0, 4.0] if turn == 1 else [4.0])
    whole = method.start(model, torch.cat([ids, more], 1), torch.nn.functional.pad(mask, (0, 200), value=1))
    mine, its = (retrieval_cache(each.cache).selector for each in (state, whole))
    assert mine.head.config == its.head.config
    real = torch.arange(250) >= torch.tensor([0, 17])[:, None]
    assert_close(mine.keys.keys.transpose(1, 2)[real], its.keys.keys.transpose(1, 2)[real])
    assert retrieval_cache(early.cache).selector.head.config.max_position_embeddings == 64
