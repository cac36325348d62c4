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
        kind, seed = _pages if rng.random() < _PAGES_IN else kind, rng.random()
        yield judged((kind.__name__, seed), partial(kind, world, folder, Random(seed)))


def _csv(world: World, folder: Path, rng: Random) -> str:
    values: list[Any] = [rng.choice((hostile(rng), rng.randrange(-9, 9), -1.5, None, "-1.5", "+2e3")) for _ in range(6)]
    names = [f"c{place}" for place in range(len(values))]
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
    made = []
    for place in range(2):
        shared: dict[str, Any] = {"task": texts[0], "sample": f"{texts[1]}{place}", "asks": texts[2]}
        shared |= {"references": [texts[3]], "date": texts[4]}
        made.append(row("full", None, 1.0, answer=texts[5], **shared))
        made.append(row(texts[6] if rng else "plain", 64, 0.5, answer=texts[7], **shared))
    return made


def _tables(world: World, folder: Path, rng: Random) -> str:
    made, plain = _rows(rng), _rows(None)
    _same_lines(summary_table(summarize(made)), summary_table(summarize(plain)))
    both = (tables_of(rows, summarize(rows)) for rows in (made, plain))
    for own, other in zip(*both, strict=True):
        _same_lines(own.markdown(), other.markdown())
        _same_lines(own.latex(), other.latex())
        for text, separator in ((own.markdown(), r"\|"), (own.latex(), "&")):
            lines = [line for line in text.splitlines() if line.startswith("|") or line.rstrip().endswith(r"\\")]
            counts = {len(re.findall(rf"(?<!\\)(?:\\\\)*{separator}", line)) for line in lines}
            assert len(counts) <= 1, f"columns differ: {text}"
        own.save(folder)
        with (folder / f"{own.name}.csv").open(newline="", encoding="utf-8") as stream:
            cells = [cell for line in csv.reader(stream) for cell in line]
        assert all(map(_is_no_formula, cells)), f"a formula in {cells}"
    return "right"


def _same_lines(text: str, plain: str) -> None:
    assert all(each.isprintable() for line in text.split("\n") for each in line), f"a control character: {text!r}"
    assert len(text.splitlines()) == len(plain.splitlines()), f"other lines: {text}"


def _card(world: World, folder: Path, rng: Random) -> str:
    """Metadata that are read back, the headings, code and table rows of a plain card."""
    artifact = _ARTIFACTS.setdefault(name := rng.choice(("adapter", "head", "retrieval")), None)
    artifact = _ARTIFACTS[name] = artifact or kind_of(world.folder / name).load(world.folder / name)
    texts = [hostile(rng) for _ in range(8)]
    identity = Identity(texts[1], texts[2], None, texts[3])
    origin = Provenance(f"ada/x{texts[0]}", identity, {texts[4]: [texts[5]]}, texts[6])
    card = artifact.card(CardBasics(f"Of {texts[7]}", origin, {texts[4]: 3}, license=rng.choice((None, texts[5]))))
    plain = artifact.card(
        CardBasics("Of", Provenance("ada/x", Identity("v", "t", None, "d"), {"a": "b"}, "0"), {"a": 3})
    )
    body, expected = (ModelCard(each).text for each in (card, plain))
    _same_lines(body, expected)
    for line, other in zip(body.splitlines(), expected.splitlines(), strict=True):
        assert (line[:1] == "#", line[:3] == "```") == (other[:1] == "#", other[:3] == "```"), f"another line: {line!r}"
        if line.startswith("|"):
            bars = [len(re.findall(r"(?<!\\)(?:\\\\)*\|", each)) for each in (line, other)]
            assert bars[0] == bars[1], f"columns differ: {line!r}"
    assert ModelCard(card).data.get("tags") == ModelCard(plain).data.get("tags")
    return "right"


_ARTIFACTS: dict[str, Any] = {}


def _pages(world: World, folder: Path, rng: Random) -> str:
    """A whole report and a comparison: the tags of plain ones, and nothing beside the folder."""
    tags = []
    for name, made in (("hostile", _rows(rng)), ("plain", _rows(None))):
        settings = {hostile(rng): hostile(rng)} if name == "hostile" else {"a": "b"}
        run, out = Run(folder / name, made, {"command": "x", **settings}), folder / name
        write_outputs([run], out)
        write_comparison([run, Run(folder / f"{name} too", made, settings)], out / "compared")
        pages = sorted(out.rglob("*.html"))
        assert len(pages) >= 2
        tags.append(Counter(tag for page in pages for tag in _tags(page)))
    assert {*map(str, folder.iterdir())} <= {str(folder / name) for name in ("hostile", "plain")}
    for tag in ("script", "img", "iframe", "td", "table", "a"):
        assert tags[0][tag] == tags[1][tag], f"{tags[0][tag]} {tag} instead of {tags[1][tag]}"
    return "right"


def _tags(page: Path) -> list[str]:
    found = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert not [name for name, _ in attrs if name.startswith("on")], f"{tag} {attrs}"
            found.append(tag)

    Parser().feed(page.read_text(encoding="utf-8"))
    return found
