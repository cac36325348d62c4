"""Elastic loading against layers on the device, and against set arithmetic."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keepsight.runtime.attention import Softmax
from keepsight.runtime.methods import SpeCache, SpeContext
from keepsight.runtime.offload import Begun, Traffic
from keepsight.runtime.retrieval.elastic import ElasticLayer, SlotMap, elastic_layers
from keepsight.runtime.sparse_read.cache import SelectedLayer, Selection
from keepsight.runtime.state import read
from tests.close import assert_close
from tests.models.retrieval_heads import tiny_retrieval_head
from tests.refused import refused
from tests.tiny import prompt_ids, tiny_model

WIDTH = 4
GROUP = 2
"""Query heads of a KV head."""
ENTRY = 2 * WIDTH * 4
"""Bytes of an entry of one KV head."""


@dataclass
class Walk:
    """Steps of random tokens after `start` entries.

    Attributes:
        fresh: The share of a selection that a step draws anew.
        padding: Of each row.
    """

    batch: int
    kv_heads: int
    budget: int
    start: int
    fresh: float = 0.2
    padding: list[int] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        self.importance = torch.rand(self.batch, self.kv_heads, 0)

    def layer(self) -> SelectedLayer:
        """What the walk starts from, on the device."""
        padding = None if self.padding is None else torch.tensor(self.padding)
        return SelectedLayer(self._draw(self.start), self._draw(self.start), self.start, padding)

    def elastic_layer(self) -> ElasticLayer:
        """The same with its entries on the CPU; drawn from a generator of its own."""
        slots = SlotMap.empty(self.batch, self.kv_heads, self.budget, torch.device("cpu"))
        return ElasticLayer.from_layer(replace(self).layer(), slots, Traffic())

    def steps(self, count: int) -> Iterator[tuple[Selection, tuple[Tensor, Tensor, Tensor]]]:
        """What each step selects among the entries before it, and its query, key and value."""
        for length in range(self.start, self.start + count):
            query = torch.randn(self.batch, self.kv_heads * GROUP, 1, WIDTH, generator=self.random)
            yield self.selection(length), (query, self._draw(1), self._draw(1))

    def selection(self, length: int) -> Selection:
        """The most important entries of `length`; with probability `fresh` each entry's importance is another one."""
        drawn = torch.rand(self.batch, self.kv_heads, length, generator=self.random)
        before = drawn[..., : self.importance.shape[2]]
        fresh = torch.rand(before.shape, generator=self.random) < self.fresh
        before.copy_(torch.where(fresh, before, self.importance))
        self.importance = drawn
        count = min(self.budget, length)
        if self.padding is None:
            return Selection(drawn.topk(count).indices, None)
        padding = torch.tensor(self.padding)[:, None, None]
        indices = drawn.masked_fill(torch.arange(length) < padding, -1.0).topk(count).indices
        return Selection(indices, indices >= padding)

    def _draw(self, tokens: int) -> Tensor:
        return torch.randn(self.batch, self.kv_heads, tokens, WIDTH, generator=self.random)


@st.composite
def walks(draw):
    start = draw(st.integers(1, 12))
    batch = draw(st.integers(1, 3))
    padding = draw(st.none() | st.lists(st.integers(0, start - 1), min_size=batch, max_size=batch))
    kv_heads = draw(st.integers(1, 3))
    budget = draw(st.integers(1, 16))
    seed = draw(st.integers(0, 99))
    fresh = draw(st.sampled_from([0.0, 0.2, 1.0]))
    return Walk(batch, kv_heads, budget, start, fresh, padding, seed)


