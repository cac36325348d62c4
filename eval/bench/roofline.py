"""Times by arithmetic alone: the rows of the benchmark on a GPU and their rooflines, and the time to first token.

A pass takes as long as its operations at the card's rate, or its bytes at the card's bandwidth, at least.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

from keepsight.errors import UserError
from keepsight.eval.answers import entry_bytes
from keepsight.eval.bench.measure import median_seconds
from keepsight.models.decoder import head_width, input_embedding
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.runtime.layer import GROWTH
from keepsight.runtime.methods import Quest, SpeCache
from keepsight.train.dataset import Batch
from keepsight.train.importance import ImportanceObjective
from keepsight.train.plan import COPIES, stored_bytes
from keepsight.train.tracking import pass_flops, peak_of, weights_per_token

CONTEXT = 2**18
_LIKE_BOTH: dict[str, Any] = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
SHAPES: dict[str, Any] = {
    "llama-3.1-8b": LlamaConfig(
        vocab_size=128256, intermediate_size=14336, num_hidden_layers=32, max_position_embeddings=CONTEXT, **_LIKE_BOTH
    ),
    "qwen3-8b": Qwen3Config(
        vocab_size=151936, intermediate_size=12288, num_hidden_layers=36, max_position_embeddings=CONTEXT, **_LIKE_BOTH
    ),
}
TOKENS, TRAINED_TOKENS = (8192, 32768, 131072), (16384, 32768)
BUDGET, ANSWER = 1024, 128
MOST_ROWS = 256
"""Maximum rows of a batch; larger batches decode no faster per row."""
CARDS = {"A100": (2.04, 80), "H100": (3.35, 80), "H100 NVL": (3.9, 94), "H200": (4.8, 141), "B200": (7.7, 180)}
"""Nvidia's GPUs: bandwidth in 1e12 bytes per second and memory in 1e9 bytes (from its data sheets)."""
_HOST = 128 * 2**30
"""Bytes of CPU memory that a host is assumed to have, for a card that is not here."""

METHODS = (
    *("full", "full, flash-attn", "snapkv", "adakv", "lookaheadkv, uniform", "lookaheadkv, shared"),
    *("specache", "specontext", "specontext, offloaded", "quest"),
)
KERNELS = {"sdpa": None, "flash-attn": "flash_attn", "flashinfer": "flashinfer"}
"""Kernels of attention, and the package that each needs."""


@dataclass(frozen=True)
class Row:
    """One measurement: `generate` by a method, `attention` of one layer by a kernel, or a step of `train`."""

    kind: str
    model: str
    tokens: int
    method: str

    @property
    def note(self) -> str | None:
        """A note on a package that the row needs and that is not installed."""
        package = "flash_attn" if self.method == "full, flash-attn" else KERNELS.get(self.method)
        return f"{package} is not installed" if package and find_spec(package) is None else None


@dataclass
class Figures:
    """The figures of a row; None where a row has no such figure.

    Attributes:
        first_s: Seconds to the first token; of attention, over the prompt; of training, of a prefill.
        share: Of these seconds, those beyond a plain prefill; of training, prefills that a step takes.
        step_s: Seconds of a decoding step of one row, or of a training step.
        rows: Rows of the batch, at most `MOST_ROWS`: an estimate, less an eighth each time memory runs out.
        batch_s: Seconds of its decoding step.
        kv_bytes: Bytes on the device for one row: keys, values and the method's own index of them.
        peak_bytes: The most beyond the weights, while the prompt is read; of training, in a step.
        batch_peak_bytes: The most while the largest batch is decoded.
    """

    first_s: float | None = None
    share: float | None = None
    step_s: float | None = None
    rows: int | None = None
    batch_s: float | None = None
    kv_bytes: int | None = None
    peak_bytes: int | None = None
    batch_peak_bytes: int | None = None


@dataclass(frozen=True)
class Card:
    """A GPU: bfloat16 operations a second, bytes a second, bytes of its memory and of the CPU's."""

    name: str
    flops: float
    bandwidth: float
    memory: int
    host: int = _HOST

    def seconds(self, flops: float, moved: float) -> float:
        """The roofline."""
        return max(flops / self.flops, moved / self.bandwidth)


def known_card(name: str) -> Card:
    """A card by its data sheet."""
    if name not in CARDS:
        raise UserError(f"--card {name!r} is unknown; choose one of {', '.join(CARDS)}")
    bandwidth, memory = CARDS[name]
    return Card(name, peak_of(name) * 1e12, bandwidth * 1e12, memory * 10**9)


def measured_card(device: torch.device) -> Card:
    """This machine's card, measured: rate of a matrix product, bandwidth of a copy (bytes read and written)."""
    size = 8192
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = median_seconds(lambda: one @ other, 10)
    source = torch.randn(size * size * 4, device=device)
    target = torch.empty_like(source)
    rates = 2 * size**3 / product, 2 * source.nbytes / median_seconds(lambda: target.copy_(source), 10)
    host = psutil.virtual_memory().available
    if device.type != "cuda":
        return Card("CPU", *rates, host, host)
    return Card(torch.cuda.get_device_name(device), *rates, torch.cuda.mem_get_info(device)[1], host)


