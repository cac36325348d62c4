"""HTML pages: the report of an evaluation, the comparison of several, and one about a prompt and its kept tokens.

Report and comparison have their plots and tables as files beside them. Pages are made from `templates/`, and share a
head, filters and settings.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jinja2 import Environment, FunctionLoader, StrictUndefined
from numpy.typing import NDArray

from keepsight.eval.kept_tokens import KeptOfSample, encode_counts, name_of_counts, path_of
from keepsight.eval.record import FULL, Key, ResultRow
from keepsight.eval.report import plots, tables
from keepsight.eval.report.figures import Plot, glyph, label_of, styles_of
from keepsight.eval.report.summary import (
    COLUMNS,
    MEASURES,
    Frame,
    csv_cells,
    difference,
    findings,
    mean_over_tasks,
    notes_on,
    number_text,
    summarize,
    summary_rows,
)
from keepsight.eval.report.tables import TASK_COLUMNS, VARIANT, Column, Table, interval_text, sort_key, value_text
from keepsight.eval.results import Run, flatten, labels_of, names_of
from keepsight.files import read_json, write_csv, write_text

Settings = Mapping[str, Any]
_FUNCTIONS = (glyph, label_of, value_text, interval_text, number_text, sort_key)
"""Functions that templates may call."""
_LABELS = {"score": "Score", "excess_nll": "Excess NLL (nats/token)", "agreement": "Top-1 agreement"}
EXAMPLES = 10


# Templates, and the head that pages share


def render_page(template: str, **values: Any) -> str:
    """The page of a template in `templates/` as one text; values are escaped, and none may be missing."""
    environment = Environment(
        loader=FunctionLoader(_template_text),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for function in _FUNCTIONS:
        environment.globals[function.__name__] = function
    return environment.get_template(template).render(values)


def _template_text(name: str) -> str:
    folder = resources.files("keepsight.eval.report") / "templates"
    return (folder / name).read_text(encoding="utf-8")


def render_results(
    template: str,
    runs: Sequence[Run],
    folder: Path,
    plots: Iterable[Plot],
    tables: Iterable[Table],
    title: str = "",
    **values: Any,
) -> str:
    """The page about some runs of a template that extends `page.html.j2`.

    The runs' rows and settings are summed up at the head, under `title` or the model's name; plots and tables in
    `folder` are linked; the template shows `plots`, `tables` and the other `values`.
    """
    rows = _rows_of(runs)
    settings = []
    settings_by_name = {}
    for name, run in zip(names_of(runs), runs, strict=True):
        settings.append(run.settings)
        settings_by_name[name] = flatten(run.settings)
    title_of_model, subtitle = headline(rows, settings)
    if title:
        subtitle = f"{title_of_model} · {subtitle}"
    values_of_rows = _ValuesOfRows(rows)
    styles = styles_of(values_of_rows.methods)
    beside = []
    for name in ("plots", "tables"):
        if (folder / name).is_dir():
            beside.append(name)
    return render_page(
        template,
        title=title or title_of_model,
        subtitle=subtitle,
        facts=_facts(rows, settings),
        styles=styles,
        numbers=dict(zip(styles, range(len(styles)), strict=True)),
        choices={
            "budget": values_of_rows.budgets,
            "task": values_of_rows.tasks,
            "length": values_of_rows.lengths,
        },
        plots={plot.name: plot for plot in plots},
        tables={table.name: table for table in tables},
        beside=beside,
        settings=settings_by_name,
        **values,
    )


class _ValuesOfRows:
    """The distinct values of some rows, in ascending order; prompts are their numbers of tokens."""

    def __init__(self, rows: Iterable[ResultRow]) -> None:
        columns: dict[str, set[Any]] = defaultdict(set)
        for row in rows:
            for name in ("budget", "task", "length", "method", "prompt_tokens", "date"):
                value = getattr(row, name)
                if value is not None:
                    columns[name].add(value)
        self.budgets = sorted(columns["budget"])
        self.tasks = sorted(columns["task"])
        self.lengths = sorted(columns["length"])
        self.methods = sorted(columns["method"])
        self.prompts = sorted(columns["prompt_tokens"])
        self.dates = sorted(filter(None, columns["date"]))


def _rows_of(runs: Iterable[Run]) -> list[ResultRow]:
    rows: list[ResultRow] = []
    for run in runs:
        rows += run.rows
    return rows


def headline(rows: Sequence[ResultRow], runs: Sequence[Settings]) -> tuple[str, str]:
    """Title of a page and the line below it: model; dtype, quantization, adapter and date."""
    names = []
    adapters = []
    for settings in runs:
        names.append(_last_part(_target(settings).get("name")))
        adapters.append(_last_part(_used(settings, "adapter")))
    models = _joined(names)
    title = f"KV-cache eviction on {models}" if models else "KV-cache eviction: evaluation"
    parts = [_precision(runs), _joined(adapters), _dates(_ValuesOfRows(rows).dates)]
    return title, " · ".join(filter(None, parts))


def _facts(rows: Sequence[ResultRow], runs: Sequence[Settings]) -> dict[str, str]:
    """Facts that a reader needs to judge the numbers; what is not known is left out."""
    models = []
    adapters = []
    heads = []
    versions = []
    tables_of_papers = []
    for settings in runs:
        target = _target(settings)
        tables_of_papers.append(settings.get("table"))
        models.append(_named(target.get("name"), target.get("version")))
        adapters.append(_named(_used(settings, "adapter"), settings.get("adapter_digest")))
        heads.append(_named(_used(settings, "retrieval"), settings.get("retrieval_digest")))
        of_run = settings.get("versions") or {}
        versions.append(", ".join(f"{name} {version}" for name, version in of_run.items()))

    values = _ValuesOfRows(rows)
    budgets = "full cache only"
    if values.budgets:
        budgets = f"{_listed(values.budgets)} KV entries per layer and KV head"
    prompts = ""
    if values.prompts:
        prompts = f"{values.prompts[0]} to {values.prompts[-1]} tokens"
    sample_counts: Counter[tuple[str, int]] = Counter()
    for task, length, _ in {row.key for row in rows}:
        sample_counts[task, length] += 1
    fewest = min(sample_counts.values())
    most = max(sample_counts.values())
    samples = str(most) if fewest == most else f"{fewest}-{most}"

    facts = {
        "table": _joined(tables_of_papers),
        "model": _joined(models),
        "adapter": _joined(adapters),
        "retrieval head": _joined(heads),
        "precision": _precision(runs),
        "attention": _joined_of_targets(runs, "attention"),
        "measured": _dates(values.dates),
        "tasks": _listed(values.tasks),
        "lengths": f"{_listed(values.lengths)} tokens",
        "prompts": prompts,
        "methods": _listed(values.methods),
        "budgets": budgets,
        "samples": f"{samples} for each task and length, {sum(sample_counts.values())} in all",
        "question while compressing": _joined(row.question for row in rows),
        "versions": _joined(versions),
    }
    return {name: value for name, value in facts.items() if value}


def _target(settings: Settings) -> Mapping[str, Any]:
    return settings.get("target") or {}


def _precision(runs: Sequence[Settings]) -> str:
    dtype = _joined_of_targets(runs, "dtype")
    quantization = _joined_of_targets(runs, "quantization")
    if not dtype or not quantization:
        return dtype
    if quantization == "none":
        quantization = "not quantized"
    return f"{dtype}, {quantization}"


def _dates(dates: Sequence[str]) -> str:
    if not dates:
        return ""
    return dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"


def _used(settings: Settings, kind: str) -> str | None:
    """The adapter or head that a run names, if one of its methods read it: then its digest is there."""
    return settings.get(kind) if settings.get(f"{kind}_digest") else None


def _named(name: str | None, version: str | None) -> str:
    """A name with the first digits of its digest or commit."""
    if not name or not version:
        return str(name or "")
    return f"{name} ({str(version).removeprefix('sha256:')[:12]})"


def _last_part(path: str | None) -> str:
    return str(path or "").rstrip("/").rpartition("/")[2]


def _joined(values: Iterable[str | None]) -> str:
    """The distinct values, in their order."""
    return "; ".join(dict.fromkeys(map(str, filter(None, values))))


def _joined_of_targets(runs: Iterable[Settings], name: str) -> str:
    """`_joined` values of the base models' settings."""
    return _joined(_target(settings).get(name) for settings in runs)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


