"""A page a sample: which tokens of its prompt each method kept, and all answers side by side."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from keepsight.eval.kept_tokens import KeptOfSample, count_key, path_of
from keepsight.eval.report.examples import answers_of, place_of
from keepsight.eval.report.facts import headline
from keepsight.eval.report.inspect_page import KeptCounts, render_kept_page
from keepsight.eval.report.styles import in_order, label_of, styles_of
from keepsight.eval.results import FULL, Key, Row, key_of
from keepsight.eval.runs import Run
from keepsight.files import read_json, write_text


def write_sample_pages(runs: Sequence[Run], folder: Path) -> dict[Key, str]:
    """Write the pages of all samples whose kept tokens were stored.

    Returns:
        For `task, length, sample` of each, the page relative to the folder that holds `folder`.
    """
    pages = {}
    for key, group in _by_sample(runs).items():
        rows = [row for _, row in group]
        found = {path: None for run, row in group if (path := path_of(run.folder, row)).is_file()}
        kept = [read_json(path, KeptOfSample) for path in found]
        counts = {name: each for content in kept for name, each in content.counts.items()}
        if not any(count_key(row) in counts for row in rows):
            continue
        settings = {id(run): run.settings for run, _ in group}
        text = _page(rows, kept[0], counts, [*settings.values()])
        name = f"{next(iter(found)).stem}.html"
        write_text(folder / name, text)
        pages[key] = f"{folder.name}/{name}"
    return pages


def _by_sample(runs: Sequence[Run]) -> dict[Key, list[tuple[Run, Row]]]:
    samples: dict[Key, list[tuple[Run, Row]]] = defaultdict(list)
    for run in runs:
        for row in run.rows:
            if row.get("sample_digest"):
                samples[key_of(row)].append((run, row))
    return samples


def _page(rows: list[Row], kept: KeptOfSample, counts: dict[str, str], settings: list[Row]) -> str:
    order = {method: place for place, method in enumerate(in_order(row["method"] for row in rows))}
    rows = sorted(rows, key=lambda row: (row["budget"] or 0, order[row["method"]]))
    styles, sample = styles_of(order), rows[0]
    shown = [
        KeptCounts(_label(row), styles[row["method"]].colour, counts[count_key(row)])
        for row in rows
        if row["method"] != FULL and count_key(row) in counts
    ]
    model, subtitle = headline(rows, settings)
    return render_kept_page(
        title=place_of(sample),
        subtitle=f"{model} · {subtitle}",
        tokens=kept.tokens,
        shape=(kept.layers, kept.heads),
        kept=shown,
        facts={
            "sample": str(sample["sample"]),
            "prompt": f"{len(kept.tokens)} tokens",
            "question": str(sample.get("asks") or ""),
            "expected": " | ".join(sample["references"]),
        },
        answers=[(_label(each.row), styles[each.row["method"]].colour, each) for each in answers_of(rows)],
        back="../report.html",
        settings={},
    )


def _label(row: Row) -> str:
    name = label_of(row["method"])
    return name if row["budget"] is None else f"{name}, budget {row['budget']}"
