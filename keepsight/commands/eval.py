"""keepsight eval: score methods and KV budgets from one prefill per sample.

    keepsight eval adapter=runs/adapter tasks=niah_single lengths=512,1024 budgets=64,128 samples=20 out=runs/eval
    keepsight eval tasks=jsonl jsonl.dir=DIR max_tokens=2048 methods=full,snapkv,lookaheadkv out=runs/real

    keepsight eval "methods=[snapkv,{name: snapkv, allocate: adakv},{name: evict, observer: short_keys}]" ...
    accelerate launch -m keepsight eval ...                    # samples divided over processes, results merged once

Tasks: niah_single, niah_multikey, niah_multivalue, niah_multiquery (niah: all four), jsonl. Methods: a name (the
README has the table), or one with options. An option is a field of the method, such as window, sinks, every (evict
while decoding too), or a part: observer, reduce, pool, allocate. question=unseen compresses the context before the
question arrives, question=multi asks several questions of one compressed cache. `out` gets results.jsonl (a row per
sample, method and budget), summary.csv, report.html, plots/, tables/ and samples/, a page for each of the first samples
with what every method kept. A stopped run resumes when the same command is run again; with more samples, tasks,
lengths, methods or budgets it is extended, and only what is missing is run. reuse=DIR takes what another run has
measured on the same inputs.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from tqdm import tqdm

from keepsight.commands.config import Recipe
from keepsight.commands.from_recipe import resources_later, resources_of, target_of
from keepsight.commands.plugins import import_plugins
from keepsight.commands.provenance import settings_of
from keepsight.commands.terminal import printable
from keepsight.commands.variants import bound, variants_of
from keepsight.errors import UserError
from keepsight.eval.answers import default_batch_tokens
from keepsight.eval.judge import Judge
from keepsight.eval.kept_tokens import KeptTokens, first_of_each
from keepsight.eval.report.report import write_outputs
from keepsight.eval.report.summary import summarize, summary_table
from keepsight.eval.results import EARLIER, Measured, finished, merge, part_of
from keepsight.eval.reuse import Earlier
from keepsight.eval.rows import Variant
from keepsight.eval.run_samples import check_samples
from keepsight.eval.runs import read_run
from keepsight.eval.sweep import groups_of, sweep
from keepsight.eval.tasks.benchmark import TaskRequest
from keepsight.eval.tasks.protocols import protocol_named
from keepsight.eval.tasks.registry import Benchmarks, make_all, tasks_of
from keepsight.eval.tasks.samples import RenderedSample, render_apart
from keepsight.files import append_lines, require_writable, whole_lines
from keepsight.files import one_writer
from keepsight.models.targets import processor_of
from keepsight.models.targets import Target
from keepsight.runtime.state import context_of
from keepsight.runtime.saved import QUESTIONS


@dataclass
class EvalKeys(Recipe):
    """What is compared on what.

    Attributes:
        tasks: Benchmarks, such as niah, ruler, longbench, jsonl, or their tasks, such as ruler_vt.
        lengths: Prompt lengths of generated tasks, in tokens of the target's tokenizer.
        methods: Names, or {name: NAME, option: value}.
        budgets: KV budgets: entries per layer and KV head, or ratios of the prompt such as 0.1.
    """

    tasks: list[str] = field(default_factory=lambda: ["niah_single"])
    lengths: list[int] = field(default_factory=lambda: [512, 1024])
    methods: list[Any] = field(default_factory=lambda: ["full", "oracle", "lookaheadkv", "snapkv", "streamingllm"])
    budgets: list[Any] = field(default_factory=lambda: [64, 128])


@dataclass
class Config(Benchmarks, EvalKeys):
    """Keys of `keepsight eval`.

    Attributes:
        out: Folder for results and report.
        bits: Bit widths for the methods that quantize entries, a row for each; the method's default when empty.
        samples: Number of samples per task and length; per file of tasks that are read from files (0 for all).
        seed: Seed of generated tasks.
        protocol: Whose prompts, truncation and post-processing RULER and LongBench follow: reference, kvcache-factory,
            kvpress or draft-based.
        max_tokens: Longest prompt of the jsonl task in tokens; longer ones are dropped and counted.
        max_new_tokens: Shortens every answer to this many tokens; 0 for each task's own limit.
        judge: Who scores MT-Bench and LongBench-Write.
        question: What methods see while they compress: seen (the whole prompt), unseen (only what stands before the
            question), multi (the same, and every question about a context is asked of one compressed cache).
        max_batch_tokens: Max KV entries per head in one decoding batch over all variants; 0 for a quarter of the free
            memory.
        pages: Samples of each task and length whose kept tokens are stored, and shown on a page of their own.
        reuse: Folders of earlier runs. A row that depends on the same target, sample, method and options is taken from
            there instead of being measured again, its times included.
        plugins: Modules of your own, or entry points of the group keepsight, that are imported first: what they add to
            METHODS can be named in `methods`.
    """

    out: str = "???"
    bits: list[int] = field(default_factory=list)
    samples: int = 20
    seed: int = 1000
    protocol: str = "reference"
    max_tokens: int = 2048
    max_new_tokens: int = 0
    judge: Judge = field(default_factory=Judge)
    question: str = "seen"
    max_batch_tokens: int = 0
    pages: int = 1
    reuse: list[str] = field(default_factory=list)
    plugins: list[str] = field(default_factory=list)


def run(config: Config) -> None:
    """Evaluate, then write the summary, the plots and the report."""
    check(config)  # bad values end here, before anything loads
    variants = variants_of(config.methods, config.budgets, config.bits, resources_later(config))
    processes, out = PartialState(cpu=not torch.cuda.is_available()), Path(config.out)
    target = target_of(config)
    variants = bound(variants, resources_of(config, target))
    samples, notes = samples_of(config, target)
    settings = settings_of(config, target, variants) | {"notes": notes}
    earlier = Earlier.read(config.reuse)
    if config.question != "seen":
        samples = [render_apart(sample, target.tokenizer) for sample in samples]
    check_samples(target, samples, variants)
    pages = {*first_of_each(samples, config.pages)}  # before sorting: they stay the same when samples are added
    # What does not fit into memory ends in the first minute, and processes that take turns end together.
    samples.sort(key=lambda sample: -len(sample.prompt_ids))
    with one_writer(out) if processes.is_main_process else nullcontext():
        if processes.is_main_process:
            merge(out, settings, 1 + len(variants))
            for subject, note in notes.items():
                print(f"{subject}: {note}")
            _show(samples[0], target)
        processes.wait_for_everyone()
        kept = KeptTokens(out, target, [sample for sample in samples if sample.key in pages], config.reuse)
        earlier = earlier.and_rows(whole_lines(out / EARLIER, Measured))
        _measure(config, target, samples, variants, earlier, kept, processes)
        processes.wait_for_everyone()
        if processes.is_main_process:
            merge(out, settings, 1 + len(variants))
            write_all(out)
            (out / EARLIER).unlink(missing_ok=True)


def check(config: Config) -> None:
    """Import the plugins, and refuse bad values.

    Raises:
        UserError: a value is out of range, a task is unknown, or `out` cannot be written to.
    """
    import_plugins(config.plugins)
    for key in ("max_new_tokens", "max_batch_tokens"):
        if getattr(config, key) < 0:
            raise UserError(f"{key}={getattr(config, key)} must be at least 0, which leaves it to keepsight")
    for key in ("samples", "pages"):
        if getattr(config, key) < 0:
            raise UserError(f"{key}={getattr(config, key)} must be at least 0")
    if config.question not in QUESTIONS:
        raise UserError(f"question={config.question} is unknown; choose one of {', '.join(QUESTIONS)}")
    config.judge.check()
    for name in config.tasks:
        tasks_of(config, name, protocol_named(config.protocol))
    require_writable(Path(config.out))


def _measure(
    config: Config,
    target: Target,
    samples: list[RenderedSample],
    variants: list[Variant],
    earlier: Earlier,
    kept: KeptTokens,
    processes: PartialState,
) -> None:
    """Append the rows of this process's share of the samples to its part of the results."""
    out = Path(config.out)
    done = finished(out)
    own = own_share(samples, config.question, processes.process_index, processes.num_processes)
    part = part_of(out, processes.process_index, processes.num_processes)
    most = config.max_batch_tokens or default_batch_tokens(target.model) // processes.num_processes
    with tqdm(total=len(own), desc="samples", unit="sample", disable=not processes.is_main_process) as progress:
        progress.update(sum(sample.key in done for sample in own))
        by_key = {sample.key: sample for sample in own}
        for rows in sweep(target, own, variants, done, most, config.question, earlier, kept.note):
            sample = by_key[rows[0]["task"], rows[0]["length"], rows[0]["sample"]]
            kept.write(rows)
            append_lines(part, config.judge.score(sample, rows))
            progress.update()


