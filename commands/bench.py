"""keepsight bench: speed and memory on this machine, which are only printed, and the search for a draft's layers."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

import numpy as np

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
from keepsight.commands.variants import require_evict, variants_of
from keepsight.data_gen.backends import InThisProcess
from keepsight.data_gen.generate import generate_data
from keepsight.data_gen.store import TrainingSample, read_training_samples
from keepsight.errors import UserError, printable
from keepsight.eval.bench.decoding import bench_decode, bench_largest, bench_speculate, bench_sweep
from keepsight.eval.bench.eviction import bench_evict, bench_operators
from keepsight.eval.bench.measure import require_room
from keepsight.eval.bench.offload import bench_specache, size_lines, step_lines, text_prompts, traffic_lines
from keepsight.eval.bench.serving import bench_serve, bench_vllm
from keepsight.eval.query_similarity import query_similarity
from keepsight.eval.report.tables import Column, Table
from keepsight.eval.tasks.niah import make_samples
from keepsight.files import require_writable, write_json, write_png
from keepsight.models.decoder import context_of
from keepsight.models.draft_head import DraftHead
from keepsight.models.draft_sources import DraftHeadSource, keep_layers
from keepsight.models.lookahead import Lookahead
from keepsight.models.model_files import located
from keepsight.models.retrieval_head import RetrievalHead
from keepsight.models.targets import Target
from keepsight.progress import print_above, progress_bar
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import Method
from keepsight.runtime.methods import SpeCache
from keepsight.tables import TerminalColumn, terminal_table
from keepsight.train.dataset import with_short_prompts
from keepsight.train.draft_layers import Subset, Text, closeness, draft_figure, read_answer, relative_time, search
from keepsight.train.plan import bench_step


def train(config: configs.BenchTrain) -> None:
    """Measure a training step."""
    require_room(outline_of(config), config.tokens + config.answer_tokens)
    model = target_of(config).model
    require_room(model, config.tokens + config.answer_tokens, config.train.batch_size)
    lookahead = Lookahead(model, config.lookahead)
    _print(bench_step(lookahead, config.tokens, config.answer_tokens, config.repeats, config.train))


def sweep(config: configs.BenchEval) -> None:
    """Measure the sweep of an evaluation."""
    target, methods = _methods(config, config.tokens)
    _print(bench_sweep(target, methods, config.tokens, config.answer_tokens, config.samples))


def evict(config: configs.BenchEvict) -> None:
    """Measure scoring and selecting."""
    target, methods = _methods(config, *config.lengths)
    _print(bench_evict(target, _evicting(methods), config.lengths, config.repeats))


def _evicting(methods: Mapping[str, Method]) -> dict[str, Evict]:
    evicting = {}
    for label, method in methods.items():
        refusal = f"method {label.split()[0]!r} evicts nothing from the cache; name methods that do"
        evicting[label] = require_evict(method, refusal)
    return evicting


def decode(config: configs.BenchDecode) -> None:
    """Measure decoding steps."""
    target, methods = _methods(config, config.tokens)
    if config.batch:
        _print(bench_decode(target.model, methods, config.tokens, config.batch, config.answer_tokens))
    else:
        _print(bench_largest(target.model, methods, config.tokens, config.answer_tokens))


def serve(config: BenchServe) -> None:
    """Measure batched serving."""
    target, methods = _methods(config, config.tokens)
    load = config.tokens, config.answer_tokens, config.requests, config.rows
    if config.vllm:
        source, _, _ = located(config.model.id, config.model.revision, config.model.own_file)
        _print(bench_vllm(target, source, _evicting(methods), *load))
    else:
        _print(bench_serve(target.model, methods, *load))


def ops(config: configs.BenchOps) -> None:
    """Count operators and syncs."""
    target, methods = _methods(config, config.tokens)
    _print(bench_operators(target.model, methods, config.tokens))


def specache(config: configs.BenchSpeCache) -> None:
    """Measure decoding steps of SpeCache."""
    require_room(outline_of(config), config.tokens)
    target = target_of(config)
    for bits in config.bits:
        _print(bench_specache(target, SpeCache(bits), config.tokens, config.batch, config.answer_tokens))


def speculate(config: configs.BenchSpeculate) -> None:
    """Measure speculative decoding."""
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
    _print(bench_speculate(target, draft.of(target.model), prompts, config.answer_tokens, config.draft_tokens))


def _prompts(config: configs.BenchSpeculate | configs.BenchQueries, target: Target) -> list[list[int]]:
    """The last prompts of a data folder that are short enough, or needles in a haystack."""
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


def queries(config: configs.BenchQueries) -> None:
    """Compare queries by content and position."""
    prompts = _prompts(config, without_weights(config))
    target = target_of(config)
    measuring = query_similarity(target.model, prompts, config.answer_tokens, config.seed)
    by_prompt = list(progress_bar(measuring, total=config.samples, name="prompts", unit="prompt"))

    columns = (
        Column("content", "content", is_text=True),
        Column("position", "position", digits=2),
        Column("after RoPE", "after RoPE", digits=4),
        Column("before RoPE", "before RoPE", digits=4),
    )
    rows = []
    for content, position in by_prompt[0]:
        similarities = [of_prompt[content, position] for of_prompt in by_prompt]
        after_rope, before_rope = np.mean(similarities, axis=0)
        rows.append({"content": content, "position": position, "after RoPE": after_rope, "before RoPE": before_rope})
    caption = "Cosine similarity with the answer's queries; position is a share of the prompt, 1 the answer's place."
    _print(Table("queries", caption, columns, rows).markdown().splitlines())


def retrieve(config: configs.BenchRetrieve) -> None:
    """Measure a retrieval head."""
    _print(_retrieval_lines(config, target_of(config)))


def _retrieval_lines(config: configs.BenchRetrieve, target: Target) -> Iterator[str]:
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
    yield from step_lines(target, head, max(config.budgets), config.lengths, config.batch, config.repeats)
    if prompts:
        yield from traffic_lines(target, head, config.budgets, prompts, config.answer_tokens)
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
    drafts = []
    for subset in searched:
        if len(subset.layers) in config.keep:
            measured = closeness(keep_layers(model, subset.layers), held_out_texts)
            drafts.append(Subset(**asdict(measured), layers=subset.layers))
    times = [relative_time(keep_layers(model, draft.layers), model, held_out[0].prompt_ids) for draft in drafts]

    settings = {
        "model": target.name,
        "version": target.version,
        "data": digest,
        "samples": config.samples,
        "held_out": config.held_out,
        "answer_tokens": config.answer_tokens,
    }
    rows = [{**asdict(draft), "time": time} for draft, time in zip(drafts, times, strict=True)]
    write_json(out / "draft.json", {"settings": settings, "drafts": rows})
    write_png(out / "draft.png", draft_figure(searched, drafts))
    print(f"{_draft_table(drafts, times, config)}\n\nfor the recipe:")
    for draft in drafts:
        print(f"draft: {{layers: {draft.layers}}}")


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


def _draft_table(drafts: list[Subset], times: list[float], config: configs.BenchDraft) -> str:
    rows = []
    for draft, time in zip(drafts, times, strict=True):
        row = {"layers": len(draft.layers), "agreement": draft.agreement, "accepted": draft.accepted}
        rows.append({**row, "KL (nats)": draft.kl, "time a token": f"{time:.2f}x"})
    columns = (
        TerminalColumn("layers", "d"),
        TerminalColumn("agreement", ".3f"),
        TerminalColumn("accepted", ".1f"),
        TerminalColumn("KL (nats)", ".3f"),
        TerminalColumn("time a token"),
    )
    title = f"{config.held_out} held-out texts, at most {config.answer_tokens} answer tokens of each"
    return f"{title}\n{terminal_table(rows, columns)}"
