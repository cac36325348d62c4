"""From `results.jsonl` to means: `summary.csv`, the table of the terminal, paired differences, and findings."""

import math
import operator
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby

from keepsight.errors import printable
from keepsight.eval.report.figures import label_of
from keepsight.eval.report.intervals import FEW, Estimate, estimate, weighted
from keepsight.eval.results import FULL, Key, Row, key_of

MEASURES = ("score", "excess_nll", "agreement")
"""Columns that get an interval."""
MEANS = ("recall", "mass", "tau", "same_tokens", "prompt_tokens")
"""Means reported beside them."""
COLUMNS = (
    *("task", "length", "method", "budget", "n", *MEASURES),
    *(f"{measure}_{end}" for measure in MEASURES for end in ("low", "high")),
    *MEANS,
    "not_evicted",
)
MAX_BLOCKS = 4
"""With more pairs of task and length than these, none has a block of its own in the terminal."""
OURS = "lookaheadkv"
"""Methods whose name begins with this word are compared with the others."""
BOUNDS = ("oracle", "exact_topk", "random")
"""Methods that no method competes with: the bounds from above and below."""
_MOST = 4
"""Findings at most."""


def _same_tokens(row: Row) -> int | None:
    """Tokens of the answer before it differs from the full cache's; all of them where it does not."""
    first = row.get("first_difference")
    return row.get("answer_tokens") if first is None else first


def _budget_entries(row: Row) -> float | None:
    budget: float | None = row["budget"]
    return budget * (row.get("prompt_tokens") or row["length"]) if isinstance(budget, float) else budget


_MEAN_OF: dict[str, Callable[[Row], float | None]] = {
    **{name: operator.methodcaller("get", name) for name in ("recall", "mass", "tau", "prompt_tokens")},
    "same_tokens": _same_tokens,
    "time_to_first_token": lambda row: row["time_to_first_token"],
    "kv_mib": lambda row: row["kv_bytes"] / 2**20,
    "budget_entries": _budget_entries,
}


@dataclass(frozen=True)
class SummaryRow:
    """Means over the samples of one task, length, method and budget.

    Attributes:
        task: Name of the task; a sentence such as `mean of 3 tasks` in what `mean_over_tasks` returns.
        length: Nominal prompt length in tokens; 0 for a mean over lengths.
        budget: KV entries per layer and KV head, or a share of the prompt; None for the full cache.
        estimates: By the names in `MEASURES`: the score of the task's metric, 0 to 1; excess NLL (delta NLL vs. full
            cache): the mean negative log-likelihood of the full cache's own answer minus that under the full cache, in
            nats per token; top-1 agreement, the share of that answer's tokens that stay the arg-max.
        means: By the names in `_MEAN_OF`, None where something was not measured: recall of the entries that the answer
            attends to most, attention mass kept, Kendall's tau, tokens of the prompt, tokens before the answer differs
            from the full cache's, seconds before the first token, MiB of keys and values, the budget in entries.
        samples: The samples, as text.
        not_evicted: Number of samples of which the method kept as much as the full cache.
        against: In a paired difference, the method that is subtracted.
    """

    task: str
    length: int
    method: str
    budget: int | float | None
    n: int
    estimates: Mapping[str, Estimate]
    means: Mapping[str, float | None]
    samples: str = ""
    not_evicted: int = 0
    against: str = ""

    @property
    def score(self) -> float:
        """Mean score."""
        return self.estimates["score"].value

    @property
    def excess_nll(self) -> float:
        """Mean excess NLL."""
        return self.estimates["excess_nll"].value


def summarize(rows: Iterable[Row]) -> list[SummaryRow]:
    """Mean over samples for each task, length, method and budget, in the order of `summary.csv`."""
    groups: dict[tuple[str, int, str, float | None], list[Row]] = defaultdict(list)
    rows = [*rows]
    full = {key_of(row): row["kept"] for row in rows if row["method"] == FULL}
    for row in rows:
        groups[row["task"], row["length"], row["method"], row["budget"]].append(row)
    found = [_mean_over_samples(*key, group, full) for key, group in groups.items()]
    return sorted(found, key=lambda row: (row.task, row.length, row.method != FULL, row.method, row.budget or 0))


def summary_rows(summary: Iterable[SummaryRow]) -> list[dict[str, object]]:
    """What `summary.csv` has in its `COLUMNS`: floats with 4 decimals, an empty budget for the full cache."""
    cells = []
    for row in summary:
        means = [row.estimates[measure].value for measure in MEASURES]
        ends = [end for measure in MEASURES for end in row.estimates[measure].interval or (None, None)]
        place = row.task, row.length, row.method, row.budget, row.n
        values = *place, *means, *ends, *(row.means[name] for name in MEANS), row.not_evicted
        cells.append(dict(zip(COLUMNS, map(_cell, values), strict=True)))
    return cells


