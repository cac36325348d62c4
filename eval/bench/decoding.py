"""The speed of decoding: from each method's cache, with a draft head, and in an evaluation's sweep."""

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import StoppingCriteriaList

from keepsight.errors import UserError, one_line
from keepsight.eval.answers import default_batch_tokens, entry_bytes, free_tokens
from keepsight.eval.bench.measure import random_ids, read_greedily, require_room, row_bytes_with_room, seconds_of
from keepsight.eval.bench.offload import random_state
from keepsight.eval.bench.runner import Runner, TableRow, with_ratios
from keepsight.eval.record import RowStore
from keepsight.eval.sweep import Variant, plan, run_samples, sweep
from keepsight.eval.tasks.niah import make_samples
from keepsight.models.draft_head import EagleHead
from keepsight.models.targets import Target
from keepsight.models.transformers_internals import attention_of_config
from keepsight.progress import progress_bar
from keepsight.runtime.attention import Reader
from keepsight.runtime.drafting.speculative import (
    Round,
    acceptance_by_position,
    acceptance_length,
    decode_speculatively,
)
from keepsight.runtime.generate import CacheMethod, FullCache, Method, decode, end_ids, generate, stop_after
from keepsight.runtime.join import can_join, join
from keepsight.runtime.retrieval.specontext import HeadSelector, RetrievalCache
from keepsight.runtime.sparse_read.cache import LayerSelector
from keepsight.runtime.state import Needs, State, full_layers, prefill
from keepsight.tables import TerminalColumn, name_column

_WARM_UP = 3
"""Steps that are not timed: the first ones make room for more entries and load kernels."""
_MOST_ROWS = 1024


def bench_decode(
    runner: Runner,
    model: PreTrainedModel,
    methods: Mapping[str, Method],
    tokens: int,
    batch: int,
    steps: int,
    attentions: Sequence[str] = (),
) -> Iterator[str]:
    """A line for each method: milliseconds a decoding step, over those of the full cache and of the first method.

    Prompts are random tokens. The methods take turns step by step, so that a machine that slows down slows all of them:
    ratios hold where times do not. For this the caches of all methods are in memory at once. `attentions` are further
    implementations of attention with which the full cache is timed, one after another.
    """
    require_room(model, tokens + _WARM_UP + steps, batch)
    yield f"{batch} rows of {tokens} tokens, median of {steps} steps, {torch.get_num_threads()} threads, {model.dtype}"

    def measure(_: None) -> Iterator[TableRow]:
        ids = random_ids(model, batch, tokens)
        yield from _in_turns(model, {"full cache": FullCache(), **methods}, ids, steps)
        for attention in attentions:
            with _attending_by(model, attention):
                decoding = _Decoding.after(model, FullCache(), ids)
                for _step in range(steps):
                    decoding.step()
            yield {"method": f"full cache, {attention}", **decoding.figures(batch), "of first": None}

    rows = with_ratios(runner.rows("decode", [({"tokens": tokens}, None)], measure), {"of full": "ms a step"})
    names = ["full cache", *methods, *(f"full cache, {attention}" for attention in attentions)]
    figures = ("ms a step", "tokens/s", "of full", "of first", "KV MiB", "selecting", "prefill s", "with prefill/s")
    columns = _columns(names, *figures)
    yield from runner.table("decode", columns, rows)


def _in_turns(model: PreTrainedModel, methods: Mapping[str, Method], ids: Tensor, steps: int) -> Iterator[TableRow]:
    """A row for each method; `of first` compares it with the first method after the full cache."""
    decodings: dict[str, _Decoding] = {}
    for name, method in progress_bar(methods.items(), name="prompts", unit="method"):
        decodings[name] = _Decoding.after(model, method, ids)
    for _ in progress_bar(range(steps), name="steps", unit="step"):
        for decoding in decodings.values():
            decoding.step()
    _, first_method, *_ = decodings.values()
    for name, decoding in decodings.items():
        of_first = decoding.seconds / first_method.seconds
        yield {"method": name, **decoding.figures(len(ids)), "of first": of_first, "selecting": decoding.selecting()}


