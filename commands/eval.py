"""keepsight eval: score methods and KV budgets from one prefill per sample."""

import platform
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState

from keepsight import __version__
from keepsight.commands.config import Eval as Config
from keepsight.commands.config_shared import ModelConfig, TaskKeys, check_sampling
from keepsight.commands.from_recipe import resources_of, target_of, without_weights
from keepsight.commands.recipe import table_of
from keepsight.commands.saved_config import save_config
from keepsight.commands.variants import ALL, variants_of
from keepsight.errors import BadRow, UserError, printable
from keepsight.eval.answers import Sampling, default_batch_tokens
from keepsight.eval.kept_tokens import KeptTokens, first_of_each
from keepsight.eval.record import Cell, Digests, Key, RowStore, cells_text, merge, rows_so_far, rows_to_reuse
from keepsight.eval.report.pages import verdict_of, write_outputs
from keepsight.eval.report.summary import summary_table
from keepsight.eval.results import SETTINGS, read_run, require_same_run
from keepsight.eval.sweep import FULL_CACHE, Refused, SampleGroup, Variant, check_samples, plan, sweep
from keepsight.eval.tasks.benchmark import TaskRequest, protocol_named
from keepsight.eval.tasks.registry import make_all, tasks_of
from keepsight.eval.tasks.samples import RenderedSample, render_apart
from keepsight.files import file_digest, one_writer, require_writable, write_json
from keepsight.models.artifacts import fetch
from keepsight.models.decoder import context_of
from keepsight.models.retrieval_head import weights_path
from keepsight.models.targets import Target, processor_of
from keepsight.models.transformers_internals import attention_of_config
from keepsight.progress import progress_bar

_NOT_IN_RESULTS = ("out", "max_batch_tokens", "reuse", "pages", "skip")
"""Keys that no answer depends on."""
SKIPPED = "rows skipped"
"""Subject of the note on rows that make no sample."""


def run(config: Config) -> str:
    """Evaluate, then write the summary, the plots and the report; returns what to do next."""
    check(config)  # bad values are refused before anything loads
    check_sampling(config.temperature, config.top_p)
    if config.draws > 1 and not config.temperature:
        raise UserError(
            f"draws={config.draws}: greedy answers are all alike; give a temperature, or leave it out",
            field="draws",
            code="conflict",
        )
    out = Path(config.out)
    processes = PartialState(cpu=not torch.cuda.is_available())
    outline = without_weights(config)
    variants = variants_of(config.methods, config.budgets, config.bits, resources_of(config, outline))
    samples, notes = samples_of(config, outline)
    samples = _drawn(samples, config.draws)
    rows_before = rows_so_far(out)
    require_same_run(out, rows_before, _keys_of(config), _planned(samples, variants))
    reused = rows_to_reuse(config.reuse)

    target = target_of(config)
    settings = {**settings_of(config, target, variants), "notes": notes}
    require_same_run(out, rows_before, settings, _planned(samples, variants))
    settings["planned_samples"] = len(samples)
    if config.question != "seen":
        samples = [render_apart(sample, target.tokenizer) for sample in samples]
    refused = Refused()
    refusing = refused if ALL in config.methods else None
    check_samples(target, samples, variants, refusing)
    pages = set(first_of_each(samples, config.pages))  # before sorting: they stay the same when samples are added
    # Longest first: what does not fit into memory fails in the first minute, and processes end at about the same time.
    samples.sort(key=lambda sample: -len(sample.prompt_ids))
    kept_tokens = KeptTokens(out, target, [sample for sample in samples if sample.key in pages], config.reuse)
    groups = plan(target, samples, variants, config.question, _sampling(config))

    unjudged: list[BadRow] = []
    processes.wait_for_everyone()  # until all have read the rows so far, which are now merged
    with one_writer(out) if processes.is_main_process else nullcontext():
        if processes.is_main_process:
            merge(out)
            save_config(config)
            write_json(out / SETTINGS, settings)
            print_notes(notes)
            _show(samples[0], target)
            _drop_changed(out, groups)
        processes.wait_for_everyone()
        store = RowStore(out, processes.process_index, processes.num_processes, reused)
        _measure(config, target, groups, variants, store, kept_tokens, processes, unjudged, refused)
        processes.wait_for_everyone()
        left_out = {f"{name} at budget {budget}": f"left out: {error}" for (name, budget), error in refused.items()}
        if processes.is_main_process:
            merge(out)
            write_json(out / SETTINGS, {**settings, "notes": {**notes, **left_out}})
            if unjudged and not rows_so_far(out):
                raise unjudged[0]
            write_all(out)
            if SKIPPED in notes:
                print_notes({SKIPPED: notes[SKIPPED]})

    if unjudged:
        first_error = printable(str(unjudged[0]))
        print(f"{len(unjudged)} samples have no verdict, such as {first_error}; run the command again to ask again")
    if left_out and ALL in config.methods:
        print(printable("; ".join(f"{variant} was {reason}" for variant, reason in left_out.items())))
    elif refused:
        (name, budget), error = next(iter(refused.items()))
        message = f"{name} at budget {budget} was left out: {error}; the rows of the other methods are in {out}"
        if len(refused) > 1:
            message += f", {len(refused)} variants were left out"
        raise error.reworded(message)
    return f"open the report in a browser, or keepsight compare {shlex.quote(str(out))} OTHER_EVALUATION"