# The report, and the comparison of several runs


def write_outputs(runs: Sequence[Run], folder: Path) -> Frame:
    """Write `summary.csv`, the plots, the tables, a page a sample, and `report.html` that shows all of it.

    Several runs have the same base model, and no sample and variant twice. Returns the `summarize`d rows.
    """
    rows = _rows_of(runs)
    summary = summarize(rows)
    write_csv(folder / "summary.csv", COLUMNS, csv_cells(summary_rows(summary)))
    plots_of_runs = plots_of(rows, summary)
    for plot in plots_of_runs:
        plot.save(folder / "plots")
    tables_of_runs = tables_of(rows, summary)
    for table in tables_of_runs:
        table.save(folder / "tables")
    pages = write_sample_pages(runs, folder / "samples")
    write_report(runs, folder, pages, plots_of_runs, tables_of_runs, verdict_of(runs, summary))
    return summary


def verdict_of(runs: Sequence[Run], summary: Frame) -> list[str]:
    """The sentences at the head of a report: which runs are incomplete, then the findings."""
    incomplete = [run.incomplete for run in runs]
    return [*filter(None, incomplete), *findings(summary)]


def plots_of(rows: Sequence[ResultRow], summary: Frame) -> list[Plot]:
    """The plots of a run, in the order of the page."""
    plots_of_run = [
        plots.overview_plot(summary),
        plots.tradeoffs_plot(summary),
        plots.scores_plot(summary),
        plots.excess_nll_plot(summary),
    ]
    plots_of_run += filter(None, [plots.depth_plot(rows), plots.options_plot(summary)])
    return plots_of_run


