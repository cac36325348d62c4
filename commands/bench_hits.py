"""keepsight bench hits: top-k hit rate of the methods that read or keep a part of the cache, step by step."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from keepsight.commands.bench_samples import SampleColumns, made_with, require_question_seen, rows_of_samples
from keepsight.commands.config_bench import BenchHits as Config
from keepsight.commands.eval import check, print_notes, samples_of
from keepsight.commands.from_recipe import resources_of, target_of, without_weights
from keepsight.commands.recipe import table_of
from keepsight.commands.variants import variants_of
from keepsight.errors import UserError
from keepsight.eval.bench.runner import runner_in
from keepsight.eval.compress import needs_of_all
from keepsight.eval.hits import SHARED, Hits, answering, best_shared, compare, entries_kept, entries_read
from keepsight.eval.report.plots import hits_plot
from keepsight.eval.report.summary import Frame
from keepsight.eval.report.tables import Column, Table
from keepsight.eval.sweep import Variant, check_samples
from keepsight.eval.tasks.samples import RenderedSample
from keepsight.files import write_png
from keepsight.models.retrieval_head import RetrievalHead
from keepsight.models.targets import Target
from keepsight.runtime.evict import Evict
from keepsight.runtime.methods import SpeContext

_MEANS = ["hit", "mass", "overlap", "read"]
_COLUMNS = (
    Column("task", "task", is_text=True),
    Column("length", "length"),
    Column("method", "method", is_text=True),
    Column("budget", "budget"),
    Column("samples", "samples", digits=4),
    Column("steps", "steps", digits=4),
    Column("hit", "hit", digits=4),
    Column("mass", "mass", digits=4),
    Column("overlap", "overlap", digits=4),
    Column("read", "read", digits=1),
)
_SETTINGS = ("methods", "budgets", "heads", "retrieval", "adapter", "draft", "bits", "max_new_tokens", "seed")
"""Keys that all rows depend on, beside those of the model and of the benchmarks."""


@dataclass(frozen=True)
class _Row(Hits, SampleColumns):
    """A line of hits.jsonl."""


def run(config: Config) -> None:
    """Measure, print the table and write it with its plot."""
    check(config)
    require_question_seen(config, "hit rates are measured")
    outline = without_weights(config)
    variants = variants_of(config.methods, config.budgets, config.bits, resources_of(config, outline))
    for variant in variants:
        is_evicting = isinstance(variant.method, Evict) and not variant.method.every
        if not variant.method.selects_each_step and not is_evicting:
            raise UserError(
                f"methods= names {variant.name!r}, which neither selects entries at each step nor evicts from the "
                "prompt alone; see --help",
                field="methods",
                code="model",
            )
    samples, notes = samples_of(config, outline)
    target = target_of(config)
    variants += _further_heads(config, target, variants)
    check_samples(target, samples, variants)

    out = Path(config.out)

    def measure(sample: RenderedSample) -> Iterator[dict[str, Any]]:
        return map(asdict, _hits_of_sample(target, sample, variants, config.budgets))

    with runner_in(out, made_with(config, _SETTINGS, target)) as runner:
        print_notes(notes)
        rows = rows_of_samples(runner, "hits", samples, measure, _Row)
        if not rows:
            raise UserError(
                f"budgets={config.budgets}: no step has more entries than the smallest; lower it",
                field="budgets",
                code="range",
            )
        summary = _summary(rows)
        table = Table.of("hits", "Top-k hit rates: means over steps, layers and KV heads.", _COLUMNS, summary)
        runner.save_csv("hits", *table.csv_rows())
        write_png(out / "hits.png", hits_plot(summary).figure())
    print(table.markdown())
    if config.preset:
        print(f"table: {table_of(config)}")


def _further_heads(config: Config, target: Target, variants: list[Variant]) -> list[Variant]:
    """Variants for the heads of `heads=`, under their own names."""
    variant_names = {variant.name for variant in variants}
    for name in sorted(config.heads):
        if name in variant_names or name.startswith(SHARED):
            raise UserError(
                f"heads= names {name!r}, which is another row's name; choose another", field="heads", code="conflict"
            )
    head_variants = []
    for name, reference in config.heads.items():
        head = RetrievalHead.from_pretrained(reference, model=target.model)
        head_variants += [Variant(name, SpeContext(budget, head)) for budget in config.budgets]
    return head_variants


def _hits_of_sample(
    target: Target, sample: RenderedSample, variants: list[Variant], budgets: list[int]
) -> Iterator[Hits]:
    """The hit rates of a sample: of the best shared entries at each budget, and of every variant."""
    feature_layers = set[int]()
    group_counts = {1}
    for variant in variants:
        feature_layers.update(variant.method.needs().features)
        if isinstance(variant.method, SpeContext):
            group_counts.add(variant.method.head.config.groups)
    prompt = sample.prompt_ids[None].to(target.model.device)
    layers = tuple(sorted(feature_layers))
    needs = needs_of_all(variant.method for variant in variants if isinstance(variant.method, Evict))
    answered = answering(target.model, prompt, sample.max_new_tokens, target.end_tokens, layers, needs)

    hits = []
    for groups in sorted(group_counts):
        name = SHARED if groups == 1 else f"{SHARED} by {groups} groups"
        for budget in budgets:
            hits.append(compare(name, budget, answered, best_shared(answered, budget, groups)))
    for variant in variants:
        method: Any = variant.method
        entries_of: Any = entries_kept if isinstance(method, Evict) else entries_read
        budget_of_variant: Any = variant.budget
        hits.append(compare(variant.name, budget_of_variant, answered, entries_of(target.model, method, answered)))
    return filter(None, hits)  # without those of answers that are as short as the budget


def _summary(rows: list[dict[str, Any]]) -> Frame:
    """Means over the steps of each task, length, method and budget; of equal budgets the best hit rate first."""
    frame = pd.DataFrame(rows).rename(columns={"name": "method"})
    frame[_MEANS] = frame[_MEANS].mul(frame["steps"], axis=0)
    sums = {name: (name, "sum") for name in ("steps", *_MEANS)}
    groups = frame.groupby(["task", "length", "method", "budget"], sort=False)
    summary = groups.agg(samples=("sample", "size"), **sums)
    summary[_MEANS] = summary[_MEANS].div(summary["steps"], axis=0)
    order = {"task": True, "length": True, "budget": True, "hit": False}
    return summary.reset_index().sort_values([*order], ascending=[*order.values()])