@contextmanager
def _attending_by(model: PreTrainedModel, attention: str) -> Iterator[None]:
    """The model attends by another implementation within the block; UserError if transformers cannot load it."""
    before = attention_of_config(model.config)
    try:
        model.set_attn_implementation(attention)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"attention={attention} cannot be loaded ({one_line(str(error))}); leave it out, or install it",
            field="attention",
            code="missing",
        ) from error
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def bench_largest(
    runner: Runner, model: PreTrainedModel, methods: Mapping[str, Method], tokens: int, steps: int
) -> Iterator[str]:
    """A line for each method, in the largest batch that fits the free memory with it, and no more than `_MOST_ROWS`."""
    require_room(model, tokens + _WARM_UP + steps)
    ids = random_ids(model, 1, tokens)
    compared: dict[str, Method] = {"full cache": FullCache(), **methods}

    def measure(method: Method, _: int) -> TableRow:
        count, decoding = _in_largest_batch(model, method, ids)
        for _ in range(steps):
            decoding.step()
        return {"rows": count, **decoding.figures(count)}

    yield f"rows of {tokens} tokens, median of {steps} steps, {torch.get_num_threads()} threads, {model.dtype}"
    rows = runner.compare("decode", compared, measure, lengths=[tokens], ratios={"of full": "tokens/s"})
    columns = _columns(compared, "rows", "ms a step", "tokens/s", "of full", "KV MiB")
    yield from runner.table("decode", columns, rows)


_FORMS = {
    "rows": "d",
    "ms a step": ".1f",
    "tokens/s": ".1f",
    "of full": ".2f",
    "of first": ".2f",
    "KV MiB": ".1f",
    "selecting": ".0%",
    "prefill s": ".2f",
    "with prefill/s": ".1f",
}
"""How each figure is written."""


def _columns(methods: Iterable[str], *names: str) -> list[TerminalColumn]:
    """The columns of a table of decoding speeds: the method, and these figures."""
    return [name_column("method", methods), *(TerminalColumn(name, _FORMS[name]) for name in names)]


@torch.no_grad()
def _in_largest_batch(model: PreTrainedModel, method: Method, ids: Tensor) -> tuple[int, "_Decoding"]:
    """The number of rows and their decoding: of copies of a prompt [1, N], or of random entries where none can join."""
    alone = method.start(model, ids)
    length = ids.shape[1]
    config = model.config.get_text_config()
    row_bytes = row_bytes_with_room(alone.kv_bytes, config)
    rows = int(min(free_tokens(model) * entry_bytes(model) * 0.9 / row_bytes, _MOST_ROWS))
    if not can_join(alone):  # it may hold entries in CPU memory, which come in powers of two
        rows = min(rows, int(psutil.virtual_memory().available * 0.4 / (entry_bytes(model) * length)))
    while True:
        try:
            return max(rows, 1), _Decoding(method.reader(model), _of_rows(model, method, alone, max(rows, 1), length))
        except torch.OutOfMemoryError:
            if rows < 2:
                raise
            rows //= 2


def _of_rows(model: PreTrainedModel, method: Method, alone: State, rows: int, length: int) -> State:
    if can_join(alone):
        return join([alone] * rows)
    assert isinstance(method, CacheMethod)
    return method.compress_state(model, random_state(model, method.needs(), rows, length))


