"""Makes `results/figures.csv`: what the presets of papers' figures and tables gave on a small model.

    python docs/paper_results.py 'processor=2 cores' runs/figures_dapq_recall runs/figures_topk ...

A folder is the output of a preset's command, and its name is the run in `results/runs.csv`; `FIGURES` says which figure
it is and which columns count. Rows of the same run in the file are replaced, others stay. Values are means over tasks.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from keepsight.eval.hits import SHARED
from keepsight.eval.results import read_run
from keepsight.files import write_text

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ["paper", "figure", "setting", "budget", "measure", "value", "samples", "date", "processor", "run"]


class Figure(NamedTuple):
    """A figure or table of a paper, the CSV that its command writes, and the columns of it that the figure shows."""

    paper: str
    figure: str
    file: str
    measures: tuple[str, ...]
    setting: str = "method"


WITHOUT_BUDGET = ("cosine", "correlation", "tau")
"""Measures that do not depend on the budget; they have one row."""
FIGURES = {
    "figures_tradeoffs": Figure("LookaheadKV", "figure 2", "summary", ("score", "excess_nll")),
    "figures_draws": Figure("LookaheadKV", "table 4", "summary", ("score", "excess_nll")),
    "figures_longproc": Figure("LookaheadKV", "figure 5", "summary", ("score", "excess_nll")),
    "figures_similarity": Figure("LookaheadKV", "table 8", "importance", ("recall", "tau")),
    "figures_correlation": Figure("SpecPC", "figures 4 and 8", "importance", ("correlation", "tau", "recall")),
    "figures_drafts": Figure("SpecKV", "figure 11", "summary", ("score", "excess_nll")),
    "figures_lookahead": Figure("SpecKV", "figure 12", "summary", ("score", "excess_nll")),
    "figures_pc_lookahead": Figure("SpecPC", "figure 12", "summary", ("score", "excess_nll")),
    "figures_sparse_prefill": Figure("SpecKV", "figure 13", "summary", ("score", "excess_nll")),
    "figures_levels": Figure("SpeContext", "figure 5(a)", "hits", ("hit", "mass")),
    "figures_overlap": Figure("SpeContext", "figure 6(b)", "hits", ("overlap",)),
    "figures_sparsity": Figure("SpeCache", "figure 2 (left)", "hits", ("mass",)),
    "figures_niah": Figure("SpeCache", "figure 4", "summary", ("score", "excess_nll")),
    "figures_topk": Figure("SpeCache", "figure 5", "summary", ("score", "excess_nll")),
    "figures_fetching": Figure("SpeCache", "table 4", "summary", ("score", "excess_nll")),
    "figures_fetching_time": Figure("SpeCache", "table 4", "decode", ("ms a step", "KV MiB")),
    "figures_one_bit": Figure("SpeCache", "table 5", "summary", ("score", "excess_nll")),
    "figures_queries": Figure("DapQ", "figure 2, table 1", "queries", ("after RoPE", "before RoPE"), "place"),
    "figures_dapq_recall": Figure("DapQ", "figure 3", "importance", ("recall",)),
    "figures_dapq_attention": Figure("DapQ", "table 8", "importance", ("cosine",)),
}


def rows_of(folder: Path, processor: str) -> pd.DataFrame:
    """The rows of a run: a line for each setting, budget and measure."""
    kind = FIGURES[folder.name]
    table = pd.read_csv(folder / f"{kind.file}.csv")
    if kind.file == "queries":
        table["place"] = table["content"] + ", at " + table["position"].astype(str)
    if kind.file == "hits":
        table = table[~table["method"].str.startswith(SHARED)]  # bounds of ours, in no figure
    if "budget" not in table:
        table["budget"] = float("nan")
    counts = table["n"] if "n" in table else table.get("samples")
    place = [kind.setting, "budget"]
    if counts is not None and "task" in table:
        per_task = table.assign(count=counts).groupby([*place, "task"], dropna=False, sort=False)["count"].first()
        samples = int(per_task.groupby(level=[0, 1], dropna=False).sum().max())
    else:
        samples = 1
    table = table.iloc[sorted(range(len(table)), key=lambda index: _number_of(table[kind.setting].iloc[index]))]
    means = table.groupby(place, dropna=False, sort=False)[[*kind.measures]].mean().reset_index()
    lines = []
    for _, row in means.iterrows():
        for measure in kind.measures:
            if pd.isna(row[measure]):
                continue
            line = {"setting": row[kind.setting], "measure": measure, "value": f"{row[measure]:.4g}"}
            line["budget"] = "" if pd.isna(row["budget"]) or measure in WITHOUT_BUDGET else f"{row['budget']:g}"
            if line not in lines:
                lines.append(line)
    found = pd.DataFrame(lines).assign(paper=kind.paper, figure=kind.figure, samples=samples)
    return found.assign(date=date_of(folder), processor=processor, run=folder.name)[COLUMNS]


def _number_of(setting: str) -> tuple[str, float]:
    """A setting as a key to sort by: what it is, then the number of an option at its end."""
    base, _, number = setting.rpartition("=")
    return (base, float(number)) if number.replace(".", "", 1).isdecimal() else (setting, 0.0)


def date_of(folder: Path) -> str:
    """Day of the measurement: an evaluation's rows have it; else the day on which the table was written."""
    if (folder / "results.jsonl").exists():
        return max(row.date for row in read_run(folder).rows)
    (table,) = folder.glob(f"{FIGURES[folder.name].file}.csv")
    return pd.Timestamp(table.stat().st_mtime, unit="s").date().isoformat()


if __name__ == "__main__":
    named, *folders = sys.argv[1:]
    if not named.startswith("processor=") or not folders:
        sys.exit("expected processor=NAME and folders of runs, see the first lines of this file")
    path = ROOT / "results" / "figures.csv"
    added = [rows_of(Path(folder), named.partition("=")[2]) for folder in folders]
    new_runs = [Path(folder).name for folder in folders]
    if path.exists():
        before = pd.read_csv(path, dtype=str, keep_default_na=False)
        added.insert(0, before[~before["run"].isin(new_runs)])
    table = pd.concat(added)
    order = {name: number for number, name in enumerate(FIGURES)}
    table = table.assign(order=table["run"].map(order).fillna(len(order))).sort_values("order", kind="stable")
    write_text(path, table[COLUMNS].to_csv(index=False, lineterminator="\n"))
