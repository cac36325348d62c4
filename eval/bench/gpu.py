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
from typing import Any, NamedTuple, TypeVar

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
    GpuRow,
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
from keepsight.runtime.methods.lookaheadkv import adapter_fields
from keepsight.runtime.state import Needs, State, prefill
from keepsight.tables import LiveTable, TerminalColumn
from keepsight.train.dataset import Batch
from keepsight.train.importance import ImportanceObjective
from keepsight.train.plan import stored_bytes

STEPS = 16
TURNS = 3
MakeMethod = Callable[[PreTrainedModel], CacheMethod]
Kind = TypeVar("Kind")
Measured = TypeVar("Measured")


def _lookahead(model: PreTrainedModel, **settings: Any) -> CacheMethod:
    return LookaheadKV(budget=BUDGET, **adapter_fields(Lookahead(model, LookaheadSettings(**settings)).adapter()))


def _specontext(model: PreTrainedModel, offload: bool) -> CacheMethod:
    head = RetrievalHead.untrained(model, NONE, trained=CONTEXT).to(model.dtype)
    layers_on_cpu = model.config.num_hidden_layers if offload else 0
    return SpeContext(BUDGET, head, offload=layers_on_cpu)


MAKE_METHOD: dict[str, MakeMethod] = {
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


class Start(NamedTuple):
    """What it costs to read and compress a prompt.

    Attributes:
        seconds: Seconds to the first token.
        share: Of these seconds, those beyond a plain prefill, as a share of the prefill's.
        peak_bytes: The most beyond the weights, while the prompt is read.
    """

    seconds: float
    share: float
    peak_bytes: int


@torch.no_grad()
def timed_start(model: PreTrainedModel, method: CacheMethod, ids: Tensor, turns: int) -> tuple[State, Start]:
    """The state of prompts [B, N] under a method, and its cost: medians of turns, each after a plain prefill.

    One more turn comes first and is dropped, since it loads kernels. The peak is the last turn's.
    """
    states: list[State] = []
    plain_seconds: list[float] = []
    method_seconds: list[float] = []
    peak = 0

    def start() -> None:
        states.append(method.start(model, ids))

    for _ in range(1 + turns):
        states.clear()  # one state at a time is in memory
        plain_seconds.append(seconds_of(lambda: prefill(model, ids, needs=Needs())))
        peak = peak_bytes(lambda: method_seconds.append(seconds_of(start)))
    ratios = [seconds / plain for seconds, plain in zip(method_seconds, plain_seconds, strict=True)]
    return states.pop(), Start(statistics.median(method_seconds[1:]), statistics.median(ratios[1:]) - 1, peak)


def batches_of(model: PreTrainedModel, method: CacheMethod, state: State, tokens: int) -> Callable[[int], State]:
    """A function of a number of rows that makes a batch to decode from, without recordings.

    Its rows are copies of the one-row state, or random entries of `tokens` tokens each where states cannot be joined.
    """
    if can_join(state):
        alone = state.unrecorded()
        return lambda rows: join([alone] * rows)
    return lambda rows: method.compress_state(model, random_state(model, Needs(), rows, tokens)).unrecorded()


class Bench:
    """Measures rows on a device, one model in memory at a time."""

    def __init__(self, device: torch.device, card: Card) -> None:
        self.device = device
        self.card = card
        self._loaded_name = ""
        self._loaded_model: Any = None

    def measure(self, row: GpuRow) -> Figures:
        """The figures of a row; afterwards everything but the model is freed."""
        attention = "flash_attention_2" if row.method == "full, flash-attn" else "sdpa"
        try:
            if row.kind == "attention":
                return self._attention(row)
            if row.kind == "train":
                return self.training_step(self.model(row.model, attention), row)
            return self._generate(self.model(row.model, attention), row)
        finally:
            self.free()

    def free(self) -> None:
        """Free what is not used."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def model(self, shape: str, attention: str = "sdpa") -> Any:
        """A model of one of `SHAPES` with random weights in bfloat16."""
        name = f"{shape} {attention}"
        if self._loaded_name != name:
            self._loaded_name = ""
            self._loaded_model = None
            self.free()
            torch.manual_seed(0)
            options: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": attention}
            with self.device:
                model = AutoModelForCausalLM.from_config(SHAPES[shape], **options)
            self._loaded_name = name
            self._loaded_model = model.requires_grad_(False).eval()
        return self._loaded_model

    @torch.no_grad()
    def _generate(self, model: Any, row: GpuRow) -> Figures:
        method = MAKE_METHOD[row.method](model)
        reader = method.reader(model)
        turns = TURNS if row.tokens < max(TOKENS) else 1
        state, start = timed_start(model, method, random_ids(model, 1, row.tokens), turns)
        figures = Figures(
            first_s=start.seconds,
            share=start.share,
            step_s=_step(reader, state.copy()),
            kv_bytes=state.kv_bytes,
            peak_bytes=start.peak_bytes,
        )
        batch_of = batches_of(model, method, state, row.tokens)
        del state  # a batch of random entries needs its memory

        def decode_batch(rows: int) -> tuple[float, int]:
            seconds: list[float] = []
            peak = peak_bytes(lambda: seconds.append(_step(reader, batch_of(rows))))
            return seconds[0], peak

        figures.rows, figures_of_batch = self.largest_batch(rows_that_fit(row, self.card), decode_batch)
        if figures_of_batch is not None:
            figures.batch_s, figures.batch_peak_bytes = figures_of_batch
        return figures

    def largest_batch(self, rows: int, measure_batch: Callable[[int], Measured]) -> tuple[int, Measured | None]:
        """The rows of the largest batch that fits, of at most `rows`, and what `measure_batch` finds in it.

        Where memory runs out, an eighth of the rows is left out; 0 and None where not even one fits.
        """
        while rows:
            self.free()
            try:
                return rows, measure_batch(rows)
            except torch.OutOfMemoryError:
                rows -= max(1, rows // 8)
        return 0, None

    def training_step(self, model: Any, row: GpuRow) -> Figures:
        """Seconds of a training step of a lookahead module, against a prefill."""
        objective = ImportanceObjective(Lookahead(model, LookaheadSettings()))
        optimizer = torch.optim.AdamW(objective.trained_parameters(), lr=1e-4, weight_decay=0.0, fused=True)
        ids = random_ids(model, 1, row.tokens + ANSWER)

        def step() -> None:
            objective.loss(Batch(ids[:, : row.tokens], ids[:, row.tokens :])).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        prefill_seconds = median_seconds(lambda: prefill(model, ids, needs=Needs()), TURNS)
        step_seconds_of_turns = []
        for _ in range(TURNS):
            step_seconds_of_turns.append(seconds_of(step))
        step_seconds = statistics.median(step_seconds_of_turns)
        return Figures(
            first_s=prefill_seconds,
            share=step_seconds / prefill_seconds,
            step_s=step_seconds,
            peak_bytes=peak_bytes(step),
        )

    @torch.no_grad()
    def _attention(self, row: GpuRow) -> Figures:
        config = SHAPES[row.model]
        query = self._random(config.num_attention_heads, row.tokens, config.head_dim)
        key = self._random(config.num_key_value_heads, row.tokens, config.head_dim)
        value = self._random(config.num_key_value_heads, row.tokens, config.head_dim)
        attend_all = _kernel(row.method, query, key, value)
        attend_last = _kernel(row.method, query[:, :, -1:], key, value)
        return Figures(
            first_s=median_seconds(attend_all, 10),
            step_s=median_seconds(attend_last, 50),
            kv_bytes=key.nbytes + value.nbytes,
            peak_bytes=peak_bytes(attend_all),
        )

    def _random(self, heads: int, tokens: int, width: int) -> Tensor:
        return torch.randn(1, heads, tokens, width, device=self.device, dtype=torch.bfloat16)


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
    # Both libraries have heads behind tokens.
    query = query.transpose(1, 2).contiguous()
    key = key.transpose(1, 2).contiguous()
    value = value.transpose(1, 2).contiguous()
    if name == "flash-attn":
        return lambda: library.flash_attn_func(query, key, value, causal=True)
    if query.shape[1] == 1:
        return lambda: library.single_decode_with_kv_cache(query[0, 0], key[0], value[0])
    return lambda: library.single_prefill_with_kv_cache(query[0], key[0], value[0], causal=True)


FLOORS = ("first_s", "step_s", "batch_s")
COLUMNS = (
    "card",
    *(column.name for column in fields(GpuRow)),
    *(column.name for column in fields(Figures)),
    *(f"{name}_roofline" for name in FLOORS),
    *("flops", "bandwidth", "torch", "date", "attempts", "note"),
)
_ATTEMPTS = 2
"""Maximum attempts at a row, which may end the process or run out of time each time."""


class Results:
    """The rows of a CSV, of any card; `write` writes the whole file, atomically.

    A row is a dataclass whose fields are among the columns; it is done once it has a value in the column `done`, or a
    note.
    """

    def __init__(self, path: Path, columns: Sequence[str] = COLUMNS, done: str = "first_s") -> None:
        self.path = path
        self.columns = columns
        self.done = done
        self.lines: list[dict[str, Any]] = []
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                self.lines = list(csv.DictReader(file))
            if any(set(columns) != line.keys() for line in self.lines):
                raise UserError(
                    f"{path}: its columns are not {', '.join(columns)}; name another file with --out",
                    field="out",
                    code="file",
                )

    def line(self, card: str, row: Any) -> dict[str, Any]:
        """A row's line, or an empty one that is not in the table yet."""
        key = {"card": card}
        for name, value in asdict(row).items():
            key[name] = str(value)
        for line in self.lines:
            if key.items() <= line.items():
                return line
        return {**dict.fromkeys(self.columns, ""), **key}

    def missing(self, card: str, rows: Sequence[Kind]) -> list[Kind]:
        """The rows that have neither figures nor a note, in order of the number of attempts so far."""
        missing = []
        for attempts in range(_ATTEMPTS):
            for row in rows:
                line = self.line(card, row)
                is_measured = line[self.done] or line["note"]
                if not is_measured and int(line["attempts"] or 0) == attempts:
                    missing.append(row)
        return missing

    def write(self, card: str, row: Any, **values: Any) -> None:
        """Set columns of a row's line."""
        line = self.line(card, row)
        if not any(line is other for other in self.lines):
            self.lines.append(line)
        for name, value in values.items():
            line[name] = "" if value is None else str(value)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_csv(self.path, self.columns, self.lines)


def measure_missing(
    results: Results,
    card: Card,
    rows: Sequence[Kind],
    seconds: float,
    *,
    figures_of: Callable[[Kind], tuple[Any, str | None]],
    floor_of: Callable[[Kind, int | None], Any],
    line_of: Callable[[Kind, Any, Any, str | None], str],
    floors: Sequence[str],
    **columns: str,
) -> int:
    """Measure the rows that are missing, none begun after `seconds`; returns how many are left.

    `figures_of` measures a row and says what went wrong, `floor_of` is its roofline in a batch, `line_of` shows both;
    `floors` are the figures that have a roofline, and `columns` the values of further columns.
    """
    start = time.monotonic()
    missing = results.missing(card.name, rows)
    for index, row in enumerate(missing):
        if time.monotonic() - start > seconds:
            return len(missing) - index
        results.write(card.name, row, attempts=int(results.line(card.name, row)["attempts"] or 0) + 1)
        figures, note = figures_of(row)
        least = floor_of(row, figures.rows)
        rooflines = {f"{name}_roofline": getattr(least, name) for name in floors}
        results.write(
            card.name,
            row,
            **asdict(figures),
            **rooflines,
            **columns,
            flops=card.flops,
            bandwidth=card.bandwidth,
            torch=torch.__version__,
            date=time.strftime("%Y-%m-%d"),
            note=note,
        )
        print(line_of(row, figures, least, note), flush=True)
        if note and torch.cuda.is_available():
            torch.cuda.synchronize()  # ends the process where an error has left the device unusable
    return 0


def run(bench: Bench, results: Results, rows: Sequence[GpuRow], seconds: float) -> int:
    """Measure the rows that are missing, none begun after `seconds`; returns how many are left."""

    def figures_of(row: GpuRow) -> tuple[Figures, str | None]:
        note = row.note
        figures = Figures()
        try:
            if not note:
                figures = bench.measure(row)
        except (UserError, RuntimeError, ImportError) as error:  # memory that runs out is a RuntimeError
            note = one_line(f"{type(error).__name__}: {error}", 200)
        return figures, note

    def floor_of(row: GpuRow, count: int | None) -> Figures:
        return roofline(row, bench.card, count)

    return measure_missing(
        results,
        bench.card,
        rows,
        seconds,
        figures_of=figures_of,
        floor_of=floor_of,
        line_of=text_of,
        floors=FLOORS,
    )


TABLE = LiveTable(
    [
        TerminalColumn("model", width=13, is_text=True),
        TerminalColumn("tokens", "d"),
        TerminalColumn("what", width=22, is_text=True),
        TerminalColumn("first s", width=16),
        TerminalColumn("share", ".3f"),
        TerminalColumn("step ms", width=16),
        TerminalColumn("rows", "d", width=5),
        TerminalColumn("tokens/s", width=16),
        TerminalColumn("KV", width=10),
        TerminalColumn("peak", width=10),
        TerminalColumn("note", is_text=True),
    ]
)


def text_of(row: GpuRow, figures: Figures, least: Figures, note: str | None = None) -> str:
    """A line: each figure, and its roofline behind it."""
    cells = {
        "model": row.model,
        "tokens": row.tokens,
        "what": row.method if row.kind == "generate" else f"{row.kind}: {row.method}",
    }
    return TABLE.line(cells | figure_cells(figures, least, note))


def figure_cells(figures: Any, least: Any, note: str | None) -> dict[str, Any]:
    """The cells of a line that `Figures` and `gpu_day.DayFigures` share; `least` are the rooflines."""
    kv_bytes = figures.kv_bytes or least.kv_bytes
    peak = figures.peak_bytes or least.peak_bytes
    return {
        "first s": with_roofline(figures.first_s, least.first_s),
        "share": figures.share,
        "step ms": with_roofline(milliseconds(figures.step_s), milliseconds(least.step_s)),
        "rows": figures.rows or least.rows,
        "tokens/s": with_roofline(
            tokens_per_second(figures.rows, figures.batch_s), tokens_per_second(least.rows, least.batch_s)
        ),
        "KV": size_text(kv_bytes) if kv_bytes else None,
        "peak": size_text(peak) if peak else None,
        "note": note,
    }


def with_roofline(value: float | None, floor: float | None) -> str:
    """A figure and its roofline, `value / floor`; empty where there is neither."""
    if value is None and floor is None:
        return ""
    return f"{_number(value)} / {_number(floor)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def milliseconds(seconds: float | None) -> float | None:
    """Seconds as milliseconds; None where nothing was measured."""
    return None if seconds is None else seconds * 1000


def tokens_per_second(rows: int | None, step_seconds: float | None) -> float | None:
    """What a batch of so many rows decodes in a second; None where it was not measured."""
    return rows / step_seconds if rows and step_seconds else None


def card_line(card: Card) -> str:
    """A card's rates, its memory, and the CPU memory beside it."""
    rates = f"{card.flops / 1e12:.0f} TFLOP/s in bfloat16, {card.bandwidth / 1e12:.2f} TB/s"
    return f"{card.name}: {rates}, {size_text(card.memory)}; beside it {size_text(card.host)}"


def dry_lines(card: Card, missing: Sequence[GpuRow]) -> Iterator[str]:
    """What would be measured: shapes, bytes, and the roofline of each figure."""
    yield card_line(card)
    for name, config in SHAPES.items():
        heads = f"{config.num_attention_heads} query and {config.num_key_value_heads} KV heads of {config.head_dim}"
        entry, _, _ = memory_and_traffic("full", config, 1)
        sizes = f"{size_text(stored_bytes(outline(name)))} of weights, {entry} bytes of KV entries a token"
        yield f"{name}: {config.num_hidden_layers} layers of {config.hidden_size}, {heads}, {sizes}"
    yield f"budget {BUDGET}; {len(missing)} rows to measure; figure / roofline; KV and peak: bytes known to be stored"
    yield TABLE.heading()
    for row in missing:
        yield text_of(row, Figures(), roofline(row, card), row.note)


def new_parser(module: str, docstring: str | None, *, card: str, out: str, seconds: float) -> argparse.ArgumentParser:
    """The options of a benchmark of GPUs that measures the rows of a CSV; `card`, `out` and `seconds` are defaults."""
    about = (docstring or "").partition(".\n")[0]
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("--dry", action="store_true", help="print what would be measured, by the data sheet of --card")
    parser.add_argument("--card", default=card, help=f"card of --dry: {', '.join(CARDS)}")
    parser.add_argument("--out", default=out, help=f"the CSV (default {out})")
    parser.add_argument("--seconds", type=float, default=seconds, help=f"begin no row after these (default {seconds})")
    parser.add_argument("--only", default="", help="rows whose line has this text, such as snapkv")
    return parser


def run_table(
    options: argparse.Namespace,
    results: Results,
    rows: Sequence[Kind],
    heading: str,
    dry_lines: Callable[[Card, Sequence[Kind]], Iterator[str]],
    measure: Callable[[torch.device, Card, Sequence[Kind]], int],
) -> None:
    """Measure the rows of a CSV on this machine's GPU, or print what would be measured."""
    if options.dry or not torch.cuda.is_available():
        card = known_card(options.card)
        reason = "" if options.dry else ", as torch finds no GPU here"
        print(f"a dry run{reason}")
        print(*dry_lines(card, results.missing(card.name, rows)), sep="\n")
        return
    device = torch.device("cuda", 0)
    card = measured_card(device)
    print(f"{card}\n{heading}", flush=True)
    missing = measure(device, card, rows)
    advice = "; call again for them" if missing else ""
    print(f"{options.out}: {missing} rows are left{advice}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or print what would be measured; returns 2 where an argument is refused, else 0."""
    parser = new_parser("keepsight.eval.bench.gpu", __doc__, card="H100", out="results/gpu.csv", seconds=420)
    options = parser.parse_args(arguments)
    try:
        results = Results(Path(at_home(options.out)))
        rows = [row for row in all_rows() if options.only in text_of(row, Figures(), Figures())]

        def measure(device: torch.device, card: Card, rows: Sequence[GpuRow]) -> int:
            return run(Bench(device, card), results, rows, options.seconds)

        run_table(options, results, rows, TABLE.heading(), dry_lines, measure)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
