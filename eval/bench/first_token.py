"""Time to first token by arithmetic: the model of LookaheadKV's appendix B (arXiv 2603.10899).

Every pass takes as long as its operations at 0.7 of the card's rate, or its bytes at 0.9 of its bandwidth. A method's
passes follow one another; what it adds to the plain prefill is its overhead.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.eval.answers import entry_bytes
from keepsight.eval.bench.roofline import Card
from keepsight.models.decoder import head_width, input_embedding
from keepsight.train.plan import stored_bytes
from keepsight.train.tracking import pass_flops, weights_per_token

FLOPS_REACHED, BANDWIDTH_REACHED = 0.7, 0.9
WINDOW = 32
"""Observing tokens: soft tokens, drafts, and the last ones of the prompt."""
PLAIN = "forward pass only"
_MEASURED_AS = {PLAIN: "full", "snapkv": "snapkv", "lookaheadkv": "lookaheadkv, uniform"}
"""Rows of the benchmark on a GPU."""


class Work(NamedTuple):
    """Operations, and bytes that are moved, of one pass."""

    flops: float
    moved: float


def reading(model: PreTrainedModel, tokens: int, before: int = 0) -> Work:
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
    """What each method runs before its first token: drafts of 32 tokens, LAQ's from a cache of `budget` entries."""
    plain, look, beyond = reading(model, tokens), scoring(model, WINDOW, tokens), reading(model, tokens + WINDOW)
    drafted = [reading(model, 1, budget + step) for step in range(WINDOW)]
    found = {PLAIN: [plain], "lookaheadkv": [beyond, look], "snapkv": [plain, look]}
    if draft is not None:
        written = [reading(draft, tokens), *(reading(draft, 1, tokens + step) for step in range(WINDOW))]
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
                if card not in row["card"] or row["model"] not in model_id.lower() or not row["first_s"]:
                    continue
                found[int(row["tokens"]), row["method"]] = float(row["first_s"])
            except (KeyError, TypeError, ValueError):
                raise UserError(f"measured={path}: expected the columns that make bench-gpu writes") from None
    names = {as_: name for name, as_ in _MEASURED_AS.items()}
    return {(tokens, names[as_]): seconds for (tokens, as_), seconds in found.items() if as_ in names}
