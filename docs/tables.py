"""Makes the tables of README, RESULTS.md, the guides and the shipped cards from `results/*.csv`, and README's plot.

    python docs/tables.py

A line added to a file appears in the tables at the next run; its command goes to `results/runs.csv`. A page marks the
place of a table with `<!-- table: NAME -->`; the text between it and `<!-- end -->` is replaced.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from keepsight.eval.report.figures import STYLES, look
from keepsight.files import size_text, write_text
from keepsight.runtime.registry import Style

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "RESULTS.md", ROOT / "docs" / "performance.md"]
PAGES += sorted((ROOT / "checkpoints").glob("*/README.md"))
PLACE = re.compile(r"(?<=<!-- table: )([\w-]+)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)
EXCESS = "{excess_nll} ({low} to {high})"
OURS = "LookaheadKV (shipped)"
EARLIER = "LookaheadKV before its last stage"
BEFORE = "LookaheadKV shipped before 2026-11-27"
UNPOOLED = "LookaheadKV, the paper's selection without pooling"


@dataclass(frozen=True)
class Table:
    """A file of `results/` as a table: a line per value of `by`, a column per value of `across`."""

    file: str
    across: str
    cell: str = EXCESS
    """Format of a cell, filled from its row in the file; a missing value becomes a dash."""
    by: str = "method"
    rows: dict[str, str] = field(default_factory=dict)
    """The values of `by` that are shown, in this order, with other names for them; all without it."""
    head: str = "{}"
    where: dict[str, tuple[str, ...]] = field(default_factory=dict)
    columns: tuple[str, ...] = ("date", "processor", "run")
    """Columns of the file that end each line; several values are joined."""
    title: str = ""

    def text(self) -> str:
        """The table in Markdown."""
        found = read(self.file)
        found = found[found.isin(self.where)[[*self.where]].all(axis=1)]
        if found.empty:
            return "Not measured.\n"
        found = found.assign(cell=found.apply(lambda row: filled(self.cell, row), axis=1))
        cells = found.pivot(index=self.by, columns=self.across, values="cell").fillna("–")
        cells = cells[found[self.across].unique()].rename(columns=lambda place: self.head.format(thousands(place)))
        lines = cells.join(found.groupby(self.by)[[*self.columns]].agg(joined))
        shown = self.rows or alike(*found[self.by].unique())
        lines = lines.loc[[*shown]].rename(lambda name: marked(name, shown[name]))
        return markdown(lines.rename_axis(self.title or self.by).reset_index())


def read(file: str) -> pd.DataFrame:
    """The rows of a file of `results/`; all values are texts."""
    return pd.read_csv(ROOT / "results" / f"{file}.csv", dtype=str, keep_default_na=False)


def markdown(frame: pd.DataFrame) -> str:
    """A frame as a table."""
    lines = [frame.columns, ["---"] * frame.shape[1], *frame.to_numpy()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def marked(name: str, label: str) -> str:
    """The label of a row, in bold for our module."""
    return f"**{label}**" if name in (OURS, "lookaheadkv") else label


def joined(values: Iterable[str]) -> str:
    """The different values, without the empty one."""
    return ", ".join(dict.fromkeys(filter(None, values)))


def filled(cell: str, row: pd.Series) -> str:
    """A cell; its part in brackets is left out where a value of it is missing."""
    if any(not row[key] for key in re.findall(r"{(\w+)}", cell.partition(" (")[2])):
        cell = cell.partition(" (")[0]
    return cell.format(**row.replace("", "–"))


def thousands(place: str) -> str:
    """A number of tokens or entries as pages write it."""
    return f"{int(place):,}" if place.isdecimal() else place


def alike(*names: str) -> dict[str, str]:
    """Rows that are shown under their own names."""
    return {name: name for name in names}


SNAPKV = alike("SnapKV, mean over 3", "SnapKV, max over 7", "SnapKV, unpooled")
BASELINES = alike("LAQ", "SpecKV (26-layer draft)", "DapQ") | SNAPKV
REST = alike("StreamingLLM", "untrained soft tokens")
FIRST = "LookaheadKV after the first stage"
VARIANTS = {
    EARLIER: "before the last stage",
    FIRST: "after the first stage",
    UNPOOLED: "the shipped module with the paper's selection, unpooled",
    BEFORE: "shipped before 2026-11-27, trained in eight stages",
}
ORACLE = alike("oracle attention (mean over 3)", "oracle attention (unpooled)")
WEIGHTED_LAQ, WEIGHTED_SNAPKV = "LAQ, 32 draft tokens, learned head weights", "SnapKV, learned head weights"
TUNED = {
    **alike(OURS),
    WEIGHTED_LAQ: "LAQ, 32 draft tokens, unpooled, heads share a budget, learned weights",
    "LAQ, 32 draft tokens, heads share a budget": "the same without weights",
    **alike("LAQ, 32 draft tokens, unpooled", "LAQ"),
    WEIGHTED_SNAPKV: "SnapKV, mean over 3, heads share a budget, learned weights",
    "SnapKV, heads share a budget": "the same without weights",
    **alike("SnapKV, mean over 3"),
    "LookaheadKV, uniform selection": "LookaheadKV (shipped), uniform selection",
    "LookaheadKV, the paper's selection": "LookaheadKV (shipped), the paper's selection, pooled by max over 7",
    **alike(EARLIER),
}
UNTRAINED = "KVgrad", "KVzip", "Expected Attention", "SnapKV, mean over 3"
READING = alike("exact_topk", "specontext (shipped head)", "quest")
SCORE = "{score} / {excess_nll}"
TABLES = {
    "real": Table(
        "real_prompts",
        "budget",
        rows=alike(*ORACLE, OURS) | VARIANTS | BASELINES | REST,
        head="{} entries",
    ),
    "card": Table(
        "real_prompts",
        "budget",
        rows=alike("oracle attention (unpooled)", OURS, UNPOOLED, *BASELINES),
        head="{} entries",
        columns=("date",),
    ),
    "differences": Table(
        "real_prompts_differences",
        "budget",
        cell="{difference} ({low} to {high})",
        by="minus",
        where={"method": (OURS,)},
        head="{} entries",
        title="LookaheadKV minus",
    ),
    "unseen": Table(
        "question",
        "budget",
        rows=alike("oracle attention (mean over 3)", OURS, *UNTRAINED),
        head="{} entries",
        where={"question": ("unseen",), "samples": ("110",)},
        columns=("run",),
    ),
    "tuned": Table(
        "question",
        "budget",
        rows=TUNED,
        head="{} entries",
        where={"question": ("seen",), "samples": ("33",)},
        columns=("run",),
    ),
    "needles": Table(
        "needles",
        "length",
        cell="{score}",
        rows=alike("full cache", OURS, "oracle attention (unpooled)", "SnapKV, mean over 3"),
        head="{} tokens",
    ),
    "needle-tasks": Table(
        "needle_tasks",
        "samples",
        cell=SCORE,
        rows=alike("full cache", OURS, "oracle attention (unpooled)"),
        head="{} samples",
        where={"budget": ("64", "")},
    ),
    "reading": Table("reading_needles", "budget", cell=SCORE, rows=READING, head="{} entries"),
    "serving": Table("serving", "caches", cell="{value}", by="what", title="16 requests at once"),
    "hits": Table("reading_hits", "budget", cell="{hit_rate} / {mass}", head="{} entries"),
}


SLOW = "2 cores, AMD EPYC, AVX2"
"""A slower machine, whose times are only in the file."""


PADDED = "2026-11-24"
"""The last day on which layers were padded to their longest head; decoding steps until then are only in the file."""


def time_table() -> str:
    """The table of times: the rows of the most informative runs, without AdaKV and the parts of a time."""
    found = read("time")
    found = found[found["run"].isin(["evict", "decode2048", "train8x4", "sweep"]) & (found["processor"] != SLOW)]
    found = found.query("what != 'decoding step' or date > @PADDED")
    found = found[~found["what"].isin(["observing", "selecting", "prefill"]) & (found["method"] != "AdaKV")]
    return markdown(found[["what", "method", "setting", "values", "unit", "date", "processor", "run"]])


SEEN, UNSEEN = ("64", "128", "256"), ("0.5", "0.25", "0.1")
"""Budgets of README's table and of the table of all methods: question seen, question unseen."""
SCORED = {"RULER": ("all_ruler", "128"), "needles": ("all_needles", "64")}
"""The columns of scores in the table of all methods: their runs and budgets."""
CONTINUED = {
    "all110_reads": "all110",
    "all110_more": "all110",
    "all_needles_reads": "all_needles",
    "needles_more": "all_needles",
}
"""Runs of further methods that fill columns of an earlier run in the table of all methods."""
FRONT = {
    "lookaheadkv": OURS,
    "kvgrad": "KVgrad",
    "kvzip": "KVzip",
    "laq 32 unpooled": "LAQ, 32 draft tokens, unpooled",
    "laq": "LAQ",
    "snapkv mean 3": "SnapKV, mean over 3",
}
"""The rows of README's table: their names in methods.csv and in question.csv."""


