"""Adds runs with real models to `results/real_models*.csv` and `results/fits.csv`.

    python -m docs.real_models 'processor=2 cores, AMD EPYC, AVX512' runs/ruler_4096 runs/needles ...
    python -m docs.real_models 'processor=2 cores, AMD EPYC, AVX512' log=runs/fits.log runs/fit_gemma3-270m

A folder is the output of `keepsight eval`, `bench importance`, `bench decode` or `fit`, and its name is the run in
`results/runs.csv`, where an evaluation's command is added if the run has none yet: look at it, and add a note. A run's
rows in the files are replaced, all others stay. A run that was stopped has the rows of what it has measured.

    real_models             scores and excess NLL with 95 % intervals, by model, tasks, length, method and budget
    real_models_differences the same of LookaheadKV minus each other method, paired
    real_models_needles     needles by length and depth, of evaluations whose samples have a depth
    real_models_importance  how close predicted importance is to the answer's
    real_models_speed       first token and decoding step
    fits                    `log=` has what `keepsight fit` and GNU time's -v have printed
"""

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from docs.method_results import ROOT, TableOf, add_runs, text_of
from keepsight.data_gen.store import finished_manifest
from keepsight.eval.record import RESULTS, ResultRow
from keepsight.eval.report.figures import label_of
from keepsight.eval.report.summary import difference, kind_of, mean_over_tasks, summarize
from keepsight.eval.results import Run, read_run
from keepsight.files import read_jsonl, write_text
from keepsight.runtime.registry import METHODS

CODE = {"lcc", "repobench-p"}
"""Files of LongBench whose task is code."""
NAMES = {
    "full": "full cache",
    "oracle unpooled": "oracle attention (unpooled)",
    "oracle mean 3": "oracle attention (mean over 3)",
    "lookaheadkv paper": "LookaheadKV, the paper's selection",
    "by the paper": "LookaheadKV, a module by the paper's recipe",
    "laq 32 unpooled": "LAQ, 32 draft tokens, unpooled",
    "snapkv mean 3": "SnapKV, mean over 3",
    "snapkv": "SnapKV, max over 7",
    "snapkv unpooled": "SnapKV, unpooled",
}
"""What pages call methods with these labels."""
KINDS = {
    "ada-speckv": "Ada-SpecKV",
    "adakv": "AdaKV",
    "dapq": "DapQ",
    "h2o": "H2O",
    "laq": "LAQ",
    "lookaheadkv": "LookaheadKV",
    "pyramidkv": "PyramidKV",
    "snapkv": "SnapKV",
    "specache": "SpeCache",
    "speckv": "SpecKV",
    "speckvpc": "SpecKV-PC",
    "specontext": "SpeContext",
    "specpc": "SpecPC",
    "streamingllm": "StreamingLLM",
}
"""What pages call methods that have no label of their own."""
STAGES = ("answers", "importance", "eviction", "evaluation", "total")


def shown(method: str, adapter: str | None = None) -> str:
    """What pages call a method: by its label, or by its kind with the rest of the label behind a comma."""
    if method == "lookaheadkv" and (adapter or "").startswith("shipped:"):
        return "LookaheadKV (shipped)"
    if method in NAMES:
        return NAMES[method]
    if method.startswith("full cache"):  # as benchmarks call it, some with an implementation of attention
        return method
    kind = kind_of(method).rstrip(",")
    if kind not in METHODS and kind not in KINDS:
        return method
    rest = method.removeprefix(kind).strip(", ")
    name = KINDS.get(kind) or label_of(kind)
    return f"{name}, {rest}" if rest else name


def tasks_of(run: Run) -> str:
    """What pages call the tasks of an evaluation."""
    settings = run.settings
    tasks = settings["tasks"]
    kinds = dict.fromkeys(task.partition("_")[0] for task in tasks)
    files = {*(settings.get("jsonl") or {}).get("files", [])}
    only_needles = all(task.startswith("ruler_niah_") for task in tasks)
    names = {
        "ruler": "RULER's needles" if only_needles else "RULER",
        "niah": "needles",
        "jsonl": "code" if files and files <= CODE else "real prompts",
    }
    return ", ".join(names.get(kind, kind) for kind in kinds)