def _drawn(samples: Sequence[RenderedSample], draws: int) -> list[RenderedSample]:
    """The samples, repeated once per draw; the ids of all draws but the first end in its number."""
    drawn = list(samples)
    for draw in range(1, draws):
        for sample in samples:
            drawn.append(replace(sample, id=f"{sample.id}, draw {draw + 1}", draw=draw))
    return drawn


def _planned(samples: Iterable[RenderedSample], variants: Iterable[Variant]) -> set[tuple[Key, Cell]]:
    """The rows that an evaluation will have."""
    cells = [FULL_CACHE.cell, *(variant.cell for variant in variants)]
    return set(product((sample.key for sample in samples), cells))


def _sampling(config: Config) -> Sampling:
    return Sampling(config.temperature, config.top_p, config.seed)


def check(config: TaskKeys) -> None:
    """UserError where a task is unknown or lacks its files or judge, or `out` is not writable."""
    for name in config.tasks:
        for benchmark, task in tasks_of(config, name, protocol_named(config.protocol)):
            benchmark.require(task, config.judge.name)
    require_writable(Path(config.out))


def _drop_changed(out: Path, groups: Iterable[SampleGroup]) -> None:
    """Remove rows that depend on something that has changed since, and say so: they are measured again."""
    planned: dict[Key, Digests] = {}
    for group in groups:
        for sample, digests in zip(group.samples, group.inputs, strict=True):
            planned[sample.key] = digests
    changed = RowStore(out).drop_changed(planned)
    if changed:
        cells = cells_text(changed)
        reason = "since then the method, its weights, the task, the template or the device has changed"
        print(printable(f"{out}: measured again: {cells}; {reason}"))


def _measure(
    config: Config,
    target: Target,
    groups: Sequence[SampleGroup],
    variants: list[Variant],
    store: RowStore,
    kept_tokens: KeptTokens,
    processes: PartialState,
    unjudged: list[BadRow],
    refused: Refused,
) -> None:
    """Add the rows of this process's share of the samples to the store: every n-th group of n processes'.

    `unjudged` gets the errors of samples without a verdict of the judge, which then have no rows. Variants in `refused`
    are left out. The first error of every other variant that refuses a sample is added to it.
    """
    groups = groups[processes.process_index :: processes.num_processes]
    batch_tokens = config.max_batch_tokens or default_batch_tokens(target.model) // processes.num_processes
    samples: dict[Key, RenderedSample] = {}
    done = 0
    for group in groups:
        for sample, inputs in zip(group.samples, group.inputs, strict=True):
            samples[sample.key] = sample
            done += store.has_all(sample.key, inputs)

    with progress_bar(total=len(samples), name="samples", unit="sample", shown=processes.is_main_process) as progress:
        progress.update(done)
        rows_of_samples = sweep(
            target,
            groups,
            variants,
            batch_tokens,
            store,
            config.question,
            kept_tokens.note,
            refused,
            _sampling(config),
        )
        for rows in rows_of_samples:
            kept_tokens.write(rows)
            try:
                store.add(config.judge.score(samples[rows[0].key], rows))
            except BadRow as error:
                unjudged.append(error)
                if config.skip is not None and len(unjudged) > config.skip:
                    raise
            progress.update()


def write_all(out: Path) -> None:
    """Write summary, plots and report of the run in a folder, and print the table."""
    run = read_run(out)
    summary = write_outputs([run], out)
    paragraphs = [summary_table(summary), *map(printable, verdict_of([run], summary)), f"report: {out / 'report.html'}"]
    print("\n\n".join(paragraphs))


