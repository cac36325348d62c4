"""HTML pages: the report of an evaluation, the comparison of several, and one about a prompt and its kept tokens.

Report and comparison have their plots and tables as files beside them. Pages are made from `templates/`, and share a
head, filters and settings.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from itertools import chain, takewhile, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jinja2 import Environment, FunctionLoader, StrictUndefined
from numpy.typing import NDArray

from keepsight.eval.kept_tokens import KeptOfSample, count_key, encode_counts, path_of
from keepsight.eval.report import plots, tables
from keepsight.eval.report.figures import Plot, glyph, label_of, styles_of
from keepsight.eval.report.summary import (
    COLUMNS,
    MEASURES,
    Frame,
    difference,
    findings,
    mean_over_tasks,
    notes_on,
    number_text,
    summarize,
    summary_rows,
)
from keepsight.eval.report.tables import PLACE, VARIANT, Column, Table, interval_text, sort_key, value_text
from keepsight.eval.results import FULL, Key, Row, Run, flatten, key_of, labels_of, names_of
from keepsight.files import read_json, write_csv, write_text

Settings = Mapping[str, Any]
_FUNCTIONS = (glyph, label_of, value_text, interval_text, number_text, sort_key)
"""Functions that templates may call."""
_LABELS = {"score": "Score", "excess_nll": "Excess NLL (nats/token)", "agreement": "Top-1 agreement"}
EXAMPLES = 10


# Templates, and the head that pages share


def render_page(template: str, **values: Any) -> str:
    """The page of a template in `templates/` as one text; values are escaped, and none may be missing."""
    folder = resources.files("keepsight.eval.report") / "templates"
    loader = FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8"))
    blocks: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, **blocks)
    environment.globals.update({each.__name__: each for each in _FUNCTIONS})
    return environment.get_template(template).render(values)


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
    rows = [row for run in runs for row in run.rows]
    settings = [run.settings for run in runs]
    of_model, subtitle = headline(rows, settings)
    styles = styles_of(row["method"] for row in rows)
    return render_page(
        template,
        title=title or of_model,
        subtitle=f"{of_model} · {subtitle}" if title else subtitle,
        facts=_facts(rows, settings),
        styles=styles,
        numbers={method: number for number, method in enumerate(styles)},
        choices={
            name: sorted({row[name] for row in rows if row[name] is not None}) for name in ("budget", "task", "length")
        },
        plots={plot.name: plot for plot in plots},
        tables={table.name: table for table in tables},
        beside=[name for name in ("plots", "tables") if (folder / name).is_dir()],
        settings={name: flatten(run.settings) for name, run in zip(names_of(runs), runs, strict=True)},
        **values,
    )


def headline(rows: Sequence[Row], runs: Sequence[Settings]) -> tuple[str, str]:
    """Title of a page and the line below it: model; dtype, quantization, adapter and date."""
    models = _joined(_last_part(_target(each).get("name")) for each in runs)
    title = f"KV-cache eviction on {models}" if models else "KV-cache eviction: evaluation"
    parts = [_precision(runs), _joined(_last_part(_used(each, "adapter")) for each in runs), _dates(rows)]
    return title, " · ".join(filter(None, parts))


def _facts(rows: Sequence[Row], runs: Sequence[Settings]) -> dict[str, str]:
    """Facts that a reader needs to judge the numbers; what is not known is left out."""
    samples = Counter((row["task"], row["length"]) for row in {key_of(row): row for row in rows}.values())
    counts = sorted(set(samples.values()))
    budgets = sorted({row["budget"] for row in rows if row["budget"] is not None})
    prompts = [row["prompt_tokens"] for row in rows if "prompt_tokens" in row]
    versions = [(each.get("versions") or {}).items() for each in runs]
    facts = {
        "table": _joined(each.get("table") for each in runs),
        "model": _joined(_named(_target(each).get("name"), _target(each).get("version")) for each in runs),
        "adapter": _joined(_named(_used(each, "adapter"), each.get("adapter_digest")) for each in runs),
        "retrieval head": _joined(_named(_used(each, "retrieval"), each.get("retrieval_digest")) for each in runs),
        "precision": _precision(runs),
        "attention": _joined(_target(each).get("attention") for each in runs),
        "measured": _dates(rows),
        "tasks": ", ".join(sorted({row["task"] for row in rows})),
        "lengths": f"{', '.join(map(str, sorted({row['length'] for row in rows})))} tokens",
        "prompts": f"{min(prompts)} to {max(prompts)} tokens" if prompts else "",
        "methods": ", ".join(sorted({row["method"] for row in rows})),
        "budgets": ", ".join(map(str, budgets)) + " KV entries per layer and KV head" if budgets else "full cache only",
        "samples": "-".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
        + f" for each task and length, {sum(samples.values())} in all",
        "question while compressing": _joined(str(row["question"]) for row in rows),
        "versions": _joined(", ".join(f"{name} {version}" for name, version in each) for each in versions),
    }
    return {name: value for name, value in facts.items() if value}


def _target(settings: Settings) -> Mapping[str, Any]:
    return settings.get("target") or {}


def _precision(runs: Sequence[Settings]) -> str:
    quantized, dtype = (_joined(_target(each).get(name) for each in runs) for name in ("quantization", "dtype"))
    return f"{dtype}, {'not quantized' if quantized == 'none' else quantized}" if dtype and quantized else dtype


def _dates(rows: Sequence[Row]) -> str:
    dates = sorted({str(row["date"]) for row in rows if row.get("date")})
    return " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else ""


def _used(settings: Settings, kind: str) -> str | None:
    """The adapter or head that a run names, if one of its methods read it: then its digest is there."""
    return settings.get(kind) if settings.get(f"{kind}_digest") else None


def _named(name: str | None, version: str | None) -> str:
    """A name with the first digits of its digest or commit."""
    return f"{name} ({str(version).removeprefix('sha256:')[:12]})" if name and version else str(name or "")


def _last_part(path: str | None) -> str:
    return str(path or "").rstrip("/").rpartition("/")[2]


def _joined(values: Iterable[str | None]) -> str:
    """The distinct values, in their order."""
    return "; ".join(dict.fromkeys(str(value) for value in values if value))


# The report, and the comparison of several runs


def write_outputs(runs: Sequence[Run], folder: Path) -> Frame:
    """Write `summary.csv`, the plots, the tables, a page a sample, and `report.html` that shows all of it.

    Several runs have the same base model, and no sample and variant twice. Returns the `summarize`d rows.
    """
    rows = [row for run in runs for row in run.rows]
    write_csv(folder / "summary.csv", COLUMNS, summary_rows(summary := summarize(rows)))
    drawn, made = plots_of(rows, summary), tables_of(rows, summary)
    for plot in drawn:
        plot.save(folder / "plots")
    for table in made:
        table.save(folder / "tables")
    write_report(runs, folder, write_sample_pages(runs, folder / "samples"), drawn, made, findings(summary))
    return summary


def plots_of(rows: Sequence[Row], summary: Frame) -> list[Plot]:
    """The plots of a run, in the order of the page."""
    makers = (plots.overview_plot, plots.tradeoffs_plot, plots.scores_plot, plots.excess_nll_plot)
    deep = plots.depth_plot(rows)
    return [*(make(summary) for make in makers), *([deep] if deep else [])]


def tables_of(rows: Sequence[Row], summary: Frame) -> list[Table]:
    """The tables of a run, in the order of the page."""
    of_scores = [make(summary) for make in (tables.overall_table, tables.difference_table, tables.task_table)]
    return [*of_scores, tables.cost_table(rows)]


def write_report(
    runs: Sequence[Run],
    folder: Path,
    pages: Mapping[Key, str],
    drawn: Sequence[Plot],
    made: Sequence[Table],
    found: Sequence[str],
) -> None:
    """Write `report.html` with plots, tables and findings into `folder`; `pages` of samples are relative to it."""
    rows = [row for run in runs for row in run.rows]
    more: dict[str, Any] = {"examples": choose_examples(rows), "place_of": place_of, "pages": pages}
    more |= {"findings": found, "samples_a_cell": plots.SAMPLES_A_CELL}
    page = render_results("report.html.j2", runs, folder, drawn, made, **more)
    write_text(folder / "report.html", page)


def write_comparison(runs: Sequence[Run], folder: Path) -> list[Table]:
    """Write `compare.html`, its plot and its tables; returns a table for each measure, means over tasks.

    `runs` are at least two, as `keepsight.eval.results.comparable` gives them.
    """
    names = labels_of(runs)
    by_task = [summarize(run.rows) for run in runs]
    means = [mean_over_tasks(summary) for summary in by_task]
    overall = [_table(measure, means, names) for measure in MEASURES]
    detailed = [_table(measure, by_task, names, PLACE) for measure in MEASURES]
    later = zip(names[1:], means[1:], strict=True)
    pairs = {f"{name} - {names[0]}": difference(mean, means[0], on=["method", "order"]) for name, mean in later}
    plot = plots.comparison_plot(pairs)
    if plot.panels:
        plot.save(folder / "plots")
    for table in (*overall, *detailed):
        table.save(folder / "tables")
    title, more = " against ".join(names), {"labels": names, "differing": _differing(runs)}
    page = render_results("compare.html.j2", runs, folder, [plot], [*overall, *detailed], title, **more)
    write_text(folder / "compare.html", page)
    return overall


def _table(measure: str, summaries: Sequence[Frame], names: Sequence[str], places: Sequence[Column] = ()) -> Table:
    """One measure of every run, and its difference from the first run; `places` are the first columns."""
    columns = [*places, *VARIANT]
    on = [*(column.name for column in places), "method", "order"]
    groups = pd.concat(summaries).groupby(on, sort=False)
    rows = groups["budget"].first().to_frame()
    for at, (name, summary) in enumerate(zip(names, summaries, strict=True)):
        rows[f"run{at}"] = summary.set_index(on)[measure]
        columns.append(Column(f"run{at}", name))
    for at, (name, summary) in enumerate(zip(names[1:], summaries[1:], strict=True), 1):
        rows[f"minus{at}"] = difference(summary, summaries[0], on=on).set_index(on)[measure]
        columns.append(Column(f"minus{at}", f"{name} - {names[0]}", is_signed=True))
    rows["n"] = groups["n"].first().astype("Int64").where(groups["n"].nunique() == 1)
    notes = " ".join(filter(None, dict.fromkeys(map(notes_on, summaries))))
    name, title = (f"{measure}_by_task", "by task and length") if places else (measure, "mean over tasks")
    caption = f"{_LABELS[measure]}{' ' if places else ', '}{title}"
    columns.append(Column("n", "n"))
    return Table.of(name, f"{caption}. {notes}" if notes else caption, columns, rows.reset_index())


def _differing(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Settings that are not the same in all runs."""
    settings = [flatten(run.settings) for run in runs]
    keys = dict.fromkeys(chain.from_iterable(settings))
    values = {key: [each.get(key, "") for each in settings] for key in keys if key != "command"}
    values |= {"folder": names_of(runs)}
    return {key: each for key, each in values.items() if len(set(each)) > 1}


