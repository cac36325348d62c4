"""Decoding steps that a CUDA graph can hold: the same operators on the same memory, whatever the text.

After eviction the size of everything is known. Room for the answer is reserved, and the kept entries are copied into
buffers that requests of one shape share. What changes from step to step lies in tensors on the device: the number of
appended tokens, positions, the latest token, logits, the answer, and which rows have ended. All layers' entries are in
one pool, one KV head after another; a layer whose heads are equal is one whose heads happen to have equal counts.

A step chooses a token and reads it. Arg-max, temperature, top-k and top-p are in the step, which is then captured as it
is, and the CPU looks for the end of rows every `CHECK_INTERVAL` steps. With other processors, other criteria than end
tokens and lengths, or a streamer, tokens are chosen by `keepsight.runtime.generate.decode`, and the step reads them.

Without a GPU the same steps run one operator after another. Only tests ask for that: `decode` grows caches on a CPU.
"""

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.generation import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from typing_extensions import override

from keepsight.errors import one_line
from keepsight.experimental import is_on
from keepsight.models.decoder import is_on_several_devices
from keepsight.runtime import ragged_kernel
from keepsight.runtime.attention import OwnAttention, Reader, Softmax, grouped_attention, run
from keepsight.runtime.join import as_ragged
from keepsight.runtime.layer import Counts
from keepsight.runtime.rope_length import length_limit
from keepsight.runtime.state import Needs, State

logger = logging.getLogger("keepsight")

CHECK_INTERVAL = 16
"""Steps after which the CPU waits to see whether all rows have ended."""
LEAST_TOKENS = 32
"""An answer of fewer tokens is not worth a capture; it is replayed where a graph of its shape is there."""
MOST_GRAPHS = 8
"""Graphs that a model keeps, the latest ones."""
_KEPT_SHARE = 1 / 8
"""Of the device's memory, the most that buffers of kept graphs take; larger ones last for one answer."""
_USED_SHARE = 0.5
"""Of the free memory, the most that the buffers of a step take."""
_WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)
_SYNCING_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok")
"""Fields of configurations with experts, which a step runs without waiting only as `batched_mm`."""


@dataclass(frozen=True)
class Capacity:
    """The sizes of a step's buffers, rounded up so that requests share them.

    Attributes:
        rows: Rows of the batch.
        entries: Entries of the pool.
        longest: The most entries of a KV head, with its answer.
        tokens: The most tokens of an answer.
    """

    rows: int
    entries: int
    longest: int
    tokens: int


@dataclass(frozen=True)
class Choice:
    """How a step chooses tokens.

    Attributes:
        warpers: Temperature, top-k and top-p, in the order in which they are applied.
        do_sample: Whether to draw from the logits instead of taking the arg-max.
        end_tokens: Number of end tokens.
    """

    warpers: tuple[Any, ...]
    do_sample: bool
    end_tokens: int

    @property
    def key(self) -> tuple[Any, ...]:
        """What decides the operators."""
        settings = [(type(warper).__name__, *sorted(vars(warper).items())) for warper in self.warpers]
        return (*settings, self.do_sample, self.end_tokens)


def rounded(count: int) -> int:
    """The least of 2^k, 1.25, 1.5 and 1.75 x 2^k that is at least `count`, and at least 64."""
    power = 64
    while power * 2 <= count:
        power *= 2
    for quarters in (4, 5, 6, 7):
        if power * quarters // 4 >= count:
            return power * quarters // 4
    return power * 2


def most_tokens(criteria: StoppingCriteriaList, length: int) -> int | None:
    """The most tokens that criteria allow after `length` ones, at least 1; None where they bound no length."""
    limits = [criterion.max_length for criterion in criteria if isinstance(criterion, MaxLengthCriteria)]
    return max(min(limits) - length, 1) if limits else None


def choice_of(
    criteria: StoppingCriteriaList, processors: LogitsProcessorList | None, do_sample: bool, is_streamed: bool
) -> Choice | None:
    """How a step chooses tokens itself; None where something looks at every token or its scores."""
    warpers = tuple(processors or ())
    if is_streamed or not all(type(warper) in _WARPERS for warper in warpers):
        return None
    if not all(type(criterion) in (MaxLengthCriteria, EosTokenCriteria) for criterion in criteria):
        return None
    return Choice(warpers, do_sample, len(end_tokens_of(criteria)))


