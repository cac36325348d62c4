"""From `results.jsonl` to means: `summary.csv`, the table of the terminal, paired differences, and findings."""

import math
from collections.abc import Iterable
from typing import Any, TypeAlias

import pandas as pd

from keepsight.errors import printable
from keepsight.eval.report.figures import label_of
from keepsight.eval.report.intervals import FEW, Estimate, estimate, weighted
from keepsight.eval.results import FULL, Row

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
PLACE = ["task", "length"]
Frame: TypeAlias = Any
"""A `pandas.DataFrame`, whose own types know no columns."""
_MOST = 4
"""Maximum number of findings."""
_PLOTTED = ("time_to_first_token", "kv_mib", "budget_entries")
_NUMBERS = (*MEANS[:3], "prompt_tokens", "first_difference", "answer_tokens", "time_to_first_token", "kv_bytes", "kept")


def summarize(rows: Iterable[Row]) -> Frame:
    """Means over the samples of each task, length, method and budget, in the order of `summary.csv`.

    Columns of the result:
        task, length, method: Of the samples; the length is nominal, in tokens.
        budget: KV entries per layer and KV head (int), or a share of the prompt (float); None for the full cache.
        order: The budget as a number, 0 for the full cache.
        n: Number of samples.
        score: `Estimate` of the task's metric, 0 to 1.
        excess_nll: `Estimate` of the excess NLL (delta NLL vs. full cache): the mean negative log-likelihood of the
            full cache's own answer minus that under the full cache, in nats per token.
        agreement: `Estimate` of the top-1 agreement: the share of that answer's tokens that stay the arg-max.
        of_full: The score as a share of the full cache's; NaN where that is missing or zero.
        recall, mass, tau: Recall of the entries that the answer attends to most, attention mass kept, Kendall's tau.
        same_tokens: Tokens of the answer before it differs from the full cache's; all of them where it does not.
        prompt_tokens, time_to_first_token, kv_mib, budget_entries: Tokens of the prompt, seconds, MiB of keys and
            values, and the budget in entries. These means, and those before, are NaN where nothing was measured.
        samples: The samples, as text.
        not_evicted: Number of samples of which the method kept as much as the full cache.
    """
    columns = [*PLACE, "method", "budget", "sample", "sample_digest", "context", *MEASURES, *_NUMBERS]
    frame = pd.DataFrame([*rows], columns=columns, dtype=object).sort_values("sample", kind="stable")
    frame = frame.astype(dict.fromkeys((*MEASURES, *_NUMBERS), float))
    frame["order"] = frame["budget"].astype(float).fillna(0)
    frame["evicts"] = frame["method"] != FULL
    frame["stratum"] = frame["task"] + ", " + frame["length"].map(str) + " tokens"
    frame["samples"] = frame["sample_digest"].fillna(frame["sample"])
    known = frame.groupby([*PLACE, "samples"])["context"].transform("first")  # earlier versions wrote none
    frame["context"] = known.fillna(frame["samples"])
    frame["same_tokens"] = frame["first_difference"].fillna(frame["answer_tokens"])
    frame["kv_mib"] = frame["kv_bytes"] / 2**20
    tokens = frame["prompt_tokens"].fillna(frame["length"].astype(float))
    frame["budget_entries"] = frame["order"].mask(are_shares(frame), frame["order"] * tokens)
    whole = frame["kept"].mask(frame["evicts"]).groupby([frame[name] for name in (*PLACE, "sample")]).transform("max")
    frame["not_evicted"] = frame["budget"].notna() & (frame["kept"] >= whole)
    groups = frame.groupby([*PLACE, "evicts", "method", "order"])
    summary = groups.agg(
        budget=("budget", "first"),
        n=("sample", "size"),
        **{name: (name, list) for name in (*MEASURES, "context")},
        **{name: (name, "mean") for name in (*MEANS, *_PLOTTED)},
        stratum=("stratum", "first"),
        samples=("samples", ", ".join),
        not_evicted=("not_evicted", "sum"),
    ).reset_index()
    summary["samples"] = summary["stratum"] + ": " + summary["samples"]
    for name in MEASURES:
        parts = zip(summary[name], summary["stratum"], summary["context"], strict=True)
        summary[name] = [estimate(*part, can_be_share=name == "score") for part in parts]
    return _with_share_of_full(summary)


def are_shares(rows: Frame) -> Any:
    """Whether each budget is a share of the prompt."""
    return rows["budget"].map(lambda budget: isinstance(budget, float))