# Pages about one prompt: which of its tokens each layer's heads kept, and the answers side by side


class Answer(NamedTuple):
    """A row's answer: the beginning that it shares with the full cache's, the rest, and whether it ends early."""

    row: Row
    same: str
    own: str
    early: bool


class Example(NamedTuple):
    """A sample at the budget where scores differ most from the full cache's, by `difference` (0 to 1).

    The answers are the full cache's, if it was run, then the others', the best score first; `sample` is one's row.
    """

    sample: Row
    answers: list[Answer]
    budget: int
    difference: float


def answers_of(rows: Sequence[Row]) -> list[Answer]:
    """Answers with what they have in common with the full cache's, which is `rows[0]` where it was run."""
    whole = rows[0]["answer"] if rows and rows[0]["method"] == FULL else ""
    pairs = [zip(whole, row["answer"], strict=False) for row in rows]
    ends = [sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], each)) for each in pairs]
    found = [(row, row["answer"][:end], row["answer"][end:]) for row, end in zip(rows, ends, strict=True)]
    return [Answer(*each, early=not each[2] and len(each[1]) < len(whole)) for each in found]


def place_of(row: Row) -> str:
    """A sample's label: `niah_single, 512 tokens, needle at 40 % depth`."""
    depth = row.get("depth")
    needle = "" if depth is None else f", needle at {100 * depth:.0f} % depth"
    return f"{row['task']}, {row['length']} tokens{needle}"