def end_tokens_of(criteria: StoppingCriteriaList) -> list[int]:
    """All end tokens that criteria name."""
    tokens: list[int] = []
    for criterion in criteria:
        if isinstance(criterion, EosTokenCriteria):
            tokens += criterion.eos_token_id.flatten().tolist()
    return tokens


def reason_against(model: Reader, state: State) -> str | None:
    """Why the steps after a state cannot be static; None where they can."""
    if not isinstance(model, PreTrainedModel) or not state.has_plain_entries:
        return "entries are read in a form of their own"
    if state.needs != Needs():
        return "what the answer reads is recorded"
    is_hybrid = any(layer.recurrent is not None for layer in state.layers)
    if not state.layers or len(state.layers) < len(state.cache.layers) or is_hybrid:
        return "layers have a window or a recurrent state"
    if length_limit(model.config) is not None:
        return "RoPE depends on the length of the text"
    if any(layer.expansion is not None for layer in state.layers):
        return "attention is latent"
    if is_on_several_devices(model):
        return "the model is on several devices"
    shapes = {(layer.kv_heads, layer.keys.shape[3], layer.values.shape[3], layer.keys.dtype) for layer in state.layers}
    if len(shapes) > 1:
        return "layers have entries of different shapes"
    return None


def reason_against_graph(model: PreTrainedModel, state: State) -> str | None:
    """Why a CUDA graph cannot hold the steps after a state for which `reason_against` is None."""
    layer = state.layers[0]
    if not ragged_kernel.usable(layer.keys, layer.values):
        return "there is no Triton kernel for its entries"
    config = model.config.get_text_config(decoder=True)
    has_experts = any(getattr(config, name, None) for name in _SYNCING_EXPERTS)
    if has_experts and getattr(config, "_experts_implementation", None) != "batched_mm":
        return "experts are not run as batched_mm, and wait for the device"
    if model.training:
        return "the model is in training mode"
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return "modules have hooks, which a graph would not call"
    return None


class StaticLayer(OwnAttention, DynamicLayer):
    """A layer of a `StaticStep`: it writes into the pool and attends to its own part of it."""

    def __init__(self, step: "StaticStep", index: int) -> None:
        super().__init__()
        self.step = step
        self.index = index
        self.is_initialized = True

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        places = self.step.places[self.index]
        self.step.keys.index_copy_(0, places, key_states.reshape(len(places), -1))
        self.step.values.index_copy_(0, places, value_states.reshape(len(places), -1))
        return key_states, value_states

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        step = self.step
        if step.in_kernel:
            starts = step.starts[self.index]
            ends = step.ends[self.index]
            return ragged_kernel.attend_ragged(
                query, step.keys, step.values, starts, ends, step.capacity.longest, softmax
            )
        kv_heads = key.shape[1]
        shape = (len(step.starts), len(query), kv_heads, step.capacity.longest, -1)
        keys = step.keys.view(shape)[self.index]
        values = step.values.view(shape)[self.index]
        lengths = step.lengths[self.index].view(len(query), kv_heads, 1, 1)
        return grouped_attention(query, keys, values, step.columns < lengths, softmax)

    @override
    def get_seq_length(self) -> int:
        return 0  # positions are given to the model

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # so is the mask, which this layer does not look at


