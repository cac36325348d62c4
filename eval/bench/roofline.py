"""Times by arithmetic alone: the rows of the benchmark on a GPU and their rooflines, and the time to first token.

A pass takes as long as its operations at the card's rate, or its bytes at the card's bandwidth, at least.
"""

import csv
from collections.abc import Mapping, Sequence
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
from keepsight.eval.bench.measure import median_seconds, row_bytes_with_room
from keepsight.models.decoder import head_width, input_embedding
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.runtime.methods import Quest, SpeCache
from keepsight.tables import TerminalColumn, terminal_table
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
TOKENS = (8192, 32768, 131072)
TRAINED_TOKENS = (16384, 32768)
BUDGET = 1024
ANSWER = 128
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
class GpuRow:
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
        raise UserError(f"--card {name!r} is unknown; choose one of {', '.join(CARDS)}", field="card", code="unknown")
    bandwidth, memory = CARDS[name]
    return Card(name, peak_of(name) * 1e12, bandwidth * 1e12, memory * 10**9)


def measured_card(device: torch.device) -> Card:
    """This machine's card, measured: rate of a matrix product, bandwidth of a copy (bytes read and written)."""
    size = 8192
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    right = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    source = torch.randn(size * size * 4, device=device)
    target = torch.empty_like(source)
    flops = 2 * size**3 / median_seconds(lambda: left @ right, 10)
    bandwidth = 2 * source.nbytes / median_seconds(lambda: target.copy_(source), 10)
    host = psutil.virtual_memory().available
    if device.type != "cuda":
        return Card("CPU", flops, bandwidth, host, host)
    _, memory = torch.cuda.mem_get_info(device)
    return Card(torch.cuda.get_device_name(device), flops, bandwidth, memory, host)


def all_rows() -> list[GpuRow]:
    """All measurements, short prompts first."""
    rows: list[GpuRow] = []
    for tokens in sorted({*TOKENS, *TRAINED_TOKENS}):
        if tokens in TOKENS:
            for model in SHAPES:
                for method in METHODS:
                    rows.append(GpuRow("generate", model, tokens, method))
            first_model = next(iter(SHAPES))
            for kernel in KERNELS:
                rows.append(GpuRow("attention", first_model, tokens, kernel))
        if tokens in TRAINED_TOKENS:
            for model in SHAPES:
                rows.append(GpuRow("train", model, tokens, "lookahead module"))
    return rows


