"""What was run, for the head of a page: model, adapter, precision, date, tasks, methods, samples."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from keepsight.eval.report.styles import in_order
from keepsight.eval.results import Row, key_of

Settings = Mapping[str, Any]


def model_of(settings: Settings) -> str:
    """The model's name without its owner; empty where the settings do not say it."""
    return str((settings.get("target") or {}).get("name") or "").rstrip("/").rpartition("/")[2]


def headline(rows: Sequence[Row], runs: Sequence[Settings]) -> tuple[str, str]:
    """Title of a page and the line below it: model; dtype, quantization, adapter and date."""
    models = _joined(model_of(each) for each in runs)
    title = f"KV-cache eviction on {models}" if models else "KV-cache eviction: evaluation"
    parts = [_precision(runs), _joined(_short(_used(each, "adapter")) for each in runs), _dates(rows)]
    return title, " · ".join(filter(None, parts))


def facts_of(rows: Sequence[Row], runs: Sequence[Settings]) -> dict[str, str]:
    """Everything that a reader needs to judge the numbers; what is not known is left out."""
    samples = Counter((row["task"], row["length"]) for row in {key_of(row): row for row in rows}.values())
    counts = sorted(set(samples.values()))
    budgets = sorted({row["budget"] for row in rows if row["budget"] is not None})
    facts = {
        "model": _joined(_artifact(each.get("target") or {}) for each in runs),
        "adapter": _joined(_named(_used(each, "adapter"), each.get("adapter_digest")) for each in runs),
        "retrieval head": _joined(_named(_used(each, "retrieval"), each.get("retrieval_digest")) for each in runs),
        "precision": _precision(runs),
        "attention": _joined((each.get("target") or {}).get("attention") for each in runs),
        "measured": _dates(rows),
        "tasks": ", ".join(sorted({row["task"] for row in rows})),
        "lengths": ", ".join(str(length) for length in sorted({row["length"] for row in rows})) + " tokens",
        "methods": ", ".join(in_order(row["method"] for row in rows)),
        "budgets": ", ".join(map(str, budgets)) + " KV entries per layer and KV head" if budgets else "full cache only",
        "samples": "-".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
        + f" for each task and length, {sum(samples.values())} in all",
        "question while compressing": _joined(str(row["question"]) for row in rows),
        "versions": _joined(
            ", ".join(f"{name} {version}" for name, version in (each.get("versions") or {}).items()) for each in runs
        ),
    }
    return {name: value for name, value in facts.items() if value}


def _precision(runs: Sequence[Settings]) -> str:
    targets = [each.get("target") or {} for each in runs]
    quantized = _joined(each.get("quantization") for each in targets)
    dtype = _joined(each.get("dtype") for each in targets)
    return f"{dtype}, {'not quantized' if quantized == 'none' else quantized}" if dtype and quantized else dtype


def _dates(rows: Sequence[Row]) -> str:
    dates = sorted({str(row["date"]) for row in rows if row.get("date")})
    return " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else ""


def _used(settings: Settings, kind: str) -> str | None:
    """The adapter or head that a run names, if one of its methods read it: then its digest is there."""
    return settings.get(kind) if settings.get(f"{kind}_digest") else None


def _artifact(target: Mapping[str, Any]) -> str:
    return _named(target.get("name"), target.get("version"))


def _named(name: str | None, version: str | None) -> str:
    """A name with the first digits of its digest or commit."""
    if not name:
        return ""
    return f"{name} ({str(version).removeprefix('sha256:')[:12]})" if version else str(name)


def _short(path: str | None) -> str:
    return str(path or "").rstrip("/").rpartition("/")[2]


def _joined(values: Iterable[str | None]) -> str:
    """The distinct values, in their order."""
    return "; ".join(dict.fromkeys(str(value) for value in values if value))
