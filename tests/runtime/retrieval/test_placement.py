"""Layers that move to the CPU while an answer grows, on a tiny model with a limit that it soon reaches."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.cache_utils import Cache

from keepsight.errors import UserError
from keepsight.runtime.retrieval.elastic import ElasticLayer, Placement, elastic_layers
from keepsight.runtime.retrieval.memory_plan import plan_for
from keepsight.runtime.retrieval.specontext import SpeContext, retrieval_cache
from keepsight.runtime.sparse_read.cache import LayerSelector, SelectedLayer, SelectedState, Selection, real_mask
from keepsight.runtime.state import prefill, read
from tests.close import assert_close
from tests.models.retrieval_heads import tiny_retrieval_head
from tests.tiny import prompt_ids, tiny_model

ROWS, PROMPT, BUDGET = 2, 30, 8
CPU = torch.device("cpu")


def device_bytes(layers: list[Any]) -> int:
    """Bytes that a cache's layers take on the device, room to grow included.

    The retrieval head's keys and the weights come on top of them.
    """
    on_cpu = elastic_layers(layers)
    lists = {id(layer.slots.arrangement): layer.slots.arrangement.held for layer in on_cpu}
    held = [*lists.values(), *(layer.slots.rows for layer in on_cpu)]
    held += [each for layer in layers if not isinstance(layer, ElasticLayer) for each in (layer.keys, layer.values)]
    return sum(each.untyped_storage().nbytes() for each in held)


class ChoosingReader:
    """Chooses at random, the same in every run, after layers were placed; notes how many lie on the CPU."""

    def __init__(self, model, placement=None):
        self.model, self.config, self.placement = model, model.config, placement
        self.random, self.on_cpu, self.bytes = torch.Generator().manual_seed(0), [], []

    def __call__(self, past_key_values, **options):
        layers = past_key_values.layers
        length = past_key_values.get_seq_length()
        if self.placement is not None:
            self.placement.place(layers, length + 1)
        chosen = self._choose(length, layers[0].padding)
        for layer in layers:
            layer.prepare(chosen)
        output = self.model(past_key_values=past_key_values, **options)
        self.on_cpu.append([isinstance(layer, ElasticLayer) for layer in layers])
        self.bytes.append(device_bytes(layers))
        return output

    def _choose(self, length, padding):
        drawn = torch.rand(ROWS, 2, length, generator=self.random)
        if padding is not None:
            drawn = drawn.masked_fill(~real_mask(padding, length)[:, None], -1.0)
        indices = drawn.topk(min(BUDGET, length)).indices
        return Selection(indices, None if padding is None else indices >= padding[:, None, None])


def _start(model, *lengths):
    state = prefill(model, *prompt_ids(*lengths))
    padding = None if state.tokens_mask is None else max(lengths) - state.lengths
    layers: list[Any] = [SelectedLayer(keys, values, max(lengths), padding) for keys, values, _ in state.entries()]
    return state.as_kind(SelectedState, Cache(layers=layers))


def _answer(model, placement, steps, *lengths):
    """The logits of every step, and the reader."""
    reader: Any = ChoosingReader(model, placement)
    state, logits = _start(model, *lengths), []
    with torch.no_grad():
        for _ in range(steps):
            state, step = read(reader, state, state.logits.argmax(dim=-1, keepdim=True))
            logits.append(step)
    return torch.cat(logits, dim=1), reader, state


def _plan(model, fits):
    """A plan in which so many tokens of each row fit with every layer on the device, and not one more."""
    plan = plan_for(model, limit=10**12, requests=ROWS, budget=BUDGET)
    return replace(plan, limit=plan.memory(ROWS * fits, 0))


@pytest.mark.parametrize("lengths", [(PROMPT, PROMPT), (PROMPT, 17)])
def test_a_long_answer_never_exceeds_its_limit(lengths):
    """Each layer moves before the step that crosses its threshold, the last one first; the answer stays the same."""
    model, steps = tiny_model(), 190
    plan = _plan(model, 32)
    expected, unlimited, _ = _answer(model, None, steps, *lengths)
    logits, reader, _ = _answer(model, Placement(BUDGET, CPU, plan=plan), steps, *lengths)
    assert_close(logits, expected)
    assert torch.equal(logits.argmax(dim=-1), expected.argmax(dim=-1))
    moved_at: dict[int, int] = {}
    for length, on_cpu, held in zip(range(PROMPT + 1, PROMPT + steps + 1), reader.on_cpu, reader.bytes, strict=True):
        count = sum(on_cpu)
        assert on_cpu == [False] * (3 - count) + [True] * count
        assert plan.weights_held + held <= plan.memory(ROWS * length, count) <= plan.limit
        moved_at.setdefault(count, length)
        if count:
            assert plan.memory(ROWS * length, count - 1) > plan.limit
    assert moved_at == {count: plan.thresholds[count - 1] // ROWS + 1 for count in (1, 2, 3)} | {0: PROMPT + 1}
    assert plan.weights_held + max(unlimited.bytes) > plan.limit


def test_a_prompt_beyond_thresholds_moves_layers_at_once():
    model = tiny_model()
    plan = _plan(model, 40)
    lengths = [threshold // ROWS for threshold in plan.thresholds]
    state = _start(model, 200, 200)
    Placement(BUDGET, CPU, plan=plan).place(state.cache.layers, 201)
    expected = next(count for count, length in enumerate(lengths) if length >= 201)
    assert len(elastic_layers(state.cache.layers)) == expected > 1


def test_layers_that_lie_on_the_cpu_whatever_the_length():
    model = tiny_model()
    expected, _, _ = _answer(model, None, 20, PROMPT, PROMPT)
    for least, on_cpu in ((1, 1), (3, 3), (99, 3)):
        logits, reader, state = _answer(model, Placement(BUDGET, CPU, least), 20, PROMPT, PROMPT)
        assert_close(logits, expected)
        assert all(sum(each) == on_cpu for each in reader.on_cpu)
        layers = elastic_layers(state.cache.layers)
        assert len({id(layer.full.traffic) for layer in layers}) == 1
        assert len({id(layer.slots.arrangement) for layer in layers}) == 1
        assert layers[0].full.traffic.selections == 20 * on_cpu


def test_an_answer_that_outgrows_the_device_is_refused():
    """The retrieval head's keys stay on the device: they alone set an end."""
    model = tiny_model()
    plan = replace(_plan(model, 40), head_keys=64)
    state = _start(model, PROMPT, PROMPT)
    with pytest.raises(UserError, match=r"do not fit into 0.2. MiB: the least is 0.2. MiB with 3 of 3 layers"):
        Placement(BUDGET, CPU, plan=plan).place(state.cache.layers, plan.thresholds[-1] // ROWS + 1)


def test_layers_that_choose_by_themselves_stay_on_the_device():
    class Own(LayerSelector):
        def select(self, query, scaling, keys, padding):
            raise AssertionError

    keys = torch.randn(1, 2, 9, 4)
    with pytest.raises(UserError, match="a layer that reads its own keys to select has to have them on the device"):
        Placement(BUDGET, CPU, least=1).place([SelectedLayer(keys, keys, 9, None, Own())], 10)


def _method(budget=BUDGET, **options):
    return SpeContext(budget, tiny_retrieval_head("previous-step", max_position_embeddings=1024), **options)


def _read_on(model, method, state, answer):
    """The logits of an answer, and the states after each token."""
    reader, logits, states = method.reader(model), [], []
    for token in answer.split(1, dim=1):
        state, step = read(reader, state, token)
        logits.append(step)
        states.append(state)
    return torch.cat(logits, dim=1), states


@pytest.mark.parametrize("lengths", [(40, 40), (40, 23)])
def test_specontext_reads_the_same_wherever_its_layers_lie(lengths):
    """Offloaded from the start, or as a limit asks; in a batch of different lengths, too."""
    model, answer = tiny_model(), prompt_ids(60, 60, seed=1)[0]
    ids, mask = prompt_ids(*lengths)
    expected, states = _read_on(model, _method(), _method().start(model, ids, mask), answer)
    for count in (1, 3):
        method = _method(offload=count)
        logits, found = _read_on(model, method, method.start(model, ids, mask), answer)
        assert_close(logits, expected)
        assert found[0].kv_bytes < states[0].kv_bytes
        assert (found[-1].length, found[-1].counts().tolist()) == (100, states[-1].counts().tolist())
        assert len(elastic_layers(found[-1].cache.layers)) == count


def test_specontext_never_exceeds_its_limit():
    model, steps = tiny_model(max_position_embeddings=1024), 190
    ids, answer = prompt_ids(PROMPT, PROMPT)[0], prompt_ids(steps, steps, seed=1)[0]
    unlimited = _method(memory_limit="1GB")
    plan = retrieval_cache(unlimited.start(model, ids).cache).placement.plan
    assert plan is not None
    assert plan.head == sum(each.nbytes for each in unlimited.head.state_dict().values())
    plan = replace(plan, limit=plan.memory(ROWS * 40, 0))
    method = _method(memory_limit=plan.limit)
    expected, _ = _read_on(model, unlimited, unlimited.start(model, ids), answer)
    state, reader, logits, on_cpu = method.start(model, ids), method.reader(model), [], []
    for length, token in enumerate(answer.split(1, dim=1), start=PROMPT + 1):
        state, step = read(reader, state, token)
        logits.append(step)
        on_cpu.append(len(elastic_layers(state.cache.layers)))
        keys = retrieval_cache(state.cache).selector.keys.keys.untyped_storage().nbytes()
        assert plan.weights_held + device_bytes(state.cache.layers) + keys <= plan.limit
        assert on_cpu[-1] == plan.layers_on_cpu(ROWS * length)
    assert sorted(set(on_cpu)) == [0, 1, 2, 3]
    assert_close(torch.cat(logits, dim=1), expected)


def test_a_prompt_that_can_never_fit_is_refused_before_it_is_read():
    model = tiny_model()
    plan = retrieval_cache(_method(memory_limit="1GB").start(model, prompt_ids(30)[0]).cache).placement.plan
    assert plan is not None
    method = _method(memory_limit=plan.weights_held + 9000)
    with pytest.raises(UserError, match=r"240 tokens in 1 requests do not fit into 0.2. MiB"):
        method.start(model, prompt_ids(240)[0])
    with pytest.raises(UserError, match="is below the weights alone"):
        _method(memory_limit=1000).start(model, prompt_ids(30)[0])


def test_bad_options_are_refused():
    with pytest.raises(UserError, match="SpeContext: offload -1 must be a whole number"):
        _method(offload=-1)
    with pytest.raises(UserError, match="'24 gigs' is no amount of memory"):
        _method(memory_limit="24 gigs")


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_interrupted_step_changes_nothing(failing, monkeypatch):
    """Whichever layer it ends in; the layers on the CPU forget the token as the others do."""
    model, method = tiny_model(), _method(offload=2)
    ids, answer = prompt_ids(40, 23), prompt_ids(12, 12, seed=1)[0]
    expected, _ = _read_on(model, method, method.start(model, *ids), answer)
    state, reader = method.start(model, *ids), method.reader(model)
    for token, wanted in zip(answer.split(1, dim=1), expected.split(1, dim=1), strict=True):
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[failing].mlp, "forward", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                read(reader, state, (token + 1) % 128)
        state, logits = read(reader, state, token)
        assert_close(logits, wanted)


def _interrupt(*args, **kwargs):
    raise KeyboardInterrupt


def test_copies_of_an_offloaded_state_go_their_own_ways():
    model, method = tiny_model(), _method(offload=2)
    state = method.start(model, prompt_ids(40, 23)[0])
    answers = [prompt_ids(10, 10, seed=seed)[0] for seed in (1, 2)]
    expected = [_read_on(model, method, method.start(model, prompt_ids(40, 23)[0]), each)[0] for each in answers]
    for copied, answer, wanted in zip((state.copy(), state), answers, expected, strict=True):
        assert_close(_read_on(model, method, copied, answer)[0], wanted)