def choose_examples(rows: Sequence[Row], count: int = EXAMPLES) -> list[Example]:
    """The samples whose scores differ most from the full cache's, taking the tasks and lengths in turn."""
    samples: dict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        samples[key_of(row)].append(row)
    places: dict[tuple[str, int], list[Example]] = defaultdict(list)
    for (task, length, _), group in samples.items():
        full = next((row for row in group if row["method"] == FULL), None)
        budgets = sorted({row["budget"] for row in group if row["budget"] is not None})
        at_budget = [_example(full, [row for row in group if row["budget"] == budget]) for budget in budgets]
        places[task, length] += sorted(at_budget, key=lambda example: -example.difference)[:1]
    for examples in places.values():
        examples.sort(key=lambda example: (-example.difference, example.sample["sample"]))
    turns = chain.from_iterable(zip_longest(*(places[place] for place in sorted(places))))
    return [example for example in turns if example is not None][:count]


def _example(full: Row | None, rows: list[Row]) -> Example:
    rows.sort(key=lambda row: (-row["score"], row["excess_nll"], row["method"]))
    best = (full or rows[0])["score"]
    answers = answers_of([full, *rows] if full else rows)
    return Example(rows[0], answers, rows[0]["budget"], max(abs(best - row["score"]) for row in rows))


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
    colours = {name: style.colour for name, style in styles_of([*kept, FULL]).items()}
    rows = [{"method": method, "answer": answer} for method, answer in (answers or {}).items()]
    methods = [(name, colours[name], encode_counts(array)) for name, array in kept.items()]
    found = [(each.row["method"], colours[each.row["method"]], each) for each in answers_of(rows)]
    content = KeptOfSample(tokens, layers, heads, {})
    write_text(path, _render(content, methods, found, title=title, settings=flatten(settings)))


