"""From `results.jsonl` to means: `summary.csv`, the table of the terminal, paired differences, and findings."""

import math
from collections.abc import Iterable
from typing import Any, TypeAlias

import pandas as pd

from keepsight.errors import printable
from keepsight.eval.record import FULL, ResultRow
from keepsight.eval.report.figures import label_of
from keepsight.eval.report.intervals import LEAST_SAMPLES, Estimate, estimate, weighted
from keepsight.tables import TerminalColumn, terminal_table

MEASURES = ("score", "excess_nll", "agreement")
"""Columns that get an interval."""
MEANS = ("recall", "mass", "tau", "same_tokens", "prompt_tokens")
"""Means reported beside them."""
COLUMNS = (
    *("task", "length", "method", "budget", "n", *MEASURES),
    *("score_low", "score_high", "excess_nll_low", "excess_nll_high", "agreement_low", "agreement_high"),
    *MEANS,
    "not_evicted",
)
MAX_BLOCKS = 4
"""With more pairs of task and length than these, none has a block of its own in the terminal."""
OURS = "lookaheadkv"
"""Methods whose name begins with this word are compared with the others."""
BOUNDS = ("oracle", "exact_topk", "random")
"""Methods that no method competes with: the bounds from above and below."""
TASK_AND_LENGTH = ["task", "length"]
Frame: TypeAlias = Any
"""A `pandas.DataFrame`, whose own types know no columns."""
_MAX_FINDINGS = 4
_PLOTTED = ("time_to_first_token", "kv_mib", "budget_entries")
_NUMBERS = (*MEANS[:3], "prompt_tokens", "first_difference", "answer_tokens", "time_to_first_token", "kv_bytes", "kept")


# Means of each task and length


def summarize(rows: Iterable[ResultRow]) -> Frame:
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
    frame = _frame_of_rows(rows)
    lists = _aggregations((*MEASURES, "context"), list)
    means = _aggregations((*MEANS, *_PLOTTED), "mean")
    summary = (
        frame.groupby([*TASK_AND_LENGTH, "evicts", "method", "order"])
        .agg(
            budget=("budget", "first"),
            n=("sample", "size"),
            **lists,
            **means,
            stratum=("stratum", "first"),
            samples=("samples", ", ".join),
            not_evicted=("not_evicted", "sum"),
        )
        .reset_index()
    )
    summary["samples"] = summary["stratum"] + ": " + summary["samples"]
    for measure in MEASURES:
        estimates = []
        for values, stratum, contexts in zip(summary[measure], summary["stratum"], summary["context"], strict=True):
            estimates.append(estimate(values, stratum, contexts, can_be_share=measure == "score"))
        summary[measure] = estimates
    return _with_share_of_full(summary)


def _frame_of_rows(rows: Iterable[ResultRow]) -> Frame:
    """The rows with the columns that `summarize` groups and averages, by sample."""
    columns = [*TASK_AND_LENGTH, "method", "budget", "sample", "sample_digest", "context", *MEASURES, *_NUMBERS]
    frame = pd.DataFrame(list(map(vars, rows)), columns=columns, dtype=object)
    frame = frame.sort_values("sample", kind="stable")
    frame = frame.astype(dict.fromkeys((*MEASURES, *_NUMBERS), float))
    frame["order"] = frame["budget"].astype(float).fillna(0)
    frame["evicts"] = frame["method"] != FULL
    frame["stratum"] = frame["task"] + ", " + frame["length"].map(str) + " tokens"
    frame["samples"] = frame["sample_digest"].fillna(frame["sample"])
    context = frame.groupby([*TASK_AND_LENGTH, "samples"])["context"].transform("first")
    frame["context"] = context.fillna(frame["samples"])
    frame["same_tokens"] = frame["first_difference"].fillna(frame["answer_tokens"])
    frame["kv_mib"] = frame["kv_bytes"] / 2**20
    frame["budget_entries"] = frame["order"].mask(are_shares(frame), frame["order"] * frame["prompt_tokens"])
    kept_by_full = frame["kept"].mask(frame["evicts"])
    sample = [frame["task"], frame["length"], frame["sample"]]
    entries_of_sample = kept_by_full.groupby(sample).transform("max")
    frame["not_evicted"] = frame["budget"].notna() & (frame["kept"] >= entries_of_sample)
    return frame


