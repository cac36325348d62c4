"""Texts from outside in all that is written and printed: tables, pages, cards, JSON, the terminal, a push's list."""

import csv
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

from huggingface_hub import ModelCard

from keepsight.eval.record import ResultRow
from keepsight.eval.report.pages import tables_of, write_comparison, write_outputs
from keepsight.eval.report.summary import summarize, summary_table
from keepsight.eval.results import Run
from keepsight.files import read_json, write_csv, write_json
from keepsight.models.card import CardBasics, Provenance
from keepsight.models.hub import kind_of
from keepsight.models.identity import Identity
from tests.eval.report.results import row
from tests.faults.texts import Verdict, hostile, judged
from tests.faults.world import World

_PAGES_IN = 0.02
"""Share of the trials that draw plots, which take seconds."""


def sinks(world: World, rng: Random, count: int) -> Iterator[Verdict]:
    """Each sink with hostile texts, against the same sink with plain ones."""
    folder = world.folder.with_name("sinks")
    for _ in range(count):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        kind = rng.choice((_csv, _json, _tables, _tables, _card, _card))
        if rng.random() < _PAGES_IN:
            kind = _pages
        seed = rng.random()
        yield judged((kind.__name__, seed), partial(kind, world, folder, Random(seed)))


def _csv(world: World, folder: Path, rng: Random) -> str:
    values: list[Any] = []
    for _ in range(6):
        values.append(rng.choice((hostile(rng), rng.randrange(-9, 9), -1.5, None, "-1.5", "+2e3")))
    names = [f"c{index}" for index in range(len(values))]
    write_csv(folder / "a.csv", names, [dict(zip(names, values, strict=True))])
    with (folder / "a.csv").open(newline="", encoding="utf-8") as stream:
        header, cells = csv.reader(stream)
    assert header == names
    for value, cell in zip(values, cells, strict=True):
        text = "" if value is None else str(value).replace("\r\n", "\n").replace("\r", "\n")
        assert cell in (text, f"'{text}"), f"{value!r} became {cell!r}"
        assert _is_no_formula(cell), f"a formula: {cell!r}"
    return "right"


def _is_no_formula(cell: str) -> bool:
    start = cell.lstrip("\t\r\n")[:1]
    is_number = re.fullmatch(r"[+-]?\d+(\.\d+)?(e[+-]?\d+)?", cell) is not None
    return is_number or start not in ("=", "+", "-", "@") or not start


def _json(world: World, folder: Path, rng: Random) -> str:
    value = {hostile(rng): [hostile(rng), {"a": hostile(rng), "b": rng.choice((1, None, 1.5, True))}]}
    write_json(folder / "a.json", value)
    assert read_json(folder / "a.json") == value, f"{value} came back otherwise"
    return "right"


def _rows(rng: Random | None) -> list[ResultRow]:
    """Two methods on two samples of one task; hostile where there is a `rng`."""
    texts = [hostile(rng) if rng else "plain" for _ in range(8)]
    task, sample, question, reference, date, full_answer, method, answer = texts
    rows: list[ResultRow] = []
    for number in range(2):
        shared: dict[str, Any] = {
            "task": task,
            "sample": f"{sample}{number}",
            "asks": question,
            "references": [reference],
            "date": date,
        }
        rows.append(row("full", None, 1.0, answer=full_answer, **shared))
        rows.append(row(method, 64, 0.5, answer=answer, **shared))
    return rows


def _tables(world: World, folder: Path, rng: Random) -> str:
    hostile_rows = _rows(rng)
    plain_rows = _rows(None)
    _same_lines(summary_table(summarize(hostile_rows)), summary_table(summarize(plain_rows)))
    tables = tables_of(hostile_rows, summarize(hostile_rows))
    plain_tables = tables_of(plain_rows, summarize(plain_rows))
    for table, plain_table in zip(tables, plain_tables, strict=True):
        _same_lines(table.markdown(), plain_table.markdown())
        _same_lines(table.latex(), plain_table.latex())
        for text, separator in ((table.markdown(), r"\|"), (table.latex(), "&")):
            lines = [line for line in text.splitlines() if line.startswith("|") or line.rstrip().endswith(r"\\")]
            counts = {_separators(line, separator) for line in lines}
            assert len(counts) <= 1, f"columns differ: {text}"
        table.save(folder)
        with (folder / f"{table.name}.csv").open(newline="", encoding="utf-8") as stream:
            for cells in csv.reader(stream):
                assert all(map(_is_no_formula, cells)), f"a formula in {cells}"
    return "right"