def all_rows() -> list[Row]:
    """All measurements, short prompts first."""
    rows = list[Row]()
    for tokens in sorted({*TOKENS, *TRAINED_TOKENS}):
        if tokens in TOKENS:
            rows += [Row("generate", model, tokens, method) for model in SHAPES for method in METHODS]
            rows += [Row("attention", next(iter(SHAPES)), tokens, kernel) for kernel in KERNELS]
        if tokens in TRAINED_TOKENS:
            rows += [Row("train", model, tokens, "lookahead module") for model in SHAPES]
    return rows


def memory_and_traffic(method: str, config: Any, tokens: int) -> tuple[int, int, int]:
    """Bytes of one row of a batch: stored on the device, read there in a step, stored in CPU memory.

    Stored bytes are counted as `State.kv_bytes` does; numbers have 16 bits.
    """
    layers, heads, width = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    item = 2
    row = heads * 2 * width * item  # of a layer and token
    full, kept = layers * row * tokens, layers * row * min(BUDGET, tokens)
    if method.startswith("full"):
        return full, full, 0
    if method == "quest":
        pages = Quest(BUDGET).page
        bounds = (layers - 2) * row * (tokens // pages)
        return full + bounds, bounds + kept + 2 * row * max(tokens - BUDGET, 0), 0
    if method == "specache":
        given = SpeCache()
        keys, values = tokens - tokens % given.residual, max(tokens - given.residual, 0)
        of_packed = width * given.bits // 8 + 2 * item * width // given.group
        packed = (keys + values) * of_packed + (2 * tokens - keys - values) * width * item
        slots = min(given.topk, keys) * (2 * width * item + 8)
        return layers * heads * (packed + slots), layers * heads * (packed + slots), layers * row * keys
    if method.startswith("specontext"):
        of_head = config.hidden_size // config.num_attention_heads // 2 * 2
        keys = heads * of_head * item * tokens
        offloaded = method.endswith("offloaded")
        slots = layers * row * (BUDGET + 1)
        return (slots if offloaded else full) + keys, keys + kept, full if offloaded else 0
    return kept, kept, 0


@cache
def outline(name: str) -> PreTrainedModel:
    """A model without values."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(SHAPES[name], dtype=torch.bfloat16)


def rows_that_fit(row: Row, card: Card) -> int:
    """Rows of the largest batch, with room to grow and to copy a layer; at least 1."""
    config = SHAPES[row.model]
    held, _, in_cpu = memory_and_traffic(row.method, config, row.tokens)
    each = held * (1 + GROWTH + 2 / config.num_hidden_layers) + 8 * config.vocab_size
    fitting = min((card.memory - stored_bytes(outline(row.model))) * 0.9 / each, MOST_ROWS)
    pinned = card.host * 0.8 / (2 * in_cpu) if in_cpu else fitting  # which comes in powers of two
    return max(int(min(fitting, pinned)), 1)


def roofline(row: Row, card: Card, rows: int | None = None) -> Figures:
    """Lower bounds of a row's figures on a card, in a batch of `rows`; of memory, the bytes known to be stored."""
    model, config = outline(row.model), SHAPES[row.model]
    weights, width = stored_bytes(model), config.num_attention_heads * config.head_dim
    of_token = 2 * 2 * config.num_key_value_heads * config.head_dim  # bytes of a layer and token
    per_token, embedding = weights_per_token(model), input_embedding(model).nbytes
    if row.kind == "attention":
        entries = of_token * row.tokens
        moved = entries + 2 * 2 * row.tokens * width
        whole, last = 2 * row.tokens**2 * width, 4 * row.tokens * width
        return Figures(card.seconds(whole, moved), None, card.seconds(last, entries), kv_bytes=entries)
    full = memory_and_traffic("full", config, row.tokens)[0]
    first = card.seconds(pass_flops(model, per_token, row.tokens), weights + full)
    if row.kind == "train":
        objective = ImportanceObjective(Lookahead(model, LookaheadSettings()))
        ids = torch.zeros(1, row.tokens + ANSWER, dtype=torch.long)
        flops = objective.flops(Batch(ids[:, : row.tokens], ids[:, row.tokens :])) or 0.0
        learned = COPIES * sum(each.nbytes for each in objective.trained_parameters())
        importance = config.num_hidden_layers * config.num_attention_heads * row.tokens * 4
        trained = card.seconds(flops, weights + full + learned)
        return Figures(first, trained / first, trained, kv_bytes=full, peak_bytes=full + importance + learned)
    held, read, _ = memory_and_traffic(row.method, config, row.tokens)
    rows = rows or rows_that_fit(row, card)

    def step(rows: int) -> float:
        flops = rows * (2 * per_token + embedding + 4 * width * read / of_token)
        return card.seconds(flops, weights - embedding + rows * read)

    return Figures(first, None, step(1), rows, step(rows), held)


# Time to first token: the model of LookaheadKV's appendix B (arXiv 2603.10899). A method's passes follow one another.

FLOPS_REACHED, BANDWIDTH_REACHED = 0.7, 0.9
WINDOW = 32
"""Number of observing tokens: soft tokens, draft tokens, or the last ones of the prompt."""
PLAIN = "forward pass only"
_MEASURED_AS = {PLAIN: "full", "snapkv": "snapkv", "lookaheadkv": "lookaheadkv, uniform"}
"""Rows of the benchmark on a GPU."""


class Work(NamedTuple):
    """Operations, and bytes that are moved, of one pass."""

    flops: float
    moved: float


def work_of(model: PreTrainedModel, tokens: int, before: int = 0) -> Work:
    """A pass over `tokens` after `before` entries, with the logits of the last token."""
    flops = pass_flops(model, weights_per_token(model), tokens, before) + 2 * input_embedding(model).numel()
    return Work(flops, stored_bytes(model) + entry_bytes(model) * (before + tokens))


def scoring(model: PreTrainedModel, observers: int, tokens: int) -> Work:
    """The attention of observers to all entries, whose weights are written and read once."""
    config = model.config.get_text_config(decoder=True)
    weights = observers * tokens * config.num_hidden_layers * config.num_attention_heads
    moved = entry_bytes(model) * tokens / 2 + 2 * weights * model.dtype.itemsize
    return Work(2 * weights * head_width(config), moved)


def passes_of(model: PreTrainedModel, draft: PreTrainedModel | None, tokens: int, budget: int) -> dict[str, list[Work]]:
    """The passes of each method before its first token: drafts of 32 tokens, LAQ's from a cache of `budget` entries."""
    plain, look, beyond = work_of(model, tokens), scoring(model, WINDOW, tokens), work_of(model, tokens + WINDOW)
    drafted = [work_of(model, 1, budget + step) for step in range(WINDOW)]
    found = {PLAIN: [plain], "lookaheadkv": [beyond, look], "snapkv": [plain, look]}
    if draft is not None:
        written = [work_of(draft, tokens), *(work_of(draft, 1, tokens + step) for step in range(WINDOW))]
        found["speckv"] = [*written, beyond, scoring(model, 2 * WINDOW, tokens)]
    return found | {"laq": [plain, look, *drafted, look]}


def seconds_on(card: Card, passes: Sequence[Work]) -> float:
    """Seconds of passes that follow one another."""
    reached = Card(card.name, card.flops * FLOPS_REACHED, card.bandwidth * BANDWIDTH_REACHED, card.memory)
    return sum(reached.seconds(*each) for each in passes)


def table_lines(
    model: PreTrainedModel,
    draft: PreTrainedModel | None,
    card: Card,
    lengths: Sequence[int],
    budget: int,
    measured: Mapping[tuple[int, str], float],
) -> Iterator[str]:
    """A line for each length and method; `measured` are seconds to the first token by length and method."""
    yield f"{card.name}, one prompt, {FLOPS_REACHED:.0%} of its operations, {BANDWIDTH_REACHED:.0%} of its bandwidth"
    yield f"{'tokens':>7}  {'method':<18}{'TFLOP':>9}{'GB':>9}{'ms':>10}{'overhead ms':>13}{'%':>8}{'measured ms':>13}"
    for tokens in lengths:
        plain = 0.0
        for name, passes in passes_of(model, draft, tokens, budget).items():
            seconds = seconds_on(card, passes)
            plain = plain or seconds
            work = sum(each.flops for each in passes) / 1e12, sum(each.moved for each in passes) / 1e9
            more = f"{(seconds - plain) * 1e3:>13.2f}{(seconds / plain - 1) * 100:>8.2f}" if name != PLAIN else " " * 21
            own = measured.get((tokens, name))
            taken = "" if own is None else f"{own * 1e3:>13.1f}"
            yield f"{tokens:>7}  {name:<18}{work[0]:>9.2f}{work[1]:>9.1f}{seconds * 1e3:>10.1f}{more}{taken}".rstrip()


def measured_on(path: Path, card: str, model_id: str) -> dict[tuple[int, str], float]:
    """Seconds to the first token by length and method of a card and model, in the CSV of `make bench-gpu`."""
    if not path.is_file():
        raise UserError(f"measured={path}: no such file; name the CSV that make bench-gpu writes")
    found = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                known = [name for name in CARDS if name in row["card"]]  # such as H100 and H100 NVL
                if (
                    card != max(known, key=len, default=row["card"])
                    or row["model"] not in model_id.lower()
                    or not row["first_s"]
                ):
                    continue
                found[int(row["tokens"]), row["method"]] = float(row["first_s"])
            except (KeyError, TypeError, ValueError):
                raise UserError(f"measured={path}: expected the columns that make bench-gpu writes") from None
    names = {as_: name for name, as_ in _MEASURED_AS.items()}
    return {(tokens, names[as_]): seconds for (tokens, as_), seconds in found.items() if as_ in names}