def _aggregations(columns: Iterable[str], how: Any) -> dict[str, tuple[str, Any]]:
    """Arguments of `agg` for columns that keep their names."""
    return {column: (column, how) for column in columns}


def are_shares(rows: Frame) -> Any:
    """Whether each budget is a share of the prompt."""
    return rows["budget"].map(lambda budget: isinstance(budget, float))


def _with_share_of_full(summary: Frame) -> Frame:
    scores = summary["score"].astype(float)
    scores_of_full = scores.where(summary["method"] == FULL)
    full = scores_of_full.groupby([summary["task"], summary["length"]]).transform("max")
    return summary.assign(of_full=scores / full.where(full != 0))


class SummaryRows(list[dict[str, Any]]):
    """The rows of `summary.csv` as dicts by column: numbers as they are, None where nothing was measured."""

    def to_pandas(self) -> Frame:
        """The rows as a `pandas.DataFrame` with all columns of `summary.csv`."""
        return pd.DataFrame(list(self), columns=list(COLUMNS))


def summary_rows(summary: Frame) -> SummaryRows:
    """What `summary.csv` has in its `COLUMNS`; the budget of the full cache is None."""
    cells = summary.copy()
    for measure in MEASURES:
        cells[measure] = summary[measure].astype(float)
        ends = [value.interval or (math.nan, math.nan) for value in summary[measure]]
        cells[[f"{measure}_low", f"{measure}_high"]] = ends
    return SummaryRows(records(cells[[*COLUMNS]]))


def csv_cells(rows: SummaryRows) -> list[dict[str, object]]:
    """The rows as texts of `summary.csv`: floats with 4 decimals, an empty budget for the full cache."""
    lines = []
    for row in rows:
        cells: dict[str, object] = {}
        for column, value in row.items():
            if value is None:
                cells[column] = ""
            else:
                cells[column] = number_text(value, 4) if isinstance(value, float) else value
        lines.append(cells)
    return lines