def front_table() -> str:
    """README's table: excess NLL on the 110 prompts with the question seen and unseen, and costs with it seen."""
    seen = read("methods").query("run == 'all110'").set_index(["method", "budget"])
    unseen = read("question").query("question == 'unseen' and samples == '110'").set_index(["method", "budget"])

    def means(table: pd.DataFrame, name: str) -> str:
        return " / ".join(table["excess_nll"][name, budget] for budget in SEEN)

    lines = [("full cache", "0", "0", "1")]
    for name, label in FRONT.items():
        cost = 1 + float(seen["cost"][name, SEEN[0]]) / 100
        lines.append((marked(name, label), means(seen, name), means(unseen, label), f"{cost:.2f}"))
    return markdown(pd.DataFrame(lines, columns=["method", "question seen", "question unseen", "cost, prefills"]))


OTHER_TASKS = {
    "other_seen": "up to 4,096 tokens, answers of 128",
    "other_unseen": "up to 4,096 tokens, answers of 32, question unseen",
    "long_seen": "4,096 to 8,192 tokens, answers of 32",
    "long_unseen": "4,096 to 8,192 tokens, answers of 32, question unseen",
}
"""Runs on tasks of other kinds, and what their prompts and answers are."""


def other_tasks_table() -> str:
    """Tasks of other kinds than the eleven data sets: a line per method, excess NLL at four budgets for each run."""
    found = read("other_tasks")
    means = found.groupby(["method", "run"], sort=False)["excess_nll"].agg(" / ".join).unstack().fillna("–")
    counts = dict(zip(found["run"], found["samples"], strict=True))
    lines = [(marked(name, name), *means.loc[name, [*OTHER_TASKS]]) for name in means.index]
    titles = [f"{kind} ({counts[run]} prompts)" for run, kind in OTHER_TASKS.items()]
    return markdown(pd.DataFrame(lines, columns=["method", *titles]))


