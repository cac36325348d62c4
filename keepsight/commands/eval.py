"""keepsight eval: score methods and budgets from one prefill a sample.

    keepsight eval adapter=runs/adapter tasks=[niah_single] lengths=[512,1024] budgets=[64,128] samples=20 out=runs/eval
    keepsight eval tasks=[jsonl] jsonl.dir=DIR max_tokens=2048 methods=[full,snapkv,lookaheadkv] out=runs/real

Tasks: niah_single, niah_multikey, niah_multivalue, niah_multiquery (niah: all four), jsonl. Methods: full, oracle,
lookaheadkv, snapkv, streamingllm, or one with options: {name: snapkv, window: 16}. `out` gets results.jsonl (a row a
sample), summary.csv, plots and report.html. A stopped run goes on when the same command is given again.
"""

import platform
import shlex
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from keepsight import __version__
from keepsight.config import Recipe, at_least_one
from keepsight.errors import UserError
from keepsight.eval import jsonl, niah
from keepsight.eval.plots import plot_excess_nll, plot_scores
from keepsight.eval.report import write_report
from keepsight.eval.samples import Sample, answerable, render
from keepsight.eval.summary import summarize, table, write_summary
from keepsight.eval.sweep import Variant, sweep
from keepsight.files import append_lines, read_json, whole_lines, write_json, write_lines
from keepsight.models.targets import Target
from keepsight.runtime.evict import Evict
from keepsight.runtime.methods import make_method
from keepsight.targets import adapter_of, target_of


@dataclass
class JsonlConfig:
    """Real samples.

    Attributes:
        dir: Folder of JSONL files in LongBench's or RULER's layout; tasks.json in it or beside it.
        files: Names to read, without .jsonl; all that can be scored by default.
    """

    dir: str | None = None
    files: list[str] = field(default_factory=list)


@dataclass
class Config(Recipe):
    """Keys of `keepsight eval`.

    Attributes:
        out: Folder for results and report.
        tasks: niah_single, niah_multikey, niah_multivalue, niah_multiquery, niah (all four), jsonl.
        lengths: Prompt lengths of the needle tasks, in tokens of the target's tokenizer.
        methods: Names, or {name: NAME, option: value}.
        budgets: Entries per layer and KV head, or ratios such as 0.1.
        samples: Per task and length; per file of the jsonl task (0 for all).
        seed: Of the needle tasks.
        haystack: Text file to hide needles in, instead of the offline essays.
        jsonl: Real samples.
        max_tokens: Longest prompt of the jsonl task; longer ones are dropped and counted.
        max_new_tokens: Shortens every answer to this many tokens; 0 for each task's own limit.
        max_batch: Variants decoded together; lower it when memory runs out.
    """

    out: str = "???"
    tasks: list[str] = field(default_factory=lambda: ["niah_single"])
    lengths: list[int] = field(default_factory=lambda: [512, 1024])
    methods: list[Any] = field(default_factory=lambda: ["full", "oracle", "lookaheadkv", "snapkv", "streamingllm"])
    budgets: list[Any] = field(default_factory=lambda: [64, 128])
    samples: int = 20
    seed: int = 1000
    haystack: str | None = None
    jsonl: JsonlConfig = field(default_factory=JsonlConfig)
    max_tokens: int = 2048
    max_new_tokens: int = 0
    max_batch: int = 16


def run(config: Config) -> None:
    """Evaluate, then write the summary, the plots and the report."""
    at_least_one(config, "max_batch")
    if config.max_new_tokens < 0:
        raise UserError(f"max_new_tokens={config.max_new_tokens} must be at least 0, for each task's own limit")
    variants = variants_of(config)
    out = Path(config.out)
    target = target_of(config)
    settings = _settings(config, target)
    samples = samples_of(config, target)
    finished = _finished(out, settings, 1 + len(variants))
    _show(samples[0], target)
    with tqdm(total=len(samples), initial=len(finished), desc="samples", unit="sample") as progress:
        for rows in sweep(target, samples, variants, finished, config.max_batch):
            append_lines(out / "results.jsonl", rows)
            progress.update()
    write_all(out, settings)


def write_all(out: Path, settings: dict[str, Any]) -> None:
    """Summary, plots and report from `out/results.jsonl`; prints the table."""
    rows = whole_lines(out / "results.jsonl")
    summary = summarize(rows)
    write_summary(rows, out / "summary.csv")
    plot_scores(summary, out / "scores.png")
    plot_excess_nll(summary, out / "excess_nll.png")
    write_report(rows, out, settings)
    print(f"{table(summary)}\n\nreport: {out / 'report.html'}")