def records(frame: Frame) -> list[dict[Any, Any]]:
    """The rows of a frame as dicts, with None for what is missing."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


# Means over tasks, and differences


def mean_over_tasks(summary: Frame) -> Frame:
    """Means of each method and budget over tasks of equal weight, and over lengths (shown as 0); `ranked`."""
    variant = ["method", "order"]
    numbers = [*MEANS, *_PLOTTED]
    samples_of_task = summary.groupby([*variant, "task"])["n"].transform("sum")
    tasks_of_variant = summary.groupby(variant)["task"].transform("nunique")
    weight = summary["n"] / samples_of_task / tasks_of_variant
    groups = summary.assign(weight=weight, **summary[numbers].mul(weight, axis=0)).groupby(variant)
    lists = _aggregations(MEASURES, list)
    sums = _aggregations(numbers, "sum")
    mean = groups.agg(
        budget=("budget", "first"),
        n=("n", "sum"),
        weight=("weight", list),
        **lists,
        **sums,
        samples=("samples", "; ".join),
        not_evicted=("not_evicted", "sum"),
    )
    is_measured_in_all = groups[numbers].count().eq(groups.size(), axis=0)
    mean[numbers] = mean[numbers].where(is_measured_in_all)
    for measure in MEASURES:
        mean[measure] = list(map(weighted, mean[measure], mean["weight"]))
    tasks = summary["task"].unique()
    title = f"mean of {len(tasks)} tasks" if len(tasks) > 1 else "".join(tasks)
    return ranked(_with_share_of_full(mean.reset_index().assign(task=title, length=0)))


def by_task_and_length(summary: Frame) -> dict[tuple[str, int], Frame]:
    """The rows of each task and length, both ascending; within one in the order of `ranked`."""
    return {(task, length): ranked(rows) for (task, length), rows in summary.groupby(TASK_AND_LENGTH)}


def ranked(rows: Frame) -> Frame:
    """Rows by budget, the full cache first; at equal budget the best score first, then the lowest excess NLL."""
    numbers = rows.assign(score=-rows["score"].astype(float), excess_nll=rows["excess_nll"].astype(float))
    return rows.loc[numbers.sort_values(["order", "score", "excess_nll", "method"]).index]


def difference(rows: Frame, others: Frame, **on: Any) -> Frame:
    """Rows merged with others (`on` as in `DataFrame.merge`), whose estimates are subtracted; the samples are the same.

    `against` is the other row's method; its other columns have `_other` behind their names.
    """
    merged = rows.merge(others, suffixes=("", "_other"), **on).rename(columns={"method_other": "against"})
    merged = merged[merged["samples"] == merged["samples_other"]]
    return merged.assign(**{measure: merged[measure] - merged[f"{measure}_other"] for measure in MEASURES})


def differences(rows: Frame) -> Frame:
    """All pairs of `ranked` methods at equal budget, the better first, and every method against the full cache."""
    rows = rows.assign(rank=range(len(rows)))
    full = rows[rows["method"] == FULL]
    evicting = rows[rows["method"] != FULL]
    from_full = difference(evicting, full, how="cross")
    from_worse = difference(evicting, evicting, on="order").query("rank < rank_other")
    return pd.concat([from_full, from_worse])


# The terminal's table


def summary_table(summary: Frame) -> str:
    """A plain-text table for the terminal: the mean over tasks last, after a block for each of a few tasks."""
    groups = by_task_and_length(summary)
    mean = mean_over_tasks(summary)
    blocks = []
    if len(groups) <= MAX_BLOCKS:
        for (task, length), rows in groups.items():
            blocks.append(_block(f"{task}, {length} tokens", rows))
    if len(groups) > 1:
        blocks.append(_block(f"{mean['task'].iloc[0]}, all lengths", mean))
    notes = notes_on(mean)
    if notes:
        blocks.append(printable(notes))
    return "\n\n".join(blocks)


_COLUMNS_SHOWN = (
    TerminalColumn("budget"),
    TerminalColumn("method", is_text=True),
    TerminalColumn("score", ".3f"),
    TerminalColumn("95 %", is_text=True),
    TerminalColumn("", is_text=True),
    TerminalColumn("excess NLL"),
    TerminalColumn("top-1 agreement", ".3f"),
    TerminalColumn("n", "d"),
)


def _block(title: str, rows: Frame) -> str:
    """A heading, and a line for each method and budget; a budget is shown once."""
    names = rows["method"].map(printable)
    heading = printable(title)
    prompt_tokens = rows["prompt_tokens"].iloc[0]
    if not math.isnan(prompt_tokens):
        heading += f" (prompts: {prompt_tokens:.0f} on average)"
    cells = []
    for row, name, is_shown in zip(rows.itertuples(), names, rows["budget"].duplicated(), strict=True):
        budget = "all" if row.budget is None else str(row.budget)
        if is_shown:
            budget = ""
        of_full = ""
        if row.method != FULL and not math.isnan(row.of_full):
            of_full = f"{row.of_full:.2f} of full"
        interval = ""
        if row.score.interval:
            interval = "[{:.3f}, {:.3f}]".format(*row.score.interval)
        cells.append(
            {
                "budget": budget,
                "method": name,
                "score": row.score.value,
                "95 %": interval,
                "": of_full,
                "excess NLL": number_text(row.excess_nll.value, 3),
                "top-1 agreement": row.agreement.value,
                "n": row.n,
            }
        )
    return f"{heading}\n{terminal_table(cells, _COLUMNS_SHOWN)}"


def notes_on(rows: Frame) -> str:
    """What weakens the numbers of some rows, as sentences: nothing was evicted, or samples are missing or few."""
    rows = rows.assign(most=rows.groupby(TASK_AND_LENGTH)["n"].transform("max"))
    kept_all = []
    for row in rows[rows["not_evicted"] > 0].itertuples():
        kept_all.append(f"{row.method} {row.budget} ({row.not_evicted} of {row.n})")
    missing = []
    for row in rows[rows["n"] < rows["most"]].itertuples():
        missing.append(f"{row.method} {row.budget} ({row.n} of {row.most})")

    notes = []
    if kept_all:
        notes.append(f"Nothing was evicted in some samples: {', '.join(dict.fromkeys(kept_all))}.")
    if missing:
        notes.append(f"Some samples were not measured: {', '.join(dict.fromkeys(missing))}.")
    if any(value.n < LEAST_SAMPLES for value in rows["excess_nll"]):
        notes.append(f"Intervals of fewer than {LEAST_SAMPLES} samples are too narrow.")
    return " ".join(notes)


def number_text(value: float, digits: int, is_signed: bool = False) -> str:
    """A number with a fixed number of decimals, never `-0`."""
    return f"{round(value, digits) + 0.0:{'+' if is_signed else ''}.{digits}f}"


# Findings


def findings(summary: Frame) -> list[str]:
    """A sentence for each of the smallest budgets, about the means over tasks; the measure is excess NLL.

    Without a row of `OURS` the best method is compared with the second best.
    """
    mean = mean_over_tasks(summary)
    full = mean[mean["method"] == FULL]
    evicting = mean[mean["budget"].notna() & ~mean["method"].map(kind_of).isin(BOUNDS)]
    sentences = [_finding(rows, full) for _, rows in evicting.groupby("order")]
    return sentences[:_MAX_FINDINGS]


def kind_of(method: str) -> str:
    """A method's name without its options."""
    return method.partition(" ")[0]