def samples_of(config: TaskKeys, target: Target) -> tuple[list[RenderedSample], dict[str, str]]:
    """The samples of all tasks, and notes on them."""
    request = TaskRequest(
        tokenizer=target.tokenizer,
        context=context_of(target.model),
        every_question=config.question == "multi",
        protocol=protocol_named(config.protocol),
        judge=config.judge.name,
        processor=partial(processor_of, target),
        lengths=config.lengths,
        samples=config.samples,
        seed=config.seed,
        max_tokens=config.max_tokens,
        skip=config.skip,
    )
    samples = make_all(config, config.tasks, request)
    if not samples:
        raise UserError("tasks= and samples= leave no sample to evaluate", field="tasks", code="range")
    if len({sample.key for sample in samples}) < len(samples):
        raise UserError(
            "tasks=, lengths= and jsonl.files= name some samples twice; name each once", field="tasks", code="conflict"
        )
    if config.max_new_tokens:
        limit = config.max_new_tokens
        samples = [replace(sample, max_new_tokens=min(limit, sample.max_new_tokens)) for sample in samples]
    if request.skipped:
        request.notes[SKIPPED] = f"{len(request.skipped)}, such as {request.skipped[0]}; skip=0 makes it an error"
    return samples, request.notes


def _show(sample: RenderedSample, target: Target) -> None:
    """Print one rendered prompt, so that a wrong template or a truncated prompt is seen before hours are spent."""
    ids = [*sample.prompt_ids.tolist(), *sample.question_ids.tolist()]
    head = target.tokenizer.decode(ids[:48])
    tail = target.tokenizer.decode(ids[-48:])
    cut = "its middle cut out" if sample.is_cut else "nothing cut"
    print(f"first prompt, {printable(f'{sample.task} {sample.id}')}: {len(ids)} tokens, {cut}")
    print(printable(f"--- head\n{head}\n--- tail\n{tail}\n---", lines=True))


def print_notes(notes: Mapping[str, str]) -> None:
    """Print the notes of `samples_of`."""
    for subject, note in notes.items():
        print(printable(f"{subject}: {note}"))


def settings_of(config: Config, target: Target, variants: list[Variant]) -> dict[str, Any]:
    """The content of settings.json: configuration, base model, trained weights, hardware and library versions."""
    adapter_digests = [variant.method.adapter_digest for variant in variants if variant.method.adapter_digest]
    settings = _keys_of(config)
    of_target: dict[str, Any] = {
        "name": target.name,
        "version": target.version,
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "quantization": _quantization(config.model, target),
        "attention": attention_of_config(target.model.config),
    }
    if config.model.chat_template:
        of_target["template"] = target.identity.template
    settings["target"] = of_target
    settings["adapter"] = config.adapter
    settings["adapter_digest"] = ", ".join(dict.fromkeys(adapter_digests)) or None  # each once
    settings["retrieval"] = config.retrieval
    settings["retrieval_digest"] = ", ".join(_head_digests(config, variants)) or None
    settings["versions"] = {
        "keepsight": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": _device(target),
    }
    settings["table"] = table_of(config)
    settings["command"] = shlex.join([Path(sys.argv[0]).name.replace("__main__.py", "keepsight"), *sys.argv[1:]])
    return settings


def _keys_of(config: Config) -> dict[str, Any]:
    """The command's keys, without those that no answer depends on."""
    return {key: value for key, value in asdict(config).items() if key not in _NOT_IN_RESULTS}


def _head_digests(config: Config, variants: list[Variant]) -> Iterator[str]:
    """Digests of the retrieval heads that methods use: `retrieval`, and those named in `methods`."""
    if not any(variant.method.uses_retrieval_head for variant in variants):
        return
    heads = [config.retrieval]
    for method in config.methods:
        if isinstance(method, Mapping):
            heads.append(method.get("retrieval"))
    for head in dict.fromkeys(filter(None, heads)):  # each once
        yield file_digest(weights_path(fetch(head)))


def _quantization(model: ModelConfig, target: Target) -> str:
    """How the weights are quantized, or were before they were loaded; `none`."""
    quantized: Any = getattr(target.model.config, "quantization_config", None)
    if quantized is not None:
        settings = quantized if isinstance(quantized, dict) else quantized.to_dict()
        return str(settings.get("quant_method", "unknown"))
    weights_file = model.id if Path(model.id).is_file() else model.packaged_file
    if weights_file is None or not target.version.startswith("sha256:"):
        return "none"
    name = Path(weights_file).stem if isinstance(weights_file, str) else ""
    kind = re.search(r"I?Q\d\w*|B?F\d+", name, flags=re.IGNORECASE)
    label = kind[0] if kind else name
    return f"GGUF {label}, dequantized" if label else "GGUF, dequantized"


def _device(target: Target) -> str:
    """The GPU, or the CPU with its number of threads."""
    if target.model.device.type == "cuda":
        return torch.cuda.get_device_name(target.model.device)
    processor = platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    return f"{processor} CPU, 1 thread" if threads == 1 else f"{processor} CPU, {threads} threads"