def by_length(run: Run) -> dict[int, list[ResultRow]]:
    """The rows of an evaluation by the length of their prompts; files have prompts of all lengths up to a maximum."""
    groups: dict[int, list[ResultRow]] = {}
    for row in run.rows:
        length = run.settings["max_tokens"] if "jsonl" in run.settings["tasks"] else row.length
        groups.setdefault(length, []).append(row)
    return dict(sorted(groups.items()))


def scores_of(folder: Path, processor: str) -> pd.DataFrame:
    """A line per length, method and budget with the means over tasks; of methods that have all samples."""
    if not (folder / RESULTS).is_file():
        return pd.DataFrame()
    run = read_run(folder)
    lines = list[dict[str, str]]()
    for length, rows in by_length(run).items():
        means = mean_over_tasks(summarize(rows))
        for mean in means[means["n"] == means["n"].max()].itertuples():
            firsts = [row.time_to_first_token for row in rows if row.cell == (mean.method, mean.budget)]
            lines.append(line_of(run, length, mean.method, mean) | {"first_s": text_of(median(firsts), 2)})
    return of_run(lines, run, folder, processor)


def differences_of(folder: Path, processor: str) -> pd.DataFrame:
    """A line per length, method and budget: LookaheadKV's means minus that method's, over the same samples."""
    if not (folder / RESULTS).is_file():
        return pd.DataFrame()
    run = read_run(folder)
    lines = list[dict[str, str]]()
    for length, rows in by_length(run).items():
        means = mean_over_tasks(summarize(rows))
        is_ours = means["method"] == "lookaheadkv"
        others = means[~is_ours & means["budget"].notna()]
        for pair in difference(means[is_ours], others, on="order").itertuples():
            lines.append(line_of(run, length, pair.against, pair))
    return of_run(lines, run, folder, processor)


def line_of(run: Run, length: int, method: str, mean: Any) -> dict[str, str]:
    """The cells of a mean over tasks, or of a difference of two: what it is of, and its estimates."""
    return {
        "model": run.target["name"],
        "tasks": tasks_of(run),
        "question": run.rows[0].question,
        "length": str(length),
        "method": shown(method, run.settings.get("adapter")),
        "budget": "" if mean.budget is None else f"{mean.budget:g}",
        **estimates_of(mean),
        "samples": str(mean.n),
    }


def of_run(lines: list[dict[str, str]], run: Run, folder: Path, processor: str) -> pd.DataFrame:
    """The lines of an evaluation with its date, processor and name; empty without lines."""
    if not lines:
        return pd.DataFrame()
    date = max(row.date for row in run.rows)
    return pd.DataFrame(lines).assign(date=date, processor=processor, run=folder.name)


def estimates_of(mean: Any) -> dict[str, str]:
    """Score and excess NLL of a mean over tasks, or of a difference of two, each with its 95 % interval."""
    cells = dict[str, str]()
    for name, prefix, estimate in (("score", "score", mean.score), ("excess_nll", "excess", mean.excess_nll)):
        low, high = estimate.interval or (float("nan"), float("nan"))
        cells[name] = text_of(estimate.value, 3)
        cells[f"{prefix}_low"] = text_of(low, 3)
        cells[f"{prefix}_high"] = text_of(high, 3)
    return cells


