"""What a GPU that is at hand for minutes is used for: tests, then speeds beside transformers' own, in order of worth.

    make gpu-day DRY=1                            # the rows, their bytes and rooflines; needs no GPU
    python -m keepsight.eval.bench.gpu_day        # from a checkout or a bare copy of it; needs no hydra

A model in the shape of Llama-3.1-8B with random weights, in bfloat16. Each row is written to a CSV when it is measured;
a later call measures the missing rows. Times are medians of five turns after one that warms up.
"""

import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from typing_extensions import override

from keepsight.errors import UserError, one_line
from keepsight.eval.bench import gpu
from keepsight.eval.bench.measure import median_seconds, random_ids, read_greedily, seconds_of
from keepsight.eval.bench.roofline import BUDGET, Card, GpuRow, roofline, rows_that_fit
from keepsight.files import at_home
from keepsight.runtime.attention import Reader
from keepsight.runtime.generate import stop_after
from keepsight.runtime.state import State
from keepsight.runtime.static_step import static_step
from keepsight.tables import LiveTable, TerminalColumn

MODEL = "llama-3.1-8b"
TURNS = 5
STEPS = 16
BATCH = 8
ROOM = 8
"""Steps beyond the timed ones, which warm up or are profiled."""
TEST_SECONDS = 120
TESTS = ("test_graph.py", "test_kernels.py", "test_methods.py")
"""Files of tests/gpu, those of what has never run on a GPU first."""
TRANSFORMERS = "transformers"
TRAINED_TOKENS = 16384


@dataclass(frozen=True)
class DayRow:
    """One measurement.

    Attributes:
        part: `tests`, `decoding`, `training` or `vllm`.
        method: The method, or `transformers`.
        tokens: Tokens of each prompt.
        decoding: `eager`, `graph`, `static, compiled` or `generate_batch`.
    """

    part: str
    method: str = ""
    tokens: int = 0
    decoding: str = ""


@dataclass
class DayFigures:
    """The figures of a row; None where a row has no such figure.

    Attributes:
        first_s: Seconds to the first token of one prompt; of training, of a prefill; of tests, all seconds.
        share: Of these seconds, those beyond a plain prefill; of training, prefills that a step takes.
        step_s: Seconds of a decoding step of one row, or of a training step.
        busy_s: Seconds of such a step in which the GPU works, by PyTorch's profiler.
        launches: Kernels of such a step.
        step8_s: Seconds of a decoding step of `BATCH` rows.
        rows: Rows of the largest batch.
        batch_s: Seconds of its decoding step.
        capture_s: Seconds to load a state of one row and to capture its step.
        load_s: Seconds to load a state of one row where the graph is there.
        kv_bytes: Bytes of keys and values of one row.
        peak_bytes: The most beyond the weights, while the prompt is read.
    """

    first_s: float | None = None
    share: float | None = None
    step_s: float | None = None
    busy_s: float | None = None
    launches: int | None = None
    step8_s: float | None = None
    rows: int | None = None
    batch_s: float | None = None
    capture_s: float | None = None
    load_s: float | None = None
    kv_bytes: int | None = None
    peak_bytes: int | None = None


FLOORS = ("first_s", "step_s", "step8_s", "batch_s")
COLUMNS = (
    "card",
    *(column.name for column in fields(DayRow)),
    *(column.name for column in fields(DayFigures)),
    *(f"{name}_roofline" for name in FLOORS),
    *("flops", "bandwidth", "torch", "transformers", "date", "attempts", "note"),
)


def all_rows() -> list[DayRow]:
    """All measurements, the most valuable first."""
    rows = [DayRow("tests")]
    uniform = "lookaheadkv, uniform"
    for method in (uniform, "full"):
        rows += [DayRow("decoding", method, 8192, "eager"), DayRow("decoding", method, 8192, "graph")]
    rows.append(DayRow("decoding", TRANSFORMERS, 8192, "eager"))
    for method in ("snapkv", "lookaheadkv, shared"):
        rows += [DayRow("decoding", method, 8192, "eager"), DayRow("decoding", method, 8192, "graph")]
    rows += [
        DayRow("decoding", TRANSFORMERS, 8192, "generate_batch"),
        DayRow("decoding", TRANSFORMERS, 8192, "static, compiled"),
    ]
    for method in (uniform, "full", "snapkv", "lookaheadkv, shared"):
        rows += [DayRow("decoding", method, 32768, "eager"), DayRow("decoding", method, 32768, "graph")]
    for method in ("quest", "specontext", "specontext, offloaded", "specache"):
        rows.append(DayRow("decoding", method, 8192, "eager"))
    for decoding in ("eager", "generate_batch", "static, compiled"):
        rows.append(DayRow("decoding", TRANSFORMERS, 32768, decoding))
    rows += [DayRow("training", "lookahead module", TRAINED_TOKENS), DayRow("vllm", "full", 8192)]
    return rows


