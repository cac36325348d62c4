"""Static decoding steps against `decode`'s own loop, token for token; and what lets a CUDA graph hold them."""

import functools
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import MaxTimeCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from keepsight.eval.bench.eviction import count
from keepsight.models.decoder import FULL, has_latents, layer_kinds
from keepsight.runtime import generate as generating
from keepsight.runtime import ragged_kernel, static_step
from keepsight.runtime.allocate import Adaptive
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import Decoded, FullCache, decode, generate, stop_after
from keepsight.runtime.importance import Pool
from keepsight.runtime.layer import RaggedLayer
from keepsight.runtime.methods import METHODS, RKV, PyramidKV, SnapKV, StreamingLLM
from keepsight.runtime.state import Needs, State, prefill, read
from keepsight.runtime.static_step import (
    CHECK_INTERVAL,
    Choice,
    StaticStep,
    capacity_of,
    choice_of,
    most_tokens,
    reason_against,
    reason_against_graph,
    rounded,
)
from tests.close import assert_close
from tests.families import FAMILIES, MORE, family_model
from tests.runtime.family_methods import NAMES, PROMPT, method_of
from tests.tiny import base_tokenizer, prompt_ids, tiny_model

FAMILY = "Llama 3"
TOKENS = 40
RAGGED = SnapKV(12, window=3, pool=Pool(kernel=3), allocate=Adaptive())
UNIFORM = StreamingLLM(12)
BY_LAYER = PyramidKV(12, window=3)
PADDED = {"full": FullCache(), "ragged": RAGGED, "uniform": UNIFORM, "by layer": BY_LAYER}
WARPERS = LogitsProcessorList([TemperatureLogitsWarper(1.5), TopKLogitsWarper(40), TopPLogitsWarper(0.9)])


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@functools.cache
def batch_state(name: str) -> State:
    """The state of a method after two prompts, one of which is padded; never changed."""
    return PADDED[name].start(tiny_model(), *prompt_ids(30, 13)).unrecorded()


def ends_of(answers: Tensor, *steps: int) -> list[int]:
    """Tokens that end each answer [B, T] at about its step: none of them is in the row before."""
    ends = []
    for row, step in zip(answers.tolist(), steps, strict=True):
        ends.append(next(token for token in row[step:] if token not in row[:step]))
    return ends


def decode_both_ways(
    model: Any, state: State, ends: list[int] | None, tokens: int = TOKENS, **options: Any
) -> list[Decoded]:
    """The answer of `decode`'s own loop, and that of static steps."""
    answers = []
    for static in (False, True):
        torch.manual_seed(3)
        decoded = decode(model, state.copy(), stop_after(tokens, ends), pad_token=0, static=static, **options)
        answers.append(decoded)
    return answers


def assert_same(expected: Decoded, static: Decoded) -> None:
    assert torch.equal(static.ids, expected.ids)
    assert torch.equal(static.state.tokens, expected.state.tokens)
    assert torch.equal(static.state.lengths, expected.state.lengths)
    assert torch.equal(static.state.counts(), expected.state.counts())
    assert_close(static.state.logits, expected.state.logits)
    for layer, expected_layer in zip(static.state.entries(), expected.state.entries(), strict=True):
        assert_close(layer.keys, expected_layer.keys)
        assert_close(layer.values, expected_layer.values)


@pytest.mark.parametrize("name", NAMES)
def test_every_method_answers_alike_or_says_why_not(name: str, folder: Path) -> None:
    model = family_model(FAMILY)
    method = method_of(name, FAMILY, folder)
    state = method.start(model, PROMPT)
    if type(state) is State:
        state = state.unrecorded()
    reason = reason_against(method.reader(model), state)
    if isinstance(method, Evict):
        assert reason is None
    if reason is not None:
        assert reason == "entries are read in a form of their own"
        return
    answer = decode(model, state.copy(), stop_after(TOKENS, None), pad_token=0).ids
    assert_same(*decode_both_ways(model, state, ends_of(answer, 18)))


@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_every_family_answers_alike_or_says_why_not(family: str) -> None:
    """Windows, latents and recurrent states, in layers of their own or beside full attention, have none."""
    model = family_model(family)
    method = SnapKV(16, window=8)
    state = method.start(model, PROMPT).unrecorded()
    reason = reason_against(method.reader(model), state)
    has_plain_layers = set(layer_kinds(model.config)) == {FULL} and not has_latents(model)
    assert (reason is None) == has_plain_layers
    if reason is None:
        assert_same(*decode_both_ways(model, state, None, 4))