def needles_of(folder: Path, processor: str) -> pd.DataFrame:
    """A line per kind of needle, length, depth, method and budget; RULER's own needles are among its scores."""
    if not (folder / RESULTS).is_file():
        return pd.DataFrame()
    run = read_run(folder)
    rows = pd.DataFrame(map(vars, run.rows))
    rows = rows[rows["depth"].notna() & rows["task"].str.startswith("niah_")]
    if rows.empty:
        return pd.DataFrame()
    kinds = rows["task"].str.removeprefix("niah_").replace("depth", "single")
    methods = [shown(method, run.settings.get("adapter")) for method in rows["method"]]
    budgets = ["" if pd.isna(budget) else f"{budget:g}" for budget in rows["budget"]]
    rows = rows.assign(kind=kinds, method=methods, budget=budgets, depth=rows["depth"].map("{:.2f}".format))
    columns = ["kind", "method", "budget", "length", "depth"]
    groups = rows.groupby(columns, sort=False)["score"]
    lines = groups.agg(["mean", "size"]).reset_index().sort_values(["length", "depth"], kind="stable")
    return pd.DataFrame(
        {
            "model": run.target["name"],
            "question": rows["question"].iloc[0],
            **{column: lines[column] for column in columns},
            "score": [text_of(score, 3) for score in lines["mean"]],
            "samples": lines["size"],
            "date": rows["date"].max(),
            "processor": processor,
            "run": folder.name,
        }
    )


def importance_of(folder: Path, processor: str) -> pd.DataFrame:
    """A line per method and budget with the means over tasks."""
    path = folder / "importance.csv"
    if not path.is_file():
        return pd.DataFrame()
    table = pd.read_csv(path)
    settings = made_with(folder)
    groups = table.groupby(["method", "budget"], sort=False)
    lines = groups[["recall", "mass", "correlation", "tau"]].mean().map(lambda value: text_of(value, 3))
    lines["samples"] = groups["samples"].sum()
    lines = lines.reset_index()
    methods = [shown(method, settings.get("adapter")) for method in lines["method"]]
    lines.insert(0, "model", settings["model.id"])
    return lines.assign(method=methods, date=written(path), processor=processor, run=folder.name)


def speed_of(folder: Path, processor: str) -> pd.DataFrame:
    """A line per length, method and budget: seconds to the first token, milliseconds a step, MiB of KV entries."""
    path = folder / "decode.jsonl"
    if not path.is_file():
        return pd.DataFrame()
    settings = made_with(folder)
    lines = list[dict[str, str]]()
    for row in read_jsonl(path):
        name, _, budget = row["method"].rpartition(" ")
        if not budget.isdecimal():
            name = row["method"]
            budget = ""
        lines.append(
            {
                "model": settings["model.id"],
                "tokens": str(row["tokens"]),
                "method": shown(name, settings.get("adapter")),
                "budget": budget,
                "first_s": text_of(row.get("prefill s") or float("nan"), 2),
                "step_ms": text_of(row["ms a step"], 1),
                "kv_mib": text_of(row["KV MiB"], 1),
            }
        )
    return pd.DataFrame(lines).assign(date=written(path), processor=processor, run=folder.name)


def made_with(folder: Path) -> dict[str, Any]:
    """The settings of a benchmark's folder."""
    return json.loads((folder / "settings.json").read_text("utf-8"))["settings"]


def written(path: Path) -> str:
    """The day on which a file was written."""
    return pd.Timestamp(path.stat().st_mtime, unit="s").date().isoformat()


def fit_of(folder: Path, processor: str, log: str) -> pd.DataFrame:
    """The line of a fit: seconds of its stages, peak memory, and the needles that its evaluation finds."""
    if not (folder / "fit.json").is_file():
        return pd.DataFrame()
    seconds, peak_mib = stages_of(log, folder.name)
    run = read_run(folder / "eval")
    evicting = [row for row in run.rows if row.budget is not None]
    budget = min(row.budget for row in evicting if row.budget is not None)
    needles = dict[str, str]()
    for method in ("full", "lookaheadkv", "snapkv"):
        scores = [row.score for row in run.rows if row.cell == (method, None if method == "full" else budget)]
        needles[method] = f"{sum(scores):g} of {len(scores)}"
    line = {
        "model": run.target["name"],
        "samples": finished_manifest(folder / "data").samples,
        **{f"{stage}_s": seconds.get(stage, "") for stage in STAGES},
        "peak_mib": peak_mib,
        "length": max(row.length for row in run.rows),
        "budget": f"{budget:g}",
        **needles,
        "date": max(row.date for row in run.rows),
        "processor": processor,
        "run": folder.name,
    }
    return pd.DataFrame([line])


