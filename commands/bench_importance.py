"""keepsight bench importance: how close the importance that methods predict is to that of the answer."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from keepsight.commands.bench_samples import SampleColumns, made_with, require_question_seen, rows_of_samples
from keepsight.commands.config_bench import BenchImportance as Config
from keepsight.commands.eval import check, print_notes, samples_of
from keepsight.commands.from_recipe import resources_of, target_of, without_weights
from keepsight.commands.recipe import table_of
from keepsight.commands.variants import variants_of
from keepsight.errors import UserError
from keepsight.eval.bench.runner import runner_in
from keepsight.eval.by_head import lines_by_head
from keepsight.eval.predicted import Predicted, predictions
from keepsight.eval.report.plots import predicted_plot
from keepsight.eval.report.summary import Frame
from keepsight.eval.report.tables import Column, Table
from keepsight.eval.sweep import check_samples
from keepsight.eval.tasks.samples import RenderedSample
from keepsight.files import write_png
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import Method
from keepsight.runtime.prompt_compression.specpc import SpecPC

_MEASURES = ["recall", "mass", "cosine", "correlation", "tau"]
_ROW_COLUMNS = {"task": "task", "length": "length", "sample": "sample", "name": "method", "budget": "budget"}
"""Columns of a row of importance.jsonl, and their names in the tables."""
_GROUP = ["task", "length", "method", "budget"]
_GROUP_COLUMNS = (
    Column("task", "task", is_text=True),
    Column("length", "length"),
    Column("method", "method", is_text=True),
    Column("budget", "budget"),
)
_MEASURE_COLUMNS = (
    Column("samples", "samples", digits=4),
    Column("recall", "recall", digits=4),
    Column("mass", "mass", digits=4),
    Column("cosine", "cosine", digits=4),
    Column("correlation", "correlation", digits=4),
    Column("tau", "tau", digits=4),
)
_SETTINGS = ("methods", "budgets", "adapter", "draft", "max_new_tokens", "seed")
"""Keys that all rows depend on, beside those of the model and of the benchmarks."""


@dataclass(frozen=True)
class _Row(Predicted, SampleColumns):
    """A line of importance.jsonl."""


def run(config: Config) -> None:
    """Measure, print the table and write it with its plot."""
    check(config)
    require_question_seen(config, "importance is predicted")
    outline = without_weights(config)
    # Budgets are cuts of one ranking, so that each method is made once, at the largest.
    largest = max(config.budgets)
    variants = variants_of(config.methods, [largest], [], resources_of(config, outline))
    methods = list[tuple[str, Method]]()
    for variant in variants:
        if not isinstance(variant.method, (Evict, SpecPC)):
            raise UserError(
                f"methods= names {variant.name!r}, which predicts no importance; name methods that evict, or specpc",
                field="methods",
                code="model",
            )
        methods.append((variant.name, variant.method))
    samples, notes = samples_of(config, outline)
    target = target_of(config)
    check_samples(target, samples, variants)

    def measure(sample: RenderedSample) -> Iterator[dict[str, Any]]:
        predicted = predictions(target, sample.prompt_ids, methods, config.budgets, sample.max_new_tokens)
        return map(asdict, predicted)

    out = Path(config.out)
    with runner_in(out, made_with(config, _SETTINGS, target)) as runner:
        print_notes(notes)
        rows = rows_of_samples(runner, "importance", samples, measure, _Row)
        if not rows:
            raise UserError(
                f"budgets={config.budgets}: no prompt is longer than the smallest; lower it",
                field="budgets",
                code="range",
            )
        frame = lines_by_head(rows, _ROW_COLUMNS, _MEASURES)
        summary = _means(frame, _GROUP)
        columns = (*_GROUP_COLUMNS, *_MEASURE_COLUMNS)
        caption = "Predicted importance against the answer's: means over samples, layers and KV heads."
        table = Table.of("importance", caption, columns, summary)
        runner.save_csv("importance", *table.csv_rows())
        by_layer_or_head = None
        if config.by:
            by_layer_or_head = _means(frame, [*_GROUP, *config.by])
            by_columns = (*_GROUP_COLUMNS, *(Column(name, name) for name in config.by), *_MEASURE_COLUMNS)
            parts = Table.of("importance_by", caption, by_columns, by_layer_or_head)
            runner.save_csv("importance_by_" + "_".join(config.by), *parts.csv_rows())
        points = {row["name"]: row["points"] for row in reversed(rows) if row["points"]}
        write_png(out / "importance.png", predicted_plot(summary, by_layer_or_head, points).figure())
    print(table.markdown())
    if config.preset:
        print(f"table: {table_of(config)}")


def _means(frame: Frame, columns: list[str]) -> Frame:
    """Means over samples and all that `columns` do not name, all heads of a sample weighing the same."""
    groups = frame.groupby(columns, sort=False)
    means = groups[_MEASURES].mean()
    means.insert(0, "samples", groups["sample"].nunique())
    return means.reset_index()
