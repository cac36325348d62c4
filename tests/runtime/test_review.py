"""Refusals that come in time, options that are not lost, and conversations over packed entries."""

from dataclasses import replace

import pytest
import torch

from keepsight.errors import UserError
from keepsight.runtime.drafting.speckv import ModelDrafter
from keepsight.runtime.generate import Conversation, decode, stop_after
from keepsight.runtime.methods import H2O, LAQ, SnapKV
from keepsight.runtime.methods.laq import QueryCache
from keepsight.runtime.methods.positions import LaCache, Ladder
from keepsight.runtime.methods.window import PromptWindow
from keepsight.runtime.quantized.kivi import Kivi
from keepsight.runtime.quantized.specache import SpeCache
from keepsight.runtime.readers import TurnReader
from keepsight.runtime.saved import save_state
from keepsight.runtime.state import entries, read
from tests.close import assert_close
from tests.runtime.prompt_compression.prompts import small_cascade, small_specpc, tiny_draft
from tests.runtime.test_ragged import random_cache
from tests.tiny import prompt_ids, tiny_model

PACKED = [Kivi(2, 8, 8), SpeCache(2, 8, 8, topk=4), SpeCache(2, 8, 8, topk=4, speculative=False)]


def test_h2o_refuses_a_state_that_another_method_has_read():
    model, ids = tiny_model(), prompt_ids(60)[0]
    conversation = Conversation(model, H2O(40), SnapKV(40).start(model, ids))
    with pytest.raises(UserError, match="h2o: the attention that entries received was not recorded"):
        conversation.say(ids[:, :20], max_new_tokens=3)


@pytest.mark.parametrize("method", [small_specpc(lookahead=5), small_cascade()], ids=["specpc", "speckvpc"])
def test_a_draft_that_does_not_fit_the_context_is_refused(method):
    method.check(95, 100)
    with pytest.raises(UserError, match="5 drafted tokens after a prompt of 96 do not fit the context of 100"):
        method.check(96, 100)


def test_a_draft_model_of_a_short_context_is_refused():
    model, draft = tiny_model(), tiny_draft(max_position_embeddings=64)
    for run in (
        ModelDrafter(draft, 5).write,
        lambda _, ids: small_specpc(draft=draft, lookahead=5).look(model, ids[0]),
    ):
        run(model, prompt_ids(59)[0])
        with pytest.raises(UserError, match="of 60 tokens and a draft of 5 do not fit the draft model's context of 64"):
            run(model, prompt_ids(60)[0])


@pytest.mark.parametrize("method", PACKED, ids=repr)
def test_a_packed_state_is_neither_saved_nor_continued_from(method, tmp_path):
    model, ids = tiny_model(), prompt_ids(40)[0]
    state = method.start(model, ids)
    with pytest.raises(UserError, match=r"in its own form .* cannot be saved"):
        save_state(state, tmp_path, model=model)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="give the state that it was made from"):
        Conversation(model, method, state)


@pytest.mark.parametrize("method", PACKED, ids=repr)
def test_a_conversation_goes_on_with_packed_entries(method):
    """The same tokens one by one, from one state that is never packed again."""
    model = tiny_model(eos_token_id=None)
    turns = [prompt_ids(40, seed=1)[0], prompt_ids(9, seed=2)[0]]
    conversation, reader = Conversation(model, method), method.reader(model)
    turn_reader = TurnReader(model) if isinstance(method, SpeCache) else reader
    state, unread = method.start(model, turns[0]), turns[0][:, :0]
    for turn in turns:
        if unread.shape[1]:
            state = state.copy()  # which forgets what SpeCache has fetched ahead
            for token in torch.cat([unread, turn], dim=1).split(1, dim=1):
                state, _ = read(turn_reader, state, token)
        decoded = decode(reader, state, stop_after(6, None), pad_token=0)
        state, unread = decoded.state, decoded.ids[:, -1:]
        assert torch.equal(conversation.say(turn, max_new_tokens=6, do_sample=False), decoded.ids)
        assert conversation.state is not None
        assert torch.equal(conversation.state.counts(), state.counts())
        assert_close(conversation.state.logits, state.logits)


def test_a_replaced_field_reaches_what_the_observer_leaves_open():
    assert replace(LAQ(64), budget=100) == LAQ(100)
    assert replace(LAQ(64), budget=100).bound_observer == QueryCache(budget=100)
    assert replace(LaCache(64), sinks=2).bound_observer == Ladder(sinks=2)
    assert replace(SnapKV(64), window=8).bound_observer == PromptWindow(8)


def test_ragged_layers_are_cropped_to_their_last_eviction_at_most():
    cache, _ = random_cache([[3, 1]])
    new = torch.ones(1, 2, 2, 4)
    for index in range(2):
        cache.update(new, new, index)
    with pytest.raises(UserError, match="cannot remove 3 tokens, only the 2"):
        cache.crop(-3)
    assert cache.get_seq_length() == 52
    cache.crop(-2)
    assert cache.get_seq_length() == 50
    held = [each.real for each in entries(cache)]
    assert [None if real is None else real.sum(dim=-1).tolist() for real in held] == [[[3, 1]]] * 2