def variants_of(config: Config) -> list[Variant]:
    """Every method at every budget; made before the target is loaded, so that bad values end the command at once."""
    variants = []
    for given in config.methods:
        if not isinstance(given, str | dict):
            raise UserError(f"methods={given!r}: expected a method's name, or {{name: NAME, option: value}}")
        options = {"name": given} if isinstance(given, str) else dict(given)
        name = str(options.pop("name", ""))
        label = name + "".join(f" {key}={value}" for key, value in options.items())
        if name == "full":
            continue  # the sweep always answers from the full cache first
        variants += [
            Variant(label, make_method(name, budget, adapter_of(config), **options)) for budget in config.budgets
        ]
    if not variants:
        raise UserError("methods= and budgets= must name at least one method that evicts, and one budget")
    return variants


def samples_of(config: Config, target: Target) -> list[Sample]:
    """The samples of all tasks."""
    samples: list[Sample] = []
    for task in config.tasks:
        samples += _real_samples(config, target) if task == "jsonl" else _needles(task, config, target)
    samples, refused = answerable(samples, target.tokenizer)
    for reason in refused:
        print(f"refused, not scored: {reason}")
    if not samples:
        raise UserError("tasks= and samples= leave no sample to evaluate")
    if config.max_new_tokens:
        limit = config.max_new_tokens
        samples = [replace(sample, max_new_tokens=min(limit, sample.max_new_tokens)) for sample in samples]
    return samples


def _needles(task: str, config: Config, target: Target) -> list[Sample]:
    kinds = [name for name in niah.KINDS if task in ("niah", f"niah_{name}")]
    if not kinds:
        known = ", ".join(f"niah_{name}" for name in niah.KINDS)
        raise UserError(f"task {task!r} is unknown; choose one of niah, {known}, jsonl")
    haystack = Path(config.haystack) if config.haystack else None
    return [
        sample
        for kind in kinds
        for length in config.lengths
        for sample in niah.make_samples(kind, length, config.samples, config.seed, target.tokenizer, haystack)
    ]


def _real_samples(config: Config, target: Target) -> list[Sample]:
    if config.jsonl.dir is None:
        raise UserError("tasks=[jsonl] needs jsonl.dir=FOLDER with JSONL files and a tasks.json")
    files, limit = config.jsonl.files or None, config.samples or None
    samples, dropped = jsonl.read_samples(Path(config.jsonl.dir), files, config.max_tokens, target.tokenizer, limit)
    for name, count in dropped.items():
        if count:
            print(f"{name}: {count} samples are longer than max_tokens={config.max_tokens} and were dropped")
    return samples


def _show(sample: Sample, target: Target) -> None:
    """Print one rendered prompt, so that a wrong template or a cut prompt is seen before hours are spent."""
    ids = render(sample, target.tokenizer)
    head, tail = target.tokenizer.decode(ids[:48]), target.tokenizer.decode(ids[-48:])
    print(f"first prompt, {sample.task} {sample.id}: {len(ids)} tokens, nothing cut")
    print(f"--- head\n{head}\n--- tail\n{tail}\n---")


def _settings(config: Config, target: Target) -> dict[str, Any]:
    """What the results depend on, for the report and for resuming."""
    given = asdict(config)
    kept = {key: given[key] for key in given if key not in ("defaults", "lookahead", "train", "out", "max_batch")}
    versions = {
        "keepsight": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    return kept | {
        "target": {"name": target.name, "version": target.version},
        "adapter": adapter_of(config),
        "adapter_digest": _adapter_digest(config),
        "versions": versions,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _adapter_digest(config: Config) -> str | None:
    methods = [variant.method for variant in variants_of(config) if isinstance(variant.method, Evict)]
    artifacts = [getattr(method.observer, "artifact", None) for method in methods]
    return next((artifact.digest for artifact in artifacts if artifact is not None), None)


def _finished(out: Path, settings: dict[str, Any], rows_each: int) -> set[tuple[Any, ...]]:
    """(task, length, sample id) of what an earlier run with the same settings has done.

    A sample of fewer rows than `rows_each`, cut short by a kill or a full disk, is done again: its rows are dropped.

    Raises:
        UserError: `out` holds results of other settings.
    """
    path, results = out / "settings.json", out / "results.jsonl"
    rows = whole_lines(results)
    if rows and path.exists():
        before = read_json(path)
        for key, value in settings.items():
            if key not in ("command", "versions") and before.get(key) != value:
                raise UserError(
                    f"{out}: these results were made with {key}={before.get(key)!r}, now it is {value!r}; "
                    "choose another out=, or delete the folder"
                )
    write_json(path, settings)
    counts = Counter(_key(row) for row in rows)
    whole = [row for row in rows if counts[_key(row)] == rows_each]
    if len(whole) < len(rows):
        write_lines(results, whole)
    return {_key(row) for row in whole}


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["task"], row["length"], row["sample"]