def methods_table() -> str:
    """The table of all methods, the lowest excess NLL at the middle budget first: a line per method.

    Methods whose means on the eleven prompts are all equal share a line: keepsight's first, then kvpress's. Their means
    on the 110 prompts, cost and MiB are keepsight's.
    """
    found = read("methods").replace({"run": CONTINUED}).set_index(["method", "run", "budget"])

    def cell(method: str, column: str, run: str, *budgets: str) -> str:
        alone = (method, run, "") in found.index  # a method without budgets
        values = [found[column].get((method, run, budget), "") or "–" for budget in ("",) * alone or budgets]
        return " / ".join(values) if {*values} != {"–"} else "–"

    def line(name: str) -> tuple[str, ...]:
        scores = ([cell(name, column, *run) for column in ("score", "excess_nll")] for run in SCORED.values())
        return (
            marked(name, name),
            cell(name, "excess_nll", "all_seen", *SEEN),
            cell(name, "excess_nll", "all_unseen", *UNSEEN),
            cell(name, "excess_nll", "all110", *SEEN),
            *(" / ".join(pair) if {*pair} != {"–"} else "–" for pair in scores),
            cell(name, "cost", "all_seen", SEEN[1]),
            cell(name, "kv_mib", "all_seen", SEEN[1]),
        )

    means = found.xs("all_seen", level="run")["excess_nll"].astype(float).to_dict()
    highest = float("inf")
    methods = sorted(
        {*found.index.unique("method")},
        key=lambda name: (
            means.get((name, SEEN[1]), means.get((name, ""), highest)),
            name.startswith("kvpress "),
            name,
        ),
    )
    means_of = [f"seen, {' / '.join(SEEN)}", f"unseen, {' / '.join(UNSEEN)}"]
    rest = [f"110 prompts, {means_of[0]}", *SCORED, "cost, %", "MiB"]
    lines = pd.DataFrame(map(line, methods), columns=["method", *means_of, *rest])
    lines["method"] = lines.groupby(means_of)["method"].transform(", ".join)
    return markdown(lines.drop_duplicates(means_of))


