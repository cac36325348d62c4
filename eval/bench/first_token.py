"""Time to first token by arithmetic: the model of LookaheadKV's appendix B (arXiv 2603.10899).

Every pass takes as long as its operations at 0.7 of the card's rate, or its bytes at 0.9 of its bandwidth. A method's
passes follow one another; what it adds to the plain prefill is its overhead.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.eval.bench.roofline import Card
from keepsight.models.decoder import cached_kv_heads, head_width, input_embedding
from keepsight.train.plan import stored_bytes
from keepsight.train.tracking import pass_flops, weights_per_token

FLOPS_REACHED, BANDWIDTH_REACHED = 0.7, 0.9
WINDOW = 32
"""Observing tokens: soft tokens, drafts, and the last ones of the prompt."""
PLAIN = "forward pass only"
_MEASURED_AS = {PLAIN: "full", "snapkv": "snapkv", "lookaheadkv": "lookaheadkv, uniform"}
"""Rows of the benchmark on a GPU."""


@dataclass(frozen=True)
class Work:
    """Operations, and bytes that are moved, of one pass."""

    flops: float
    moved: float


@dataclass(frozen=True)
class Passes:
    """The passes of a model, from its configuration alone."""

    model: PreTrainedModel

    def read(self, tokens: int, before: int = 0) -> Work:
        """A pass over `tokens` after `before` entries, with the logits of the last token."""
        embedding = input_embedding(self.model)
        flops = pass_flops(self.model, weights_per_token(self.model), tokens, before) + 2 * embedding.numel()
        return Work(flops, stored_bytes(self.model) + self._entry * (before + tokens))

    def score(self, observers: int, tokens: int) -> Work:
        """The attention of observers to all entries, whose weights are written and read once."""
        config = self.model.config.get_text_config(decoder=True)
        heads = config.num_hidden_layers * config.num_attention_heads
        weights, item = observers * tokens * heads, self.model.dtype.itemsize
        return Work(2 * weights * head_width(config), self._entry * tokens / 2 + 2 * weights * item)

    @property
    def _entry(self) -> int:
        config = self.model.config.get_text_config(decoder=True)
        heads = config.num_hidden_layers * cached_kv_heads(self.model)
        return 2 * heads * head_width(config) * self.model.dtype.itemsize


def passes_of(model: PreTrainedModel, draft: PreTrainedModel | None, tokens: int, budget: int) -> dict[str, list[Work]]:
    """What each method runs before its first token: drafts of 32 tokens, LAQ's from a cache of `budget` entries."""
    own = Passes(model)
    plain, look = own.read(tokens), own.score(WINDOW, tokens)
    beyond = own.read(tokens + WINDOW)
    drafted = [own.read(1, budget + step) for step in range(WINDOW)]
    found = {PLAIN: [plain], "lookaheadkv": [beyond, look], "snapkv": [plain, look]}
    if draft is not None:
        small = Passes(draft)
        written = [small.read(tokens), *(small.read(1, tokens + step) for step in range(WINDOW))]
        found["speckv"] = [*written, beyond, own.score(2 * WINDOW, tokens)]
    return found | {"laq": [plain, look, *drafted, look]}


def seconds_on(card: Card, passes: Sequence[Work]) -> float:
    """Seconds of passes that follow one another."""
    reached = Card(card.name, card.flops * FLOPS_REACHED, card.bandwidth * BANDWIDTH_REACHED, card.memory)
    return sum(reached.seconds(each.flops, each.moved) for each in passes)


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
    return {
        (tokens, name): found[tokens, as_]
        for tokens, as_ in found
        for name in _MEASURED_AS
        if _MEASURED_AS[name] == as_
    }
