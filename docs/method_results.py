"""Makes `results/methods.csv`, the table of all methods, and paired differences, in `results/methods_differences.csv`.

    python docs/method_results.py 'processor=2 cores' runs/all_seen runs/all_unseen

Each folder is the output of `keepsight eval methods=all`, and its name is the run in `results/runs.csv`. If it contains
`kvpress/measured.jsonl` (docs/kvpress_results.py), the results of kvpress's presses on the same samples are added.
"""

import functools
import json
import sys
from pathlib import Path

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
    lines = groups.agg(
        excess_nll=("excess_nll", "mean"),
        score=("score", "mean"),
        cost=("cost", "median"),
        kv_mib=("kv_mib", "mean"),
        samples=("excess_nll", "size"),
    )
    ends = [estimate([*values], "all prompts").ends for _, values in groups["excess_nll"]]
    for place, (name, column) in enumerate(zip(("low", "high"), zip(*ends, strict=True), strict=True), 1):
        lines.insert(place, name, column)
    lines = lines[lines["samples"] == lines["samples"].max()]  # not of methods that refused a prompt
    decimals = {"excess_nll": "{:.3f}", "low": "{:.2f}", "high": "{:.2f}", "score": "{:.3f}"}
    decimals |= {"cost": "{:.1f}", "kv_mib": "{:.2f}"}
    for column, form in decimals.items():
        lines[column] = ["" if np.isnan(value) else form.format(value + 0.0) for value in lines[column]]
    dtype, date = read_run(folder).target["dtype"], rows["date"].max()
    return lines.reset_index().assign(dtype=dtype, date=date, processor=processor, run=folder.name)


def differences(folder: Path, processor: str) -> pd.DataFrame:
    """A line per pair of `COMPARED` and budget: the mean difference of the excess NLL, its interval, the largest."""
    rows = measured(folder)
    by_prompt = rows.pivot_table("excess_nll", index=["task", "length"], columns=["method", "budget"])
    lines = list[dict[str, str]]()
    for name, other in COMPARED.items():
        for budget in by_prompt[name] if other in by_prompt else ():
            found = by_prompt[name, budget] - by_prompt[other, budget]
            numbers = (found.mean(), *estimate([*found], "all prompts").ends, found.abs().max())
            texts = [f"{round(number, 4) + 0.0:+.4f}" for number in numbers]
            place = {"method": name, "minus": other, "question": rows["question"].iloc[0], "budget": budget}
            lines.append(place | dict(zip(("difference", "low", "high", "largest"), texts, strict=True)))
    samples, date = len(by_prompt), rows["date"].dropna().max()
    return pd.DataFrame(lines).assign(samples=samples, date=date, processor=processor, run=folder.name)


if __name__ == "__main__":
    named, *folders = sys.argv[1:]
    if not named.startswith("processor=") or not folders:
        sys.exit("expected processor=NAME and folders of evaluations, see the first lines of this file")
    processor, runs = named.partition("=")[2], [Path(folder) for folder in folders]
    for file, made in (("methods", summarized), ("methods_differences", differences)):
        lines = pd.concat([made(run, processor) for run in runs])
        write_text(ROOT / "results" / f"{file}.csv", lines.to_csv(index=False, lineterminator="\n"))
