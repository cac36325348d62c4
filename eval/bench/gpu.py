"""What methods cost on a GPU, in the shapes of two 8B models with random weights, one row after the other.

    make bench-gpu DRY=1                      # what it would measure: shapes, bytes, rooflines; needs no GPU
    python -m keepsight.eval.bench.gpu        # from a checkout or a bare copy of it; needs no hydra

Each row is written to a CSV as soon as it is measured, and a later call measures the missing rows. A row is compared
with its roofline: the time of its arithmetic or of its memory traffic on the card, whichever is longer.
"""

import argparse
import csv
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from keepsight.errors import UserError, one_line
from keepsight.eval.bench.measure import median_seconds, peak_bytes, random_ids, read_greedily, seconds_of
from keepsight.eval.bench.offload import random_state
from keepsight.eval.bench.roofline import (
    ANSWER,
    BUDGET,
    CARDS,
    CONTEXT,
    KERNELS,
    SHAPES,
    TOKENS,
    Card,
    Figures,
    Row,
    all_rows,
    known_card,
    measured_card,
    memory_and_traffic,
    outline,
    roofline,
    rows_that_fit,
)
from keepsight.files import at_home, size_text, write_csv
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.models.retrieval_head import NONE, RetrievalHead
from keepsight.runtime.generate import CacheMethod, FullCache
from keepsight.runtime.join import can_join, join
from keepsight.runtime.methods import AdaKV, LookaheadKV, Quest, SnapKV, SpeCache, SpeContext
from keepsight.runtime.methods.lookaheadkv import parts_of
from keepsight.runtime.state import Needs, State, prefill
from keepsight.train.dataset import Batch
from keepsight.train.importance import ImportanceObjective
from keepsight.train.plan import stored_bytes

STEPS, TURNS = 16, 3
MakeMethod = Callable[[PreTrainedModel], CacheMethod]


def _lookahead(model: PreTrainedModel, **settings: Any) -> CacheMethod:
    return LookaheadKV(budget=BUDGET, **parts_of(Lookahead(model, LookaheadSettings(**settings)).adapter()))


def _specontext(model: PreTrainedModel, offload: bool) -> CacheMethod:
    head = RetrievalHead.untrained(model, NONE, trained=CONTEXT).to(model.dtype)
    return SpeContext(BUDGET, head, offload=model.config.num_hidden_layers if offload else 0)


_MAKE: dict[str, MakeMethod] = {
    "full": lambda model: FullCache(),
    "full, flash-attn": lambda model: FullCache(),
    "snapkv": lambda model: SnapKV(BUDGET),
    "adakv": lambda model: AdaKV(BUDGET),
    "lookaheadkv, uniform": _lookahead,
    "lookaheadkv, shared": partial(_lookahead, queries="max", floor=0.2, sharing="model", value_norm=True),
    "specache": lambda model: SpeCache(),
    "specontext": partial(_specontext, offload=False),
    "specontext, offloaded": partial(_specontext, offload=True),
    "quest": lambda model: Quest(BUDGET),
}