def gpu_table() -> str:
    """What methods cost on GPUs: a table per card and model, a line per generation that was measured to its end."""
    found = read("gpu").query("kind == 'generate' and batch_s != ''")

    def line(row: pd.Series) -> tuple[str, ...]:
        first, share, step, batch = (float(row[name]) for name in ("first_s", "share", "step_s", "batch_s"))
        sizes = (size_text(int(row[name])) for name in ("kv_bytes", "peak_bytes"))
        speed = f"{int(row['rows']) / batch:,.0f} ({row['rows']} rows)"
        times = (f"{first:.2f}", f"{share:.1%}", f"{step * 1e3:.0f}")
        return thousands(row["tokens"]), row["method"], *times, speed, *sizes

    names = ["tokens", "method", "first token, s", "beyond a prefill", "step, ms", "tokens/s", "KV", "peak"]
    parts = []
    for (card, model), rows in found.groupby(["card", "model"], sort=False):
        lines = markdown(pd.DataFrame([line(row) for _, row in rows.iterrows()], columns=names))
        parts.append(f"{card}, {model}:\n\n{lines}")
    return "\n".join(parts)


OWN = {
    "time": time_table,
    "front": front_table,
    "methods": methods_table,
    "other-tasks": other_tasks_table,
    "gpu": gpu_table,
}
"""Tables with a function of their own."""


def made(name: str) -> str:
    """A table by its name."""
    return OWN[name]() if name in OWN else TABLES[name].text()


def with_tables(text: str) -> str:
    """A page with its tables replaced."""
    return PLACE.sub(lambda place: place[1] + place[2] + made(place[1]), text)


PLOTTED = {
    "StreamingLLM": ("StreamingLLM", STYLES["streamingllm"]),
    "untrained soft tokens": ("untrained soft tokens", Style(STYLES["lookaheadkv"].colour, "o", ":")),
    "SpecKV (26-layer draft)": ("SpecKV", STYLES["speckv"]),
    "SnapKV, mean over 3": ("SnapKV", STYLES["snapkv"]),
    "DapQ": ("DapQ", STYLES["dapq"]),
    "LAQ": ("LAQ", STYLES["laq"]),
    UNPOOLED: (UNPOOLED, Style(STYLES["lookaheadkv"].colour, "o", "--")),
    OURS: ("LookaheadKV", STYLES["lookaheadkv"]),
    "oracle attention (mean over 3)": ("oracle attention", STYLES["oracle"]),
}
BUDGETS = [64, 128, 256]


def draw() -> Figure:
    """Excess NLL against the budget."""
    figure = Figure(figsize=(8, 4), dpi=150, layout="constrained")
    axes, found = figure.subplots(), read("real_prompts").set_index("method")
    for place, (name, (label, style)) in enumerate(PLOTTED.items()):
        means, low, high = found.loc[name, ["excess_nll", "low", "high"]].to_numpy(float).T
        budgets = [budget * 2 ** (0.03 * (place - 4)) for budget in BUDGETS]  # so that intervals stay apart
        axes.vlines(budgets, low, high, style.colour, linewidth=1, alpha=0.5)
        width = 2.4 if label == "LookaheadKV" else 1.4
        axes.plot(budgets, means, style.line, marker=style.marker, color=style.colour, linewidth=width, label=label)
    axes.set(xscale="log", ylim=0, xlabel="entries kept per layer and KV head", ylabel="excess NLL (nats a token)")
    axes.xaxis.set(major_locator=FixedLocator(BUDGETS), minor_locator=NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    look(axes)
    figure.legend(loc="outside right upper", frameon=False)
    return figure


if __name__ == "__main__":
    for page in PAGES:
        write_text(page, with_tables(page.read_text("utf-8")))
    draw().savefig(ROOT / "docs" / "images" / "excess_nll.png", facecolor="white")
