"""Elastic loading against layers on the device, against reloading everything, and against set arithmetic."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepsight.errors import UserError
from keepsight.runtime.methods import SpeCache, SpeContext
from keepsight.runtime.offload import Begun, Traffic
from keepsight.runtime.retrieval.elastic import Arrangement, ElasticLayer
from keepsight.runtime.sparse_read.cache import Selection
from keepsight.runtime.state import read
from tests.close import assert_close
from tests.models.retrieval_heads import tiny_retrieval_head
from tests.runtime.retrieval.walks import WIDTH, Walk, by_loops, step
from tests.tiny import prompt_ids, tiny_model

ENTRY = 2 * WIDTH * 4
"""Bytes of an entry of one KV head."""


class ReloadingLayer(ElasticLayer):
    """Fetches every chosen entry in every step."""

    def prepare(self, chosen):
        self.slots.arrangement = Arrangement(torch.full_like(self.slots.arrangement.held, -1))
        super().prepare(chosen)


def _elastic(walk, kind=ElasticLayer, arrangement=None):
    held = arrangement or Arrangement.empty(walk.batch, walk.kv_heads, walk.budget, torch.device("cpu"))
    return kind.from_layer(walk.layer(), held, Traffic())


def _same_walk(walk):
    """The same walk from its start."""
    return Walk(walk.batch, walk.kv_heads, walk.budget, walk.start, walk.fresh, walk.padding, walk.seed)


@st.composite
def walks(draw):
    start, batch = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    padding = draw(st.none() | st.lists(st.integers(0, start - 1), min_size=batch, max_size=batch))
    return Walk(
        batch,
        draw(st.integers(1, 3)),
        draw(st.integers(1, 16)),
        start,
        draw(st.sampled_from([0.0, 0.2, 1.0])),
        padding,
        draw(st.integers(0, 99)),
    )


@settings(deadline=None, max_examples=20)
@given(walk=walks(), count=st.integers(1, 30))
def test_elastic_loading_equals_reloading_everything_and_a_layer_on_the_device(walk, count):
    """Also while the cache is shorter than the budget, and with rows that are shorter than others."""
    resident = walk.layer()
    elastic, reloading = _elastic(_same_walk(walk)), _elastic(_same_walk(walk), ReloadingLayer)
    for chosen, states in walk.steps(count):
        before = resident.keys.clone(), resident.values.clone()
        expected = step(resident, chosen, states)
        assert_close(by_loops(*before, chosen, walk.padding, states), expected)
        assert_close(step(elastic, chosen, states), expected)
        assert_close(step(reloading, chosen, states), expected)
    for mine, its in zip(elastic.entries(), resident.entries(), strict=True):
        torch.testing.assert_close(mine, its, atol=0, rtol=0)
    assert elastic.bytes == walk.batch * walk.kv_heads * (walk.budget + 1) * ENTRY, "of the slots"
    assert elastic.get_seq_length() == resident.get_seq_length()
    assert elastic.get_mask_sizes(1) == resident.get_mask_sizes(1)
    traffic, all_of_it = elastic.full.traffic, reloading.full.traffic
    assert traffic.asked == all_of_it.asked == all_of_it.fetched
    assert traffic.fetched == traffic.asked - traffic.reused * ENTRY
    assert traffic.selections == count


@settings(deadline=None, max_examples=15)
@given(walk=walks(), count=st.integers(2, 12))
def test_only_the_set_difference_is_copied(walk, count):
    """Head by head: what is copied is what was not there; what stays keeps its slot."""
    arrangement = Arrangement.empty(walk.batch, walk.kv_heads, walk.budget, torch.device("cpu"))
    for length in range(walk.start, walk.start + count):
        chosen, before = walk.chosen(length), arrangement.held
        change = arrangement.to(chosen, length)
        arrangement, heads = change.after, walk.batch * walk.kv_heads
        moved = {(entry % heads, entry // heads) for entry in change.moves.entries.tolist()}
        expected, reused = set(), 0
        for head in range(heads):
            real = chosen.real.flatten(0, 1)[head] if chosen.real is not None else ...
            now = set(chosen.indices.flatten(0, 1)[head][real].tolist())
            last = set(before.flatten(0, 1)[head].tolist()) - {-1}
            after = arrangement.held.flatten(0, 1)[head].tolist()
            assert sorted(set(after) - {-1}) == sorted(each for each in after if each >= 0) == sorted(now)
            for slot, entry in enumerate(before.flatten(0, 1)[head].tolist()):
                assert after[slot] == entry or entry not in now or slot >= chosen.indices.shape[2]
            expected |= {(head, entry) for entry in now - last}
            reused += len(now & last)
        assert (moved, change.moves.reused) == (expected, reused)
        flat = arrangement.held.flatten()[change.moves.slots]
        assert torch.equal(flat, change.moves.entries // heads)


def test_a_copy_goes_its_own_way():
    walk = Walk(2, 2, 6, 10, padding=[0, 3])
    layer, plain = _elastic(walk), _same_walk(walk).layer()
    for chosen, states in walk.steps(5):
        step(layer, chosen, states)
        step(plain, chosen, states)
    copies = layer.share(), plain.share()
    for offset, pair in ((1, copies), (2, (layer, plain)), (3, copies)):
        other = Walk(2, 2, 6, pair[0].get_seq_length(), padding=[0, 3], seed=offset)
        for chosen, states in other.steps(4):
            assert_close(step(pair[0], chosen, states), step(pair[1], chosen, states))


def test_tokens_that_were_taken_back_leave_no_trace(removed=4):
    """Their places are taken by other tokens, whose entries must not be mistaken for those in the slots."""
    walk = Walk(1, 2, 8, 10)
    layer, plain = _elastic(walk), _same_walk(walk).layer()
    for length in range(10, 40):
        if length % 10 == 7:  # the last entries are in the slots
            layer.crop(-removed)
            plain.crop(-removed)
        held = layer.get_seq_length()
        chosen = Selection(torch.arange(held - 8, held).expand(1, 2, -1), None)
        (_, states) = next(walk.steps(1))
        assert_close(step(layer, chosen, states), step(plain, chosen, states))
        layer.prepare(Selection(torch.arange(held - 7, held + 1).expand(1, 2, -1), None))  # announced, and not read


def test_more_entries_than_slots_are_refused():
    layer = _elastic(Walk(1, 1, 3, 8))
    with pytest.raises(UserError, match="4 entries are selected, and a layer on the CPU has slots for 3"):
        layer.prepare(Selection(torch.arange(4).view(1, 1, 4), None))


def test_only_the_fetching_thread_waits_for_the_device(monkeypatch):
    """What computes the model lets the device's stream wait: for a layer's slots, and for SpeCache's entries."""
    waiting, ordering = set(), []
    monkeypatch.setattr(Begun, "wait", lambda self: waiting.add(threading.current_thread().name))
    monkeypatch.setattr(Begun, "precede", lambda self: ordering.append(threading.current_thread()))
    model, head = tiny_model(), tiny_retrieval_head()
    for method in (SpeContext(8, head, offload=2), SpeCache(2, 8, 16, 4, speculative=False)):
        ordering.clear()
        read(method.reader(model), method.start(model, prompt_ids(60)[0]), prompt_ids(3, seed=1)[0])
        assert {*ordering} == {threading.current_thread()} and len(ordering) >= 6
        assert len(waiting) == 1 and next(iter(waiting)).startswith("keepsight-fetch")