def own_share(samples: list[RenderedSample], question: str, process: int, processes: int) -> list[RenderedSample]:
    """Every n-th group of samples, n being the number of processes."""
    return [sample for group in groups_of(samples, question)[process::processes] for sample in group]


def write_all(out: Path) -> None:
    """Summary, plots and report of the run in a folder; prints the table."""
    run = read_run(out)
    write_outputs([run], out)
    print(f"{summary_table(summarize(run.rows))}\n\nreport: {out / 'report.html'}")


def samples_of(config: Config, target: Target) -> tuple[list[RenderedSample], dict[str, str]]:
    """The samples of all tasks, and notes on them."""
    request = TaskRequest(
        tokenizer=target.tokenizer,
        context=context_of(target.model),
        lengths=config.lengths,
        samples=config.samples,
        seed=config.seed,
        max_tokens=config.max_tokens,
        every_question=config.question == "multi",
        protocol=protocol_named(config.protocol),
        judge=config.judge.name,
        processor=partial(processor_of, target),
    )
    samples = make_all(config, config.tasks, request)
    if not samples:
        raise UserError("tasks= and samples= leave no sample to evaluate")
    if len({sample.key for sample in samples}) < len(samples):
        raise UserError("tasks=, lengths= and jsonl.files= name some samples twice; name each once")
    if config.max_new_tokens:
        limit = config.max_new_tokens
        samples = [replace(sample, max_new_tokens=min(limit, sample.max_new_tokens)) for sample in samples]
    return samples, request.notes


def _show(sample: RenderedSample, target: Target) -> None:
    """Print one rendered prompt, so that a wrong template or a truncated prompt is seen before hours are spent."""
    ids = [*sample.prompt_ids.tolist(), *sample.question_ids.tolist()]
    head, tail = target.tokenizer.decode(ids[:48]), target.tokenizer.decode(ids[-48:])
    cut = "its middle cut out" if sample.is_cut else "nothing cut"
    print(f"first prompt, {sample.task} {sample.id}: {len(ids)} tokens, {cut}")
    print(printable(f"--- head\n{head}\n--- tail\n{tail}\n---"))
