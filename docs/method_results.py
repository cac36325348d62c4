"""Makes `results/methods.csv`, the table of all methods, from folders that `keepsight eval methods=all` has written.

    python docs/method_results.py 'processor=2 cores' runs/all_seen runs/all_unseen

Rows of kvpress's presses on the same samples are added where a folder has `kvpress/measured.jsonl`
(docs/kvpress_results.py). A folder's name is the run that `results/runs.csv` describes.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from keepsight.eval.results import FULL, read_run
from keepsight.files import write_text

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ["task", "length", "sample"]
RESAMPLES = 2000


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
        low=("excess_nll", lambda values: interval(values)[0]),
        high=("excess_nll", lambda values: interval(values)[1]),
        score=("score", "mean"),
        cost=("cost", "median"),
        kv_mib=("kv_mib", "mean"),
        samples=("excess_nll", "size"),
    )
    lines = lines[lines["samples"] == lines["samples"].max()]  # not of methods that refused a prompt
    decimals = {"excess_nll": "{:.3f}", "low": "{:.2f}", "high": "{:.2f}", "score": "{:.3f}"}
    decimals |= {"cost": "{:.1f}", "kv_mib": "{:.2f}"}
    for column, form in decimals.items():
        lines[column] = ["" if np.isnan(value) else form.format(value + 0.0) for value in lines[column]]
    dtype, date = read_run(folder).target["dtype"], rows["date"].max()
    return lines.reset_index().assign(dtype=dtype, date=date, processor=processor, run=folder.name)


def interval(values: pd.Series) -> np.ndarray:
    """Ends of the 95 % bootstrap interval of the mean, [2] float64, samples drawn with replacement."""
    drawn = np.random.default_rng(95).choice(values.to_numpy(), (RESAMPLES, len(values)))
    return np.percentile(drawn.mean(axis=1), [2.5, 97.5])


if __name__ == "__main__":
    named, *folders = sys.argv[1:]
    if not named.startswith("processor=") or not folders:
        sys.exit("expected processor=NAME and folders of evaluations, see the first lines of this file")
    lines = pd.concat([summarized(Path(folder), named.partition("=")[2]) for folder in folders])
    write_text(ROOT / "results" / "methods.csv", lines.to_csv(index=False, lineterminator="\n"))