def floor_of(row: DayRow, card: Card, rows: int | None = None) -> DayFigures:
    """Lower bounds of a row's figures on a card, in a largest batch of `rows`."""
    if row.part == "training":
        least = roofline(GpuRow("train", MODEL, row.tokens, row.method), card)
        return DayFigures(
            least.first_s, least.share, least.step_s, kv_bytes=least.kv_bytes, peak_bytes=least.peak_bytes
        )
    if row.part != "decoding":
        return DayFigures()
    method = "full" if row.method == TRANSFORMERS else row.method
    bench_row = GpuRow("generate", MODEL, row.tokens, method)
    least = roofline(bench_row, card, rows or _largest(row, card))
    floor = DayFigures(
        first_s=least.first_s,
        step_s=least.step_s,
        step8_s=roofline(bench_row, card, BATCH).batch_s,
        kv_bytes=least.kv_bytes,
    )
    if row.method != TRANSFORMERS:  # whose largest batch would take a prefill of all rows for each turn
        floor.rows = least.rows
        floor.batch_s = least.batch_s
    return floor


def _largest(row: DayRow, card: Card) -> int:
    """Rows of the largest batch; a graph has a copy of the entries, which takes half of the free memory at most."""
    method = "full" if row.method == TRANSFORMERS else row.method
    rows = rows_that_fit(GpuRow("generate", MODEL, row.tokens, method), card)
    return max(rows * 3 // 10, 1) if row.decoding == "graph" and method == "full" else rows


class DayBench(gpu.Bench):
    """Measures the rows of a day."""

    def figures(self, row: DayRow) -> tuple[DayFigures, str]:
        """The figures of a row and a note; afterwards everything but the model is freed."""
        try:
            if row.part == "tests":
                return self._tests()
            if row.part == "vllm":
                return DayFigures(), _vllm_note()
            model = self.model(MODEL)
            if row.part == "training":
                step = self.training_step(model, GpuRow("train", MODEL, row.tokens, row.method))
                return DayFigures(step.first_s, step.share, step.step_s, peak_bytes=step.peak_bytes), ""
            if row.method == TRANSFORMERS:
                return self._transformers(model, row), ""
            return self._decoding(model, row), ""
        finally:
            self.free()

    def _tests(self) -> tuple[DayFigures, str]:
        """Run the tests of what needs a GPU; the note is the last line of their output."""
        root = Path(__file__).resolve().parents[2]
        paths = [str(root / "tests" / "gpu" / name) for name in TESTS]
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--tb=line", *paths]
        start = time.perf_counter()
        with subprocess.Popen(
            command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                output, _ = process.communicate(timeout=TEST_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
                output += f"\nstopped after {TEST_SECONDS} s"
        print(output, flush=True)
        return DayFigures(first_s=time.perf_counter() - start), summary(output)

    @torch.no_grad()
    def _decoding(self, model: Any, row: DayRow) -> DayFigures:
        method = gpu.MAKE_METHOD[row.method](model)
        reader = method.reader(model)
        ids = random_ids(model, 1, row.tokens)
        figures = DayFigures()
        if row.decoding == "eager":
            state, start = gpu.timed_start(model, method, ids, TURNS)
            figures.first_s = start.seconds
            figures.share = start.share
            figures.peak_bytes = start.peak_bytes
        else:
            state = method.start(model, ids)
        figures.kv_bytes = state.kv_bytes
        self._time_alone(reader, state.unrecorded(), row, figures)
        batch_of = gpu.batches_of(model, method, state, row.tokens)
        del state  # a batch of random entries needs its memory

        def batch_step_seconds(rows: int) -> float:
            return self._step_seconds(reader, batch_of(rows), row)

        figures.step8_s = batch_step_seconds(BATCH)
        figures.rows, figures.batch_s = self.largest_batch(_largest(row, self.card), batch_step_seconds)
        return figures

    def _time_alone(self, reader: Reader, state: State, row: DayRow, figures: DayFigures) -> None:
        """Steps of one row, and the GPU's work in one."""
        if row.decoding == "graph":
            seconds = [seconds_of(lambda: self._with_steps(reader, state, lambda advance: None)) for _ in range(3)]
            figures.capture_s = seconds[0]
            figures.load_s = statistics.median(seconds[1:])
        figures.step_s = self._step_seconds(reader, state.copy(), row)
        if self.device.type == "cuda":
            self._in_steps(reader, state.copy(), row, partial(_profile, figures))

    def _step_seconds(self, reader: Reader, state: State, row: DayRow) -> float:
        seconds: list[float] = []

        def time_steps(advance: Callable[[], None]) -> None:
            seconds.append(median_seconds(lambda: _repeat(advance, STEPS), TURNS) / STEPS)

        self._in_steps(reader, state, row, time_steps)
        return seconds[0]

    def _in_steps(
        self, reader: Reader, state: State, row: DayRow, action: Callable[[Callable[[], None]], None]
    ) -> None:
        """Call an action with a function that runs one step after a state, whose cache grows."""
        if row.decoding == "graph":
            self._with_steps(reader, state, action)
            return
        states = [state]

        def advance() -> None:
            states.append(read_greedily(reader, states.pop(), 1))

        action(advance)

    def _with_steps(self, reader: Reader, state: State, action: Callable[[Callable[[], None]], None]) -> None:
        """The same with static steps; on a CPU they are not captured.

        Raises:
            UserError: they cannot be captured.
        """
        criteria = stop_after((TURNS + 1) * STEPS + ROOM, None)
        options: dict[str, Any] = {"do_sample": False, "is_streamed": False, "pad_token": 0}
        is_gpu = self.device.type == "cuda"
        with static_step(reader, state, 0, criteria, None, **options, without_graph=not is_gpu) as step:
            if step is None:
                raise UserError("decoded without a CUDA graph: the log says why", field="graph", code="state")
            action(partial(step.advance, reader))

    @torch.no_grad()
    def _transformers(self, model: PreTrainedModel, row: DayRow) -> DayFigures:
        """The same by transformers alone: a prompt, then `BATCH` prompts."""
        figures = DayFigures()
        answer_of = self._generate_batch if row.decoding == "generate_batch" else partial(_generate, row.decoding)
        for rows in (1, BATCH):
            ids = random_ids(model, rows, row.tokens)
            first = median_seconds(lambda ids=ids: answer_of(model, ids, 1), TURNS)  # type: ignore[misc]
            longer = median_seconds(lambda ids=ids: answer_of(model, ids, 1 + STEPS), TURNS)  # type: ignore[misc]
            step_seconds = (longer - first) / STEPS
            if rows == 1:
                figures.first_s = first
                figures.step_s = step_seconds
            else:
                figures.step8_s = step_seconds
        return figures

    def _generate_batch(self, model: Any, ids: Tensor, tokens: int) -> None:
        """Continuous batching, which captures CUDA graphs."""
        config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        model.generate_batch(inputs=ids.tolist(), generation_config=config, warmup=False)


class _StopAt(StoppingCriteria):
    """Stops all rows at a length, whatever `max_length` is: a static cache has the size of `max_length`."""

    def __init__(self, length: int) -> None:
        self.length = length

    @override
    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length, device=input_ids.device)


def _generate(decoding: str, model: Any, ids: Tensor, tokens: int) -> None:
    """An answer by transformers; answers of all lengths have one static cache, so that the model is compiled once."""
    options: dict[str, Any] = {"cache_implementation": "static"} if decoding == "static, compiled" else {}
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=1 + STEPS,
        stopping_criteria=StoppingCriteriaList([_StopAt(ids.shape[1] + tokens)]),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )


def _repeat(action: Callable[[], None], count: int) -> None:
    for _ in range(count):
        action()


def _profile(figures: DayFigures, advance: Callable[[], None]) -> None:
    """Set the GPU's busy seconds and kernels of a step."""
    steps = 4
    advance()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        _repeat(advance, steps)
        torch.cuda.synchronize()
    recorded: Any = profiled.profiler
    durations: list[int] = []
    for event in recorded.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            durations.append(event.duration_ns())
    figures.busy_s = sum(durations) / 1e9 / steps
    figures.launches = len(durations) // steps


def summary(output: str) -> str:
    """The last line of pytest's output that counts tests, and whether they were stopped."""
    counted = [
        line.strip("= ") for line in output.splitlines() if re.search(r"\d+ (passed|failed|skipped|error)", line)
    ]
    stopped = [line for line in output.splitlines() if line.startswith("stopped after")]
    failed = re.findall(r"^FAILED \S+::(\S+)", output, flags=re.MULTILINE)
    return "; ".join([*(counted[-1:] or ["no test ended"]), *stopped, *failed])[:400]


def _vllm_note() -> str:
    if find_spec("vllm") is None:
        return "vllm is not installed; its CUDA wheels are too large to be carried with the tree"
    return "vllm has a torch of its own: measure it in its environment, keepsight bench serve vllm=true"


def run(bench: DayBench, results: gpu.Results, rows: Sequence[DayRow], seconds: float) -> int:
    """Measure the rows that are missing, none begun after `seconds`; returns how many are left."""
    import transformers

    def figures_of(row: DayRow) -> tuple[DayFigures, str | None]:
        try:
            return bench.figures(row)
        except Exception as error:  # another library's, of any kind: the other rows are measured
            return DayFigures(), one_line(f"{type(error).__name__}: {error}", 200)

    def floor(row: DayRow, count: int | None) -> DayFigures:
        return floor_of(row, bench.card, count)

    return gpu.measure_missing(
        results,
        bench.card,
        rows,
        seconds,
        figures_of=figures_of,
        floor_of=floor,
        line_of=text_of,
        floors=FLOORS,
        transformers=transformers.__version__,
    )


TABLE = LiveTable(
    [
        TerminalColumn("part", width=8, is_text=True),
        TerminalColumn("tokens", "d"),
        TerminalColumn("method", width=21, is_text=True),
        TerminalColumn("decoding", width=16, is_text=True),
        TerminalColumn("first s", width=16),
        TerminalColumn("share", ".3f"),
        TerminalColumn("step ms", width=16),
        TerminalColumn("GPU ms", ".4g"),
        TerminalColumn(f"{BATCH} rows ms", width=16),
        TerminalColumn("rows", "d", width=5),
        TerminalColumn("tokens/s", width=14),
        TerminalColumn("KV", width=10),
        TerminalColumn("peak", width=10),
        TerminalColumn("note", is_text=True),
    ]
)


def text_of(row: DayRow, figures: DayFigures, least: DayFigures, note: str | None = None) -> str:
    """A line: each figure, and its roofline behind it."""
    cells = {
        "part": row.part,
        "tokens": row.tokens or None,
        "method": row.method,
        "decoding": row.decoding,
        "GPU ms": gpu.milliseconds(figures.busy_s),
        f"{BATCH} rows ms": gpu.with_roofline(gpu.milliseconds(figures.step8_s), gpu.milliseconds(least.step8_s)),
    }
    return TABLE.line(cells | gpu.figure_cells(figures, least, note))


def dry_lines(card: Card, missing: Sequence[DayRow]) -> Iterator[str]:
    """What would be measured: bytes, and the roofline of each figure."""
    yield gpu.card_line(card)
    yield f"{MODEL}, budget {BUDGET}; {len(missing)} rows to measure; figure / roofline"
    yield TABLE.heading()
    for row in missing:
        note = ""
        if row.part == "tests":
            note = f"tests/gpu: {', '.join(TESTS)}; {TEST_SECONDS} s at most"
        elif row.part == "vllm":
            note = _vllm_note()
        yield text_of(row, DayFigures(), floor_of(row, card), note)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or print what would be measured; returns 2 where an argument is refused, else 0."""
    parser = gpu.new_parser(
        "keepsight.eval.bench.gpu_day", __doc__, card="H200", out="results/gpu_day.csv", seconds=450
    )
    options = parser.parse_args(arguments)
    try:
        results = gpu.Results(Path(at_home(options.out)), COLUMNS, done="date")
        rows = [row for row in all_rows() if options.only in text_of(row, DayFigures(), DayFigures())]

        def measure(device: torch.device, card: Card, rows: Sequence[DayRow]) -> int:
            return run(DayBench(device, card), results, rows, options.seconds)

        gpu.run_table(options, results, rows, TABLE.heading(), dry_lines, measure)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