def summary_rows(summary: Frame) -> list[dict[str, object]]:
    """What `summary.csv` has in its `COLUMNS`: floats with 4 decimals, an empty budget for the full cache."""
    cells = summary.copy()
    for name in MEASURES:
        cells[name] = summary[name].astype(float)
        cells[[f"{name}_low", f"{name}_high"]] = [each.interval or (math.nan, math.nan) for each in summary[name]]
    return [{name: _cell(value) for name, value in row.items()} for row in records(cells[[*COLUMNS]])]


def records(frame: Frame) -> list[dict[Any, Any]]:
    """The rows of a frame as dicts, with None for what is missing."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def mean_over_tasks(summary: Frame) -> Frame:
    """Means of each method and budget over tasks of equal weight, and over lengths (shown as 0); `ranked`."""
    variant, numbers, tasks = ["method", "order"], [*MEANS, *_PLOTTED], summary["task"].unique()
    samples_of_task = summary.groupby([*variant, "task"])["n"].transform("sum")
    weight = summary["n"] / samples_of_task / summary.groupby(variant)["task"].transform("nunique")
    groups = summary.assign(weight=weight, **summary[numbers].mul(weight, axis=0)).groupby(variant)
    mean = groups.agg(
        budget=("budget", "first"),
        n=("n", "sum"),
        weight=("weight", list),
        **{name: (name, list) for name in MEASURES},
        **{name: (name, "sum") for name in numbers},
        samples=("samples", "; ".join),
        not_evicted=("not_evicted", "sum"),
    )
    mean[numbers] = mean[numbers].where(groups[numbers].count().eq(groups.size(), axis=0))
    for name in MEASURES:
        mean[name] = [weighted(*pair) for pair in zip(mean[name], mean["weight"], strict=True)]
    title = f"mean of {len(tasks)} tasks" if len(tasks) > 1 else "".join(tasks)
    return ranked(_with_share_of_full(mean.reset_index().assign(task=title, length=0)))


def by_task_and_length(summary: Frame) -> dict[tuple[str, int], Frame]:
    """The rows of each task and length, both ascending; within one in the order of `ranked`."""
    return {(task, length): ranked(rows) for (task, length), rows in summary.groupby(PLACE)}


def ranked(rows: Frame) -> Frame:
    """Rows by budget, the full cache first; at equal budget the best score first, then the lowest excess NLL."""
    numbers = rows.assign(score=-rows["score"].astype(float), excess_nll=rows["excess_nll"].astype(float))
    return rows.loc[numbers.sort_values(["order", "score", "excess_nll", "method"]).index]


def difference(rows: Frame, others: Frame, **on: Any) -> Frame:
    """Rows merged with others (`on` as in `DataFrame.merge`), whose estimates are subtracted; the samples are the same.

    `against` is the other row's method; its other columns have `_other` behind their names.
    """
    pairs = rows.merge(others, suffixes=("", "_other"), **on).rename(columns={"method_other": "against"})
    pairs = pairs[pairs["samples"] == pairs["samples_other"]]
    return pairs.assign(**{name: pairs[name] - pairs[f"{name}_other"] for name in MEASURES})


def differences(rows: Frame) -> Frame:
    """All pairs of `ranked` methods at equal budget, the better first, and every method against the full cache."""
    rows = rows.assign(rank=range(len(rows)))
    full, evicting = rows[rows["method"] == FULL], rows[rows["method"] != FULL]
    pairs = difference(evicting, evicting, on="order").query("rank < rank_other")
    return pd.concat([difference(evicting, full, how="cross"), pairs])


def summary_table(summary: Frame) -> str:
    """A plain-text table for the terminal: the mean over tasks last, after a block for each of a few tasks."""
    groups = by_task_and_length(summary)
    blocks = [_block(f"{task}, {length} tokens", rows) for (task, length), rows in groups.items()]
    mean = mean_over_tasks(summary)
    if len(blocks) > 1:
        title = f"{mean['task'].iloc[0]}, all lengths"
        blocks = [*(blocks if len(blocks) <= MAX_BLOCKS else []), _block(title, mean)]
    return "\n\n".join(filter(None, [*blocks, printable(notes_on(mean))]))


def notes_on(rows: Frame) -> str:
    """What weakens the numbers of some rows, as sentences: nothing was evicted, or samples are missing or few."""
    rows = rows.assign(most=rows.groupby(PLACE)["n"].transform("max"))
    kept_all, few = rows[rows["not_evicted"] > 0].itertuples(), rows[rows["n"] < rows["most"]].itertuples()
    whole = [f"{row.method} {row.budget} ({row.not_evicted} of {row.n})" for row in kept_all]
    missing = [f"{row.method} {row.budget} ({row.n} of {row.most})" for row in few]
    titles = {"Nothing was evicted in some samples": whole, "Some samples were not measured": missing}
    notes = [f"{title}: {', '.join(dict.fromkeys(found))}." for title, found in titles.items() if found]
    if any(each.n < FEW for each in rows["excess_nll"]):
        notes.append(f"Intervals of fewer than {FEW} samples are too narrow.")
    return " ".join(notes)


def number_text(value: float, digits: int, is_signed: bool = False) -> str:
    """A number with a fixed number of decimals, never `-0`."""
    return f"{round(value, digits) + 0.0:{'+' if is_signed else ''}.{digits}f}"


def _cell(value: object) -> object:
    if isinstance(value, float):
        return number_text(value, 4)
    return "" if value is None else value


def _with_share_of_full(summary: Frame) -> Frame:
    scores = summary["score"].astype(float)
    full = scores.where(summary["method"] == FULL).groupby([summary[name] for name in PLACE]).transform("max")
    return summary.assign(of_full=scores / full.where(full != 0))


def _block(title: str, rows: Frame) -> str:
    names = rows["method"].map(printable)
    width = max(len("method"), *map(len, names))
    columns = f"{'score':>6}  {'95 %':<14}  {'':<12}  {'excess NLL':>10}  {'top-1 agreement':>15}  {'n':>4}"
    length = rows["prompt_tokens"].iloc[0]
    prompts = "" if math.isnan(length) else f" (prompts: {length:.0f} on average)"
    lines = [f"{printable(title)}{prompts}", f"{'budget':>6}  {'method':<{width}}  {columns}"]
    for row, name, again in zip(rows.itertuples(), names, rows["budget"].duplicated(), strict=True):
        budget = "" if again else "all" if row.budget is None else str(row.budget)
        of_full = "" if row.method == FULL or math.isnan(row.of_full) else f"{row.of_full:.2f} of full"
        interval = "[{:.3f}, {:.3f}]".format(*row.score.interval) if row.score.interval else ""
        lines.append(
            f"{budget:>6}  {name:<{width}}  {row.score.value:6.3f}  {interval:<14}  {of_full:<12}  "
            f"{number_text(row.excess_nll.value, 3):>10}  {row.agreement.value:15.3f}  {row.n:4d}"
        )
    return "\n".join(lines)


def findings(summary: Frame) -> list[str]:
    """A sentence for each of the smallest budgets, about the means over tasks; the measure is excess NLL.

    Without a row of `OURS` the best method is compared with the second best.
    """
    mean = mean_over_tasks(summary)
    evicting = mean[mean["budget"].notna() & ~mean["method"].map(kind_of).isin(BOUNDS)]
    return [_finding(rows, mean[mean["method"] == FULL]) for _, rows in evicting.groupby("order")][:_MOST]


def kind_of(method: str) -> str:
    """A method's name without its options."""
    return method.partition(" ")[0]


def _finding(rows: Frame, full: Frame) -> str:
    rows = rows.sort_values("excess_nll", key=lambda estimates: estimates.astype(float), kind="stable")
    ours = rows["method"].map(kind_of) == OURS
    best = (rows[ours] if ours.any() else rows)[:1]
    other = rows[~ours].drop(best.index, errors="ignore")[:1]
    (row,) = best.itertuples()
    place = f"{100 * row.budget:g} % of the prompt" if isinstance(row.budget, float) else f"{row.budget} entries"
    nats = f"{number_text(row.excess_nll.value, 3)} nats per token"
    sentence = f"At {place} {label_of(row.method)} has an excess NLL of {nats}"
    for pair in difference(best, other, how="cross").itertuples():
        sentence += _compared(pair.excess_nll, f"{label_of(pair.against)}, the best other method")
    scores = [f"Score {number_text(row.score.value, 2)}"]
    scores += [f"{label_of(each.method)} {number_text(each.score.value, 2)}" for each in other.itertuples()]
    scores += [f"full cache {number_text(each.score.value, 2)}" for each in full.itertuples()]
    return f"{sentence}. {', '.join(scores)}; {row.n} samples."


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
