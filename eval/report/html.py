"""HTML pages from the templates of this folder, with the head, the filters and the settings that pages share."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from keepsight.eval.report.figures import Plot, glyph, label_of, styles_of
from keepsight.eval.report.summary import number_text
from keepsight.eval.report.tables import Table, interval_text, sort_key, value_text
from keepsight.eval.results import Row, Run, flatten, key_of, names_of

Settings = Mapping[str, Any]
_FUNCTIONS = (glyph, label_of, value_text, interval_text, number_text, sort_key)
"""Functions that templates may call."""


def render_page(template: str, **values: Any) -> str:
    """The page of a template in `templates/` as one text; values are escaped, and none may be missing."""
    folder = resources.files("keepsight.eval.report") / "templates"
    loader = FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8"))
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
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