class _Decoding:
    """Greedy decoding from a state, with the seconds that each step took, and those of its prefill if it is known."""

    @torch.no_grad()
    def __init__(self, reader: Reader, state: State, prefill_seconds: float | None = None) -> None:
        self.reader = reader
        self.state = read_greedily(reader, state, _WARM_UP)
        self.prefill_seconds = prefill_seconds
        self.seconds_of_steps: list[float] = []

    @classmethod
    def after(cls, model: PreTrainedModel, method: Method, ids: Tensor) -> "_Decoding":
        """Decoding after a method's own prefill of prompts [B, N], which is timed once."""
        states = list[State]()
        seconds = seconds_of(lambda: states.append(method.start(model, ids)))
        return cls(method.reader(model), states[0], seconds)

    @torch.no_grad()
    def step(self) -> None:
        self.seconds_of_steps.append(seconds_of(self._read))

    def _read(self) -> None:
        self.state = read_greedily(self.reader, self.state, 1)

    @property
    def seconds(self) -> float:
        return statistics.median(self.seconds_of_steps)

    def figures(self, rows: int) -> TableRow:
        """Milliseconds a step, tokens per second of all rows, MiB of entries; and of prefill and steps if known."""
        kv_mib = self.state.kv_bytes / 2**20
        row: TableRow = {"ms a step": self.seconds * 1000, "tokens/s": rows / self.seconds, "KV MiB": kv_mib}
        if self.prefill_seconds is not None:
            row["prefill s"] = self.prefill_seconds
            steps = len(self.seconds_of_steps)
            row["with prefill/s"] = rows * steps / (self.prefill_seconds + sum(self.seconds_of_steps))
        return row

    @torch.no_grad()
    def selecting(self) -> float | None:
        """The share of a further step that the selection of entries takes; None where a method selects none.

        Selections are waited for one by one, so that on a GPU the share is an upper bound.
        """
        selectors: list[HeadSelector | LayerSelector | None]
        if isinstance(self.state.cache, RetrievalCache):
            selectors = [self.state.cache.selector]
        else:
            selectors = [getattr(layer, "selector", None) for layer in full_layers(self.state.cache)]
        methods = {type(selector): selector.selecting_method for selector in selectors if selector is not None}
        if not methods:
            return None
        with ExitStack() as patched:
            seconds = [patched.enter_context(_timed_selections(kind, name)) for kind, name in methods.items()]
            step_seconds = seconds_of(self._read)
        return sum(map(sum, seconds)) / step_seconds


@contextmanager
def _timed_selections(kind: type, name: str) -> Iterator[list[float]]:
    """The seconds of each selection by selectors of a class, by their method of this name, within the block."""
    seconds: list[float] = []
    select = getattr(kind, name)

    def timed_select(selector: object, *inputs: object) -> object:
        selections: list[object] = []
        seconds.append(seconds_of(lambda: selections.append(select(selector, *inputs))))
        return selections[0]

    setattr(kind, name, timed_select)
    try:
        yield seconds
    finally:
        setattr(kind, name, select)


def bench_speculate(
    runner: Runner,
    target: Target,
    head: EagleHead,
    prompts: Sequence[Sequence[int]],
    answer_tokens: int,
    draft_tokens: int,
) -> Iterator[str]:
    """Speculative decoding against plain decoding, both from the full cache; the first prompt also warms up.

    The head's pass over the prompt counts as decoding, the model's does not.
    """
    criteria = stop_after(answer_tokens, end_ids(target.model))
    is_warm = False

    def measure(prompt: Sequence[int]) -> list[TableRow]:
        nonlocal is_warm
        if not is_warm:
            _compare(target, head, prompts[0], criteria, draft_tokens)
            is_warm = True
        return [_compare(target, head, prompt, criteria, draft_tokens)]

    cases = []
    for index, prompt in enumerate(prompts):
        cases.append(({"prompt": index}, prompt))
    results = list(runner.rows("prompts", cases, measure, unit="prompt"))
    lengths = list(map(len, prompts))
    yield (
        f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, answers of at most {answer_tokens}, "
        f"drafts of {draft_tokens}, {target.model.dtype}, {torch.get_num_threads()} threads"
    )
    rounds: list[Round] = []
    for result in results:
        rounds += [Round(*counts) for counts in result["rounds"]]
    speeds = [_speed("plain", results), _speed("speculative", results)]
    columns = (
        name_column("method", ["plain", "speculative"]),
        TerminalColumn("answer tokens", "d"),
        TerminalColumn("seconds", ".2f"),
        TerminalColumn("tokens/s", ".1f"),
        TerminalColumn("of plain", ".2f"),
    )
    yield from runner.table("speculate", columns, with_ratios(speeds, {"of plain": "tokens/s"}))
    yield f"acceptance length {acceptance_length(rounds):.2f} tokens a pass of the model (1 is plain decoding)"
    shares = " ".join(f"{share:.2f}" for share in acceptance_by_position(rounds))
    yield f"share of drafts accepted up to position 1, 2, ...: {shares or 'nothing was drafted'}"
    same_answers = sum(result["is_same"] for result in results)
    yield f"{same_answers} of {len(results)} answers are the same, token for token"