def test_methods_of_all_kinds_of_layers_are_among_them() -> None:
    assert [type(layer) for layer in batch_state("ragged").layers] == [RaggedLayer] * 3
    assert RaggedLayer not in [type(layer) for layer in batch_state("uniform").layers]
    assert sum(issubclass(METHODS[name], Evict) for name in NAMES) > 20


@pytest.mark.parametrize("steps", [(3, 35), (18, 18), (0, 20), (15, 16)])
@pytest.mark.parametrize("name", PADDED)
def test_rows_that_end_at_different_steps(model: Any, name: str, steps: tuple[int, int]) -> None:
    state = batch_state(name)
    answers = decode(model, state.copy(), stop_after(TOKENS, None), pad_token=0).ids
    expected, static = decode_both_ways(model, state, ends_of(answers, *steps))
    assert_same(expected, static)
    assert static.ids.shape[1] <= TOKENS


@pytest.mark.parametrize("tokens", [1, 2, CHECK_INTERVAL, CHECK_INTERVAL + 1])
def test_answers_of_every_length(model: Any, tokens: int) -> None:
    assert_same(*decode_both_ways(model, batch_state("ragged"), None, tokens))


def test_the_state_after_an_answer_reads_on(model: Any) -> None:
    expected, static = decode_both_ways(model, batch_state("ragged"), None)
    turn = prompt_ids(5, 5, seed=4)[0]
    assert_close(read(model, static.state, turn)[1], read(model, expected.state, turn)[1])


@pytest.mark.parametrize("name", PADDED)
def test_sampled_answers_have_the_draws_of_the_seed(model: Any, name: str) -> None:
    state = batch_state(name)
    expected, static = decode_both_ways(model, state, None, logits_processor=WARPERS, do_sample=True)
    assert_same(expected, static)
    greedy, _ = decode_both_ways(model, state, None)
    assert not torch.equal(static.ids, greedy.ids)


