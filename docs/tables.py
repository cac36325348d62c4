"""Makes the tables of README, RESULTS.md, `results/*.md`, guides and cards: of `results/*.csv`, and of the registry.

    python docs/tables.py

A line added to a file of `results/` appears in the tables at the next run; its command goes to `results/runs.csv`. A
page marks the place of a table with `<!-- table: NAME -->`; the text between it and `<!-- end -->` is replaced. A new
method appears in docs/methods.md, in docs/api/methods.md and in `runtime/methods/__init__.pyi`, which type checkers
read; a new family of tests/families.py in docs/models.md. The plot of README is drawn anew.
"""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from keepsight.commands.recipe import presets
from keepsight.eval.report.figures import GRID, STYLES, TEXT, look
from keepsight.files import size_text, write_text
from keepsight.runtime.catalogue import descriptions
from keepsight.runtime.generate import SECTIONS
from keepsight.runtime.registry import METHODS, Style
from keepsight.tables import markdown_table

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "RESULTS.md"]
PAGES += [ROOT / "docs" / name for name in ("excess_nll.md", "performance.md", "which_method.md")]
PAGES += sorted((ROOT / "results").glob("*.md")) + sorted((ROOT / "checkpoints").glob("*/README.md"))
PAGES += [ROOT / "docs" / "methods.md", ROOT / "docs" / "api" / "methods.md", ROOT / "docs" / "models.md"]
STUB = ROOT / "runtime" / "methods" / "__init__.pyi"
MARKED_TABLE = re.compile(r"(?<=<!-- table: )([\w-]+)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)
EXCESS = "{excess_nll} ({low} to {high})"
OURS = "LookaheadKV (shipped)"
EARLIER = "LookaheadKV before its last stage"
BEFORE = "LookaheadKV shipped before 2026-11-27"
UNPOOLED = "LookaheadKV, the paper's selection without pooling"
BY_THE_PAPER = "LookaheadKV by the paper's recipe"


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
        results = read(self.file)
        results = results[results.isin(self.where)[[*self.where]].all(axis=1)]
        if results.empty:
            return "Not measured.\n"
        results = results.assign(cell=results.apply(lambda row: filled(self.cell, row), axis=1))
        cells = results.pivot(index=self.by, columns=self.across, values="cell").fillna("–")
        cells = cells[results[self.across].unique()].rename(columns=self.heading)
        lines = cells.join(results.groupby(self.by)[[*self.columns]].agg(joined))
        shown = self.rows or alike(*results[self.by].unique())
        lines = lines.loc[[*shown]].rename(lambda name: marked(name, shown[name]))
        return markdown_table(lines.rename_axis(self.title or self.by).reset_index())

    def heading(self, value: str) -> str:
        """The heading of a column; rows without a value of `across` kept everything."""
        if not value:
            return "everything kept"
        return self.head.format(thousands(value))


def read(file: str) -> pd.DataFrame:
    """The rows of a file of `results/`; all values are texts."""
    return pd.read_csv(ROOT / "results" / f"{file}.csv", dtype=str, keep_default_na=False)


def marked(name: str, label: str) -> str:
    """The label of a row, in bold for our module."""
    return f"**{label}**" if name in (OURS, "lookaheadkv") else label


def joined(values: Iterable[str]) -> str:
    """The different values, without the empty one."""
    different = dict.fromkeys(values)
    different.pop("", None)
    return ", ".join(different)


def filled(cell: str, row: pd.Series) -> str:
    """A cell; its part in brackets is left out where a value of it is missing."""
    before, _, in_brackets = cell.partition(" (")
    columns = re.findall(r"{(\w+)}", in_brackets)
    if any(not row[column] for column in columns):
        cell = before
    return cell.format(**row.replace("", "–"))


def thousands(text: str) -> str:
    """A number of tokens or entries as pages write it; any other text as it is."""
    if text.isdecimal():
        return f"{int(text):,}"
    return text


def with_entries(table: pd.DataFrame) -> pd.DataFrame:
    """A table whose columns of budgets say that they are entries."""
    return table.rename(columns=lambda name: f"{name} entries" if name.isdecimal() else name)


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
    BY_THE_PAPER: "a module trained by the paper's recipe, with its selection",
    f"{BY_THE_PAPER}, uniform selection": "the same module, selection=uniform",
    f"{BY_THE_PAPER}, shared selection": "the same module, selection=shared",
    f"{BY_THE_PAPER}, trained once more": "the paper's recipe and selection, trained once more",
    f"{BY_THE_PAPER}, all questions seen": "the same, all questions seen in training",
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
UNTRAINED = "KVgrad", "KVgrad, chunks of 512", "KVzip", "Expected Attention", "SnapKV, mean over 3"
READING = alike("exact_topk", "specontext (shipped head)", "quest")
SCORE = "{score} / {excess_nll}"
CODER_RULER = ("coder_ruler", "coder_ruler_paper")
CODER_REAL = ("coder_real", "coder_real_paper")
DIFFERENCE = "{difference} ({low} to {high})"


def paired(*runs: str, what: str = "excess_nll", method: str = OURS, minus: tuple[str, ...] = ()) -> Table:
    """Paired differences of runs over the same prompts: a method minus each of the others it was compared with."""
    return Table(
        "question_differences",
        "budget",
        cell=DIFFERENCE,
        by="minus",
        rows=alike(*minus),
        where={"run": runs, "what": (what,), "method": (method,)},
        columns=(),
        title=f"{method.removesuffix(' (shipped)')} minus, entries:",
    )


def trial(name: str, measure: str = "excess NLL (nats a token)") -> Table:
    """The variants of a trial, a line each."""
    where = {"trial": (name,), "measure": (measure,)}
    return Table("trials", "entries", "{value}", "variant", head="{} entries", where=where, columns=("run",))


def coder(*runs: str) -> Table:
    """Score and excess NLL of methods with Qwen2.5-Coder 0.5B in runs with the same samples."""
    columns = ("samples", "date", "processor", "run")
    return Table("coder", "budget", "{score} / {excess_nll}", head="{} entries", where={"run": runs}, columns=columns)


def on(run: str, *rows: str, columns: tuple[str, ...] = ()) -> Table:
    """Mean excess NLL of methods in a run of `question.csv`."""
    where = {"run": (run,)}
    return Table("question", "budget", "{excess_nll}", rows=alike(*rows), where=where, columns=columns)


TABLES = {
    "real": Table(
        "real_prompts",
        "budget",
        rows=alike(*ORACLE, OURS) | VARIANTS | BASELINES | REST,
        head="{} entries",
    ),
    "coder": coder(*CODER_RULER),
    "coder-real": coder(*CODER_REAL),
    "card": Table(
        "real_prompts",
        "budget",
        rows=alike("oracle attention (unpooled)", OURS, UNPOOLED, BY_THE_PAPER, *BASELINES),
        head="{} entries",
        columns=("date",),
    ),
    "differences": Table(
        "real_prompts_differences",
        "budget",
        cell=DIFFERENCE,
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
    "reading-time": Table(
        "reading_time",
        "entries",
        cell="{low_ms} to {high_ms}",
        rows=alike("full attention", "specontext", "quest"),
        head="{} entries, ms",
    ),
    "fewer-bits": Table("fewer_bits", "bits", cell="{needles_score} / {real_excess_nll}", head="bits: {}"),
    "memory": Table(
        "memory",
        "budget",
        cell="{kv_mib} / {kv_peak_mib}",
        rows=alike(OURS, "SnapKV, mean over 3", "full cache"),
        head="{} entries",
        where={"method": (OURS, "SnapKV, mean over 3", "full cache")},
    ),
    "kvpress-110": Table("kvpress", "budget", head="{} entries"),
    "by-file-seen": Table(
        "real_prompts_by_file",
        "budget",
        cell="{difference}",
        by="file",
        head="{} entries",
        where={"of": (OURS,)},
        columns=(),
    ),
    "by-file-unseen": Table(
        "by_file",
        "budget",
        cell="{excess_nll}",
        by="file",
        head="{} entries",
        where={"run": ("unseen110",), "method": (OURS,)},
        columns=(),
    ),
    "by-file-unseen-kvgrad": Table(
        "by_file",
        "budget",
        cell="{excess_nll}",
        by="file",
        head="{} entries",
        where={"run": ("kvgrad256",), "method": ("KVgrad",)},
        columns=(),
    ),
    "seen-pairs": paired("all110"),
    "unseen-pairs": paired("kvgrad256", "unseen110"),
    "other-unseen-pairs": paired("other_unseen"),
    "long-seen-pairs": paired("long_seen"),
    "long-unseen-pairs": paired("long_unseen"),
    "multi": on("multi"),
    "multi-pairs": paired("multi"),
    "reconstruction": on("reconstruction", OURS, "KVzip", "SnapKV, mean over 3"),
    "reconstruction-pairs": paired("reconstruction"),
    "weights-pairs": paired("tuned33_laq", method=EARLIER, minus=(WEIGHTED_LAQ,)),
    "weights-score-pairs": paired("tuned33_laq", what="score", method=EARLIER, minus=(WEIGHTED_LAQ,)),
    "laq-pairs": paired("scores33"),
    "laq-score-pairs": paired("scores33", what="score"),
    "scores33": trial("task scores: 33 prompts, question seen", "score"),
    "every": trial("eviction while decoding: 11 prompts, answers of up to 256 tokens"),
    "per-query-head": trial("selection per query head: 11 prompts, question seen"),
    "sparse": trial("SpecKV's sparse prefill: 8 prompts of 4,096 to 8,192 tokens, question seen"),
    "longer-prompts": trial("longer prompts in the last stage: 8 prompts of 4,096 to 8,192 tokens, question seen"),
    "departures": Table(
        "trials",
        "entries",
        cell="{value}",
        by="variant",
        head="{} entries",
        where={"trial": ("departures from the paper, one after another: 33 prompts, question seen",)},
        columns=("difference", "standard_error"),
        title="departure",
    ),
    # RESULTS.md: a few lines of the tables above.
    "short-real": Table(
        "real_prompts",
        "budget",
        cell="{excess_nll}",
        rows=alike("oracle attention (mean over 3)", OURS, "LAQ", "SnapKV, mean over 3"),
        head="{} entries",
        columns=(),
    ),
    "short-unseen": Table(
        "question",
        "budget",
        cell="{excess_nll}",
        rows=alike(OURS, "KVgrad", "KVzip", "SnapKV, mean over 3"),
        head="{} entries",
        where={"question": ("unseen",), "samples": ("110",)},
        columns=(),
    ),
    "short-tuned": Table(
        "question",
        "budget",
        cell="{excess_nll}",
        rows={
            **alike(OURS),
            WEIGHTED_LAQ: "LAQ, 32 draft tokens, learned weights",
            **alike("LAQ, 32 draft tokens, unpooled"),
            WEIGHTED_SNAPKV: "SnapKV, learned weights",
            **alike("SnapKV, mean over 3"),
        },
        head="{} entries",
        where={"question": ("seen",), "samples": ("33",)},
        columns=(),
    ),
    "short-needles": Table(
        "needles",
        "length",
        cell="{score}",
        rows=alike("full cache", OURS, "SnapKV, mean over 3"),
        head="{} tokens",
        columns=(),
    ),
    "short-reading": Table("reading_needles", "budget", SCORE, rows=READING, head="{} entries", columns=()),
    "short-serving": Table(
        "serving",
        "caches",
        cell="{value}",
        by="what",
        rows=alike("decoding step, ms", "decoded tokens per second", "peak use of the engine's cache, MiB"),
        title="16 requests at once",
        columns=(),
    ),
}


SLOW = "2 cores, AMD EPYC, AVX2"
"""A slower machine, whose times are only in the file."""


PADDED = "2026-11-24"
"""The last day on which layers were padded to their longest head; decoding steps until then are only in the file."""


def times_of(runs: list[str]) -> pd.DataFrame:
    """The rows of runs of `time.csv` that pages show: without AdaKV, the parts of a time and what is out of date."""
    results = read("time")
    results = results[results["run"].isin(runs)]
    results = results[results["processor"] != SLOW]
    results = results[results["method"] != "AdaKV"]
    results = results[~results["what"].isin(["observing", "selecting", "prefill"])]
    return results.query("what != 'decoding step' or date > @PADDED")


def time_table() -> str:
    """The table of times: the rows of the most informative runs."""
    results = times_of(["evict_one_pass", "evict", "decode2048", "train8x4", "sweep"])
    return markdown_table(results[["what", "method", "setting", "values", "unit", "date", "processor", "run"]])


SEEN = ("64", "128", "256")
"""Budgets of README's table and of the table of all methods with the question seen."""
UNSEEN = ("0.5", "0.25", "0.1")
"""Budgets of the table of all methods with the question unseen."""
SCORED = {"RULER": ("all_ruler", "128"), "needles": ("all_needles", "64")}
"""The columns of scores in the table of all methods: their runs and budgets."""
RULER_RUNS = {
    "1024": {"seen": "ruler130_seen", "unseen": "ruler130_unseen"},
    "2048": {"seen": "ruler2048_seen", "unseen": "ruler2048_unseen"},
    "4096": {"seen": "ruler4096_seen", "unseen": "ruler4096_unseen"},
}
"""The runs of RULER's tasks with SmolLM2, by the prompts' tokens and by question; of its needles alone at 4,096."""
RULER_BUDGET = "128"
"""The budget of RULER's column in short tables; that of needles is 64."""
CONTINUED = {
    "all110_reads": "all110",
    "all110_more": "all110",
    "ladders110": "all110",
    "pruned110": "all110",
    "pruned11": "all_seen",
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
    """README's table: excess NLL on the 110 prompts, scores of needles and of RULER's tasks, and costs."""
    seen = read("methods").query("run == 'all110'").set_index(["method", "budget"])
    unseen = read("question").query("question == 'unseen' and samples == '110'").set_index(["method", "budget"])

    def means(table: pd.DataFrame, name: str) -> str:
        return " / ".join(table["excess_nll"][name, budget] for budget in SEEN)

    scores = scores_of({"full": "full cache", **FRONT}).set_index("method")
    lines = [("full cache", "0", "0", *scores.loc["full cache"], "1")]
    for name, label in FRONT.items():
        row = marked(name, label)
        cost = 1 + float(seen["cost"][name, SEEN[0]]) / 100
        lines.append((row, means(seen, name), means(unseen, label), *scores.loc[row], f"{cost:.2f}"))
    columns = ["method", "question seen", "question unseen", "needles", "RULER", "cost, prefills"]
    return markdown_table(lines, columns)


def scores_of(names: dict[str, str]) -> pd.DataFrame:
    """Scores of methods on needles and on RULER's tasks, in the columns `needles` and `RULER`."""
    scores = of_methods("all_needles", names, "score", ("64",)).rename(columns={"64": "needles"})
    rows = read("real_models")
    is_shown = (rows["run"] == RULER_RUNS["1024"]["seen"]) & rows["budget"].isin(["", RULER_BUDGET])
    of_ruler = rows[is_shown].set_index("method")["score"]
    scores["RULER"] = [of_ruler.get(label, "–") for label in names.values()]
    return scores


FRONT_CODER = {
    "full cache": "full cache",
    "LookaheadKV (this module)": OURS,
    "the same module, selection=shared": "trained by the paper's recipe, our selection",
    "LookaheadKV, a module by the paper's recipe": "trained by the paper's recipe, its selection",
    "LAQ, 32 draft tokens, unpooled": "LAQ, 32 draft tokens, unpooled",
    "SnapKV, mean over 3": "SnapKV, mean over 3",
}
"""The rows of README's table for Qwen2.5-Coder 0.5B: their names in coder.csv and on the page."""


def front_coder_table() -> str:
    """README's table for Qwen2.5-Coder 0.5B: excess NLL and scores on 33 prompts, scores of RULER's tasks."""
    results = read("coder")
    lines = []
    for name, label in FRONT_CODER.items():
        rows = results[results["method"] == name]
        real = rows[rows["run"].isin(CODER_REAL)].set_index("budget").loc[[*SEEN]]
        ruler = rows[rows["run"].isin(CODER_RULER)].set_index("budget").loc[["64", "128"]]
        excess, real_scores, ruler_scores = map(" / ".join, (real["excess_nll"], real["score"], ruler["score"]))
        lines.append((marked(label, label), excess, real_scores, ruler_scores))
    return markdown_table(lines, ["method", "excess NLL", "score", "RULER's score"])


OTHER_TASKS = {
    "other_seen": "up to 4,096 tokens, answers of 128",
    "other_unseen": "up to 4,096 tokens, answers of 32, question unseen",
    "long_seen": "4,096 to 8,192 tokens, answers of 32",
    "long_unseen": "4,096 to 8,192 tokens, answers of 32, question unseen",
}
"""Runs on tasks of other kinds, and what their prompts and answers are."""


def other_tasks_table() -> str:
    """Tasks of other kinds than the eleven data sets: a line per method, excess NLL at four budgets for each run."""
    results = read("other_tasks")
    groups = results.groupby(["method", "run"], sort=False)
    means = groups["excess_nll"].agg(" / ".join).unstack().fillna("–")
    counts = dict(zip(results["run"], results["samples"], strict=True))
    lines = []
    for name in means.index:
        lines.append((marked(name, name), *means.loc[name, [*OTHER_TASKS]]))
    titles = [f"{kind} ({counts[run]} prompts)" for run, kind in OTHER_TASKS.items()]
    return markdown_table(lines, ["method", *titles])


SOURCES_NOT_TRAINED_ON = ("lcc", "multi_news", "trec")
"""The files of the 110 prompts whose data sets are no source of the training prompts (training_sources.csv)."""


UNSEEN_RIVALS = ("KVgrad", "KVzip", "SnapKV, mean over 3")


def sources_table(rivals: tuple[str, ...] = UNSEEN_RIVALS, budgets: tuple[str, ...] = SEEN) -> str:
    """Excess NLL with the question unseen on the data sets that training used, and on the others."""
    results = read("by_file").query("run in ('unseen110', 'kvgrad256')")
    results = results.assign(excess_nll=results["excess_nll"].astype(float))
    others = results["file"].isin(SOURCES_NOT_TRAINED_ON)
    parts = {
        "the eight sources of training": results[~others],
        "lcc, multi_news, trec": results[others],
    }
    lines = []
    for label, rows in parts.items():
        means = rows.groupby(["method", "budget"])["excess_nll"].mean()
        cells = []
        for name in (OURS, *rivals):
            cells.append(" / ".join(f"{means[name, budget]:.3f}" for budget in budgets))
        lines.append((label, *cells))
    return markdown_table(lines, ["data sets", "LookaheadKV", *rivals])


def short_sources_table() -> str:
    """RESULTS.md's part of the table above: KVgrad, 64 entries."""
    return sources_table(("KVgrad",), ("64",))


def of_methods(run: str, names: dict[str, str], column: str, budgets: tuple[str, ...]) -> pd.DataFrame:
    """Methods of a run of `methods.csv` as rows, budgets as columns; a method without budgets has its value in each."""
    results = read("methods").replace({"run": CONTINUED}).query("run == @run")
    values = results.set_index(["method", "budget"])[column]
    lines = []
    for name, label in names.items():
        if (name, "") in values.index:
            cells = [values[name, ""]] * len(budgets)
        else:
            cells = [values.get((name, budget), "–") for budget in budgets]
        lines.append((marked(name, label), *cells))
    return pd.DataFrame(lines, columns=["method", *budgets])


SCORED_METHODS = {"full": "full cache", **FRONT}
"""The rows of tables of task scores."""


def scores_table() -> str:
    """Task scores on the 110 prompts, question seen."""
    names = SCORED_METHODS | {"snapkv": "SnapKV, max over 7"}
    return markdown_table(with_entries(of_methods("all110", names, "score", SEEN)))


def score_tasks_table() -> str:
    """Scores on needles and RULER's tasks."""
    titles = {"needles": "needles, 64 entries", "RULER": f"RULER, {RULER_BUDGET} entries"}
    return markdown_table(scores_of(SCORED_METHODS).rename(columns=titles))


def ruler_questions_table(length: str) -> str:
    """RULER's scores with SmolLM2 on prompts of `length` tokens: a line per method, scores by question and budget."""
    rows = read("real_models")
    lines = dict[str, dict[str, str]]()
    for question, run in RULER_RUNS[length].items():
        of_run = rows[rows["run"] == run]
        for method, of_method in of_run.groupby("method", sort=False):
            scores = of_method.set_index("budget")["score"]
            budgets = [scores.get(budget, scores.get("", "–")) for budget in SEEN]
            line = lines.setdefault(method, {"method": marked(method, method)})
            line[f"question {question}, {' / '.join(SEEN)}"] = " / ".join(budgets)
    return markdown_table(pd.DataFrame(lines.values()).fillna("–"))


def short_scores_table() -> str:
    """RESULTS.md's scores: the 110 prompts, needles and RULER."""
    real = of_methods("all110", SCORED_METHODS, "score", SEEN)
    table = scores_of(SCORED_METHODS)
    table.insert(1, f"110 prompts, {' / '.join(SEEN)}", real[[*SEEN]].agg(" / ".join, axis=1))
    return markdown_table(table)


MEAN_ORACLE = "oracle attention (mean over 3)"
MEAN_SNAPKV = "SnapKV, mean over 3"
MAX_SNAPKV = "SnapKV, max over 7"
GAPS = {
    ("real_prompts", "", "seen"): "the 110 prompts",
    ("question", "110", "unseen"): "the 110 prompts",
    ("other_tasks", "other_seen", "seen"): "other kinds, up to 4K tokens",
    ("other_tasks", "other_unseen", "unseen"): "other kinds, up to 4K tokens",
    ("other_tasks", "long_seen", "seen"): "other kinds, 4K to 8K",
    ("other_tasks", "long_unseen", "unseen"): "other kinds, 4K to 8K",
}
"""The measurements whose share of the gap is shown: a file, a run or number of samples in it, and the question."""


def gaps_table() -> str:
    """How much of the gap between SnapKV and oracle attention LookaheadKV closes, from means of three decimals.

    SnapKV has the lower of its two published poolings, where both were run; oracle attention has a mean over 3.
    """
    lines = []
    for (file, selected, question), prompts in GAPS.items():
        results = read(file)
        if file == "other_tasks":
            results = results[results["run"] == selected]
        elif file == "question":
            results = results[(results["question"] == question) & (results["samples"] == selected)]
        count = results["samples"].iloc[0]
        rows = results.drop_duplicates(["method", "budget"])
        means = rows.pivot(index="budget", columns="method", values="excess_nll").apply(pd.to_numeric)
        snapkv = means.filter(items=[MEAN_SNAPKV, MAX_SNAPKV]).min(axis=1)
        shares = 100 * (snapkv - means[OURS]) / (snapkv - means[MEAN_ORACLE])
        cells = []
        for budget in ("64", "128", "256", "512"):
            cells.append(f"{shares[budget]:.0f}" if budget in shares else "–")
        lines.append((prompts, question, count, *cells))
    return markdown_table(lines, ["prompts", "question", "number", "64", "128", "256", "512"])


KVPRESS_PAIRS = {
    "SnapKV": "snapkv mean 3",
    "CriticalKV": "criticalkv mean 3",
    "KeyDiff": "keydiff",
    "TOVA": "tova",
    "Expected Attention": "expected_attention",
    "Expected Attention, AdaKV": "expected_adakv",
    "KVzip": "kvzip",
    "KVgrad": "kvgrad",
}


def short_kvpress_table() -> str:
    """RESULTS.md's lines of the table below: the methods with the largest differences."""
    return kvpress_table({"SnapKV": KVPRESS_PAIRS["SnapKV"], "KVzip": "kvzip", "KVgrad": "kvgrad"})


def kvpress_table(pairs: dict[str, str] = KVPRESS_PAIRS) -> str:
    """The largest differences from kvpress over all budgets: of a mean, and of a single prompt."""
    results = read("methods_differences")
    results = results[results["minus"].str.startswith("kvpress ")]
    lines = []
    for label, name in pairs.items():
        cells = []
        for question in ("seen", "unseen"):
            rows = results[(results["method"] == name) & (results["question"] == question)]
            mean = rows["difference"].astype(float).abs().max()
            single = rows["largest"].astype(float).abs().max()
            cells.append(f"{mean:.4f} / {single:.4f}")
        lines.append((label, *cells))
    return markdown_table(lines, ["method", "question seen", "question unseen"])


def short_time_table() -> str:
    """RESULTS.md's times: observing and selecting, and a decoding step."""
    results = times_of(["evict_one_pass", "decode2048"])
    results = results.query("what != 'decoding step' or method != 'SnapKV'")
    results = results[~results["setting"].str.startswith("1,024 tokens")]
    names = {
        "observing and selecting in one pass with the prompt, share of the prefill": "choosing, % of a prefill",
        "decoding step": "a step, ms",
    }
    return markdown_table(results.assign(what=results["what"].map(names))[["what", "method", "values"]])


SERVER_COLUMNS = {
    "server": "server",
    "workload": "asked",
    "answer_tokens": "answer, tokens",
    "requests_a_minute": "requests/min",
    "first_s": "first token, s",
    "p99_first_s": "p99 first token, s",
    "gap_ms": "gap, ms",
    "p99_gap_ms": "p99 gap, ms",
    "peak_mib": "peak MiB",
    "run": "run",
}
"""Columns of servers.csv and their titles."""


def servers_table() -> str:
    """Servers that the same clients asked in turns."""
    results = read("servers")
    lines = results[[*SERVER_COLUMNS]].to_numpy().tolist()
    return markdown_table(lines, [*SERVER_COLUMNS.values()])


FRONT_SERVERS = {
    "vLLM alone, full caches": "vLLM alone",
    "vLLM evicts by itself (`reader=vllm`), SnapKV": "vLLM that evicts (`reader=vllm`, SnapKV)",
    "`vllm=true`, prefixes made before, LookaheadKV": "vLLM with prefixes made before",
    "keepsight serve, LookaheadKV": "keepsight's own server",
}
"""The rows of README's table of servers: their names in servers.csv and in the table."""
FRONT_WORKLOADS = {
    ("new", "48"): "new prompts, answers of 48 tokens",
    ("new", "512"): "new prompts, 512 tokens",
    ("documents", "48"): "documents, 48 tokens",
    ("chats", "48"): "chats, 48 tokens",
}
"""Its columns: workload and answer length in servers.csv, and the heading."""


def front_servers_table() -> str:
    """README's table of servers: requests a minute by workload."""
    requests = read("servers").pivot(index="server", columns=["workload", "answer_tokens"], values="requests_a_minute")
    table = requests.reindex(index=[*FRONT_SERVERS], columns=[*FRONT_WORKLOADS]).fillna("–")
    table.columns = [*FRONT_WORKLOADS.values()]
    return markdown_table(table.rename(FRONT_SERVERS).rename_axis("server").reset_index())


SHOWN_STATEMENTS = ("with", "raise", "import", "assert")
"""The questions of run `nats` whose answers docs/excess_nll.md shows."""


def nats_table() -> str:
    """Answers from the full cache and from two smaller ones, with their excess NLL."""
    results = read("nats")
    lines = []
    for statement in SHOWN_STATEMENTS:
        for _, row in results[results["statement"] == statement].iterrows():
            label = row["method"]
            if row["budget"]:
                label = f"{marked(label, label)}, {row['budget']} entries"
            lines.append((row["excess_nll"], label, row["answer"]))
    return markdown_table(lines, ["excess NLL", "cache", "answer"])


SHORT_METHODS = {
    "specache": "SpeCache",
    "exact_topk": "exact top-k",
    "specontext": "SpeContext (shipped head)",
    "lookaheadkv": "LookaheadKV (shipped)",
    "laq 32 unpooled": "LAQ, 32 draft tokens, unpooled",
    "snapkv mean 3": "SnapKV, mean over 3",
}
"""RESULTS.md's rows of the table of all methods."""


def short_methods_table() -> str:
    """RESULTS.md's lines of the table of all methods: the 110 prompts, and the size of the stored keys and values."""
    sizes = of_methods("all_seen", SHORT_METHODS, "kv_mib", (SEEN[1],))[SEEN[1]]
    means = of_methods("all110", SHORT_METHODS, "excess_nll", SEEN)
    return markdown_table(with_entries(means).assign(MiB=sizes))


def short_gpu_table() -> str:
    """RESULTS.md's lines of the table of GPUs: 8,192 tokens."""
    results = read("gpu").query("kind == 'generate' and batch_s != '' and tokens == '8192'")
    lines = []
    for _, row in results[results["method"].isin(["full", "snapkv", "lookaheadkv, shared"])].iterrows():
        speed = f"{int(row['rows']) / float(row['batch_s']):,.0f}"
        lines.append((row["method"], f"{float(row['first_s']):.2f}", speed, size_text(int(row["kv_bytes"]))))
    return markdown_table(lines, ["method", "first token, s", "tokens/s", "KV of a row"])


def methods_table() -> str:
    """The table of all methods, the lowest excess NLL at the middle budget first: a line per method.

    Methods whose means on the eleven prompts are all equal share a line: keepsight's first, then kvpress's. Their means
    on the 110 prompts, cost and MiB are keepsight's.
    """
    results = read("methods").replace({"run": CONTINUED}).set_index(["method", "run", "budget"])

    def cell(method: str, column: str, run: str, *budgets: str) -> str:
        if (method, run, "") in results.index:  # a method without budgets
            budgets = ("",)
        values = [results[column].get((method, run, budget), "") for budget in budgets]
        if not any(values):
            return "–"
        return " / ".join(value or "–" for value in values)

    def score_cell(method: str, run: str, budget: str) -> str:
        score = cell(method, "score", run, budget)
        excess = cell(method, "excess_nll", run, budget)
        if score == excess == "–":
            return "–"
        return f"{score} / {excess}"

    middle = SEEN[1]
    means = results.xs("all_seen", level="run")["excess_nll"].astype(float).to_dict()

    def order(method: str) -> tuple[float, bool, str]:
        mean = means.get((method, middle), means.get((method, ""), float("inf")))
        return mean, method.startswith("kvpress "), method

    seen_title = f"seen, {' / '.join(SEEN)}"
    unseen_title = f"unseen, {' / '.join(UNSEEN)}"
    lines = []
    for method in sorted({*results.index.unique("method")}, key=order):
        line = {
            "method": marked(method, method),
            seen_title: cell(method, "excess_nll", "all_seen", *SEEN),
            unseen_title: cell(method, "excess_nll", "all_unseen", *UNSEEN),
            f"110 prompts, {seen_title}": cell(method, "excess_nll", "all110", *SEEN),
        }
        for title, (run, budget) in SCORED.items():
            line[title] = score_cell(method, run, budget)
        line["cost, %"] = cell(method, "cost", "all_seen", middle)
        line["MiB"] = cell(method, "kv_mib", "all_seen", middle)
        lines.append(line)
    table = pd.DataFrame(lines)
    means_titles = [seen_title, unseen_title]
    is_measured = (table[means_titles] != "–").any(axis=1)
    measured = table[is_measured]
    measured = measured.assign(method=measured.groupby(means_titles)["method"].transform(", ".join))
    return markdown_table(pd.concat([measured.drop_duplicates(means_titles), table[~is_measured]]))


def gpu_table() -> str:
    """What methods cost on GPUs: a table per card and model, a line per generation that was measured to its end."""
    results = read("gpu").query("kind == 'generate' and batch_s != ''")

    parts = []
    for (card, model), rows in results.groupby(["card", "model"], sort=False):
        lines = []
        for _, row in rows.iterrows():
            line = {
                "tokens": thousands(row["tokens"]),
                "method": row["method"],
                "first token, s": f"{float(row['first_s']):.2f}",
                "beyond a prefill": f"{float(row['share']):.1%}",
                "step, ms": f"{1e3 * float(row['step_s']):.0f}",
                "tokens/s": f"{int(row['rows']) / float(row['batch_s']):,.0f} ({row['rows']} rows)",
                "KV": size_text(int(row["kv_bytes"])),
                "peak": size_text(int(row["peak_bytes"])),
            }
            lines.append(line)
        parts.append(f"{card}, {model}:\n\n{markdown_table(pd.DataFrame(lines))}")
    return "\n".join(parts)


def method_rows(section: str) -> str:
    """A line for each method of a section: name, label, paper, and the first sentence of its docstring."""
    rows = []
    for method in descriptions(section):
        source = method.paper.rpartition("/")[2] if "arxiv" in method.paper else "OpenReview"
        paper = f"[{source}]({method.paper})" if method.paper else ""
        rows.append((f"`{method.name}`", method.label, paper, method.summary.replace("|", "\\|")))
    return markdown_table(rows, ["name", "method", "paper", "what it does"])


def method_classes() -> str:
    """The reference of each method's class, for mkdocstrings."""
    names = ["full"]
    for section in SECTIONS:
        names += [method.name for method in descriptions(section)]
    return "\n".join(f"\n::: {METHODS[name].__module__}.{METHODS[name].__qualname__}" for name in names) + "\n\n"


def stub() -> str:
    """The types of `keepsight.runtime.methods`, which exports the classes of the registry."""
    lines = [
        "# Made by python docs/tables.py: the classes of all registered methods, for type checkers.",
        "# ruff: noqa: I001",
    ]
    names = {
        "keepsight.runtime.generate": ["make_method"],
        "keepsight.runtime.registry": ["DRAFTERS", "METHODS", "OBSERVERS"],
        "keepsight.runtime.resources": ["Resources"],
    }
    for kind in METHODS.values():
        names.setdefault(kind.__module__, []).append(kind.__name__)
    for module in sorted(names):
        lines += [f"from {module} import {name} as {name}" for name in sorted(names[module])]
    return "\n".join(lines) + "\n"


def families_table() -> str:
    """The families of models that the tests run, and the methods that each refuses."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    from tests.runtime.family_methods import table

    return table()


def presets_table() -> str:
    """The presets of each paper: what the figure or table shows, and the command that makes it."""
    lines = []
    for name, preset in sorted(presets().items(), key=lambda item: item[1].table.partition(" (")[0]):
        paper, _, rest = preset.table.partition(" (arXiv ")
        what = rest.partition("), ")[2]
        lines.append((paper, what, f"`keepsight {preset.command} preset={name}`"))
    return markdown_table(lines, ["paper", "figure or table", "command"])


def figures_table() -> str:
    """What presets gave on a small model: a line for each figure and setting, its values by budget."""
    results = read("figures")
    lines = []
    for (paper, figure, setting, run), rows in results.groupby(["paper", "figure", "setting", "run"], sort=False):
        cells = []
        for measure, values in rows.groupby("measure", sort=False):
            name = "excess NLL" if measure == "excess_nll" else measure
            budgets = " / ".join(filter(None, values["budget"]))
            at_budgets = f" at {budgets}" if budgets else ""
            cells.append(f"{name} {' / '.join(values['value'])}{at_budgets}")
        lines.append((f"{paper}, {figure}", setting, "; ".join(cells), rows["samples"].iloc[0], run))
    return markdown_table(lines, ["figure", "setting", "measured", "samples", "run"])


DRAFTED = "Qwen/Qwen2.5-Coder-1.5B-Instruct"
"""The model whose draft is the 0.5B."""


def short_model(name: str) -> str:
    """A model's Hub id without its owner."""
    return name.rpartition("/")[2]


def entries_title(budget: str) -> str:
    """The heading of a column of a budget: of entries, or of a share of the prompt."""
    if "." in budget:
        return f"{100 * float(budget):g} % of the prompt"
    return f"{thousands(budget)} entries"


def with_interval(row: pd.Series) -> str:
    """A score with its interval where it has one, and the excess NLL."""
    interval = ""
    if row["score_low"]:
        interval = f" ({float(row['score_low']):.2f} to {float(row['score_high']):.2f})"
    return f"{float(row['score']):.2f}{interval} / {float(row['excess_nll']):.2f}"


def with_first_token(row: pd.Series) -> str:
    """As `with_interval`, and the seconds to the first token."""
    return f"{with_interval(row)}, {float(row['first_s']):.1f} s"


LOOKAHEAD = {OURS, "LookaheadKV"}
"""Modules by our recipes, bundled and from `keepsight fit`, as `real_models.csv` calls them."""


def budget_table(rows: pd.DataFrame, cell: Callable[[pd.Series], str]) -> str:
    """Rows of `real_models.csv` as a table: a line per method, a column per budget; lines that are equal are joined.

    The full cache has its values in each column.
    """
    budgets = sorted({*rows["budget"]} - {""}, key=float)
    origin = ["date", "processor", "run"]
    lines = []
    for (method, _), of_method in rows.groupby(["method", "run"], sort=False):
        cells = {row["budget"]: cell(row) for _, row in of_method.iterrows()}
        line = {"method": marked(OURS if method in LOOKAHEAD else method, method)}
        for budget in budgets:
            line[entries_title(budget)] = cells.get(budget, cells.get("", "–"))
        lines.append(line | dict(of_method[["samples", *origin]].iloc[0]))
    table = pd.DataFrame(lines)
    values = [title for title in table if title not in origin]
    return markdown_table(table.groupby(values, sort=False)[origin].agg(joined).reset_index())


def section(heading: str, parts: Sequence[str]) -> str:
    """A section of tables; nothing without any."""
    if not parts:
        return ""
    return "\n".join([f"\n## {heading}\n", *parts, ""])


def of_tasks(heading: str, tasks: str, by: Sequence[str]) -> str:
    """A section of `real_models.csv`: a table per model and value of `by`."""
    rows = read("real_models")
    rows = rows[(rows["tasks"] == tasks) & (rows["model"] != DRAFTED)]
    parts = []
    for names, of_part in rows.groupby(["model", *by], sort=False):
        model, *values = names
        titles = [short_model(model)]
        for column, value in zip(by, values, strict=True):
            titles.append(f"question {value}" if column == "question" else f"{thousands(value)} tokens")
        parts.append(f"### {', '.join(titles)}\n\n{budget_table(of_part, with_interval)}")
    return section(heading, parts)


def models_differences_tables() -> str:
    """LookaheadKV minus each other method in score, over the same samples, with paired intervals."""
    rows = read("real_models_differences")
    parts = []
    for names, of_part in rows.groupby(["model", "tasks", "question", "length"], sort=False):
        model, tasks, question, length = names
        title = f"{short_model(model)}, {tasks}, question {question}, {thousands(length)} tokens"
        parts.append(f"### {title}\n\n{budget_table(of_part, signed_score)}")
    return section("LookaheadKV minus other methods, in score", parts)


def signed_score(row: pd.Series) -> str:
    """A difference in score with its sign and interval."""
    text = f"{float(row['score']):+.3f}"
    if row["score_low"] == "":
        return text
    return f"{text} ({float(row['score_low']):+.3f} to {float(row['score_high']):+.3f})"


def models_ruler_tables() -> str:
    """RULER's 13 tasks with real models, by the length of their prompts."""
    return of_tasks("RULER by prompt length", "RULER", ["length", "question"])


def models_prompts_tables() -> str:
    """Real prompts with real models, the question seen and unseen."""
    return of_tasks("Real prompts", "real prompts", ["question"])


def models_code_tables() -> str:
    """Tasks about code with real models."""
    return of_tasks("Code", "code", ["question"])


def models_drafts_tables() -> str:
    """The model with a real draft: a table per run, then its predicted importance against the answer's."""
    rows = read("real_models")
    rows = rows[rows["model"] == DRAFTED]
    parts = []
    for (_, tasks, length), of_run in rows.groupby(["run", "tasks", "length"], sort=False):
        title = f"### {short_model(DRAFTED)}, {tasks}, {thousands(length)} tokens"
        parts.append(f"{title}\n\n{budget_table(of_run, with_first_token)}")
    importance = read("real_models_importance")
    for (model, _), of_run in importance.groupby(["model", "run"], sort=False):
        columns = ["method", "budget", "recall", "mass", "correlation", "tau", "samples", "date", "processor", "run"]
        title = f"### {short_model(model)}: predicted importance against the answer's"
        parts.append(f"{title}\n\n{markdown_table(of_run[columns])}")
    return section("A real draft", parts)


FOUND = {0.0: "○", 1.0: "●"}
"""Signs for needles that were not found and that were."""


def models_needles_tables() -> str:
    """Needles by length and depth: a sign per depth, from the beginning of the text to its end."""
    rows = read("real_models_needles")
    parts = []
    for (model, kind), of_kind in rows.groupby(["model", "kind"], sort=False):
        lengths = sorted({*of_kind["length"]}, key=int)
        lines = []
        for (method, budget), of_method in of_kind.groupby(["method", "budget"], sort=False):
            line = {"method": marked(OURS if method in LOOKAHEAD else method, method)}
            line["entries"] = thousands(budget) or "all"
            for length in lengths:
                at_length = of_method[of_method["length"] == length]
                scores = at_length["score"].astype(float).groupby(at_length["depth"].astype(float)).mean()
                signs = "".join(FOUND.get(score, "◐") for score in scores)
                line[f"{thousands(length)} tokens"] = signs or "–"
            lines.append(line | of_method[["date", "processor", "run"]].agg(joined).to_dict())
        parts.append(f"### {short_model(model)}, {kind} needle\n\n{markdown_table(pd.DataFrame(lines))}")
    return section("Needles by length and depth", parts)


def models_speed_table() -> str:
    """First token and decoding step of real models."""
    rows = read("real_models_speed")
    shown = rows.assign(
        model=rows["model"].map(short_model),
        tokens=rows["tokens"].map(thousands),
        budget=[thousands(budget) or "all" for budget in rows["budget"]],
    )
    titles = {"budget": "entries", "first_s": "first token, s", "step_ms": "a step, ms", "kv_mib": "KV MiB"}
    return markdown_table(shown.rename(columns=titles))


def minutes(seconds: str) -> str:
    """Seconds as minutes; a dash for a stage that was not run."""
    return f"{int(seconds) / 60:.1f}" if seconds else "–"


def needles_of_fit(fit: pd.Series) -> tuple[list[str], str]:
    """Needles that the full cache, the module and SnapKV find, as `4 of 5`, and the run that they are of.

    That run is the fit's own evaluation, or one of more samples with the same length in `real_models.csv`.
    """
    counts = [fit["full"], fit["lookaheadkv"], fit["snapkv"]]
    run = fit["run"]
    most_samples = int(counts[0].rpartition(" ")[2])
    rows = read("real_models").query("tasks == 'needles' and question == 'seen'")
    rows = rows[(rows["model"] == fit["model"]) & (rows["length"] == fit["length"])]
    rows = rows[rows["budget"].isin(["", fit["budget"]])]
    for name, of_run in rows.groupby("run", sort=False):
        samples = int(of_run["samples"].iloc[0])
        if samples > most_samples:
            most_samples = samples
            counts = [found_by(method, of_run) for method in ("full cache", "LookaheadKV", "SnapKV")]
            run = str(name)
    return counts, run


def found_by(method: str, rows: pd.DataFrame) -> str:
    """How many needles the first method whose name begins so finds, as `4 of 5`."""
    row = rows[rows["method"].str.startswith(method)].iloc[0]
    return f"{needles_found(row)} of {row['samples']}"


def needles_found(row: pd.Series) -> str:
    """The number of needles found: the score is their share."""
    return f"{float(row['score']) * int(row['samples']):.0f}"


def fits_table() -> str:
    """What `keepsight fit limit=48` takes and gives, for models of three families."""
    rows = read("fits")
    lines = []
    for _, row in rows.iterrows():
        (full, ours, snapkv), run = needles_of_fit(row)
        stages = " / ".join(minutes(row[f"{stage}_s"]) for stage in ("answers", "importance", "eviction"))
        lines.append(
            {
                "model": short_model(row["model"]),
                "prompts": row["samples"],
                "minutes: answers / importance / eviction": stages,
                "evaluation": minutes(row["evaluation_s"]),
                "in all": minutes(row["total_s"]),
                "peak MiB": thousands(row["peak_mib"]),
                "prompts of the test": f"{thousands(row['length'])} tokens",
                "needles: full cache": full,
                f"LookaheadKV, {row['budget']} entries": ours,
                f"SnapKV, {row['budget']} entries": snapkv,
                **row[["date", "processor"]],
                "run": joined([row["run"], run]),
            }
        )
    if not lines:
        return ""
    return markdown_table(pd.DataFrame(lines).fillna("–"))


def front_fits_table() -> str:
    """README's table of `keepsight fit limit=48`: minutes, and the needles found from 64 and from 128 entries."""
    scores = read("real_models").query("tasks == 'needles' and question == 'seen'")
    lines = []
    for _, fit in read("fits").iterrows():
        (full, *_), run = needles_of_fit(fit)
        of_run = scores[scores["run"] == run]
        line = {"model": short_model(fit["model"]), "minutes": minutes(fit["total_s"]), "full cache": full}
        for name in ("LookaheadKV", "LAQ, 32 draft tokens, unpooled", "SnapKV, mean over 3"):
            of_method = of_run[of_run["method"].str.startswith(name)].set_index("budget")
            line[name] = " / ".join(needles_found(of_method.loc[budget]) for budget in ("64", "128"))
        lines.append(line)
    return markdown_table(pd.DataFrame(lines))


TABLE_FUNCTIONS = {
    "method-classes": method_classes,
    "families": families_table,
    "time": time_table,
    "front": front_table,
    "front-coder": front_coder_table,
    "methods": methods_table,
    "other-tasks": other_tasks_table,
    "gpu": gpu_table,
    "sources": sources_table,
    "scores": scores_table,
    "score-tasks": score_tasks_table,
    "ruler-questions-1024": partial(ruler_questions_table, "1024"),
    "ruler-questions-2048": partial(ruler_questions_table, "2048"),
    "ruler-questions-4096": partial(ruler_questions_table, "4096"),
    "short-scores": short_scores_table,
    "short-sources": short_sources_table,
    "short-kvpress": short_kvpress_table,
    "gaps": gaps_table,
    "kvpress": kvpress_table,
    "short-time": short_time_table,
    "servers": servers_table,
    "front-servers": front_servers_table,
    "short-methods": short_methods_table,
    "short-gpu": short_gpu_table,
    "nats": nats_table,
    "presets": presets_table,
    "figures": figures_table,
    "models-ruler": models_ruler_tables,
    "models-prompts": models_prompts_tables,
    "models-code": models_code_tables,
    "models-drafts": models_drafts_tables,
    "models-differences": models_differences_tables,
    "models-needles": models_needles_tables,
    "models-speed": models_speed_table,
    "fits": fits_table,
    "front-fits": front_fits_table,
}
"""Tables that are more than a selection of a file: the function that makes each."""


def table_text(name: str) -> str:
    """A table by its name."""
    if name in SECTIONS:
        return method_rows(name)
    if name in TABLE_FUNCTIONS:
        return TABLE_FUNCTIONS[name]()
    return TABLES[name].text()


def with_tables(text: str) -> str:
    """A page with its tables replaced."""

    def replaced(marker: re.Match[str]) -> str:
        name, end_of_line, _ = marker.groups()
        return name + end_of_line + table_text(name)

    return MARKED_TABLE.sub(replaced, text)


PLOTTED = {
    "StreamingLLM": ("StreamingLLM", STYLES["streamingllm"]),
    "untrained soft tokens": ("untrained soft tokens", Style(STYLES["lookaheadkv"].colour, "o", ":")),
    "SpecKV (26-layer draft)": ("SpecKV", STYLES["speckv"]),
    "SnapKV, mean over 3": ("SnapKV", STYLES["snapkv"]),
    "DapQ": ("DapQ", STYLES["dapq"]),
    "LAQ": ("LAQ", STYLES["laq"]),
    BY_THE_PAPER: (BY_THE_PAPER, Style(STYLES["lookaheadkv"].colour, "o", "--")),
    OURS: ("LookaheadKV", STYLES["lookaheadkv"]),
    "oracle attention (mean over 3)": ("oracle attention", STYLES["oracle"]),
}
BUDGETS = [64, 128, 256]


def draw() -> Figure:
    """Excess NLL against the budget."""
    figure = Figure(figsize=(8, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    results = read("real_prompts").set_index("method")
    for index, (name, (label, style)) in enumerate(PLOTTED.items()):
        means, low, high = results.loc[name, ["excess_nll", "low", "high"]].to_numpy(float).T
        shift = 2 ** (0.03 * (index - 4))  # so that intervals stay apart
        budgets = [budget * shift for budget in BUDGETS]
        axes.vlines(budgets, low, high, style.colour, linewidth=1, alpha=0.5)
        width = 2.4 if label == "LookaheadKV" else 1.4
        axes.plot(budgets, means, style.line, marker=style.marker, color=style.colour, linewidth=width, label=label)
    axes.set(xscale="log", ylim=0, xlabel="entries kept per layer and KV head", ylabel="excess NLL (nats a token)")
    axes.xaxis.set(major_locator=FixedLocator(BUDGETS), minor_locator=NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    look(axes)
    figure.legend(loc="outside right upper", frameon=False)
    return figure


NEEDLE_STYLES = {
    "full cache": STYLES["full"],
    "SnapKV": STYLES["snapkv"],
    "LAQ": STYLES["laq"],
    "LookaheadKV": STYLES["lookaheadkv"],
}
"""The methods of the plot of needles by the first words of their names, and their styles."""
LIGHT = ("white", TEXT, GRID)
DARK = ("#0d1117", "#e6edf3", "#30363d")
"""The colours of background, text and grid, as GitHub's pages have them."""


def needles_figure(colours: tuple[str, str, str]) -> Figure | None:
    """The share of single needles found in texts of more than 1,000 tokens: a row per model, a panel per budget."""
    rows = read("real_models_needles").query("kind == 'single'").astype({"length": int, "score": float})
    rows = rows[rows["length"] > 1000]
    if rows.empty:
        return None
    models = sorted({*rows["model"]})
    budgets = sorted({*rows["budget"]} - {""}, key=int)
    background, text, grid = colours
    figure = Figure(figsize=(3 * len(budgets) + 0.3, 2.4 * len(models) + 0.5), dpi=150, layout="constrained")
    panels = figure.subplots(len(models), len(budgets), squeeze=False, sharex="row", sharey=True)
    for model, row_of_panels in zip(models, panels, strict=True):
        for budget, axes in zip(budgets, row_of_panels, strict=True):
            shown = rows[(rows["model"] == model) & rows["budget"].isin(["", budget])]
            for name, style in NEEDLE_STYLES.items():
                of_name = shown[shown["method"].str.startswith(name)]
                if of_name.empty:
                    continue
                lengths_of = of_name.groupby("method")["length"].nunique()
                of_method = of_name[of_name["method"] == lengths_of.idxmax()]  # of its variants
                means = of_method.groupby("length")["score"].mean()
                look_of_line = {"color": style.colour, "linewidth": 1.4, "marker": style.marker, "label": name}
                if name == "full cache":
                    look_of_line["color"] = text
                if name == "LookaheadKV":
                    look_of_line["linewidth"] = 2.4
                axes.plot(means.index, means, style.line, **look_of_line)
            lengths = sorted({*shown["length"]})
            axes.set(xscale="log", ylim=(-0.05, 1.05), title=f"{short_model(model)}, {thousands(budget)} entries")
            axes.xaxis.set(major_locator=FixedLocator(lengths), minor_locator=NullLocator())
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
            look(axes)
            axes.grid(axis="y", color=grid, linewidth=0.6)
            axes.set_facecolor(background)
            axes.title.set(fontsize=8.5, color=text)
            axes.tick_params(labelsize=7.5, colors=text)
            axes.spines[["left", "bottom"]].set_color(text)
    figure.supxlabel("tokens of the prompt", fontsize=8.5, color=text)
    figure.supylabel("needles found", fontsize=8.5, color=text)
    lines = {}
    for axes in panels.flat:
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True):
            lines[label] = line
    legend = {"loc": "outside upper center", "ncols": 4, "frameon": False, "fontsize": 8.5, "labelcolor": text}
    figure.legend(lines.values(), lines.keys(), **legend)
    return figure


def draw_needles() -> None:
    """Draw the plot of needles for light and for dark pages, once something was measured."""
    for name, colours in (("needles.png", LIGHT), ("needles_dark.png", DARK)):
        figure = needles_figure(colours)
        if figure is not None:
            figure.savefig(ROOT / "docs" / "images" / name, facecolor=colours[0])


if __name__ == "__main__":
    for page in PAGES:
        write_text(page, with_tables(page.read_text("utf-8")))
    write_text(STUB, stub())
    draw().savefig(ROOT / "docs" / "images" / "excess_nll.png", facecolor="white")
    draw_needles()