def step(layer: SelectedLayer, selection: Selection, states: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """A step as a retrieval head's reader takes it: announced, then computed."""
    layer.prepare(selection)
    return layer.step(*states, Softmax(WIDTH**-0.5))


@settings(deadline=None, max_examples=20)
@given(walk=walks(), count=st.integers(1, 30))
def test_elastic_loading_equals_a_layer_on_the_device(walk, count):
    """Also while the cache is shorter than the budget, and with rows that are shorter than others."""
    elastic = walk.elastic_layer()
    resident = walk.layer()
    for selection, states in walk.steps(count):
        assert_close(step(elastic, selection, states), step(resident, selection, states))
    for tensor, expected in zip(elastic.entries(), resident.entries(), strict=True):
        torch.testing.assert_close(tensor, expected, atol=0, rtol=0)
    slots = walk.batch * walk.kv_heads * (walk.budget + 1)
    assert elastic.nbytes == slots * ENTRY
    assert elastic.get_mask_sizes(1) == resident.get_mask_sizes(1)
    traffic = elastic.full.traffic
    assert traffic.fetched == traffic.asked - traffic.reused * ENTRY
    assert traffic.selections == count


@settings(deadline=None, max_examples=10)
@given(walk=walks(), count=st.integers(1, 8))
def test_loading_all_entries_anew_reads_the_same(walk, count):
    """Every selected entry is fetched at every step, and none before it is read."""
    elastic = walk.elastic_layer()
    elastic.keeps_slots = False
    resident = walk.layer()
    for selection, states in walk.steps(count):
        elastic.prepare(selection)
        assert elastic._loading is None
        assert_close(step(elastic, selection, states), step(resident, selection, states))
    traffic = elastic.full.traffic
    assert (traffic.fetched, traffic.reused, traffic.selections) == (traffic.asked, 0, count)


def test_a_method_that_loads_all_entries_answers_the_same():
    model = tiny_model()
    head = tiny_retrieval_head()
    elastic = SpeContext(8, head, offload=model.config.num_hidden_layers)
    loading_all = replace(elastic, loading="whole")
    answers = []
    reused = []
    for method in (elastic, loading_all):
        state = method.start(model, prompt_ids(40)[0])
        tokens = []
        for _ in range(4):
            token = state.logits.argmax(dim=-1, keepdim=True)
            tokens.append(int(token))
            state, _ = read(method.reader(model), state, token)
        answers.append(tokens)
        reused.append(elastic_layers(state.cache.layers)[0].full.traffic.reused)
    assert answers[0] == answers[1]
    assert reused[0] > reused[1] == 0


def test_a_copy_goes_its_own_way():
    walk = Walk(2, 2, 6, 10, padding=[0, 3])
    elastic = walk.elastic_layer()
    resident = walk.layer()
    for selection, states in walk.steps(5):
        step(elastic, selection, states)
        step(resident, selection, states)
    originals = elastic, resident
    copies = elastic.share(), resident.share()
    for seed, (elastic, resident) in enumerate((copies, originals, copies), start=1):
        branch = Walk(2, 2, 6, elastic.get_seq_length(), padding=[0, 3], seed=seed)
        for selection, states in branch.steps(4):
            assert_close(step(elastic, selection, states), step(resident, selection, states))


def test_tokens_that_were_taken_back_leave_no_trace(removed=4):
    """Their positions are taken by other tokens, whose entries must not be mistaken for those in the slots."""
    walk = Walk(1, 2, 8, 10)
    elastic = walk.elastic_layer()
    resident = walk.layer()
    for length in range(10, 40):
        if length % 10 == 7:  # the last entries are in the slots
            elastic.crop(-removed)
            resident.crop(-removed)
        count = elastic.get_seq_length()
        last_eight = Selection(torch.arange(count - 8, count).expand(1, 2, -1), None)
        _, states = next(walk.steps(1))
        assert_close(step(elastic, last_eight, states), step(resident, last_eight, states))
        announced = Selection(torch.arange(count - 7, count + 1).expand(1, 2, -1), None)
        elastic.prepare(announced)  # and not read


def test_more_entries_than_slots_are_refused():
    elastic = Walk(1, 1, 3, 8).elastic_layer()
    with refused("budget", "range"):
        elastic.prepare(Selection(torch.arange(4).view(1, 1, 4), None))


def test_only_the_fetching_thread_waits_for_the_device(monkeypatch):
    """What computes the model lets the device's stream wait: for a layer's slots, and for SpeCache's entries."""
    waiting_threads = set()
    ordering_threads = []
    monkeypatch.setattr(Begun, "wait", lambda self: waiting_threads.add(threading.current_thread().name))
    monkeypatch.setattr(Begun, "precede", lambda self: ordering_threads.append(threading.current_thread()))
    model = tiny_model()
    specontext = SpeContext(8, tiny_retrieval_head(), offload=2)
    specache = SpeCache(2, 8, 16, 4, speculative=False)
    for method in (specontext, specache):
        ordering_threads.clear()
        read(method.reader(model), method.start(model, prompt_ids(60)[0]), prompt_ids(3, seed=1)[0])
        assert {*ordering_threads} == {threading.current_thread()}
        assert len(ordering_threads) >= 6
        (waiting_thread,) = waiting_threads
        assert waiting_thread.startswith("keepsight-fetch")