class StaticStep:
    """The buffers of a step, and the step.

    Args:
        state: A state whose shapes they have.
        capacity: Their sizes.
        choice: How tokens are chosen; None where they are given to `read`.

    Attributes:
        keys: The pool, [entries, d]. With the ragged kernel one head's entries and its room follow another's; else each
            has `capacity.longest` places.
        values: Likewise.
        starts: [L, B x K] int64: the place of each head's first entry.
        free: [L, B x K] int64: the place of each head's first appended token.
        appended: [1] int64, the tokens appended since.
        answer: [B, capacity.tokens] int64, the tokens chosen.
        chosen_count: [1] int64, how many tokens of each row were chosen before all rows had ended.
        logits: [B, V] float32, of the latest token that was read.
        chosen_from: [B, V] float32, what the latest of these tokens was chosen from.
        key: What its graph depends on; None without a graph.
    """

    @torch.inference_mode(False)  # later answers may be decoded outside of it
    def __init__(self, state: State, capacity: Capacity, choice: Choice | None) -> None:
        layer = state.layers[0]
        device = layer.keys.device
        layers = len(state.layers)
        rows = capacity.rows
        heads = rows * layer.kv_heads

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.capacity = capacity
        self.choice = choice
        self.key: Any = None
        self.in_kernel = ragged_kernel.usable(layer.keys, layer.values)
        self.keys = layer.keys.new_zeros(capacity.entries, layer.keys.shape[3])
        self.values = layer.values.new_zeros(capacity.entries, layer.values.shape[3])
        self.starts = integers(layers, heads)
        self.free = integers(layers, heads)
        self.places = integers(layers, heads)
        self.ends = integers(layers, heads)
        self.lengths = integers(layers, heads)
        self.columns = torch.arange(capacity.longest, device=device)
        self.appended = integers(1)
        self.token = integers(rows)
        self.positions = integers(rows, 1)
        self.mask = torch.ones(rows, 1, 1, 1, dtype=torch.bool, device=device)
        self.logits = state.logits.new_zeros(rows, state.logits.shape[1])
        self.cache = Cache(layers=[StaticLayer(self, index) for index in range(layers)])
        if choice is not None:
            self.chosen_from = torch.zeros_like(self.logits)
            self.answer = integers(rows, capacity.tokens)
            self.chosen_count = integers(1)
            self.limit = integers(1)
            self.pad_token = integers(1)
            self.end_tokens = integers(choice.end_tokens)
            self.unfinished = torch.ones(rows, dtype=torch.bool, device=device)
            self.is_valid = torch.ones(1, dtype=torch.bool, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._tokens = 0  # that the answer may have
        self._first_places = np.zeros((layers, heads), np.int64)  # as `starts`, for the CPU
        self._counts = np.zeros((layers, heads), np.int64)  # entries of each head when they were loaded

    @property
    def nbytes(self) -> int:
        """Bytes of its largest buffers."""
        return buffer_bytes(self.keys, self.values, self.logits.shape[1], self.capacity)

    def load(self, state: State, tokens: int, *, pad_token: int = 0, end_tokens: Sequence[int] = ()) -> None:
        """Copy a state's entries, logits and positions, for an answer of at most `tokens` tokens.

        Rows of the buffers beyond those of the state have no entries.
        """
        state.require_unchanged()
        counts = head_counts(state, self.capacity.rows)
        starts = first_places(counts, tokens, self.in_kernel, self.capacity.longest)
        device = self.keys.device
        for index, layer in enumerate(state.layers):
            keys, values = as_ragged(layer).packed()
            places = torch.from_numpy(_runs(starts[index], counts[index])).to(device, non_blocking=True)
            self.keys.index_copy_(0, places, keys)
            self.values.index_copy_(0, places, values)
        self.starts.copy_(torch.from_numpy(starts))
        self.free.copy_(torch.from_numpy(starts + counts))
        self._first_places = starts
        self._counts = counts
        self._tokens = tokens
        if self.choice is not None:
            self.pad_token.fill_(pad_token)
            self.end_tokens.copy_(torch.tensor(end_tokens, dtype=torch.int64))
        self._begin(state)

    def _begin(self, state: State) -> None:
        """Set all that a step changes but entries."""
        rows = len(state.logits)
        self.appended.zero_()
        self.logits[:rows].copy_(state.logits)
        self.positions[:rows].copy_((state.lengths + state.rope_offset)[:, None])
        self.positions[rows:].zero_()
        if self.choice is not None:
            self.chosen_from.copy_(state.logits)
            self.chosen_count.zero_()
            self.limit.fill_(self._tokens)
            self.unfinished.fill_(True)
            self.is_valid.fill_(True)

    def capture(self, model: PreTrainedModel, state: State) -> None:
        """Capture the step in a CUDA graph, after steps that compile its kernels; `state` is the loaded one.

        Raises:
            RuntimeError: an operator cannot be captured, or memory runs out.
        """
        device = self.keys.device
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.random.fork_rng([device]), torch.cuda.stream(stream):
            for _ in range(2):
                self._step(model)
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._step(model)
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = graph
        self._begin(state)

    def _step(self, model: Reader) -> None:
        if self.choice is not None:
            self._choose(self.choice)
        self._read(model)

    def _choose(self, choice: Choice) -> None:
        is_running = self.unfinished.any()
        self.chosen_from.copy_(torch.where(is_running, self.logits, self.chosen_from))
        self.chosen_count.add_(is_running)
        scores: Any = self.logits
        for warper in choice.warpers:
            scores = warper(None, scores)
        if choice.do_sample:
            shares = scores.softmax(-1)
            self.is_valid.logical_and_(shares.isfinite().all())
            token = (shares / torch.empty_like(shares).exponential_(1)).argmax(dim=-1)  # as torch.multinomial draws
        else:
            token = scores.argmax(dim=-1)
        torch.where(self.unfinished, token, self.pad_token, out=self.token)
        self.answer.index_copy_(1, self.appended, self.token[:, None])
        has_ended = (self.token[:, None] == self.end_tokens).any(dim=1)
        is_last = self.appended + 1 >= self.limit
        self.unfinished.logical_and_((has_ended | is_last).logical_not())

    def _read(self, model: Reader) -> None:
        torch.add(self.free, self.appended, out=self.places)
        torch.add(self.places, 1, out=self.ends)
        torch.sub(self.ends, self.starts, out=self.lengths)
        output = run(
            model,
            self.cache,
            input_ids=self.token[:, None],
            attention_mask=self.mask,
            position_ids=self.positions,
            logits_to_keep=1,
        )
        self.logits.copy_(output.logits[:, -1])
        self.positions.add_(1)
        self.appended.add_(1)

    def advance(self, model: Reader) -> None:
        """Run the step once: by the graph if there is one."""
        if self._graph is None:
            self._step(model)
        else:
            self._graph.replay()

    def read(self, model: Reader, token: Tensor) -> Tensor:
        """Read a token of each row [B] int64; returns the logits [B, V] after it."""
        self.token.copy_(token)
        self.advance(model)
        return self.logits.clone()

    def decode(self, model: Reader) -> Tensor:
        """Choose and read tokens until all rows have ended; returns the answers [B, T] int64.

        Raises:
            RuntimeError: probabilities are infinite or NaN, as `torch.multinomial` raises.
        """
        for first in range(0, self._tokens, CHECK_INTERVAL):
            for _ in range(min(CHECK_INTERVAL, self._tokens - first)):
                self.advance(model)
            is_running, is_valid = torch.stack([self.unfinished.any(), self.is_valid[0]]).tolist()
            if not is_valid:
                raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
            if not is_running:
                break
        return self.answer[:, : int(self.chosen_count)].clone()

    def packed(self, index: int, rows: Sequence[int], appended: int) -> tuple[Tensor, Tensor, Counts]:
        """Some rows' entries of a layer, with `appended` tokens: keys and values [total, d], and counts [rows, K]."""
        shape = (self.capacity.rows, -1)
        starts = self._first_places[index].reshape(shape)[[*rows]]
        counts = self._counts[index].reshape(shape)[[*rows]] + appended
        places = torch.from_numpy(_runs(starts.ravel(), counts.ravel())).to(self.keys.device, non_blocking=True)
        return self.keys.index_select(0, places), self.values.index_select(0, places), counts

    def after(self, state: State, answer: Tensor) -> State:
        """The loaded state after the tokens read of `answer` [B, T] int64, all but the last; its cache grows."""
        count = answer.shape[1] - 1
        logits = self.logits if self.choice is None else self.chosen_from
        steps = torch.arange(count, device=self.free.device)
        for index, layer in enumerate(state.layers):
            if count:
                places = (self.free[index][:, None] + steps).flatten()
                shape = (self.capacity.rows, layer.kv_heads, count, -1)
                keys = self.keys.index_select(0, places).view(shape)
                layer.update(keys, self.values.index_select(0, places).view(shape))
        return replace(
            state,
            logits=logits.clone(),
            tokens=torch.cat([state.tokens, answer[:, :count]], dim=1),
            lengths=state.lengths + count,
        )


def head_counts(state: State, rows: int = 0) -> Counts:
    """[L, B x K] int64: entries of each layer, row and KV head, padding left out; 0 for rows beyond the state's."""
    sizes = [torch.as_tensor(layer.head_sizes()).flatten() for layer in state.layers]
    counts = torch.stack(sizes).cpu().numpy()
    heads = max(rows, len(state.lengths)) * state.layers[0].kv_heads
    return np.pad(counts, ((0, 0), (0, heads - counts.shape[1])))


def first_places(counts: Counts, tokens: int, in_kernel: bool, longest: int) -> Counts:
    """[L, B x K] int64: where the entries of each head begin in the pool, `counts` of them and an answer's `tokens`."""
    if not in_kernel:
        return np.arange(counts.size).reshape(counts.shape) * longest
    ends = np.cumsum(counts.ravel() + tokens)
    return (ends - counts.ravel() - tokens).reshape(counts.shape)


def _runs(starts: Counts, counts: Counts) -> Counts:
    """The places `starts[i]`, `starts[i] + 1`, ... of each run of `counts[i]` places, one run after another."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())


def capacity_of(state: State, tokens: int, rows: int = 0) -> Capacity:
    """The sizes of a step for a state and an answer of at most `tokens` tokens, with at least so many rows."""
    counts = head_counts(state, rows)
    longest = rounded(int(counts.max()) + tokens)
    layer = state.layers[0]
    entries = counts.size * longest
    if ragged_kernel.usable(layer.keys, layer.values):
        entries = rounded(int(counts.sum()) + counts.size * tokens)
    return Capacity(max(rows, len(state.lengths)), entries, longest, rounded(tokens))


def buffer_bytes(keys: Tensor, values: Tensor, vocabulary: int, capacity: Capacity) -> int:
    """Bytes of a step's pool and logits, for entries like `keys` and `values` [..., d]."""
    entry_bytes = keys.shape[-1] * keys.element_size() + values.shape[-1] * values.element_size()
    logits_bytes = capacity.rows * vocabulary * 4
    return capacity.entries * entry_bytes + 4 * logits_bytes  # logits, what was chosen from, scores, probabilities


# Graphs that requests share


_GRAPHS: WeakKeyDictionary[PreTrainedModel, OrderedDict[Any, StaticStep | None]] = WeakKeyDictionary()
"""Each model's graphs by what they depend on, the latest last; None where a capture has failed."""
_LOCK = threading.Lock()


@contextmanager
def static_step(
    model: Reader,
    state: State,
    prompt_length: int,
    criteria: StoppingCriteriaList,
    processors: LogitsProcessorList | None,
    *,
    do_sample: bool,
    is_streamed: bool,
    pad_token: int,
    without_graph: bool = False,
) -> Iterator[StaticStep | None]:
    """A loaded step, which is this thread's alone within the block, or None where `decode` is to grow the cache.

    On a GPU the step is a graph of an earlier answer of the same shape, or a new one; what stands against it is logged
    once. `without_graph` asks for a step that is not captured, on any device. The other arguments are those of
    `decode`, after `prompt_length` tokens.
    """
    tokens = most_tokens(criteria, prompt_length)
    if tokens is None or not may_be_static(state, without_graph):
        yield None
        return
    base: Any = model
    if not _is_possible(base, state, without_graph):
        yield None
        return

    choice = choice_of(criteria, processors, do_sample, is_streamed)
    capacity = capacity_of(state, tokens)
    end_tokens = end_tokens_of(criteria)
    if without_graph:
        step = StaticStep(state, capacity, choice)
        step.load(state, tokens, pad_token=pad_token, end_tokens=end_tokens)
        yield step
        return

    graph_step = _reused_or_captured(base, state, capacity, choice, tokens, pad_token, end_tokens)
    try:
        yield graph_step
    finally:
        if graph_step is not None:
            give_back(base, graph_step)


def borrowed_step(
    model: PreTrainedModel, state: State, tokens: int, rows: int, *, without_graph: bool = False
) -> StaticStep | None:
    """A loaded step that reads tokens chosen elsewhere, until `give_back`; None where there is none.

    It has room for `tokens` tokens of each row, and buffers of `rows` rows. See `static_step`.
    """
    if not may_be_static(state, without_graph) or not _is_possible(model, state, without_graph):
        return None
    capacity = capacity_of(state, tokens, rows)
    if not without_graph:
        return _reused_or_captured(model, state, capacity, None, tokens, 0, [])
    step = StaticStep(state, capacity, None)
    step.load(state, tokens)
    return step


def _is_possible(model: Any, state: State, without_graph: bool) -> bool:
    """Whether the steps after a state can be static; what stands against it is logged once."""
    reason = reason_against(model, state)
    if reason is None and not without_graph:
        reason = reason_against_graph(model, state)
    if reason is not None:
        _log_once(reason)
    return reason is None


def may_be_static(state: State, without_graph: bool = False) -> bool:
    """Whether static steps are asked for where a state is: by a test, or on a GPU by the user."""
    return without_graph or _graphs_are_on(state)


def _graphs_are_on(state: State) -> bool:
    return state.logits.is_cuda and is_on("graph")


def _shapes(state: State) -> tuple[Any, ...]:
    """What a step's buffers depend on beside their capacity."""
    layer = state.layers[0]
    widths = (layer.keys.shape[3], layer.values.shape[3])
    return (len(state.layers), layer.kv_heads, *widths, layer.keys.dtype, layer.keys.device, state.logits.shape[1])


def _fingerprint(model: PreTrainedModel) -> tuple[Any, ...]:
    """What a graph has taken over from a model: the addresses of its weights, and the adapters that were active."""
    addresses = [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]
    adapters: list[Any] = []
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            scaling: dict[str, float] = getattr(module, "scaling", {})
            adapters.append((module.disable_adapters, module.merged, *module.active_adapters, *scaling.items()))
    return (*addresses, *adapters)


def _reused_or_captured(
    model: PreTrainedModel,
    state: State,
    capacity: Capacity,
    choice: Choice | None,
    tokens: int,
    pad_token: int,
    end_tokens: Sequence[int],
) -> StaticStep | None:
    """The model's step of these sizes, or a new one, loaded; None where there is none and none is captured."""
    key = (capacity, None if choice is None else choice.key, _shapes(state), _fingerprint(model))
    with _LOCK:
        graphs = _GRAPHS.setdefault(model, OrderedDict())
        has_failed = key in graphs and graphs[key] is None
        step = None if has_failed else graphs.pop(key, None)
    if step is not None:
        step.load(state, tokens, pad_token=pad_token, end_tokens=end_tokens)
        return step
    if has_failed or tokens < LEAST_TOKENS:
        return None
    layer = state.layers[0]
    free, _ = _memory(layer.keys.device)
    if buffer_bytes(layer.keys, layer.values, state.logits.shape[1], capacity) > _USED_SHARE * free:
        _log_once("its buffers would take more than half of the free memory")
        return None
    try:
        step = StaticStep(state, capacity, choice)
        step.key = key
        step.load(state, tokens, pad_token=pad_token, end_tokens=end_tokens)
        step.capture(model, state)
    except torch.OutOfMemoryError:
        _log_once("memory ran out while it was captured")
        return None
    except RuntimeError as error:
        _log_once(f"it cannot be captured ({one_line(error, 200)})")
        with _LOCK:
            graphs[key] = None
        return None
    return step


def give_back(model: PreTrainedModel, step: StaticStep) -> None:
    """Keep a step for later answers, and drop the earliest ones where there are too many or they are too large."""
    _, total = _memory(step.keys.device)
    with _LOCK:
        graphs = _GRAPHS.setdefault(model, OrderedDict())
        graphs[step.key] = step
        kept_bytes = sum(other.nbytes for other in graphs.values() if other is not None)
        while len(graphs) > MOST_GRAPHS or kept_bytes > total * _KEPT_SHARE:
            _, dropped = graphs.popitem(last=False)
            if dropped is not None:
                kept_bytes -= dropped.nbytes


def _memory(device: torch.device) -> tuple[int, int]:
    """Free bytes of a GPU, with those that PyTorch holds and does not use, and all bytes of it."""
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused, total


@functools.cache
def _log_once(reason: str) -> None:
    logger.warning("decoding without a CUDA graph: %s", reason)
