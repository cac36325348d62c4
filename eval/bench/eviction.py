"""What eviction costs: time and memory against the prefill; operators and syncs, counted on any device."""

import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from typing_extensions import override

from keepsight.eval.bench.measure import (
    median_seconds,
    peak_bytes,
    peak_kv_bytes,
    random_ids,
    require_room,
    seconds_of,
)
from keepsight.eval.bench.runner import Runner, TableRow
from keepsight.eval.compress import needs_of_all
from keepsight.models.targets import Target
from keepsight.progress import progress_bar
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import Method
from keepsight.runtime.state import Needs, State, prefill, read
from keepsight.tables import TerminalColumn, name_column

_FREE = {"_unsafe_view", "_reshape_alias", "lift_fresh", "detach"}
"""Operators that launch no work, besides those whose result is declared to be a view."""
_SYNCS = {"_local_scalar_dense", "equal", "nonzero", "masked_select"}
_SYNCS |= {"_unique2", "unique_consecutive", "repeat_interleave"}
"""Operators whose result, or its shape, the CPU has to wait for."""
_READS = {Tensor.tolist, Tensor.numpy, Tensor.cpu}
"""Methods that sync with a GPU, but run no operator for a tensor on the CPU."""
_COPIES = {torch.tensor, Tensor.new_tensor}
"""Functions that copy Python's numbers to a device, for which the CPU waits."""


STEPS = ("observe", "select", "gather", "decode")
"""The phases whose operators are counted; methods that do not evict have only the last."""


@dataclass
class Counts:
    """Operators without views and allocations, about a kernel each on a GPU, and syncs that wait for their values."""

    operators: int = 0
    syncs: int = 0


def count(step: Callable[[], object]) -> Counts:
    """The operators and syncs of a call, counted on the CPU as they would be on a GPU."""
    counts = Counts()
    with _Reads(counts), _Operators(counts):
        step()
    return counts


class _Operators(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        launches_nothing = name in _FREE or name.startswith(("empty", "new_empty"))
        if not launches_nothing and not _is_view(func, result, args):
            self.counts.operators += 1
        if name in _SYNCS or (name.startswith("index") and _has_mask(args[1:2])):
            self.counts.syncs += 1
        return result


class _Reads(TorchFunctionMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        to_device = func is Tensor.new_tensor or kwargs.get("device") is not None
        copies = func in _COPIES and to_device and result.numel() > 0
        self.counts.syncs += func in _READS or copies
        return result


def _is_view(func: Any, result: Any, args: Any) -> bool:
    """Whether the result is a view: `to`, `contiguous` and `reshape` copy where they must."""
    if not any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns):
        return False
    if isinstance(result, list | tuple) and result:
        result = result[0]
    if not isinstance(result, Tensor):
        return True
    storages = {value.untyped_storage().data_ptr() for value in args if isinstance(value, Tensor)}
    return result.untyped_storage().data_ptr() in storages


def _has_mask(args: Any) -> bool:
    """Whether an index, the first of these arguments, has a mask among its tensors."""
    indices = args[0] if args and isinstance(args[0], list | tuple) else ()
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


@torch.no_grad()
def operators_of(model: PreTrainedModel, method: Method, ids: Tensor) -> dict[str, Counts]:
    """Operators and syncs of a method's `STEPS`, over all layers, for a prompt [1, N]; caches of masks are warm."""
    counts = {}
    if isinstance(method, Evict):
        evict = method
        state = prefill(model, ids, needs=evict.needs())
        evict.compress_state(model, state)
        observe = functools.partial(evict.bound_observer, model, state, evict.reduce)
        scores = observe()
        selected = evict.select(state, evict.importance(model, state, scores))
        counts["observe"] = count(lambda: evict.fits(state) or observe())
        counts["select"] = count(lambda: evict.select(state, evict.importance(model, state, scores)))
        counts["gather"] = count(lambda: evict.keep(model, state, selected))
    reader = method.reader(model)
    token = ids[:, -1:]
    state, _ = read(reader, method.start(model, ids).unrecorded(), token)  # makes room for more
    counts["decode"] = count(functools.partial(read, reader, state, token))
    return counts


@torch.no_grad()
def operators_of_plain_step(model: PreTrainedModel, ids: Tensor) -> Counts:
    """The operators and syncs of the plain model to decode a token after a prompt [1, N]."""
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, logits_to_keep=1)
    return count(lambda: model(ids[:, -1:], past_key_values=cache))


def bench_operators(
    runner: Runner, model: PreTrainedModel, methods: Mapping[str, Method], tokens: int
) -> Iterator[str]:
    """A line for each method: operators and syncs a layer in each step, for a prompt of random tokens."""
    layers = model.config.get_text_config().num_hidden_layers
    require_room(model, tokens)
    ids = random_ids(model, 1, tokens)
    yield f"operators / syncs a layer; {layers} layers, {tokens} prompt tokens; decode: a layer and token"

    def measure(method: Method | None, _: int) -> TableRow:
        counts = {} if method is None else operators_of(model, method, ids)
        if method is None:
            counts["decode"] = operators_of_plain_step(model, ids)
        row = {}
        for step, counted in counts.items():
            row[step] = f"{counted.operators / layers:.0f} / {counted.syncs / layers:.2g}"
        return row

    compared: dict[str, Method | None] = {"plain model": None, **methods}
    columns = [name_column("method", compared), *(TerminalColumn(step, width=12) for step in STEPS)]
    yield from runner.table("ops", columns, runner.compare("ops", compared, measure, lengths=[tokens]))


_PREFILL = "prefill"
_SUMS = "sums for h2o"
"""Rows of the table that are no methods."""
_LEAST_SECONDS = 0.4
"""Minimum seconds of a timed turn of observing or selecting, which are short."""