def _separators(line: str, separator: str) -> int:
    """How often a separator, a regular expression, stands in a line without being escaped."""
    return len(re.findall(rf"(?<!\\)(?:\\\\)*{separator}", line))


def _same_lines(text: str, plain: str) -> None:
    assert all(map(str.isprintable, text.split("\n"))), f"a control character: {text!r}"
    assert len(text.splitlines()) == len(plain.splitlines()), f"other lines: {text}"


def _card(world: World, folder: Path, rng: Random) -> str:
    """Metadata that are read back, the headings, code and table rows of a plain card."""
    name = rng.choice(("adapter", "head", "retrieval"))
    if name not in _ARTIFACTS:
        _ARTIFACTS[name] = kind_of(world.folder / name).load(world.folder / name)
    artifact = _ARTIFACTS[name]
    texts = [hostile(rng) for _ in range(8)]
    identity = Identity(texts[1], texts[2], None, texts[3])
    origin = Provenance(f"ada/x{texts[0]}", identity, {texts[4]: [texts[5]]}, texts[6])
    card = artifact.card(CardBasics(f"Of {texts[7]}", origin, {texts[4]: 3}, license=rng.choice((None, texts[5]))))
    plain = artifact.card(
        CardBasics("Of", Provenance("ada/x", Identity("v", "t", None, "d"), {"a": "b"}, "0"), {"a": 3})
    )
    body = ModelCard(card).text
    plain_body = ModelCard(plain).text
    _same_lines(body, plain_body)
    for line, plain_line in zip(body.splitlines(), plain_body.splitlines(), strict=True):
        assert line.startswith("#") == plain_line.startswith("#"), f"another line: {line!r}"
        assert line.startswith("```") == plain_line.startswith("```"), f"another line: {line!r}"
        if line.startswith("|"):
            assert _separators(line, r"\|") == _separators(plain_line, r"\|"), f"columns differ: {line!r}"
    assert ModelCard(card).data.get("tags") == ModelCard(plain).data.get("tags")
    return "right"


_ARTIFACTS: dict[str, Any] = {}


def _pages(world: World, folder: Path, rng: Random) -> str:
    """A report and a comparison: the tags of plain ones, and nothing beside the folder."""
    tags = _tags_of_pages(folder / "hostile", _rows(rng), {hostile(rng): hostile(rng)})
    plain_tags = _tags_of_pages(folder / "plain", _rows(None), {"a": "b"})
    assert set(folder.iterdir()) <= {folder / "hostile", folder / "plain"}
    for tag in ("script", "img", "iframe", "td", "table", "a"):
        assert tags[tag] == plain_tags[tag], f"{tags[tag]} {tag} instead of {plain_tags[tag]}"
    return "right"


def _tags_of_pages(out: Path, rows: list[ResultRow], settings: dict[str, str]) -> Counter[str]:
    """Write a report and a comparison, and count the tags of all pages."""
    run = Run(out, rows, {"command": "x", **settings})
    other_run = Run(out.with_name(f"{out.name} too"), rows, settings)
    write_outputs([run], out)
    write_comparison([run, other_run], out / "compared")
    pages = sorted(out.rglob("*.html"))
    assert len(pages) >= 2
    tags = Counter[str]()
    for page in pages:
        tags.update(_tags(page))
    return tags


def _tags(page: Path) -> list[str]:
    tags: list[str] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert not [name for name, _ in attrs if name.startswith("on")], f"{tag} {attrs}"
            tags.append(tag)

    Parser().feed(page.read_text(encoding="utf-8"))
    return tags