def mean_over_tasks(summary: Sequence[SummaryRow]) -> list[SummaryRow]:
    """Means of each method and budget over tasks of equal weight, and over lengths (shown as 0); `ranked`."""
    names = {row.task for row in summary}
    title = f"mean of {len(names)} tasks" if len(names) > 1 else next(iter(names), "")
    variants: dict[tuple[str, int | float | None], list[SummaryRow]] = defaultdict(list)
    for row in summary:
        variants[row.method, row.budget].append(row)
    return ranked(_weighted_mean(title, rows) for rows in variants.values())


def by_task_and_length(summary: Iterable[SummaryRow]) -> dict[tuple[str, int], list[SummaryRow]]:
    """The rows of each task and length, both ascending; within one in the order of `ranked`."""

    def place(row: SummaryRow) -> tuple[str, int]:
        return row.task, row.length

    return {key: ranked(rows) for key, rows in groupby(sorted(summary, key=place), place)}


def ranked(rows: Iterable[SummaryRow]) -> list[SummaryRow]:
    """Rows by budget, the full cache first; at equal budget the best score first, then the lowest excess NLL."""
    return sorted(rows, key=lambda row: (row.budget or 0, -row.score, row.excess_nll, row.method))


def difference(row: SummaryRow | None, other: SummaryRow | None) -> SummaryRow | None:
    """One row with another one subtracted from its estimates; None where one is missing, or their samples differ."""
    if row is None or other is None or row.samples != other.samples:
        return None
    estimates = {name: row.estimates[name] - other.estimates[name] for name in MEASURES}
    return replace(row, estimates=estimates, against=other.method)


def differences(rows: Sequence[SummaryRow]) -> list[SummaryRow]:
    """All pairs of `ranked` methods at equal budget, the better first, and every method against the full cache."""
    full = [row for row in rows if row.method == FULL]
    evicting = [row for row in rows if row.method != FULL]
    pairs = [(row, other) for row in evicting for other in full]
    pairs += [(row, other) for row, other in combinations(evicting, 2) if row.budget == other.budget]
    return [each for each in (difference(*pair) for pair in pairs) if each is not None]


def share_of_full(row: SummaryRow, rows: Iterable[SummaryRow]) -> float | None:
    """`row.score` as a share of the full cache's score among `rows`; None where that is missing or zero."""
    full = next((other.score for other in rows if other.method == FULL), 0.0)
    return row.score / full if full else None


def summary_table(summary: Sequence[SummaryRow]) -> str:
    """A plain-text table for the terminal: the mean over tasks last, after a block for each of a few tasks."""
    groups = by_task_and_length(summary)
    blocks = [_block(f"{task}, {length} tokens", rows) for (task, length), rows in groups.items()]
    mean = mean_over_tasks(summary)
    if len(blocks) > 1:
        blocks = [*(blocks if len(blocks) <= MAX_BLOCKS else []), _block(f"{mean[0].task}, all lengths", mean)]
    return "\n\n".join(filter(None, [*blocks, printable(notes_on(mean))]))


def _mean_over_samples(
    task: str, length: int, method: str, budget: float | None, rows: list[Row], full: Mapping[Key, float]
) -> SummaryRow:
    rows, stratum = sorted(rows, key=lambda row: str(row["sample"])), f"{task}, {length} tokens"
    values = {name: [float(row[name]) for row in rows] for name in MEASURES}
    estimates = {name: estimate(values[name], stratum, can_be_share=name == "score") for name in MEASURES}
    means = {}
    for name, value_of in _MEAN_OF.items():
        known = [value for row in rows if (value := value_of(row)) is not None]
        means[name] = statistics.fmean(known) if known else None
    samples = f"{stratum}: {', '.join(str(row.get('sample_digest') or row['sample']) for row in rows)}"
    not_evicted = sum(budget is not None and row["kept"] >= full.get(key_of(row), math.inf) for row in rows)
    return SummaryRow(task, length, method, budget, len(rows), estimates, means, samples, not_evicted)


def _weighted_mean(title: str, rows: list[SummaryRow]) -> SummaryRow:
    samples: dict[str, int] = defaultdict(int)
    for row in rows:
        samples[row.task] += row.n
    weights = [row.n / samples[row.task] / len(samples) for row in rows]
    means: dict[str, float | None] = {}
    for name in _MEAN_OF:
        pairs = zip(weights, (row.means[name] for row in rows), strict=True)
        known = [weight * value for weight, value in pairs if value is not None]
        means[name] = math.fsum(known) if len(known) == len(rows) else None
    estimates = {name: weighted([row.estimates[name] for row in rows], weights) for name in MEASURES}
    n, not_evicted = sum(row.n for row in rows), sum(row.not_evicted for row in rows)
    text = "; ".join(row.samples for row in rows)
    return SummaryRow(title, 0, rows[0].method, rows[0].budget, n, estimates, means, text, not_evicted)


