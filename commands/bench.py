"""keepsight bench: speed and memory on this machine, by one runner, and the search for a draft's layers."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch

from keepsight.commands import bench_servers
from keepsight.commands import config_bench as configs
from keepsight.commands.config_serving import BenchServe
from keepsight.commands.data import read_mixture
from keepsight.commands.from_recipe import (
    draft_of,
    outline_of,
    resources_of,
    target_of,
    without_weights,
)
from keepsight.commands.recipe import table_of
from keepsight.commands.variants import require_evict, variants_of
from keepsight.data_gen.backends import InThisProcess
from keepsight.data_gen.generate import generate_data
from keepsight.data_gen.store import TrainingSample, read_training_samples
from keepsight.errors import UserError, printable
from keepsight.eval.bench.decoding import bench_decode, bench_largest, bench_speculate, bench_sweep
from keepsight.eval.bench.eviction import bench_evict, bench_operators
from keepsight.eval.bench.measure import require_room
from keepsight.eval.bench.offload import bench_specache, size_lines, step_lines, text_prompts, traffic_lines
from keepsight.eval.bench.runner import Runner, TableRow, runner_in
from keepsight.eval.bench.serving import bench_serve, bench_vllm
from keepsight.eval.bench.training import bench_step
from keepsight.eval.by_head import lines_by_head, rounded
from keepsight.eval.query_similarity import query_similarity
from keepsight.eval.report.plots import queries_plot
from keepsight.eval.report.summary import Frame
from keepsight.eval.report.tables import Column, Table
from keepsight.eval.results import flatten
from keepsight.eval.tasks.benchmark import TaskRequest, protocol_named
from keepsight.eval.tasks.niah import make_samples
from keepsight.eval.tasks.registry import make_all
from keepsight.files import require_writable, write_json, write_png
from keepsight.models.decoder import context_of
from keepsight.models.draft_head import DraftHead
from keepsight.models.draft_sources import DraftHeadSource, keep_layers
from keepsight.models.identity import MadeWith
from keepsight.models.lookahead import Lookahead
from keepsight.models.model_files import located
from keepsight.models.retrieval_head import RetrievalHead
from keepsight.models.targets import Target
from keepsight.progress import print_above
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import Method
from keepsight.runtime.methods import SpeCache
from keepsight.tables import TerminalColumn, terminal_table
from keepsight.train.dataset import with_short_prompts
from keepsight.train.draft_layers import Subset, Text, closeness, draft_figure, read_answer, relative_time, search


def train(config: configs.BenchTrain) -> None:
    """Measure a training step."""
    _require_out(config)
    require_room(outline_of(config), config.tokens + config.answer_tokens)
    target = target_of(config)
    model = target.model
    require_room(model, config.tokens + config.answer_tokens, config.train.batch_size)
    lookahead = Lookahead(model, config.lookahead)
    with _runner(config, target) as runner:
        _print(bench_step(runner, lookahead, config.tokens, config.answer_tokens, config.repeats, config.train))


def sweep(config: configs.BenchEval) -> None:
    """Measure the sweep of an evaluation."""
    target, methods = _methods(config, config.tokens)
    with _runner(config, target) as runner:
        _print(bench_sweep(runner, target, methods, config.tokens, config.answer_tokens, config.samples))


def evict(config: configs.BenchEvict) -> None:
    """Measure scoring and selecting."""
    target, methods = _methods(config, *config.lengths)
    with _runner(config, target, "lengths") as runner:
        _print(bench_evict(runner, target, _evicting(methods), config.lengths, config.repeats))


def _evicting(methods: Mapping[str, Method]) -> dict[str, Evict]:
    evicting = {}
    for label, method in methods.items():
        refusal = f"method {label.split()[0]!r} evicts nothing from the cache; name methods that do"
        evicting[label] = require_evict(method, refusal)
    return evicting


def decode(config: configs.BenchDecode) -> None:
    """Measure decoding steps."""
    if config.attention and not config.batch:
        raise UserError(
            "attention= times the full cache beside a batch of a known size: leave it out, or give batch=",
            field="attention",
            code="conflict",
        )
    target, methods = _methods(config, config.tokens)
    model = target.model
    with _runner(config, target) as runner:
        if config.batch:
            load = config.tokens, config.batch, config.answer_tokens
            _print(bench_decode(runner, model, methods, *load, config.attention))
        else:
            _print(bench_largest(runner, model, methods, config.tokens, config.answer_tokens))


def serve(config: BenchServe) -> None:
    """Measure batched serving."""
    if config.servers:
        _require_out(config)
        bench_servers.require_alone(config)
        outline = without_weights(config)
        with _runner(config, outline, "servers", "workloads", "rounds") as runner:
            _print(bench_servers.lines(config, runner, outline))
        return
    target, methods = _methods(config, config.tokens)
    load = config.tokens, config.answer_tokens, config.requests, config.rows
    if config.vllm and (config.interval or config.prefill_tokens != BenchServe.prefill_tokens):
        raise UserError(
            "interval= and prefill_tokens= are for keepsight's own engine; leave them out, or leave out vllm=true",
            field="interval",
            code="conflict",
        )
    with _runner(config, target) as runner:
        if config.vllm:
            source, _, _ = located(config.model.id, config.model.revision, config.model.packaged_file)
            _print(bench_vllm(runner, target, source, _evicting(methods), *load))
        else:
            arrivals = config.interval, config.prefill_tokens
            _print(bench_serve(runner, target.model, methods, *load, *arrivals))


def ops(config: configs.BenchOps) -> None:
    """Count operators and syncs."""
    target, methods = _methods(config, config.tokens)
    with _runner(config, target) as runner:
        _print(bench_operators(runner, target.model, methods, config.tokens))


def specache(config: configs.BenchSpeCache) -> None:
    """Measure decoding steps of SpeCache."""
    _require_out(config)
    require_room(outline_of(config), config.tokens)
    target = target_of(config)
    with _runner(config, target, "bits") as runner:
        for bits in config.bits:
            _print(bench_specache(runner, target, SpeCache(bits), config.tokens, config.batch, config.answer_tokens))


def speculate(config: configs.BenchSpeculate) -> None:
    """Measure speculative decoding."""
    _require_out(config)
    if config.draft.head is None:
        raise UserError(
            "bench speculate measures a draft head; name it: draft.head=FOLDER_OR_HUB_ID draft.layers=null",
            field="draft.head",
            code="missing",
        )
    outline = without_weights(config)
    draft = draft_of(config, outline)
    assert isinstance(draft, DraftHeadSource)
    prompts = _prompts(config, outline)
    target = target_of(config)
    head = draft.of(target.model)
    with _runner(config, target) as runner:
        _print(bench_speculate(runner, target, head, prompts, config.answer_tokens, config.draft_tokens))


def _prompts(config: configs.BenchSpeculate | configs.BenchQueries, target: Target) -> list[list[int]]:
    """The last prompts of a data folder that are short enough, or needles in a haystack."""
    if isinstance(config, configs.BenchQueries) and config.tasks:
        return _prompts_of_tasks(config, target)
    if config.data is None:
        require_room(target.model, config.tokens)
        needles = make_samples("single", config.tokens, config.samples, 0, target.tokenizer)
        return [sample.prompt_ids.tolist() for sample in needles]
    samples, _ = read_training_samples(Path(config.data), target.name, target.identity, target.vocabulary)
    prompts = [sample.prompt_ids for sample in samples if len(sample.prompt_ids) <= config.tokens]
    if len(prompts) < config.samples:
        raise UserError(
            f"data={config.data}: {len(prompts)} prompts have at most {config.tokens} tokens, samples= needs "
            f"{config.samples}; lower it, or raise tokens=",
            field="samples",
            code="range",
        )
    return prompts[-config.samples :]


def _prompts_of_tasks(config: configs.BenchQueries, target: Target) -> list[list[int]]:
    """The prompts of benchmarks; UserError if there is none, or `data` is given too."""
    if config.data is not None:
        raise UserError("tasks= and data= both name prompts; leave one of them out", field="data", code="conflict")
    request = TaskRequest(
        target.tokenizer,
        context_of(target.model),
        lengths=[config.tokens],
        samples=config.samples,
        max_tokens=config.tokens,
        protocol=protocol_named("reference"),
    )
    prompts = [sample.prompt_ids.tolist() for sample in make_all(config, config.tasks, request)]
    if not prompts:
        raise UserError(
            f"tasks={config.tasks}: no prompt has at most {config.tokens} tokens; raise tokens=",
            field="tasks",
            code="range",
        )
    longest = max(map(len, prompts))
    require_room(target.model, longest + config.answer_tokens)
    return prompts


_QUERY_CAPTION = (
    "Cosine similarity with the answer's queries; a position is a share of the prompt, 1 the answer's place, or drawn."
)
_QUERY_MEASURES = ["after RoPE", "before RoPE"]


def _query_table(name: str, means: Frame, *part_columns: str) -> Table:
    """A table of similarities by content, position and these further columns."""
    columns = [Column("content", "content", is_text=True), Column("position", "position", is_text=True)]
    columns += [Column(column_name, column_name) for column_name in part_columns]
    columns += [Column(measure, measure, digits=4) for measure in _QUERY_MEASURES]
    return Table.of(name, _QUERY_CAPTION, columns, means)


def queries(config: configs.BenchQueries) -> None:
    """Compare queries by content and position."""
    _require_out(config)
    outline = without_weights(config)
    prompts = _prompts(config, outline)
    text = outline.tokenizer(config.text, add_special_tokens=False)["input_ids"] if config.text else []
    if any(end < 1 for end in config.drawn.values()):
        raise UserError(f"drawn={config.drawn}: expected numbers of at least 1", field="drawn", code="range")
    target = target_of(config)

    def measure(index: int) -> Iterator[TableRow]:
        seed = config.seed + index
        similarities = query_similarity(target.model, prompts[index], config.answer_tokens, seed, text, config.drawn)
        for (content, position), (after, before) in similarities.items():
            by_head = {"after RoPE": rounded(after), "before RoPE": rounded(before)}
            yield {"content": content, "position": position, **by_head}

    with _runner(config, target, "preset", "by") as runner:
        cases: list[tuple[TableRow, int]] = [({"prompt": index}, index) for index in range(len(prompts))]
        rows = list(runner.rows("prompts", cases, measure, unit="prompt"))
        columns = {"prompt": "prompt", "content": "content", "position": "position"}
        frame = lines_by_head(rows, columns, _QUERY_MEASURES)
        means = frame.groupby(["content", "position"], sort=False)[_QUERY_MEASURES].mean().reset_index()
        table = _query_table("queries", means)
        runner.save_csv("queries", *table.csv_rows())
        if config.by:
            by_part = frame.groupby(["content", "position", *config.by], sort=False)[_QUERY_MEASURES].mean()
            parts = _query_table("queries_by", by_part.reset_index(), *config.by)
            runner.save_csv("queries_by_" + "_".join(config.by), *parts.csv_rows())
        if config.out is not None:
            write_png(Path(config.out) / "queries.png", queries_plot(frame, "layer" in config.by).figure())
    _print(table.markdown().splitlines())
    if config.preset:
        print(f"table: {table_of(config)}")


def retrieve(config: configs.BenchRetrieve) -> None:
    """Measure a retrieval head."""
    _require_out(config)
    target = target_of(config)
    with _runner(config, target, "lengths") as runner:
        _print(_retrieval_lines(runner, config, target))


def _retrieval_lines(runner: Runner, config: configs.BenchRetrieve, target: Target) -> Iterator[str]:
    if config.retrieval is None:
        yield "retrieval= is not set: this head has random weights, which take as long as trained ones"
        settings = config.retrieval_head
        head = RetrievalHead.untrained(target.model, settings.features, context_of(target.model), settings.groups)
        head = head.to(target.model.dtype)
        prompts = list[list[int]]()
    else:
        head = resources_of(config, target).head
        prompts = text_prompts(target, config.tokens, config.samples)
    yield from size_lines(target, head, _pruned_draft(config, target))
    yield from step_lines(runner, target, head, max(config.budgets), config.lengths, config.batch, config.repeats)
    if prompts:
        yield from traffic_lines(runner, target, head, config.budgets, prompts, config.answer_tokens)
    else:
        yield "bytes moved are not measured: the choices of a random head mean nothing; set retrieval=FOLDER_OR_HUB_ID"


def _pruned_draft(config: configs.BenchRetrieve, target: Target) -> DraftHead | None:
    """The EAGLE-3 head that the recipe names, if it names one."""
    if config.draft.head is None:
        return None
    draft = draft_of(config, target)
    assert isinstance(draft, DraftHeadSource)
    head = draft.of(target.model)
    return head if isinstance(head, DraftHead) else None


def _methods(config: configs.Benched, *tokens: int) -> tuple[Target, dict[str, Method]]:
    """The base model, and every method at every budget by `LABEL BUDGET`, all for prompts of so many tokens."""
    # bad values are refused before anything loads
    _require_out(config)
    outline = without_weights(config)
    variants = variants_of(config.methods, config.budgets, [], resources_of(config, outline))
    require_room(outline.model, max(tokens))
    for length, variant in product(tokens, variants):
        variant.method.check(length, context_of(outline.model))
    methods = {}
    for variant in variants:
        label = variant.name if variant.budget is None else f"{variant.name} {variant.budget}"
        methods[label] = variant.method
    return target_of(config), methods


def _require_out(config: configs.KeepsRows) -> None:
    """UserError for a folder that cannot be written to, before a model is loaded."""
    if config.out is not None:
        require_writable(Path(config.out))


@contextmanager
def _runner(config: Any, target: Target, *row_keys: str) -> Iterator[Runner]:
    """The runner of a command, whose figures depend on this machine and all keys but `row_keys`, which each row has."""
    if config.out is None:
        yield Runner()
        return
    settings: dict[str, Any] = {**flatten(asdict(config))}
    for name in ("out", *row_keys):
        del settings[name]
    settings["command"] = str(config.__doc__).partition(":")[0]
    settings["dtype"] = str(target.model.dtype)
    settings["threads"] = torch.get_num_threads()
    settings["GPU"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    with runner_in(Path(config.out), MadeWith(target.identity, settings)) as runner:
        yield runner


def _print(lines: Iterable[str]) -> None:
    """Print each line as soon as it is measured."""
    for line in lines:
        print_above(printable(line), sys.stdout)
        sys.stdout.flush()


# The search for a draft


def draft(config: configs.BenchDraft) -> None:
    """Search, compare, print and write."""
    out = Path(config.out)
    require_writable(out)
    target = target_of(config)
    model = target.model
    layers = model.config.get_text_config().num_hidden_layers
    if max(config.keep) >= layers:
        raise UserError(
            f"keep={config.keep}: expected sizes from 1 to {layers - 1}, the model has {layers} layers",
            field="keep",
            code="range",
        )
    samples, digest = _samples(config, target)
    texts = _texts(target, samples[: config.samples], config.answer_tokens)
    searched = search(model, texts, min(config.keep), out / "search.jsonl")

    held_out = samples[config.samples :]
    held_out_texts = _texts(target, held_out, config.answer_tokens)

    def measure(subset: Subset) -> list[TableRow]:
        draft = keep_layers(model, subset.layers)
        measured = asdict(closeness(draft, held_out_texts))
        time = relative_time(draft, model, held_out[0].prompt_ids)
        return [{**measured, "layers": subset.layers, "time": time}]

    settings = {
        "model": target.name,
        "version": target.version,
        "data": digest,
        "samples": config.samples,
        "held_out": config.held_out,
        "answer_tokens": config.answer_tokens,
    }
    cases: list[tuple[TableRow, Subset]] = []
    for subset in searched:
        if len(subset.layers) in config.keep:
            cases.append(({"size": len(subset.layers)}, subset))
    with runner_in(out, MadeWith(target.identity, settings)) as runner:
        rows = list(runner.rows("drafts", cases, measure))
        write_json(out / "draft.json", {"settings": settings, "drafts": rows})
        runner.save_csv("draft", ["size", "agreement", "accepted", "kl", "time"], rows)
        drafts = [Subset(row["kl"], row["agreement"], row["accepted"], row["layers"]) for row in rows]
        write_png(out / "draft.png", draft_figure(searched, drafts))
    print(f"{_draft_table(rows, config)}\n\nfor the recipe:")
    for row in rows:
        print(f"draft: {{layers: {row['layers']}}}")


def _samples(config: configs.BenchDraft, target: Target) -> tuple[Sequence[TrainingSample], str]:
    """As many texts as `samples` and `held_out` in all, and the digest of their data."""
    needed = config.samples + config.held_out
    shortest, longest = config.prompt_tokens
    if config.data:
        folder = Path(config.data)
    else:  # prompts of the mixture with the base model's answers
        folder = Path(config.out) / "data"
        generate_data(
            target,
            {**read_mixture(config.mixture), "min_tokens": shortest, "max_tokens": longest},
            folder,
            seed=config.seed,
            backend=InThisProcess(target, 8192),
            limit=needed,
            max_new_tokens=config.answer_tokens,
            shard_size=64,
        )
    samples, manifest = read_training_samples(folder, target.name, target.identity, target.vocabulary)
    if config.data:
        samples = with_short_prompts(samples, longest)
    if len(samples) < needed:
        raise UserError(
            f"data={folder}: {len(samples)} samples have at most {longest} prompt tokens, samples= and held_out= need "
            f"{needed}; lower them, or raise prompt_tokens=",
            field="samples",
            code="range",
        )
    return samples[:needed], manifest["digest"]


def _texts(target: Target, samples: Sequence[TrainingSample], answer_tokens: int) -> list[Text]:
    return [read_answer(target.model, sample.prompt_ids, sample.answer_ids[:answer_tokens]) for sample in samples]


_DRAFT_COLUMNS = (
    TerminalColumn("layers", "d"),
    TerminalColumn("agreement", ".3f"),
    TerminalColumn("accepted", ".1f"),
    TerminalColumn("KL (nats)", ".3f"),
    TerminalColumn("time a token"),
)


def _draft_table(rows: Sequence[TableRow], config: configs.BenchDraft) -> str:
    shown = []
    for row in rows:
        time = f"{row['time']:.2f}x"
        shown.append({**row, "layers": row["size"], "KL (nats)": row["kl"], "time a token": time})
    title = f"{config.held_out} held-out texts, at most {config.answer_tokens} answer tokens of each"
    return f"{title}\n{terminal_table(shown, _DRAFT_COLUMNS)}"