def _finding(rows: Frame, full: Frame) -> str:
    """The best of our methods at one budget, or of all where none is ours, against the best of the others."""
    rows = rows.sort_values("excess_nll", key=lambda estimates: estimates.astype(float), kind="stable")
    is_ours = rows["method"].map(kind_of) == OURS
    best = rows[is_ours][:1] if is_ours.any() else rows[:1]
    other = rows[~is_ours].drop(best.index, errors="ignore")[:1]
    (row,) = best.itertuples()
    budget = f"{100 * row.budget:g} % of the prompt" if isinstance(row.budget, float) else f"{row.budget} entries"
    nats = f"{number_text(row.excess_nll.value, 3)} nats per token"
    sentence = f"At {budget} {label_of(row.method)} has an excess NLL of {nats}"
    for compared in difference(best, other, how="cross").itertuples():
        sentence += _compared(compared.excess_nll, f"{label_of(compared.against)}, the best other method")

    scores = [f"Score {number_text(row.score.value, 2)}"]
    for other_row in other.itertuples():
        scores.append(f"{label_of(other_row.method)} {number_text(other_row.score.value, 2)}")
    for full_row in full.itertuples():
        scores.append(f"full cache {number_text(full_row.score.value, 2)}")
    samples = "1 sample" if row.n == 1 else f"{row.n} samples"
    return f"{sentence}. {', '.join(scores)}; {samples}."


def _compared(excess: Estimate, other: str) -> str:
    """`, 0.55 less than snapkv (95 % interval 0.40 to 0.71)`; level with it where the interval holds zero."""
    word = "less" if excess.value < 0 else "more"
    sign = -1 if excess.value < 0 else 1
    size = number_text(sign * excess.value, 3)
    if excess.interval is None:
        return f", {size} {word} than {other}"
    low, high = sorted(sign * end for end in excess.interval)
    span = f"95 % interval {number_text(low, 3)} to {number_text(high, 3)}"
    if low > 0:
        return f", {size} {word} than {other} ({span})"
    return f": level with {other} ({size} {word}, {span})"
