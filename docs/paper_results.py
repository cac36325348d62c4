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
    "figures_tokens": Figure("LookaheadKV", "table 5", "summary", ("score", "excess_nll")),
    "figures_overhead": Figure("LookaheadKV", "table 5", "ablation", ("overhead",), "cell"),
    "figures_lengths": Figure("LookaheadKV", "figure 6", "summary", ("score", "excess_nll")),
    "figures_answers": Figure("LookaheadKV", "figure 7", "summary", ("score", "excess_nll")),
    "figures_similarity": Figure("LookaheadKV", "table 8", "importance", ("recall", "tau")),
    "figures_correlation": Figure("SpecPC", "figures 4 and 8", "importance", ("correlation", "tau", "recall")),
    "figures_drafts": Figure("SpecKV", "figure 11", "summary", ("score", "excess_nll")),
    "figures_lookahead": Figure("SpecKV", "figure 12", "summary", ("score", "excess_nll")),
    "figures_pc_lookahead": Figure("SpecPC", "figure 12", "summary", ("score", "excess_nll")),
    "figures_sparse_prefill": Figure("SpecKV", "figure 13", "summary", ("score", "excess_nll")),
    "figures_memory": Figure("SpecKV", "figure 7 (left)", "evict", ("peak MiB",)),
    "figures_contexts": Figure("SpeContext", "figures 1 and 8", "summary", ("score", "excess_nll")),
    "figures_pareto": Figure("SpeContext", "figure 1", "decode", ("tokens/s",)),
    "figures_selecting": Figure("SpeContext", "figure 2(a)", "decode", ("selecting", "ms a step")),
    "figures_levels": Figure("SpeContext", "figure 5(a)", "hits", ("hit", "mass")),
    "figures_prefetch": Figure("SpeContext", "figure 6(a)", "decode", ("ms a step",)),
    "figures_overlap": Figure("SpeContext", "figure 6(b)", "hits", ("overlap",)),
    "figures_ablation": Figure("SpeContext", "figure 11", "decode", ("tokens/s", "KV MiB")),
    "figures_throughput": Figure("SpeContext", "table 3", "decode", ("tokens/s", "with prefill/s")),
    "figures_sparsity": Figure("SpeCache", "figure 2 (left)", "hits", ("mass",)),
    "figures_niah": Figure("SpeCache", "figure 4", "summary", ("score", "excess_nll")),
    "figures_topk": Figure("SpeCache", "figure 5", "summary", ("score", "excess_nll")),
    "figures_fetching": Figure("SpeCache", "table 4", "summary", ("score", "excess_nll")),
    "figures_fetching_time": Figure("SpeCache", "table 4", "decode", ("ms a step", "KV MiB")),
    "figures_longbench_15": Figure("SpeCache", "appendix C", "summary", ("score", "excess_nll")),
    "figures_loading": Figure("SpeCache", "figure 2, loading", "parts_1_bits", ("ms a step",), "part"),
    "figures_one_bit": Figure("SpeCache", "table 5", "summary", ("score", "excess_nll")),
    "figures_queries": Figure("DapQ", "figure 2, table 1", "queries", ("after RoPE", "before RoPE"), "place"),
    "figures_dapq_recall": Figure("DapQ", "figure 3", "importance", ("recall",)),
    "figures_dapq_attention": Figure("DapQ", "table 8", "importance", ("cosine",)),
}