def notes_on(rows: Sequence[SummaryRow]) -> str:
    """What weakens the numbers of some rows, as sentences: nothing was evicted, or samples are missing or few."""
    most = Counter[tuple[str, int]]()
    for row in rows:
        most[row.task, row.length] = max(row.n, most[row.task, row.length])
    whole = [f"{row.method} {row.budget} ({row.not_evicted} of {row.n})" for row in rows if row.not_evicted]
    counts = [(row, most[row.task, row.length]) for row in rows]
    missing = [f"{row.method} {row.budget} ({row.n} of {wanted})" for row, wanted in counts if row.n < wanted]
    titles = {"Nothing was evicted in some samples": whole, "Some samples were not measured": missing}
    notes = [f"{title}: {', '.join(dict.fromkeys(found))}." for title, found in titles.items() if found]
    if any(row.n < FEW for row in rows):
        notes.append(f"Intervals of fewer than {FEW} samples are too narrow.")
    return " ".join(notes)


def number_text(value: float, digits: int, is_signed: bool = False) -> str:
    """A number with a fixed number of decimals, never `-0`."""
    return f"{round(value, digits) + 0.0:{'+' if is_signed else ''}.{digits}f}"


def _cell(value: object) -> object:
    if isinstance(value, float):
        return number_text(value, 4)
    return "" if value is None else value


def _block(title: str, rows: Sequence[SummaryRow]) -> str:
    names = [printable(row.method) for row in rows]
    width = max(len("method"), *map(len, names))
    columns = f"{'score':>6}  {'95 %':<14}  {'':<12}  {'excess NLL':>10}  {'top-1 agreement':>15}  {'n':>4}"
    length = rows[0].means["prompt_tokens"]
    prompts = "" if length is None else f" (prompts: {length:.0f} on average)"
    lines, previous = [f"{printable(title)}{prompts}", f"{'budget':>6}  {'method':<{width}}  {columns}"], object()
    for name, row in zip(names, rows, strict=True):
        budget = "" if row.budget == previous else "all" if row.budget is None else str(row.budget)
        share, ends = share_of_full(row, rows), row.estimates["score"].interval
        of_full = "" if row.method == FULL or share is None else f"{share:.2f} of full"
        interval = f"[{ends[0]:.3f}, {ends[1]:.3f}]" if ends else ""
        lines.append(
            f"{budget:>6}  {name:<{width}}  {row.score:6.3f}  {interval:<14}  {of_full:<12}  "
            f"{number_text(row.excess_nll, 3):>10}  {row.estimates['agreement'].value:15.3f}  {row.n:4d}"
        )
        previous = row.budget
    return "\n".join(lines)


def findings(summary: Sequence[SummaryRow]) -> list[str]:
    """A sentence for each of the smallest budgets, about the means over tasks; the measure is excess NLL.

    Without a row of `OURS` the best method is compared with the second best.
    """
    mean = mean_over_tasks(summary)
    full = next((row for row in mean if row.method == FULL), None)
    evicting = [row for row in mean if row.budget is not None and kind_of(row.method) not in BOUNDS]
    return [_finding([*rows], full) for _, rows in groupby(evicting, lambda row: row.budget)][:_MOST]


def kind_of(method: str) -> str:
    """A method's name without its options."""
    return method.partition(" ")[0]


def _finding(rows: list[SummaryRow], full: SummaryRow | None) -> str:
    rows.sort(key=lambda row: (row.excess_nll, -row.score))
    best = next((row for row in rows if kind_of(row.method) == OURS), rows[0])
    other = next((row for row in rows if row is not best and kind_of(row.method) != OURS), None)
    budget = best.budget
    place = f"{100 * budget:g} % of the prompt" if isinstance(budget, float) else f"{budget} entries"
    nats = f"{number_text(best.excess_nll, 3)} nats per token"
    sentence = f"At {place} {label_of(best.method)} has an excess NLL of {nats}"
    if pair := difference(best, other):
        sentence += _compared(pair.estimates["excess_nll"], f"{label_of(pair.against)}, the best other method")
    scores = [f"Score {number_text(best.score, 2)}"]
    scores += [f"{label_of(other.method)} {number_text(other.score, 2)}"] if other else []
    scores += [f"full cache {number_text(full.score, 2)}"] if full else []
    return f"{sentence}. {', '.join(scores)}; {best.n} samples."


def _compared(found: Estimate, other: str) -> str:
    """`, 0.55 less than snapkv (95 % interval 0.40 to 0.71)`; level with it where the interval holds zero."""
    ends = found.interval
    word, sign = ("less", -1) if found.value < 0 else ("more", 1)
    size = number_text(sign * found.value, 3)
    if ends is None:
        return f", {size} {word} than {other}"
    low, high = sorted(sign * end for end in ends)
    span = f"95 % interval {number_text(low, 3)} to {number_text(high, 3)}"
    return f", {size} {word} than {other} ({span})" if low > 0 else f": level with {other} ({size} {word}, {span})"