def _speed(decoding: str, results: Sequence[TableRow]) -> TableRow:
    """The sums over all prompts of one of the two kinds of decoding."""
    tokens = sum(result[f"{decoding} tokens"] for result in results)
    seconds = sum(result[f"{decoding} seconds"] for result in results)
    return {"method": decoding, "answer tokens": tokens, "seconds": seconds, "tokens/s": tokens / seconds}


@torch.no_grad()
def _compare(
    target: Target, head: EagleHead, prompt: Sequence[int], criteria: StoppingCriteriaList, draft_tokens: int
) -> TableRow:
    """Tokens of a prompt's answer by both kinds of decoding, their seconds without the prefill, and the rounds."""
    model = target.model
    ids = torch.tensor([prompt], device=model.device)
    state = prefill(model, ids, needs=Needs(features=head.layers_of(model)))
    bare = state.unrecorded()  # plain decoding needs no features
    state.logits.cpu()  # waits for the prefill
    start = time.perf_counter()
    plain = decode(model, bare, criteria, pad_token=0).ids
    plain_seconds = time.perf_counter() - start
    start = time.perf_counter()
    speculated = decode_speculatively(model, state.copy(), head, criteria, tokens=draft_tokens)
    return {
        "plain tokens": plain.shape[1],
        "plain seconds": plain_seconds,
        "speculative tokens": speculated.ids.shape[1],
        "speculative seconds": time.perf_counter() - start,
        "is_same": torch.equal(plain, speculated.ids),
        "rounds": [(result.judged, result.accepted, result.emitted) for result in speculated.rounds],
    }


def bench_sweep(
    runner: Runner, target: Target, methods: Mapping[str, Method], tokens: int, answer_tokens: int, samples: int
) -> Iterator[str]:
    """Seconds per sample of the sweep, and of a separate prefill and decode per variant, as a few lines of text.

    The sweep's time includes the full cache's own answer, the teacher-forced scores and the recall, which separate
    runs lack. Every answer has exactly `answer_tokens` tokens in both: end tokens are ignored.
    """
    require_room(target.model, tokens)
    yield (
        f"{len(methods)} variants, {tokens} prompt tokens, {answer_tokens} answer tokens, {samples} samples, "
        f"{torch.get_num_threads()} threads"
    )

    def measure(_: None) -> list[TableRow]:
        return _sweep_and_separate_runs(target, methods, tokens, answer_tokens, samples)

    rows = with_ratios(runner.rows("eval", [({"tokens": tokens}, None)], measure), {"of sweep": "s a sample"})
    columns = (
        name_column("method", ["sweep", "separate runs"]),
        TerminalColumn("s a sample", ".2f"),
        TerminalColumn("of sweep", ".2f"),
    )
    yield from runner.table("eval", columns, rows)


def _sweep_and_separate_runs(
    target: Target, methods: Mapping[str, Method], tokens: int, answer_tokens: int, samples: int
) -> list[TableRow]:
    """A row for the sweep, and one for a separate run of each variant; a sample before them warms up."""
    variants = list(map(Variant, methods.keys(), methods.values()))
    batch_tokens = default_batch_tokens(target.model)
    warm_up, *timed = (
        replace(sample, max_new_tokens=answer_tokens)
        for sample in make_samples("single", tokens, samples + 1, 0, target.tokenizer)
    )

    def run_sweep() -> None:
        for _ in sweep(target, plan(target, timed, variants), variants, batch_tokens, RowStore()):
            pass

    def run_one_by_one() -> None:
        for sample in timed:
            ids = sample.prompt_ids[None].to(target.model.device)
            for method in methods.values():
                generate(target.model, ids, method, max_new_tokens=answer_tokens, do_sample=False)

    with _endless(target.model):
        run_samples(target, [warm_up], variants, batch_tokens)
        return [
            {"method": "sweep", "s a sample": seconds_of(run_sweep) / samples},
            {"method": "separate runs", "s a sample": seconds_of(run_one_by_one) / samples},
        ]


@contextmanager
def _endless(model: PreTrainedModel) -> Iterator[None]:
    """No token ends an answer within the block."""
    config = model.generation_config
    assert config is not None
    before = config.eos_token_id
    config.eos_token_id = model.config.get_text_config().vocab_size  # which no logit is for
    try:
        yield
    finally:
        config.eos_token_id = before