def rows_of(folder: Path, processor: str) -> pd.DataFrame:
    """The rows of a run: a line for each setting, budget and measure."""
    figure = FIGURES[folder.name]
    table = pd.read_csv(folder / f"{figure.file}.csv")
    if figure.file == "queries":
        table["place"] = table["content"] + ", at " + table["position"].astype(str)
    if figure.file == "hits":
        table = table[~table["method"].str.startswith(SHARED)]  # bounds of ours, in no figure
    if figure.file == "summary":  # the modules of an ablation are named by their cells
        table["method"] = table["method"].str.replace(r"^.* adapter=.*/", "", regex=True)
    if figure.file in ("decode", "evict"):  # a budget stands behind the method's name
        parts = table["method"].str.extract(r"^(?P<method>.*?)(?: (?P<budget>\d+))?$")
        table["method"] = parts["method"]
        table["budget"] = parts["budget"].astype(float)
    if "tokens" in table:
        table["method"] += ", " + table["tokens"].map("{:,}".format) + " tokens"
    if "budget" not in table:
        table["budget"] = float("nan")

    columns = [figure.setting, "budget"]
    samples = _samples_of(table, columns)
    table = table.loc[_ordered(table[figure.setting])]
    means = table.groupby(columns, dropna=False, sort=False)[[*figure.measures]].mean().reset_index()
    lines = []
    for _, row in means.iterrows():
        for measure in figure.measures:
            if pd.isna(row[measure]):
                continue
            line = {"setting": row[figure.setting], "measure": measure, "value": f"{row[measure]:.4g}", "budget": ""}
            if measure not in WITHOUT_BUDGET and not pd.isna(row["budget"]):
                line["budget"] = f"{row['budget']:g}"
            if line not in lines:
                lines.append(line)
    return pd.DataFrame(lines).assign(
        paper=figure.paper,
        figure=figure.figure,
        samples=samples,
        date=date_of(folder),
        processor=processor,
        run=folder.name,
    )[COLUMNS]


def _samples_of(table: pd.DataFrame, columns: list[str]) -> int:
    """The number of samples over all tasks of a table; 1 where it does not say."""
    counts = table["n"] if "n" in table else table.get("samples")
    if counts is None or "task" not in table:
        return 1
    parts = [name for name in ("task", "length") if name in table]
    by_task = table.assign(count=counts).groupby([*columns, *parts], dropna=False, sort=False)["count"].first()
    return int(by_task.groupby(level=[0, 1], dropna=False).sum().max())


def _ordered(settings: pd.Series) -> list[int]:
    """Index labels in display order: settings keep their order of appearance; a numbered series is sorted by number.

    `topk=128, topk=16, full` becomes `topk=16, topk=128, full`.
    """
    parts = settings.str.extract(r"^(?P<name>.*?)(?P<number>\d+(?:\.\d+)?)?$")
    name_codes, _ = pd.factorize(parts["name"])  # names by first appearance
    last_numbers = parts["number"].astype(float).fillna(0)
    keys = pd.DataFrame({"name": name_codes, "number": last_numbers})
    return [*keys.sort_values(["name", "number"], kind="stable").index]


def date_of(folder: Path) -> str:
    """Day of the measurement: an evaluation's rows have it; else the day on which the table was written."""
    if (folder / "results.jsonl").exists():
        return max(row.date for row in read_run(folder).rows)
    (table,) = folder.glob(f"{FIGURES[folder.name].file}.csv")
    return pd.Timestamp(table.stat().st_mtime, unit="s").date().isoformat()


def main(arguments: list[str]) -> None:
    """Add the runs in the folders of the arguments, measured on the processor that the first one names."""
    processor_argument, *folders = arguments
    if not processor_argument.startswith("processor=") or not folders:
        sys.exit("expected processor=NAME and folders of runs, see the first lines of this file")
    processor = processor_argument.partition("=")[2]
    path = ROOT / "results" / "figures.csv"
    runs = [Path(folder) for folder in folders]
    rows = pd.read_csv(path, dtype=str, keep_default_na=False)
    rows = rows[~rows["run"].isin([run.name for run in runs])]
    table = pd.concat([rows, *(rows_of(run, processor) for run in runs)])
    order = {name: index for index, name in enumerate(FIGURES)}
    table["order"] = table["run"].map(order).fillna(len(order))
    table = table.sort_values("order", kind="stable")
    write_text(path, table[COLUMNS].to_csv(index=False, lineterminator="\n"))


if __name__ == "__main__":
    main(sys.argv[1:])