def tables_of(rows: Sequence[ResultRow], summary: Frame) -> list[Table]:
    """The tables of a run, in the order of the page."""
    return [
        tables.overall_table(summary),
        tables.difference_table(summary),
        tables.task_table(summary),
        tables.cost_table(rows),
    ]


def write_report(
    runs: Sequence[Run],
    folder: Path,
    pages: Mapping[Key, str],
    plots_of_runs: Sequence[Plot],
    tables_of_runs: Sequence[Table],
    sentences: Sequence[str],
) -> None:
    """Write `report.html` with plots, tables and findings into `folder`; `pages` of samples are relative to it."""
    page = render_results(
        "report.html.j2",
        runs,
        folder,
        plots_of_runs,
        tables_of_runs,
        examples=choose_examples(_rows_of(runs)),
        sample_label=sample_label,
        pages=pages,
        findings=sentences,
        samples_a_cell=plots.SAMPLES_A_CELL,
    )
    write_text(folder / "report.html", page)


def write_comparison(runs: Sequence[Run], folder: Path) -> list[Table]:
    """Write `compare.html`, its plot and its tables; returns a table for each measure, means over tasks.

    `runs` are at least two, as `keepsight.eval.results.comparable` gives them.
    """
    names = labels_of(runs)
    by_task = [summarize(run.rows) for run in runs]
    means = list(map(mean_over_tasks, by_task))
    overall = []
    detailed = []
    for measure in MEASURES:
        overall.append(_comparison_table(measure, means, names))
        detailed.append(_comparison_table(measure, by_task, names, TASK_COLUMNS))
    for table in (*overall, *detailed):
        table.save(folder / "tables")

    from_first = {}
    for name, mean in zip(names[1:], means[1:], strict=True):
        from_first[f"{name} - {names[0]}"] = difference(mean, means[0], on=["method", "order"])
    plot = plots.comparison_plot(from_first)
    if plot.panels:
        plot.save(folder / "plots")

    page = render_results(
        "compare.html.j2",
        runs,
        folder,
        [plot],
        [*overall, *detailed],
        " against ".join(names),
        labels=names,
        differing=_differing(runs),
    )
    write_text(folder / "compare.html", page)
    return overall


def _comparison_table(
    measure: str, summaries: Sequence[Frame], names: Sequence[str], task_columns: Sequence[Column] = ()
) -> Table:
    """One measure of every run, and its difference from the first run; `task_columns` are the first columns."""
    columns = [*task_columns, *VARIANT]
    on = ["task", "length", "method", "order"] if task_columns else ["method", "order"]
    groups = pd.concat(summaries).groupby(on, sort=False)
    rows = groups["budget"].first().to_frame()
    for index, name in enumerate(names):
        rows[f"run{index}"] = summaries[index].set_index(on)[measure]
        columns.append(Column(f"run{index}", name))
    for index, name in enumerate(names[1:], start=1):
        from_first = difference(summaries[index], summaries[0], on=on)
        rows[f"minus{index}"] = from_first.set_index(on)[measure]
        columns.append(Column(f"minus{index}", f"{name} - {names[0]}", is_signed=True))
    rows["n"] = groups["n"].first().astype("Int64").where(groups["n"].nunique() == 1)
    columns.append(Column("n", "n"))

    if task_columns:
        table_name = f"{measure}_by_task"
        caption = f"{_LABELS[measure]} by task and length"
    else:
        table_name = measure
        caption = f"{_LABELS[measure]}, mean over tasks"
    notes = " ".join(filter(None, dict.fromkeys(map(notes_on, summaries))))
    if notes:
        caption = f"{caption}. {notes}"
    return Table.of(table_name, caption, columns, rows.reset_index())