def stages_of(log: str, name: str) -> tuple[dict[str, str], str]:
    """Seconds by stage, and the peak memory in MiB, of the last fit of a log whose folder has this name.

    The second is empty where GNU time has not printed it. Exits where the log has no such fit that ended.
    """
    ends = [match.end() for match in re.finditer(rf"^\S*\b{re.escape(name)}/adapter: the module.*$", log, re.MULTILINE)]
    if not ends:
        sys.exit(f"log=: no fit whose folder is {name} has come to its end in it")
    rest = log[ends[-1] :].partition("\n=== ")[0]
    seconds = dict(re.findall(r"^(\w+) +(\d+) s$", rest, re.MULTILINE))
    peak = re.search(r"Maximum resident set size \(kbytes\): (\d+)", rest)
    return seconds, "" if peak is None else f"{int(peak[1]) / 1024:.0f}"


def add_commands(folders: Sequence[Path]) -> None:
    """Append to runs.csv the commands of evaluations that it lacks, without paths of the machine."""
    path = ROOT / "results" / "runs.csv"
    listed_runs = {*pd.read_csv(path, dtype=str)["run"]}
    lines = []
    for folder in folders:
        if (folder / RESULTS).is_file() and folder.name not in listed_runs:
            command = public_command(read_run(folder).settings["command"], folder.name)
            lines.append({"run": folder.name, "command": command, "note": ""})
    if lines:
        new = pd.DataFrame(lines).to_csv(index=False, header=False, lineterminator="\n")
        write_text(path, path.read_text("utf-8") + new)


def public_command(command: str, name: str) -> str:
    """A command with `runs/NAME` as its folder, and names in capitals in place of all other absolute paths."""
    words = list[str]()
    for word in shlex.split(command):
        key, is_set, value = word.partition("=")
        if key == "out":
            value = f"runs/{name}"
        elif key.endswith(".dir"):
            value = "DIR"
        else:
            value = re.sub(r"(?<![\w.])/[\w./-]+", lambda path: Path(path[0]).stem.upper(), value)
        words.append(f"{key}{is_set}{value}")
    return shlex.join(words)


FILES: dict[str, tuple[TableOf, list[str]]] = {
    "real_models": (scores_of, ["run"]),
    "real_models_differences": (differences_of, ["run"]),
    "real_models_needles": (needles_of, ["run"]),
    "real_models_importance": (importance_of, ["run"]),
    "real_models_speed": (speed_of, ["run"]),
}
"""The files of `results/` but that of fits, what makes their rows, and what is replaced."""


def options_of(arguments: Sequence[str]) -> tuple[Mapping[str, str], list[Path]]:
    """The options `processor=` and `log=`, and the folders."""
    options = dict[str, str]()
    folders = list[Path]()
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name in ("processor", "log"):
            options[name] = value
        else:
            folders.append(Path(argument))
    return options, folders


def main(arguments: Sequence[str]) -> None:
    """Add the runs in the folders of the arguments."""
    options, folders = options_of(arguments)
    if "processor" not in options or not folders:
        sys.exit("expected processor=NAME and folders of runs, see the first lines of this file")
    log = Path(options["log"]).read_text("utf-8").replace("\r", "\n") if "log" in options else ""

    def fits(folder: Path, processor: str) -> pd.DataFrame:
        return fit_of(folder, processor, log)

    for folder in folders:
        if (folder / RESULTS).is_file():
            incomplete = read_run(folder).incomplete
            if incomplete:
                print(f"{folder}: {incomplete}")
    add_runs(folders, options["processor"], {**FILES, "fits": (fits, ["run"])})
    add_commands(folders)


if __name__ == "__main__":
    main(sys.argv[1:])
