"""The card of a module that `keepsight fit` has made: command, data, stages, results, and where it falls short."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from keepsight.commands.training import origins_of
from keepsight.data_gen.store import finished_manifest
from keepsight.eval.report.findings import BOUNDS, OURS, kind_of
from keepsight.files import read_jsonl, whole_lines
from keepsight.models.card import CardBasics, excess_rows, with_evaluation, with_section
from keepsight.models.lookahead import LookaheadAdapter
from keepsight.train.dataset import prompts_from_text
from keepsight.train.trainer import MEASUREMENTS

_SHORT = 8
"""Most lines of where a module falls short."""
_SECOND = "fine-tuning, "
_MORE_THAN = 0.005
"""Nats by which another method loses less, where the card says so."""


def written_card(artifact: LookaheadAdapter, title: str, command: str, out: Path, notes: str = "") -> str:
    """The card as Markdown.

    Args:
        artifact: The module of the last stage.
        title: The card's title.
        command: What made it.
        out: Folder of the fit, with data, the trainings and, where it was run, the evaluation.
        notes: On the origin and licences of the data.
    """
    manifest = finished_manifest(out / "data")
    origin = artifact.provenance
    first = {key: value for key, value in origin.training.items() if not key.startswith(_SECOND)}
    second = {key.removeprefix(_SECOND): value for key, value in origin.training.items() if key.startswith(_SECOND)}
    stages = {
        "answers": f"{manifest.samples} prompts, {manifest.prompt_tokens} tokens; {manifest.answer_tokens} of answers",
        "importance (what answers attend to)": _listed(first),
        "eviction (what evicting costs answers)": _listed(second) or "not run",
        "trained on": f"{len(prompts_from_text(origin.trained_on) or ())} prompts; their digests are in its files",
    }
    short = replace(origin, training=stages)
    origins = "\n\n".join(each for each in (origins_of(manifest.settings.mixture), notes) if each)
    basics = CardBasics(title, short, manifest.sources, origins)
    rows = _measured(out)
    held_out = "| held-out samples | before the last stage | after it |\n| --- | --- | --- |\n" + "\n".join(rows)
    card = artifact.card(basics, held_out if rows else "")
    card = with_section(card, f"## Command\n\n```\n{command}\n```\n")
    return with_results(card, out / "eval")


def _listed(values: Mapping[str, Any]) -> str:
    return "; ".join(f"{name} {value}" for name, value in values.items())


def _measured(out: Path) -> list[str]:
    """Rows of a table of the last training's first and last measurement."""
    for stage in ("eviction", "importance"):
        if measured := whole_lines(out / stage / "training" / MEASUREMENTS):
            first, last = measured[0], measured[-1]
            plain = [name for name in ("eval_kl", "eval_recall", "eval_tau") if name in last]
            listed = [f"| {name.removeprefix('eval_')} | {first[name]:.3f} | {last[name]:.3f} |" for name in plain]
            return listed or [f"| excess NLL (nats), {row.removeprefix('| ')}" for row in excess_rows(first, last)]
    return []


def with_results(card: str, evaluated: Path, own: str = OURS) -> str:
    """A card that ends with an evaluation's table, if there is one, and where other methods lose less than `own`."""
    if not (table := evaluated / "tables" / "overall.md").is_file():
        return card
    card = with_evaluation(card, table.read_text(encoding="utf-8"))
    found = [*shortcomings([*read_jsonl(evaluated / "results.jsonl")], own)]
    lines = found[:_SHORT] or ["- Nowhere in this evaluation does another method lose less."]
    more = [f"- and in {len(found) - _SHORT} more places"] if len(found) > _SHORT else []
    rest = "- Prompts longer than those it was trained on, and of other kinds, were not measured here."
    return with_section(card, "## Where it falls short\n\n" + "\n".join([*lines, *more, rest]) + "\n")


def shortcomings(rows: Sequence[Mapping[str, Any]], own: str) -> Iterator[str]:
    """Lines of Markdown: where a method with the same budget has a lower excess NLL; the largest difference first."""
    values = defaultdict[tuple[Any, ...], dict[str, list[float]]](lambda: defaultdict(list))
    for row in rows:
        if row["budget"] is not None:
            values[row["task"], row["length"], row["budget"]][row["method"]].append(row["excess_nll"])
    found = []
    for (task, length, budget), by_method in values.items():
        means = {method: fmean(each) for method, each in by_method.items() if kind_of(method) not in BOUNDS}
        best = min(means, key=lambda method: means[method], default=own)
        if own in means and (less := means[own] - means[best]) > _MORE_THAN:
            said = f"- {task}, {length or 'all lengths'}, budget {budget}: {best} loses {means[best]:.3f} nats, "
            found.append((less, f"{said}this module {means[own]:.3f}"))
    yield from (line for _, line in sorted(found, reverse=True))