class Bench:
    """Measures rows on a device, one model in memory at a time."""

    def __init__(self, device: torch.device, card: Card) -> None:
        self.device, self.card = device, card
        self._loaded: tuple[str, Any] = "", None

    def measure(self, row: Row) -> Figures:
        """The figures of a row; afterwards everything but the model is freed."""
        try:
            if row.kind == "attention":
                return self._attention(row)
            return self._train(self._model(row), row) if row.kind == "train" else self._generate(self._model(row), row)
        finally:
            self._free()

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _model(self, row: Row) -> Any:
        attention = "flash_attention_2" if row.method == "full, flash-attn" else "sdpa"
        if self._loaded[0] != (key := f"{row.model} {attention}"):
            self._loaded = "", None
            self._free()
            torch.manual_seed(0)
            given: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": attention}
            with self.device:
                model = AutoModelForCausalLM.from_config(SHAPES[row.model], **given)
            self._loaded = key, model.requires_grad_(False).eval()
        return self._loaded[1]

    @torch.no_grad()
    def _generate(self, model: Any, row: Row) -> Figures:
        method, ids = _MAKE[row.method](model), random_ids(model, 1, row.tokens)
        reader, states, figures = method.reader(model), list[State](), Figures()
        read_greedily(reader, method.start(model, ids[:, : 2 * BUDGET]), 2)  # loads kernels

        def start() -> None:
            states[:] = []
            states.append(method.start(model, ids))

        plain, own = list[float](), list[float]()
        for _ in range(TURNS if row.tokens < max(TOKENS) else 1):
            states[:] = []
            plain.append(seconds_of(lambda: prefill(model, ids, needs=Needs())))
            figures.peak_bytes = peak_bytes(lambda: own.append(seconds_of(start)))
        figures.first_s = statistics.median(own)
        figures.share = statistics.median(one / other - 1 for one, other in zip(own, plain, strict=True))
        figures.kv_bytes, figures.step_s = states[0].kv_bytes, _step(reader, states[0].copy())
        figures.rows = rows_that_fit(row, self.card)
        if not can_join(states[0]):
            states[:] = []  # a batch is made of random entries

        def decode() -> None:
            if states:
                state = join(states * (figures.rows or 0))
            else:
                state = method.compress_state(model, random_state(model, Needs(), figures.rows or 0, row.tokens))
            figures.batch_s = _step(reader, state.unrecorded())

        while figures.rows and figures.batch_s is None:
            try:
                figures.batch_peak_bytes = peak_bytes(decode)
            except torch.OutOfMemoryError:
                figures.rows -= max(1, figures.rows // 8)
            self._free()
        return figures

    def _train(self, model: Any, row: Row) -> Figures:
        objective = ImportanceObjective(Lookahead(model, LookaheadSettings()))
        learned = objective.trained_parameters()
        optimizer = torch.optim.AdamW(learned, lr=1e-4, weight_decay=0.0, fused=True)
        ids = random_ids(model, 1, row.tokens + ANSWER)

        def step() -> None:
            objective.loss(Batch(ids[:, : row.tokens], ids[:, row.tokens :])).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        first = median_seconds(lambda: prefill(model, ids, needs=Needs()), TURNS)
        taken = statistics.median(seconds_of(step) for _ in range(TURNS))
        return Figures(first, taken / first, taken, peak_bytes=peak_bytes(step))

    @torch.no_grad()
    def _attention(self, row: Row) -> Figures:
        config = SHAPES[row.model]
        queries, kv_heads = config.num_attention_heads, config.num_key_value_heads

        def made(heads: int, tokens: int) -> Tensor:
            return torch.randn(1, heads, tokens, config.head_dim, device=self.device, dtype=torch.bfloat16)

        query, key, value = (made(heads, row.tokens) for heads in (queries, kv_heads, kv_heads))
        whole, one = _kernel(row.method, query, key, value), _kernel(row.method, query[:, :, -1:], key, value)
        seconds, peak = (median_seconds(whole, 10), median_seconds(one, 50)), peak_bytes(whole)
        return Figures(seconds[0], None, seconds[1], kv_bytes=key.nbytes + value.nbytes, peak_bytes=peak)


def _step(reader: Any, state: State) -> float:
    """Seconds of a step: a turn's mean, in which the CPU waits only for the last step; the median of the turns."""
    states = [read_greedily(reader, state, 3)]
    return median_seconds(lambda: states.append(read_greedily(reader, states.pop(), STEPS)), TURNS) / STEPS


def _kernel(name: str, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Any]:
    """Causal attention of the last queries [1, H, q, d] to keys and values [1, K, N, d]."""
    if name == "sdpa":
        causal = query.shape[2] > 1
        attend = functional.scaled_dot_product_attention
        return lambda: attend(query, key, value, is_causal=causal, enable_gqa=True)
    library: Any = import_module(KERNELS[name] or "")
    by_token = [each.transpose(1, 2).contiguous() for each in (query, key, value)]
    if name == "flash-attn":
        return lambda: library.flash_attn_func(*by_token, causal=True)
    only = [each[0] for each in by_token]
    if query.shape[2] == 1:
        return lambda: library.single_decode_with_kv_cache(only[0][0], *only[1:])
    return lambda: library.single_prefill_with_kv_cache(*only, causal=True)


FLOORS = ("first_s", "step_s", "batch_s")
COLUMNS = ("card", *(each.name for each in fields(Row)), *(each.name for each in fields(Figures)))
COLUMNS += (*(f"{name}_roofline" for name in FLOORS), "flops", "bandwidth", "torch", "date", "attempts", "note")
_ATTEMPTS = 2
"""Maximum attempts at a row, which may end the process or run out of time each time."""


class Results:
    """The rows of a CSV, of any card; `write` writes the whole file, atomically."""

    def __init__(self, path: Path) -> None:
        self.path, self.lines = path, list[dict[str, Any]]()
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                self.lines = [*csv.DictReader(file)]
            if any({*COLUMNS} ^ line.keys() for line in self.lines):
                raise UserError(f"{path}: its columns are not {', '.join(COLUMNS)}; name another file with --out")

    def line(self, card: str, row: Row) -> dict[str, Any]:
        """A row's line, or an empty one that is not in the table yet."""
        key = {"card": card} | {name: str(value) for name, value in asdict(row).items()}
        return next((each for each in self.lines if key.items() <= each.items()), dict.fromkeys(COLUMNS, "") | key)

    def missing(self, card: str, rows: Sequence[Row]) -> list[Row]:
        """The rows that have neither figures nor a note, in order of the number of attempts so far."""
        lines = [(self.line(card, row), row) for row in rows]
        begun = [(int(line["attempts"] or 0), row) for line, row in lines if not (line["first_s"] or line["note"])]
        return [row for attempts, row in sorted(begun, key=lambda each: each[0]) if attempts < _ATTEMPTS]

    def write(self, card: str, row: Row, **values: Any) -> None:
        """Set columns of a row's line."""
        line = self.line(card, row)
        if not any(each is line for each in self.lines):
            self.lines.append(line)
        line |= {name: "" if value is None else str(value) for name, value in values.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_csv(self.path, COLUMNS, self.lines)


def run(bench: Bench, results: Results, rows: Sequence[Row], seconds: float) -> int:
    """Measure the rows that are missing, none begun after `seconds`; returns how many are left."""
    card, began, missing = bench.card, time.monotonic(), results.missing(bench.card.name, rows)
    for place, row in enumerate(missing):
        if time.monotonic() - began > seconds:
            return len(missing) - place
        results.write(card.name, row, attempts=int(results.line(card.name, row)["attempts"] or 0) + 1)
        figures, note = Figures(), row.note
        try:
            figures = figures if note else bench.measure(row)
        except (UserError, RuntimeError, ImportError) as error:  # memory that runs out is a RuntimeError
            note = one_line(f"{type(error).__name__}: {error}", 200)
        least = roofline(row, card, figures.rows)
        about = {"flops": card.flops, "bandwidth": card.bandwidth, "torch": torch.__version__, "note": note}
        floors = {f"{name}_roofline": getattr(least, name) for name in FLOORS}
        results.write(card.name, row, **asdict(figures), **floors, **about, date=time.strftime("%Y-%m-%d"))
        print(text_of(row, figures, least, note), flush=True)
        if note and bench.device.type == "cuda":
            torch.cuda.synchronize()  # ends the process where an error has left the device unusable
    return 0


WIDTHS = {"first s": 18, "share": 8, "step ms": 18, "rows": 5, "tokens/s": 18, "KV": 12, "peak": 12}
HEAD = f"{'model':<13}{'tokens':>7}  {'what':<24}" + "".join(f"{name:>{width}}" for name, width in WIDTHS.items())


def text_of(row: Row, figures: Figures, least: Figures, note: str | None = None) -> str:
    """A line: each figure, and its roofline behind it."""

    def pair(own: float | None, floor: float | None) -> str:
        both = ["-" if each is None else f"{each:.4g}" for each in (own, floor)]
        return "" if both == ["-", "-"] else " / ".join(both)

    def speed(of: Figures) -> float | None:
        return of.rows / of.batch_s if of.rows and of.batch_s else None

    steps = (None if each.step_s is None else each.step_s * 1000 for each in (figures, least))
    sizes = (getattr(figures, name) or getattr(least, name) for name in ("kv_bytes", "peak_bytes"))
    share = "" if figures.share is None else f"{figures.share:.3f}"
    cells = (
        *(pair(figures.first_s, least.first_s), share, pair(*steps), figures.rows or least.rows or ""),
        *(pair(speed(figures), speed(least)), *(size_text(each) if each else "" for each in sizes)),
    )
    what = row.method if row.kind == "generate" else f"{row.kind}: {row.method}"
    aligned = "".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS.values(), strict=True))
    return f"{row.model:<13}{row.tokens:>7}  {what:<24}{aligned}" + (f"  {note}" if note else "")