def bench_evict(
    runner: Runner, target: Target, methods: Mapping[str, Evict], lengths: Sequence[int], repeats: int
) -> Iterator[str]:
    """A line for each length and method: time and memory of observe and of select, against the prefill.

    Both are measured after a prefill, as an evaluation runs them for many methods. `in all` is what a method adds to a
    prefill when it reads the prompt itself, as `generate` does: observers that are known before it take no pass of
    their own.

    Prompts are random tokens. The prefill and the methods take turns, and a share is the median of the shares of single
    turns, so that a machine that slows down slows both: shares hold where times do not.
    """
    require_room(target.model, max(lengths))
    yield (
        f"{torch.get_num_threads()} threads, median of {repeats} turns; peak: beyond what the prefill holds; "
        "KV: the most bytes of keys and values while the prompt is read and compressed"
    )

    def measure(length: int) -> Iterator[TableRow]:
        return _rows_of_length(target.model, methods, random_ids(target.model, 1, length), repeats)

    columns = (
        TerminalColumn("tokens", "d"),
        name_column("method", (_PREFILL, _SUMS, *methods)),
        TerminalColumn("observe ms", ".1f"),
        TerminalColumn("select ms", ".1f"),
        TerminalColumn("of prefill", ".2%"),
        TerminalColumn("in all", ".2%", width=8),
        TerminalColumn("peak MiB", ".1f"),
        TerminalColumn("KV MiB", ".1f"),
    )
    cases: list[tuple[TableRow, int]] = [({"tokens": length}, length) for length in lengths]
    yield from runner.table("evict", columns, runner.rows("evict", cases, measure))


class _Turn(NamedTuple):
    """Seconds of one turn: of the prefill, also with the attention sums that H2O needs, and of each method.

    By the methods' names, `observe` and `select` are those of their steps, `start` those of a prefill with the method.
    """

    prefill: float
    summing: float
    observe: dict[str, float]
    select: dict[str, float]
    start: dict[str, float]


def _rows_of_length(
    model: PreTrainedModel, methods: Mapping[str, Evict], ids: Tensor, repeats: int
) -> Iterator[TableRow]:
    """A row for the prefill, one for H2O's sums where they are needed, and one for each method."""
    needs = needs_of_all(methods.values())
    read_prompt = functools.partial(prefill, model, ids, needs=replace(needs, accumulated=False))
    turns = []
    for _ in progress_bar(range(repeats + 1), name=f"turns at {ids.shape[1]} tokens", unit="turn"):
        turns.append(_timed_turn(model, methods, ids, needs))
    turns = turns[1:]  # the first one warms up

    state = prefill(model, ids, needs=needs)
    peak = peak_bytes(read_prompt) / 2**20
    kv_mib = peak_kv_bytes(model, read_prompt) / 2**20
    prefill_seconds = statistics.median([turn.prefill for turn in turns])
    yield {"method": _PREFILL, "observe ms": prefill_seconds * 1000, "peak MiB": peak, "KV MiB": kv_mib}
    if needs.accumulated:  # summed up during the prefill, not after it
        seconds = []
        shares = []
        for turn in turns:
            seconds.append(turn.summing - turn.prefill)
            shares.append(turn.summing / turn.prefill - 1)
        milliseconds = statistics.median(seconds) * 1000
        yield {"method": _SUMS, "observe ms": milliseconds, "of prefill": statistics.median(shares)}
    for name, method in methods.items():
        observing = []
        selecting = []
        shares = []
        shares_of_start = []
        for turn in turns:
            observing.append(turn.observe[name])
            selecting.append(turn.select[name])
            shares.append((turn.observe[name] + turn.select[name]) / turn.prefill)
            shares_of_start.append(turn.start[name] / turn.prefill - 1)
        yield {
            "method": name,
            "observe ms": statistics.median(observing) * 1000,
            "select ms": statistics.median(selecting) * 1000,
            "of prefill": statistics.median(shares),
            "in all": statistics.median(shares_of_start),
            "peak MiB": max(map(peak_bytes, _steps(model, method, state))) / 2**20,
            "KV MiB": peak_kv_bytes(model, functools.partial(method.start, model, ids)) / 2**20,
        }


def _timed_turn(model: PreTrainedModel, methods: Mapping[str, Evict], ids: Tensor, needs: Needs) -> _Turn:
    """One prefill, one with the attention sums if `needs` has them, and every method's steps."""
    states: list[State] = []

    def read_prompt(accumulated: bool) -> None:
        states.clear()  # two caches would not fit where one just does
        states.append(prefill(model, ids, needs=replace(needs, accumulated=accumulated)))

    prefill_seconds = seconds_of(lambda: read_prompt(accumulated=False))
    summing = prefill_seconds
    if needs.accumulated:
        summing = seconds_of(lambda: read_prompt(accumulated=True))
    observe = {}
    select = {}
    for name, method in methods.items():
        observing, selecting = _steps(model, method, states[0])
        observe[name] = median_seconds(observing, 1, _LEAST_SECONDS)
        select[name] = median_seconds(selecting, 1, _LEAST_SECONDS)
    states.clear()
    start = {}
    for name, method in methods.items():
        start[name] = seconds_of(functools.partial(method.start, model, ids))
    return _Turn(prefill_seconds, summing, observe, select, start)


def _steps(model: PreTrainedModel, method: Evict, state: State) -> tuple[Callable[[], object], Callable[[], object]]:
    """Observing and selecting, each by itself."""
    observe = functools.partial(method.bound_observer, model, state, method.reduce)
    scores = observe()
    return observe, lambda: method.evict(model, state, scores)