def _differing(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Settings that are not the same in all runs."""
    settings = [flatten(run.settings) for run in runs]
    differing = {}
    for key in dict.fromkeys(chain.from_iterable(settings)):
        values = [settings_of_run.get(key, "") for settings_of_run in settings]
        if key != "command" and len(set(values)) > 1:
            differing[key] = values
    if len(set(names_of(runs))) > 1:
        differing["folder"] = names_of(runs)
    return differing


# Pages about one prompt: which of its tokens each layer's heads kept, and the answers side by side


class Answer(NamedTuple):
    """A method's answer in two parts: the beginning that it shares with the full cache's, and the rest.

    It `ends_early` where the full cache's goes on. `row` has its score, if there is one.
    """

    method: str
    shared: str
    rest: str
    ends_early: bool
    row: ResultRow | None = None


class Example(NamedTuple):
    """A sample at the budget where scores differ most from the full cache's, by `difference` (0 to 1).

    The answers are the full cache's, if it was run, then the others', the best score first; `sample` is one's row.
    """

    sample: ResultRow
    answers: list[Answer]
    budget: int
    difference: float


def _answer(method: str, text: str, text_of_full: str, row: ResultRow | None = None) -> Answer:
    end = 0
    for character, character_of_full in zip(text, text_of_full, strict=False):
        if character != character_of_full:
            break
        end += 1
    return Answer(method, text[:end], text[end:], end == len(text) < len(text_of_full), row)


def answers_of(rows: Sequence[ResultRow]) -> list[Answer]:
    """Answers with what they have in common with the full cache's, which is `rows[0]` where it was run."""
    text_of_full = rows[0].answer if rows and rows[0].method == FULL else ""
    return [_answer(row.method, row.answer, text_of_full, row) for row in rows]


def sample_label(row: ResultRow) -> str:
    """A sample's label: `niah_single, 512 tokens, needle at 40 % depth`."""
    label = f"{row.task}, {row.length} tokens"
    if row.depth is not None:
        label += f", needle at {100 * row.depth:.0f} % depth"
    return label


def choose_examples(rows: Sequence[ResultRow], count: int = EXAMPLES) -> list[Example]:
    """The samples whose scores differ most from the full cache's, taking the tasks and lengths in turn."""
    rows_of_samples: dict[Key, list[ResultRow]] = defaultdict(list)
    for row in rows:
        rows_of_samples[row.key].append(row)
    examples_of_tasks: dict[tuple[str, int], list[Example]] = defaultdict(list)
    for (task, length, _), rows_of_sample in rows_of_samples.items():
        example = _example(rows_of_sample)
        if example is not None:
            examples_of_tasks[task, length].append(example)
    for examples in examples_of_tasks.values():
        examples.sort(key=lambda example: (-example.difference, example.sample.sample))
    examples_in_turn: list[Example] = []
    for examples_of_turn in zip_longest(*map(examples_of_tasks.__getitem__, sorted(examples_of_tasks))):
        examples_in_turn += filter(None, examples_of_turn)
    return examples_in_turn[:count]


def _example(rows: Sequence[ResultRow]) -> Example | None:
    """A sample at the first of the budgets where scores differ most; None if it has only the full cache's row."""
    full: ResultRow | None = None
    by_budget: dict[Any, list[ResultRow]] = defaultdict(list)
    for row in rows:
        if row.method == FULL:
            full = row
        if row.budget is not None:
            by_budget[row.budget].append(row)
    most: Example | None = None
    for budget, at_budget in sorted(by_budget.items()):
        at_budget.sort(key=lambda row: (-row.score, row.excess_nll, row.method))
        score_of_full = (full or at_budget[0]).score
        largest = 0.0
        for row in at_budget:
            largest = max(largest, abs(score_of_full - row.score))
        if most is None or largest > most.difference:
            compared = [full, *at_budget] if full else at_budget
            answers = answers_of(compared)
            most = Example(at_budget[0], answers, budget, largest)
    return most


class ShownMethod(NamedTuple):
    """What the page of a prompt shows of a method: its label, colour, and counts as in `encode_counts`."""

    name: str
    colour: str
    counts: str


class ShownAnswer(NamedTuple):
    """What the page of a prompt shows of an answer: its label, its colour, and the answer."""

    name: str
    colour: str
    answer: Answer


def write_inspect_page(
    path: Path,
    tokens: list[str],
    kept: dict[str, NDArray[np.bool_]],
    title: str,
    settings: dict[str, Any],
    answers: Mapping[str, str] | None = None,
) -> None:
    """Write the page of `keepsight inspect`, which shades every token of a prompt by how many heads kept it.

    `tokens` are the texts of the prompt's N tokens, empty for one that is only a part of a character, whose text stands
    with the last of its tokens. `kept` has for each method, at least one, a bool array [layers, kv_heads, N] with at
    most 255 heads. The answers are the full cache's first.
    """
    layers, heads = next(iter(kept.values())).shape[:2]
    styles = styles_of([*kept, FULL])
    methods = []
    for name, array in kept.items():
        methods.append(ShownMethod(name, styles[name].colour, encode_counts(array)))
    answers = answers or {}
    text_of_full = answers.get(FULL, "")
    shown_answers = []
    for method, text in answers.items():
        shown_answers.append(ShownAnswer(method, styles[method].colour, _answer(method, text, text_of_full)))
    content = KeptOfSample(tokens, layers, heads, {})
    write_text(path, _render_prompt(content, methods, shown_answers, title=title, settings=flatten(settings)))


def write_sample_pages(runs: Sequence[Run], folder: Path) -> dict[Key, str]:
    """Write a page for each sample whose kept tokens were stored; returns them, relative to `folder`'s parent."""
    runs_of_samples: dict[Key, list[tuple[Run, ResultRow]]] = defaultdict(list)
    for run in runs:
        for row in run.rows:
            if row.sample_digest is not None:
                runs_of_samples[row.key].append((run, row))

    pages = {}
    for key, runs_of_sample in runs_of_samples.items():
        rows = []
        paths = []
        settings = []
        for run, row in runs_of_sample:
            rows.append(row)
            path = path_of(run.folder, row)
            if path not in paths and path.is_file():
                paths.append(path)
            if run.settings not in settings:
                settings.append(run.settings)
        kept = []
        counts: dict[str, str] = {}
        for path in paths:
            kept.append(read_json(path, KeptOfSample))
            counts.update(kept[-1].counts)
        if counts.keys().isdisjoint(map(name_of_counts, rows)):
            continue
        name = f"{paths[0].stem}.html"
        write_text(folder / name, _sample_page(rows, kept[0], counts, settings))
        pages[key] = f"{folder.name}/{name}"
    return pages


def _sample_page(
    rows: Iterable[ResultRow], kept: KeptOfSample, counts: Mapping[str, str], settings: Sequence[Settings]
) -> str:
    rows = sorted(rows, key=lambda row: (row.budget or 0, row.method))
    styles = styles_of(row.method for row in rows)
    methods = []
    for row in rows:
        if row.method != FULL and name_of_counts(row) in counts:
            methods.append(ShownMethod(_label(row), styles[row.method].colour, counts[name_of_counts(row)]))
    answers = []
    for row, answer in zip(rows, answers_of(rows), strict=True):
        answers.append(ShownAnswer(_label(row), styles[row.method].colour, answer))

    sample = rows[0]
    facts = {
        "sample": sample.sample,
        "prompt": f"{len(kept.tokens)} tokens",
        "question": sample.asks,
        "expected": " | ".join(sample.references),
    }
    model, subtitle = headline(rows, settings)
    return _render_prompt(
        kept,
        methods,
        answers,
        title=sample_label(sample),
        subtitle=f"{model} · {subtitle}",
        facts=facts,
        back="../report.html",
    )


def _label(row: ResultRow) -> str:
    name = label_of(row.method)
    return name if row.budget is None else f"{name}, budget {row.budget}"


def _render_prompt(
    kept: KeptOfSample, methods: Sequence[ShownMethod], answers: Sequence[ShownAnswer], **values: Any
) -> str:
    """The page of a prompt; `values` are `title`, and what else is known of it."""
    data = {
        "layers": kept.layers,
        "heads": kept.heads,
        "tokens": kept.tokens,
        "methods": [method._asdict() for method in methods],
    }
    defaults = {"subtitle": "", "facts": {}, "back": "", "settings": {}}
    return render_page("inspect.html.j2", data=data, answers=answers, **{**defaults, **values})