def write_sample_pages(runs: Sequence[Run], folder: Path) -> dict[Key, str]:
    """Write a page for each sample whose kept tokens were stored; returns them, relative to `folder`'s parent."""
    samples: dict[Key, list[tuple[Run, Row]]] = defaultdict(list)
    for run in runs:
        for row in run.rows:
            if row.get("sample_digest"):
                samples[key_of(row)].append((run, row))
    pages = {}
    for key, group in samples.items():
        found = {path: None for run, row in group if (path := path_of(run.folder, row)).is_file()}
        kept = [read_json(path, KeptOfSample) for path in found]
        counts = {name: each for content in kept for name, each in content.counts.items()}
        if not any(count_key(row) in counts for _, row in group):
            continue
        settings = {id(run): run.settings for run, _ in group}
        name = f"{next(iter(found)).stem}.html"
        write_text(folder / name, _sample_page([row for _, row in group], kept[0], counts, [*settings.values()]))
        pages[key] = f"{folder.name}/{name}"
    return pages


def _sample_page(rows: list[Row], kept: KeptOfSample, counts: dict[str, str], settings: list[Row]) -> str:
    rows = sorted(rows, key=lambda row: (row["budget"] or 0, row["method"]))
    styles, sample = styles_of(row["method"] for row in rows), rows[0]
    colours = {name: style.colour for name, style in styles.items()}
    model, subtitle = headline(rows, settings)
    methods = [
        (_label(row), colours[row["method"]], counts[count_key(row)])
        for row in rows
        if row["method"] != FULL and count_key(row) in counts
    ]
    facts = {
        "sample": str(sample["sample"]),
        "prompt": f"{len(kept.tokens)} tokens",
        "question": str(sample.get("asks") or ""),
        "expected": " | ".join(sample["references"]),
    }
    answers = [(_label(each.row), colours[each.row["method"]], each) for each in answers_of(rows)]
    head = {"title": place_of(sample), "subtitle": f"{model} · {subtitle}"}
    return _render(kept, methods, answers, facts=facts, back="../report.html", **head)


def _label(row: Row) -> str:
    name = label_of(row["method"])
    return name if row["budget"] is None else f"{name}, budget {row['budget']}"


def _render(
    kept: KeptOfSample,
    methods: Sequence[tuple[str, str, str]],
    answers: Sequence[tuple[str, str, Answer]],
    **shown: Any,
) -> str:
    """The page of a prompt; of methods the name, colour and counts, of answers the name, colour and answer."""
    named = [dict(zip(("name", "colour", "counts"), each, strict=True)) for each in methods]
    data = {"layers": kept.layers, "heads": kept.heads, "tokens": kept.tokens, "methods": named}
    values = {"subtitle": "", "facts": {}, "back": "", "settings": {}} | shown
    return render_page("inspect.html.j2", data=data, answers=answers, **values)