class RecordingStreamer(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self.has_ended = False

    def put(self, value: Tensor) -> None:
        self.tokens.append(value.tolist())

    def end(self) -> None:
        self.has_ended = True


class StopAtThird:
    """A criterion that looks at all tokens, such as stop strings do: three tokens below 40 in a row."""

    def __call__(self, ids: Tensor, scores: Tensor, **options: Any) -> Tensor:
        return (ids[:, -3:] < 40).all(dim=1)


@pytest.mark.parametrize(
    "options",
    [
        {"logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)])},
        {"logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5), *WARPERS]), "do_sample": True},
        {"prompt_ids": prompt_ids(4, 4, seed=9)[0]},
    ],
)
def test_other_processors_run_after_the_step(model: Any, options: dict[str, Any]) -> None:
    expected, static = decode_both_ways(model, batch_state("ragged"), None, **options)
    assert_same(expected, static)


def test_streamers_and_other_criteria_see_every_token(model: Any) -> None:
    streamers = []
    answers = []
    for static in (False, True):
        streamer = RecordingStreamer()
        criteria = stop_after(TOKENS, None)
        criteria.append(StopAtThird())
        state = batch_state("ragged").copy()
        answers.append(decode(model, state, criteria, pad_token=0, streamer=streamer, static=static))
        streamers.append(streamer)
    assert_same(*answers)
    assert streamers[0].tokens == streamers[1].tokens == answers[1].ids.T.tolist()
    assert streamers[1].has_ended


@pytest.fixture
def without_graph(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Static steps without a graph for every answer of `generate`; whether each answer could have them."""
    are_static: list[bool] = []

    def static_step_without_graph(*arguments: Any, **options: Any) -> Any:
        options["without_graph"] = True
        are_static.append(reason_against(*arguments[:2]) is None)
        return static_step.static_step(*arguments, **options)

    monkeypatch.setattr(generating, "static_step", static_step_without_graph)
    return are_static


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"repetition_penalty": 1.3},
        {"stop_strings": ["a", "e"]},
        {"min_new_tokens": 12},
    ],
)
def test_generate_answers_alike(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    tokenizer = base_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))
    all_options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": [5, 6]} | options
    if "stop_strings" in options:
        all_options["tokenizer"] = tokenizer
    ids, mask = prompt_ids(30, 13)
    torch.manual_seed(0)
    expected = generate(model, ids, RAGGED, attention_mask=mask, **all_options)
    are_static = request.getfixturevalue("without_graph")
    torch.manual_seed(0)
    assert torch.equal(generate(model, ids, RAGGED, attention_mask=mask, **all_options), expected)
    assert are_static == [True]


# What a graph needs


class Trace(TorchDispatchMode):
    """The operators of a step with all that they are given: kept storages by their address, others by their order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.new: dict[int, tuple[int, Any]] = {}
        self.references: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        values = tree_flatten((args, kwargs))[0]
        if "lift_fresh" in str(func):  # a number has become a tensor outside of all operators
            self._add(values)
        self.calls.append((str(func), [self._described(value) for value in values]))
        before = {self._identity(value) for value in values if isinstance(value, Tensor)}
        result = func(*args, **kwargs)
        returned = [value for value in tree_flatten(result)[0] if isinstance(value, Tensor)]
        self._add([tensor for tensor in returned if self._identity(tensor) not in before])
        return result

    def _add(self, values: list[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor) and self._identity(value) not in self.new:
                self.new[self._identity(value)] = (len(self.new), value.untyped_storage())
                self.references.append(StorageWeakRef(value.untyped_storage()))

    @staticmethod
    def _identity(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def _described(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return str(value)
        shape = (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype)
        identity = self._identity(value)
        if identity in self.new:
            return ("new", self.new[identity][0], *shape)
        return ("kept", identity, value.data_ptr(), *shape)


CHOICES: dict[str, Choice | None] = {
    "greedy": Choice((), False, 1),
    "sampled": Choice(tuple(WARPERS), True, 1),
    "chosen outside": None,
}


def loaded_step(state: State, choice: Choice | None, tokens: int = TOKENS) -> StaticStep:
    step = StaticStep(state, capacity_of(state, tokens), choice)
    step.load(state, tokens, end_tokens=[127] if choice else [])
    return step


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", ["ragged", "uniform"])
@torch.no_grad()
def test_two_steps_run_the_same_operators_on_the_same_memory(model: Any, name: str, choice: str) -> None:
    step = loaded_step(batch_state(name), CHOICES[choice])
    step._step(model)
    traces = []
    for _ in range(2):
        with Trace() as trace:
            step._step(model)
        traces.append(trace)
    assert traces[0].calls == traces[1].calls
    assert len(traces[0].calls) > 50
    for trace in traces:
        trace.new.clear()
        assert all(reference.expired() for reference in trace.references), "a step holds what it has allocated"
    assert count(lambda: step._step(model)).syncs == 0


@torch.no_grad()
def test_a_growing_cache_does_not_run_the_same_operators_twice(model: Any) -> None:
    """What the test before would find in the loop of `decode`."""
    state = batch_state("ragged").copy()
    traces = []
    for _ in range(2):
        with Trace() as trace:
            state, _ = read(model, state, torch.tensor([[5], [6]]))
        traces.append(trace)
    assert traces[0].calls != traces[1].calls


@torch.no_grad()
def test_one_step_serves_several_requests(model: Any) -> None:
    batch = batch_state("ragged")
    other_batch = RAGGED.start(model, *prompt_ids(28, 17, seed=5)).unrecorded()
    assert capacity_of(batch, TOKENS) == capacity_of(other_batch, TOKENS - 1)
    step = loaded_step(batch, Choice((), False, 0))
    for state, tokens in ((batch, TOKENS), (other_batch, TOKENS - 1), (batch, 7)):
        step.load(state, tokens, pad_token=0)
        answer = step.decode(model)
        static = Decoded(answer, step.after(state.copy(), answer))
        assert_same(decode(model, state.copy(), stop_after(tokens, None), pad_token=0), static)


@pytest.mark.skipif(not ragged_kernel.HAS_TRITON, reason="Triton has no wheels for this platform, or is not installed")
@pytest.mark.parametrize("name", PADDED)
def test_the_kernel_reads_the_pool(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, one head after another; the kernel is run by Triton's interpreter."""
    monkeypatch.setattr(ragged_kernel, "PART", 32)
    monkeypatch.setattr(ragged_kernel, "BLOCK", 16)
    model = tiny_model()
    state = batch_state(name)
    expected = decode(model, state.copy(), stop_after(5, None), pad_token=0)
    monkeypatch.setattr(ragged_kernel, "usable", lambda query, values: True)
    step = loaded_step(state, Choice((), False, 0), 5)
    assert step.in_kernel
    assert step.capacity.entries < state.counts().numel() * step.capacity.longest
    with torch.no_grad():
        answer = step.decode(model)
    assert torch.equal(answer, expected.ids)


def test_what_stands_against_a_static_step(model: Any) -> None:
    state = batch_state("ragged")
    assert reason_against(model, state) is None
    recorded = prefill(model, prompt_ids(20)[0], needs=Needs(window=4))
    assert reason_against(model, recorded) == "what the answer reads is recorded"
    windowed = family_model("Mistral with a window")
    assert "window" in str(reason_against(windowed, prefill(windowed, PROMPT, needs=Needs())))
    latent = family_model("DeepSeek-V3")
    assert "latent" in str(reason_against(latent, prefill(latent, PROMPT, needs=Needs())))
    scaled = tiny_model(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    assert "RoPE" in str(reason_against(scaled, prefill(scaled, PROMPT, needs=Needs())))


def test_what_stands_against_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    state = batch_state("ragged")
    assert "Triton" in str(reason_against_graph(model, state))
    monkeypatch.setattr(ragged_kernel, "usable", lambda query, values: True)
    assert reason_against_graph(model, state) is None
    with model.lm_head.register_forward_hook(lambda *_: None):
        assert "hooks" in str(reason_against_graph(model, state))
    assert reason_against_graph(model, state) is None
    assert "experts" in str(reason_against_graph(family_model("Mixtral"), state))


def test_eviction_while_decoding_goes_on_as_it_did(model: Any) -> None:
    """Even where static steps are asked for."""
    method = RKV(24, every=4, window=4)
    state = method.start(model, prompt_ids(60)[0])
    eviction = method.periodic_eviction(model)
    answers = []
    for static in (False, True):
        decoded = decode(model, state.copy(), stop_after(12, None), pad_token=0, eviction=eviction, static=static)
        answers.append(decoded)
    assert_same(*answers)


@pytest.mark.parametrize(("count", "expected"), [(1, 64), (64, 64), (65, 80), (97, 112), (113, 128), (1025, 1280)])
def test_sizes_are_rounded_up_by_a_quarter_at_most(count: int, expected: int) -> None:
    assert rounded(count) == expected


def test_which_choices_are_in_the_step() -> None:
    criteria = stop_after(10, [3])
    assert choice_of(criteria, None, False, False) == Choice((), False, 1)
    assert choice_of(criteria, WARPERS, True, False) == Choice(tuple(WARPERS), True, 1)
    assert choice_of(criteria, None, False, True) is None
    penalty = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)])
    assert choice_of(criteria, penalty, False, False) is None
    timed = StoppingCriteriaList([*criteria, MaxTimeCriteria(60.0)])
    assert choice_of(timed, None, False, False) is None
    assert most_tokens(criteria, 4) == 6
    assert most_tokens(criteria, 12) == 1
    assert most_tokens(StoppingCriteriaList(), 0) is None


def test_probabilities_that_are_not_finite_are_refused(model: Any) -> None:
    state = batch_state("ragged").copy()
    state.logits[0, 0] = torch.nan
    with pytest.raises(RuntimeError, match="probability"):
        decode(model, state, stop_after(4, None), pad_token=0, do_sample=True, static=True)


class Captures:
    """What answers of `generate` would capture on a GPU; here steps run one operator after another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[StaticStep] = []
        self.logged: list[str] = []
        self.fault: BaseException | None = None
        self.total = 2**30

        def capture(step: StaticStep, model: Any, state: State) -> None:
            if self.fault is not None:
                raise self.fault
            self.steps.append(step)

        monkeypatch.setattr(StaticStep, "capture", capture)
        monkeypatch.setattr(static_step, "_memory", lambda device: (self.total, self.total))
        monkeypatch.setattr(static_step, "_log_once", self.logged.append)
        monkeypatch.setattr(static_step, "_graphs_are_on", lambda state: True)
        monkeypatch.setattr(static_step, "reason_against_graph", lambda model, state: None)

    def answer(self, model: Any, ids: Tensor, tokens: int = TOKENS, **options: Any) -> Tensor:
        options = {"do_sample": False, "eos_token_id": None} | options
        return generate(model, ids, RAGGED, max_new_tokens=tokens, **options)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    return Captures(monkeypatch)


def test_requests_of_one_shape_share_a_graph(captures: Captures) -> None:
    model = tiny_model()
    answers = [captures.answer(model, prompt_ids(30, seed=seed)[0]) for seed in (1, 2, 1)]
    assert len(captures.steps) == 1
    assert torch.equal(answers[0], answers[2])
    assert not torch.equal(answers[0], answers[1])
    captures.answer(model, prompt_ids(30, 30)[0])
    assert len(captures.steps) == 2, "of another batch"
    captures.answer(model, prompt_ids(30)[0], do_sample=True, temperature=0.5)
    captures.answer(model, prompt_ids(30)[0], do_sample=True, temperature=0.5)
    assert len(captures.steps) == 3, "of another choice"
    captures.answer(tiny_model(seed=1), prompt_ids(30)[0])
    assert len(captures.steps) == 4, "of another model"
    assert not captures.logged


def test_a_graph_of_inference_mode_serves_answers_outside_of_it(captures: Captures) -> None:
    model = tiny_model()
    ids = prompt_ids(30)[0]
    with torch.inference_mode():
        answer = captures.answer(model, ids)
    assert torch.equal(captures.answer(model, ids), answer)
    assert len(captures.steps) == 1


def test_a_graph_is_not_used_after_weights_have_moved(captures: Captures) -> None:
    model = tiny_model()
    ids = prompt_ids(30)[0]
    captures.answer(model, ids)
    model.lm_head.weight.data = tiny_model(seed=1).lm_head.weight.data.clone()
    changed = captures.answer(model, ids)
    assert len(captures.steps) == 2
    assert not torch.equal(changed, captures.answer(tiny_model(), ids))


def test_a_short_answer_is_no_reason_to_capture(captures: Captures) -> None:
    model = tiny_model()
    ids = prompt_ids(30)[0]
    captures.answer(model, ids, tokens=static_step.LEAST_TOKENS - 1)
    assert not captures.steps
    captures.answer(model, ids, tokens=static_step.LEAST_TOKENS)
    captures.answer(model, ids, tokens=static_step.LEAST_TOKENS - 1)
    assert len(captures.steps) == 1


def test_what_cannot_be_captured_is_answered_all_the_same(captures: Captures) -> None:
    model = tiny_model()
    ids = prompt_ids(30)[0]
    expected = captures.answer(model, ids)
    other_model = tiny_model()
    captures.fault = RuntimeError("operation not permitted\nwhen stream is capturing")
    assert torch.equal(captures.answer(other_model, ids), expected)
    assert "cannot be captured (operation not permitted when stream is capturing)" in captures.logged[0]
    captures.fault = None
    assert torch.equal(captures.answer(other_model, ids), expected)
    assert len(captures.steps) == 1, "it was tried again"
    captures.total = 2**12
    assert torch.equal(captures.answer(tiny_model(), ids), expected)
    assert "more than half of the free memory" in captures.logged[-1]


def rows_of_kept_graphs(model: Any) -> list[int]:
    return [step.capacity.rows for step in static_step._GRAPHS[model].values() if step]


def test_graphs_are_kept_within_bounds_and_die_with_their_model(
    captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_step, "MOST_GRAPHS", 2)
    model = tiny_model()
    for rows in (1, 2, 3, 1):
        captures.answer(model, prompt_ids(*[30] * rows)[0])
    assert [step.capacity.rows for step in captures.steps] == [1, 2, 3, 1]
    assert rows_of_kept_graphs(model) == [3, 1]
    captures.total = 8 * captures.steps[0].nbytes  # a kept one takes an eighth at most
    captures.answer(model, prompt_ids(30)[0])
    assert rows_of_kept_graphs(model) == [1]
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None, "its graphs hold it"


def test_two_threads_do_not_share_a_step(captures: Captures) -> None:
    model = tiny_model()
    prompts = [prompt_ids(30, seed=seed)[0] for seed in range(4)]
    expected = [captures.answer(model, ids) for ids in prompts]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(functools.partial(captures.answer, model), prompts))
    for answer, expected_answer in zip(answers, expected, strict=True):
        assert torch.equal(answer, expected_answer)