def dry_lines(card: Card, missing: Sequence[Row]) -> Iterator[str]:
    """What would be measured: shapes, bytes, and the roofline of each figure."""
    rates = f"{card.flops / 1e12:.0f} TFLOP/s in bfloat16, {card.bandwidth / 1e12:.2f} TB/s"
    yield f"{card.name}: {rates}, {size_text(card.memory)}; beside it {size_text(card.host)}"
    for name, config in SHAPES.items():
        heads = f"{config.num_attention_heads} query and {config.num_key_value_heads} KV heads of {config.head_dim}"
        entry = memory_and_traffic("full", config, 1)[0]
        sizes = f"{size_text(stored_bytes(outline(name)))} of weights, {entry} bytes of KV entries a token"
        yield f"{name}: {config.num_hidden_layers} layers of {config.hidden_size}, {heads}, {sizes}"
    yield f"budget {BUDGET}; {len(missing)} rows to measure; figure / roofline; KV and peak: bytes known to be stored"
    yield HEAD
    for row in missing:
        yield text_of(row, Figures(), roofline(row, card), row.note)


def main(given: Sequence[str] | None = None) -> int:
    """Measure, or print what would be measured; returns 2 where an argument is refused, else 0."""
    about = (__doc__ or "").partition(".\n")[0]
    parser = argparse.ArgumentParser(prog="python -m keepsight.eval.bench.gpu", description=about)
    parser.add_argument("--dry", action="store_true", help="print what would be measured, by the data sheet of --card")
    parser.add_argument("--card", default="H100", help=f"card of --dry: {', '.join(CARDS)}")
    parser.add_argument("--out", default="results/gpu.csv", help="the CSV (default results/gpu.csv)")
    parser.add_argument("--seconds", type=float, default=420, help="begin no row after these (default 420)")
    parser.add_argument("--only", default="", help="rows whose line has this text, such as snapkv")
    options = parser.parse_args(given)
    try:
        results = Results(Path(at_home(options.out)))
        rows = [row for row in all_rows() if options.only in text_of(row, Figures(), Figures())]
        if options.dry or not torch.cuda.is_available():
            card = known_card(options.card)
            print("a dry run" if options.dry else "a dry run, as torch finds no GPU here")
            print(*dry_lines(card, results.missing(card.name, rows)), sep="\n")
            return 0
        device = torch.device("cuda", 0)
        bench = Bench(device, measured_card(device))
        print(f"{bench.card}\n{HEAD}", flush=True)
        left = run(bench, results, rows, options.seconds)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{options.out}: {left} rows are left" + ("; call again for them" if left else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
