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

WIDTH, GROUP = 4, 2
ENTRY = 2 * WIDTH * 4
"""Bytes of an entry of one KV head."""


def _elastic(walk):
    slots = SlotMap.empty(walk.batch, walk.kv_heads, walk.budget, torch.device("cpu"))
    return ElasticLayer.from_layer(walk.layer(), slots, Traffic())


@st.composite
def walks(draw):
    start, batch = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    padding = draw(st.none() | st.lists(st.integers(0, start - 1), min_size=batch, max_size=batch))
    kv_heads, budget, seed = draw(st.integers(1, 3)), draw(st.integers(1, 16)), draw(st.integers(0, 99))
    return Walk(batch, kv_heads, budget, start, draw(st.sampled_from([0.0, 0.2, 1.0])), padding, seed)


@settings(deadline=None, max_examples=20)
@given(walk=walks(), count=st.integers(1, 30))
def test_elastic_loading_equals_a_layer_on_the_device(walk, count):
    """Also while the cache is shorter than the budget, and with rows that are shorter than others."""
    resident, elastic = walk.layer(), _elastic(replace(walk))
    for selection, states in walk.steps(count):
        assert_close(step(elastic, selection, states), step(resident, selection, states))
    for mine, its in zip(elastic.entries(), resident.entries(), strict=True):
        torch.testing.assert_close(mine, its, atol=0, rtol=0)
    assert elastic.nbytes == walk.batch * walk.kv_heads * (walk.budget + 1) * ENTRY, "of the slots"
    assert elastic.get_mask_sizes(1) == resident.get_mask_sizes(1)
    traffic = elastic.full.traffic
    assert (traffic.fetched, traffic.selections) == (traffic.asked - traffic.reused * ENTRY, count)


@settings(deadline=None, max_examples=10)
@given(walk=walks(), count=st.integers(1, 8))
def test_loading_all_entries_anew_reads_the_same(walk, count):
    """Every selected entry is fetched at every step, and none before it is read."""
    resident, layer = walk.layer(), _elastic(replace(walk))
    layer.keeps_slots = False
    for selection, states in walk.steps(count):
        layer.prepare(selection)
        assert layer._loading is None
        assert_close(step(layer, selection, states), step(resident, selection, states))
    traffic = layer.full.traffic
    assert (traffic.fetched, traffic.reused, traffic.selections) == (traffic.asked, 0, count)


def test_a_method_that_loads_all_entries_answers_the_same():
    model = tiny_model()
    head = tiny_retrieval_head()
    elastic = SpeContext(8, head, offload=model.config.num_hidden_layers)
    answers = []
    for method in (elastic, replace(elastic, loading="whole")):
        state = method.start(model, prompt_ids(40)[0])
        tokens = []
        for _ in range(4):
            token = state.logits.argmax(dim=-1, keepdim=True)
            tokens.append(int(token))
            state, _ = read(method.reader(model), state, token)
        traffic = elastic_layers(state.cache.layers)[0].full.traffic
        answers.append((tokens, traffic.reused))
    assert answers[0][0] == answers[1][0] and answers[0][1] > answers[1][1] == 0


def test_a_copy_goes_its_own_way():
    walk = Walk(2, 2, 6, 10, padding=[0, 3])
    layer, plain = _elastic(walk), replace(walk).layer()
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
    layer, plain = _elastic(walk), replace(walk).layer()
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
    with refused("budget", "range"):
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


@dataclass
class Walk:
    """Steps of random tokens after `start` entries; `fresh` is the share of a selection that a step draws anew."""

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
        """What the walk starts from."""
        padding = None if self.padding is None else torch.tensor(self.padding)
        return SelectedLayer(self._draw(self.start), self._draw(self.start), self.start, padding)

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
        if self.padding is None:
            return Selection(drawn.topk(min(self.budget, length)).indices, None)
        padding = torch.tensor(self.padding)[:, None, None]
        indices = drawn.masked_fill(torch.arange(length) < padding, -1.0).topk(min(self.budget, length)).indices
        return Selection(indices, indices >= padding)

    def _draw(self, tokens: int) -> Tensor:
        return torch.randn(self.batch, self.kv_heads, tokens, WIDTH, generator=self.random)


def step(layer: SelectedLayer, selection: Selection, states: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """A step as a retrieval head's reader takes it: announced, then computed."""
    layer.prepare(selection)
    return layer.step(*states, Softmax(WIDTH**-0.5))
