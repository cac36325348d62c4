"""Adds runs to `results/methods.csv`, the table of all methods, and to `results/methods_differences.csv`.

    python docs/method_results.py 'processor=2 cores' runs/all_seen runs/all_unseen

Each folder is the output of `keepsight eval methods=all`, and its name is the run in `results/runs.csv`. If it has
`kvpress/measured.jsonl` (docs/kvpress_results.py), the results of kvpress's presses on the same samples are added. A
row of the same run, method, question and budget is replaced; all others stay.
"""

import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pandas as pd

from keepsight.eval.record import FULL
from keepsight.eval.report.intervals import estimate
from keepsight.eval.results import read_run
from keepsight.files import write_text

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ["task", "length", "sample"]
COMPARED = {
    "lookaheadkv": "kvgrad",
    "snapkv mean 3": "kvpress SnapKVPress(window_size=32, kernel_size=3)",
    "criticalkv mean 3": "kvpress CriticalKVPress(SnapKVPress(32, 3))",
    "keydiff": "kvpress KeyDiffPress",
    "tova": "kvpress TOVAPress",
    "expected_attention": "kvpress ExpectedAttentionPress",
    "expected_adakv": "kvpress AdaKVPress(ExpectedAttentionPress, epsilon=0.01)",
    "kvzip": "kvpress KVzipPress",
    "kvgrad": "kvpress KVgradPress",
}
"""Pairs of methods for the paired differences: a method and its baseline. Every task has one prompt."""


@functools.cache
def measured(folder: Path) -> pd.DataFrame:
    """The rows of a folder: a method's name, question, budget, excess NLL, score, cost and MiB for each sample.

    The cost is what a method takes before the first token beyond the full cache's prefill, in percent of that prefill.
    The question that is read after the compression does not count.
    """
    rows = pd.DataFrame(read_run(folder).rows)
    seconds = pd.json_normalize(list(rows["seconds"])).drop(columns="question").sum(axis=1)
    whole = rows.assign(seconds=seconds)[rows["method"] == FULL].set_index(SAMPLE)["seconds"]
    prefill = rows[SAMPLE].join(whole, on=SAMPLE)["seconds"]
    rows = rows.assign(cost=100 * (seconds / prefill - 1), kv_mib=rows["kv_bytes"] / 2**20)
    rows = pd.concat([rows, of_kvpress(folder / "kvpress" / "measured.jsonl", rows["question"].iloc[0])])
    return rows.assign(budget=["" if np.isnan(budget) else f"{budget:g}" for budget in rows["budget"].astype(float)])


def of_kvpress(path: Path, question: str) -> pd.DataFrame:
    """The rows that docs/kvpress_results.py has measured; none without the file."""
    if not path.is_file():
        return pd.DataFrame()
    rows = pd.DataFrame(map(json.loads, path.read_text("utf-8").splitlines()))
    return rows.assign(method="kvpress " + rows["press"], excess_nll=rows["excess"], question=question)


def summarized(folder: Path, processor: str) -> pd.DataFrame:
    """A line per method and budget that has all samples: means, the excess NLL with its bootstrap interval."""
    rows = measured(folder)
    groups = rows.groupby(["method", "question", "budget"], sort=False)
    intervals = [estimate([*values], "all prompts").ends for _, values in groups["excess_nll"]]
    lines = pd.DataFrame(
        {
            "excess_nll": groups["excess_nll"].mean(),
            "low": [low for low, _ in intervals],
            "high": [high for _, high in intervals],
            "score": groups["score"].mean(),
            "cost": groups["cost"].median(),
            "kv_mib": groups["kv_mib"].mean(),
            "samples": groups.size(),
        }
    )
    lines = lines[lines["samples"] == lines["samples"].max()]  # not of methods that refused a prompt
    for column, decimals in {"excess_nll": 3, "low": 2, "high": 2, "score": 3, "cost": 1, "kv_mib": 2}.items():
        lines[column] = [text_of(value, decimals) for value in lines[column]]
    return lines.reset_index().assign(
        dtype=read_run(folder).target["dtype"],
        date=rows["date"].max(),
        processor=processor,
        run=folder.name,
    )


def text_of(value: float, decimals: int) -> str:
    """A number as the file has it: empty where nothing was measured, and no negative zero."""
    if np.isnan(value):
        return ""
    return f"{value + 0.0:.{decimals}f}"


def differences(folder: Path, processor: str) -> pd.DataFrame:
    """A line per pair of `COMPARED` and budget: the mean difference of the excess NLL, its interval, the largest."""
    rows = measured(folder)
    by_prompt = rows.pivot_table("excess_nll", index=["task", "length"], columns=["method", "budget"])
    lines = list[dict[str, str]]()
    for method, baseline in COMPARED.items():
        if method not in by_prompt or baseline not in by_prompt:
            continue
        for budget in by_prompt[method]:
            difference = by_prompt[method, budget] - by_prompt[baseline, budget]
            low, high = estimate([*difference], "all prompts").ends
            lines.append(
                {
                    "method": method,
                    "minus": baseline,
                    "question": rows["question"].iloc[0],
                    "budget": budget,
                    "difference": signed(difference.mean()),
                    "low": signed(low),
                    "high": signed(high),
                    "largest": signed(difference.abs().max()),
                }
            )
    return pd.DataFrame(lines).assign(
        samples=len(by_prompt),
        date=rows["date"].dropna().max(),
        processor=processor,
        run=folder.name,
    )


def signed(value: float) -> str:
    """A difference with its sign and four decimals; one that rounds to zero is positive."""
    return f"{round(value, 4) + 0.0:+.4f}"


def merged(rows: pd.DataFrame, lines: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    """The rows of a file with new lines: a line replaces the row with the same values of `names`, others are added."""
    keys = pd.MultiIndex.from_frame(lines[names])
    kept = rows[~pd.MultiIndex.from_frame(rows[names]).isin(keys)]
    return pd.concat([kept, lines])


TableOf: TypeAlias = Callable[[Path, str], pd.DataFrame]
"""Makes a file's rows of a run, from its folder and the processor; none where the run measured something else."""


def add_runs(folders: Sequence[Path], processor: str, files: Mapping[str, tuple[TableOf, list[str]]]) -> None:
    """Add runs to files of `results/`: by a file's name, what makes its rows, and the columns by which they replace."""
    for name, (table_of, key_columns) in files.items():
        path = ROOT / "results" / f"{name}.csv"
        rows = pd.read_csv(path, dtype=str, keep_default_na=False)
        for folder in folders:
            lines = table_of(folder, processor)
            if not lines.empty:
                rows = merged(rows, lines.astype(str), key_columns)
        write_text(path, rows.to_csv(index=False, lineterminator="\n"))


def main(arguments: list[str]) -> None:
    """Add the runs in the folders of the arguments, measured on the processor that the first one names."""
    processor_argument, *folders = arguments
    if not processor_argument.startswith("processor=") or not folders:
        sys.exit("expected processor=NAME and folders of evaluations, see the first lines of this file")
    files: dict[str, tuple[TableOf, list[str]]] = {
        "methods": (summarized, ["method", "question", "budget", "run"]),
        "methods_differences": (differences, ["method", "minus", "question", "budget", "run"]),
    }
    add_runs([*map(Path, folders)], processor_argument.partition("=")[2], files)


if __name__ == "__main__":
    main(sys.argv[1:])