def memory_and_traffic(method: str, config: Any, tokens: int) -> tuple[int, int, int]:
    """Bytes of one row of a batch: stored on the device, read there in a step, stored in CPU memory.

    Stored bytes are counted as `State.kv_bytes` does; numbers have 16 bits.
    """
    layers = config.num_hidden_layers
    heads = config.num_key_value_heads
    width = config.head_dim
    item = 2
    entry = heads * 2 * width * item  # of a layer and token
    full = layers * entry * tokens
    kept = layers * entry * min(BUDGET, tokens)
    if method.startswith("full"):
        return full, full, 0
    if method == "quest":
        page = Quest(BUDGET).page
        bounds = (layers - 2) * entry * (tokens // page)
        return full + bounds, bounds + kept + 2 * entry * max(tokens - BUDGET, 0), 0
    if method == "specache":
        specache = SpeCache()
        packed_keys = tokens - tokens % specache.residual
        packed_values = max(tokens - specache.residual, 0)
        packed_width = width * specache.bits // 8 + 2 * item * width // specache.group
        recent = 2 * tokens - packed_keys - packed_values
        packed = (packed_keys + packed_values) * packed_width + recent * width * item
        slots = min(specache.topk, packed_keys) * (2 * width * item + 8)
        on_device = layers * heads * (packed + slots)
        return on_device, on_device, layers * entry * packed_keys
    if method.startswith("specontext"):
        head_keys = heads * (config.hidden_size // config.num_attention_heads // 2 * 2) * item * tokens
        if method.endswith("offloaded"):
            slots = layers * entry * (BUDGET + 1)
            return slots + head_keys, head_keys + kept, full
        return full + head_keys, head_keys + kept, 0
    return kept, kept, 0


@cache
def outline(name: str) -> PreTrainedModel:
    """A model without values."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(SHAPES[name], dtype=torch.bfloat16)


def rows_that_fit(row: GpuRow, card: Card) -> int:
    """Rows of the largest batch by `row_bytes_with_room`, at least 1."""
    config = SHAPES[row.model]
    on_device, _, in_cpu = memory_and_traffic(row.method, config, row.tokens)
    row_bytes = row_bytes_with_room(on_device, config)
    rows = min((card.memory - stored_bytes(outline(row.model))) * 0.9 / row_bytes, MOST_ROWS)
    if in_cpu:  # pinned memory comes in powers of two
        rows = min(rows, card.host * 0.8 / (2 * in_cpu))
    return max(int(rows), 1)


def roofline(row: GpuRow, card: Card, rows: int | None = None) -> Figures:
    """Lower bounds of a row's figures on a card, in a batch of `rows`; of memory, the bytes known to be stored."""
    if row.kind == "attention":
        return _attention_roofline(row, card)
    if row.kind == "train":
        return _train_roofline(row, card)
    model = outline(row.model)
    config = SHAPES[row.model]
    weights = stored_bytes(model)
    embedding = input_embedding(model).nbytes
    per_token = weights_per_token(model)
    query_width = config.num_attention_heads * config.head_dim
    entry = _entry_bytes_of_layer(config)
    on_device, read, _ = memory_and_traffic(row.method, config, row.tokens)
    rows = rows or rows_that_fit(row, card)

    def step_seconds(rows: int) -> float:
        flops = rows * (2 * per_token + embedding + 4 * query_width * read / entry)
        return card.seconds(flops, weights - embedding + rows * read)

    return Figures(
        first_s=_prefill_seconds(row, card),
        step_s=step_seconds(1),
        rows=rows,
        batch_s=step_seconds(rows),
        kv_bytes=on_device,
    )


def _entry_bytes_of_layer(config: Any) -> int:
    """Bytes of the key and the value of one token in one layer."""
    return 2 * 2 * int(config.num_key_value_heads * config.head_dim)


def _prefill_seconds(row: GpuRow, card: Card) -> float:
    model = outline(row.model)
    full, _, _ = memory_and_traffic("full", SHAPES[row.model], row.tokens)
    return card.seconds(pass_flops(model, weights_per_token(model), row.tokens), stored_bytes(model) + full)


def _attention_roofline(row: GpuRow, card: Card) -> Figures:
    """Of all tokens as queries, and of the last one."""
    config = SHAPES[row.model]
    query_width = config.num_attention_heads * config.head_dim
    entries = _entry_bytes_of_layer(config) * row.tokens
    queries_and_outputs = 2 * 2 * row.tokens * query_width
    return Figures(
        first_s=card.seconds(2 * row.tokens**2 * query_width, entries + queries_and_outputs),
        step_s=card.seconds(4 * row.tokens * query_width, entries),
        kv_bytes=entries,
    )


def _train_roofline(row: GpuRow, card: Card) -> Figures:
    """Of a prefill, and of a training step."""
    model = outline(row.model)
    config = SHAPES[row.model]
    full, _, _ = memory_and_traffic("full", config, row.tokens)
    objective = ImportanceObjective(Lookahead(model, LookaheadSettings()))
    ids = torch.zeros(1, row.tokens + ANSWER, dtype=torch.long)
    flops = objective.flops(Batch(ids[:, : row.tokens], ids[:, row.tokens :])) or 0.0
    trained = COPIES * sum(parameter.nbytes for parameter in objective.trained_parameters())
    importance = config.num_hidden_layers * config.num_attention_heads * row.tokens * 4
    prefill_seconds = _prefill_seconds(row, card)
    step_seconds = card.seconds(flops, stored_bytes(model) + full + trained)
    return Figures(
        first_s=prefill_seconds,
        share=step_seconds / prefill_seconds,
        step_s=step_seconds,
        kv_bytes=full,
        peak_bytes=full + importance + trained,
    )


# Time to first token: the model of LookaheadKV's appendix B (arXiv 2603.10899). A method's passes follow one another.

FLOPS_REACHED = 0.7
BANDWIDTH_REACHED = 0.9
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
    prompt = work_of(model, tokens)
    prompt_and_observers = work_of(model, tokens + WINDOW)
    scoring_by_window = scoring(model, WINDOW, tokens)
    passes = {
        PLAIN: [prompt],
        "lookaheadkv": [prompt_and_observers, scoring_by_window],
        "snapkv": [prompt, scoring_by_window],
    }
    if draft is not None:
        drafting = [work_of(draft, tokens)]
        for step in range(WINDOW):
            drafting.append(work_of(draft, 1, tokens + step))
        passes["speckv"] = [*drafting, prompt_and_observers, scoring(model, 2 * WINDOW, tokens)]
    drafting_from_kept = [work_of(model, 1, budget + step) for step in range(WINDOW)]
    passes["laq"] = [prompt, scoring_by_window, *drafting_from_kept, scoring_by_window]
    return passes


def seconds_on(card: Card, passes: Sequence[Work]) -> float:
    """Seconds of passes that follow one another."""
    reached = Card(card.name, card.flops * FLOPS_REACHED, card.bandwidth * BANDWIDTH_REACHED, card.memory)
    return sum(reached.seconds(work.flops, work.moved) for work in passes)


_FIRST_TOKENS = (
    TerminalColumn("tokens", "d"),
    TerminalColumn("method", is_text=True),
    TerminalColumn("TFLOP", ".2f"),
    TerminalColumn("GB", ".1f"),
    TerminalColumn("ms", ".1f"),
    TerminalColumn("overhead ms", ".2f"),
    TerminalColumn("%", ".2f"),
    TerminalColumn("measured ms", ".1f"),
)


def first_tokens(
    model: PreTrainedModel,
    draft: PreTrainedModel | None,
    card: Card,
    lengths: Sequence[int],
    budget: int,
    measured: Mapping[tuple[int, str], float],
) -> str:
    """A table with a line for each length and method; `measured` are seconds to the first token by both."""
    rows = []
    for tokens in lengths:
        plain = 0.0  # seconds of the forward pass, which comes first
        for name, passes in passes_of(model, draft, tokens, budget).items():
            seconds = seconds_on(card, passes)
            if name == PLAIN:
                plain = seconds
            row: dict[str, Any] = {"tokens": tokens, "method": name, "ms": seconds * 1e3}
            row["TFLOP"] = sum(work.flops for work in passes) / 1e12
            row["GB"] = sum(work.moved for work in passes) / 1e9
            if name != PLAIN:
                row["overhead ms"] = (seconds - plain) * 1e3
                row["%"] = (seconds / plain - 1) * 100
            if (tokens, name) in measured:
                row["measured ms"] = measured[tokens, name] * 1e3
            rows.append(row)
    title = f"{card.name}, one prompt, {FLOPS_REACHED:.0%} of its operations, {BANDWIDTH_REACHED:.0%} of its bandwidth"
    return f"{title}\n{terminal_table(rows, _FIRST_TOKENS)}"


def measured_on(path: Path, card: str, model_id: str) -> dict[tuple[int, str], float]:
    """Seconds to the first token by length and method of a card and model, in the CSV of `make bench-gpu`."""
    if not path.is_file():
        raise UserError(
            f"measured={path}: no such file; name the CSV that make bench-gpu writes", field="measured", code="missing"
        )
    names = {row_name: name for name, row_name in _MEASURED_AS.items()}
    measured = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                is_of_model = row["model"] in model_id.lower()
                if _card_of(row["card"]) != card or not is_of_model or not row["first_s"]:
                    continue
                tokens = int(row["tokens"])
                seconds = float(row["first_s"])
                if row["method"] in names:
                    measured[tokens, names[row["method"]]] = seconds
            except (KeyError, TypeError, ValueError):
                raise UserError(
                    f"measured={path}: expected the columns that make bench-gpu writes", field="measured", code="file"
                ) from None
    return measured


def _card_of(name: str) -> str:
    """The card of `CARDS` that a device's name has, the longer of H100 and H100 NVL; the name itself for others."""
    cards = [card for card in CARDS if card in name]
    return max(cards, key=len, default=name)
