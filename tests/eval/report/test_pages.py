"""The pages in a real browser: no complaint, nothing cut off, and what can be clicked works."""

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keepsight.eval.kept_tokens import encode_counts, path_of
from keepsight.eval.report.pages import write_comparison, write_inspect_page, write_sample_pages
from keepsight.eval.results import Run
from keepsight.files import write_json
from tests.browser import Page, browser
from tests.eval.report.results import row, write_page

WIDTHS = (1300, 400)
DRAWN = "document.getElementById('lines').innerText"
"""True once a page of kept tokens has drawn its charts."""
CUT_LABELS = """
[...document.querySelectorAll(".panel svg text")].filter((each) => {
  const [inner, outer] = [each.getBoundingClientRect(), each.closest("svg").getBoundingClientRect()];
  return inner.left < outer.left - 2 || inner.right > outer.right + 2 || inner.top < outer.top - 2
    || inner.bottom > outer.bottom + 2;
}).map((each) => each.textContent)
"""
CLIPPED = """
[...document.querySelectorAll("header pre")].filter(
  (each) => each.scrollWidth > each.clientWidth || each.scrollHeight > each.clientHeight).length
"""
NOTE_THE_MAPS_LABELS = """
{
  window.written = [];
  const write = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
    if (this.canvas.className === "map") written.push(String(text));
    write.call(this, text, ...place);
  };
  null;
}
"""
CONTRASTS = """
(() => {
  const numbersOf = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = (colour) => colour.slice(0, 3).map((value) => value / 255).map((share) =>
    (share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4)).reduce((sum, share, at) =>
    sum + share * [0.2126, 0.7152, 0.0722][at], 0);
  return [...document.querySelectorAll(".prompt")].flatMap((prompt) => {
    const page = numbersOf(getComputedStyle(prompt).backgroundColor);
    const text = luminance(numbersOf(getComputedStyle(prompt).color));
    return [...prompt.children].map((token) => {
      const [red, green, blue, opacity = 1] = numbersOf(getComputedStyle(token).backgroundColor);
      const shade = luminance([red, green, blue].map((value, at) => page[at] + opacity * (value - page[at])));
      return (Math.max(shade, text) + 0.05) / (Math.min(shade, text) + 0.05);
    });
  });
})()
"""
"""The contrast of the text of each token with its shade, as WCAG 2.2 defines it."""
LONG = "snapkv pool(kernel=5, kind=max) window=32 reduce=max"
METHODS = ("oracle", "lookaheadkv", "snapkv", "streamingllm", "laq", "speckv", "dapq", LONG)
SETTINGS: dict[str, Any] = {
    "command": "keepsight eval recipe=smollm2-135m " + "adapter=runs/a/long/path/to/an/adapter " * 8,
    "versions": {"torch": "2.13"},
    "adapter": "runs/mine",
    "adapter_digest": "sha256:fedcba9876543210",
    "target": {"name": "org/Tiny-1B", "version": "sha256:0123456789abcdef", "dtype": "float32", "quantization": "none"},
}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with many methods, of which one sample has its kept tokens stored."""
    folder, rows = tmp_path_factory.mktemp("run"), []
    for task, length in (("niah_single", 512), ("niah_single", 1024), ("qa", 512)):
        for sample in range(3):
            where = {"task": task, "length": length, "sample": f"s{sample}", "sample_digest": f"{task}{length}{sample}"}
            rows.append(row("full", None, 1.0, **where))
            for place, method in enumerate(METHODS):
                scores = [row(method, budget, 0.1 * place, **where) for budget in (64, 128)]
                rows += scores
    generator = np.random.default_rng(0)
    counts = {f"{m} {b}": encode_counts(generator.random((4, 2, 60)) < b / 256) for m in METHODS for b in (64, 128)}
    tokens = ["<|im_start|>", *(f" word{number}" for number in range(58)), "\n"]
    write_json(path_of(folder, rows[0]), {"tokens": tokens, "layers": 4, "heads": 2, "counts": counts})
    for beside in ("plots", "tables"):
        (folder / beside).mkdir()
    runs = [Run(folder, rows, SETTINGS)]
    write_page(runs, folder, write_sample_pages(runs, folder / "samples"))
    return folder


@pytest.mark.parametrize("width", WIDTHS)
def test_the_report_fits_any_window(page: Page, folder: Path, width: int) -> None:
    page.open(folder / "report.html", width)
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert page.problems == []
    assert page.overflowing() == []
    scrolled = "[...document.querySelectorAll('.tall')].map((each) => each.scrollHeight > each.clientHeight + 1)"
    assert page.run(scrolled) == [width == 1300]  # a phone scrolls the page alone
    assert page.run("document.title") == "KV-cache eviction on Tiny-1B · float32, not quantized · mine · 2026-11-22"
    facts = page.run("document.querySelector('header dl').innerText")
    assert all(known in facts for known in ("org/Tiny-1B (0123456789ab)", "runs/mine (fedcba987654)", "2026-11-22"))
    command = page.run("document.querySelector('header pre').innerText")
    assert command.split() == SETTINGS["command"].split()
    assert page.run(CLIPPED) == 0
    assert page.run(CUT_LABELS) == []
    smallest = page.run("Math.min(...[...document.querySelectorAll('.panel svg')].map((each) => each.clientWidth))")
    largest = page.run("Math.max(...[...document.querySelectorAll('.panel svg')].map((each) => each.clientWidth))")
    assert 240 <= smallest <= largest <= 400
    agreements = "[...document.querySelectorAll('#table-overall [data-label=\"top-1 agreement\"]')]"
    page.run("document.querySelectorAll('.sort input').forEach((box) => { if (!box.checked) box.click(); })")
    assert page.run(f"{agreements}.filter((each) => each.offsetWidth).length") == 1 + 2 * len(METHODS)
    assert page.overflowing() == []


def _column(page: Page, label: str, table: str = "overall") -> list[str]:
    cells = f"[...document.querySelectorAll('#table-{table} td[data-label=\"{label}\"]')]"
    shown: list[str] = page.run(f"{cells}.filter((each) => each.offsetParent).map((each) => each.dataset.key)")
    return shown


def test_tables_are_sorted_by_a_click(page: Page, folder: Path) -> None:
    page.open(folder / "report.html")
    click = "[...document.querySelectorAll('#table-overall th button')].find((each) => each.innerText == %r).click()"
    before = _column(page, "score")
    page.run(click % "score")
    downwards = [float(score) for score in _column(page, "score")]
    assert downwards == sorted(map(float, before), reverse=True) != [float(score) for score in before]
    page.run(click % "score")
    assert [float(score) for score in _column(page, "score")] == downwards[::-1]
    page.run(click % "method")
    assert _column(page, "method") == sorted(_column(page, "method"))
    page.run(click % "τ")
    assert _column(page, "τ")[-1] == ""  # the full cache's, which has none
    assert page.problems == []


def test_filters_leave_what_was_chosen(page: Page, folder: Path) -> None:
    page.open(folder / "report.html")
    chosen = "[...document.querySelectorAll('.chip')].find((chip) => chip.textContent.trim() == 'lookaheadkv')"
    page.run(f"{chosen}.click()")
    assert "lookaheadkv" not in _column(page, "method")
    drawn = page.run(f"{chosen}.querySelector('input').value")
    assert page.run(f"[...document.querySelectorAll('.panel .{drawn}')].every((each) => !each.getClientRects().length)")
    choose = "{ const select = document.querySelector('[name=%s]'); select.value = %r; "
    choose += "select.dispatchEvent(new Event('change', {bubbles: true})); }"
    page.run(choose % ("budget", "64"))
    assert set(_column(page, "budget")) == {"", "64"}
    page.run(choose % ("task", "qa"))
    titles = "[...document.querySelectorAll('#plot-scores .panel')].filter((each) => each.offsetParent)"
    assert page.run(f"{titles}.map((each) => each.innerText.split(String.fromCharCode(10))[0])") == ["qa, 512 tokens"]
    page.run("document.querySelector('.filters [type=reset]').click()")
    page.run("new Promise((done) => setTimeout(done, 20)).then(() => null)")
    assert len(_column(page, "method")) == 1 + 2 * len(METHODS)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_a_sample(page: Page, folder: Path, width: int) -> None:
    page.open(folder / "report.html", width)
    (link,) = page.run("[...document.querySelectorAll('.pages a')].map((each) => each.getAttribute('href'))")
    page.open(folder / link, width, ready=DRAWN)
    assert page.problems == []
    assert page.overflowing() == []
    assert page.run("document.querySelector('h1').innerText") == "niah_single, 512 tokens, needle at 5 % depth"
    assert page.run("document.querySelectorAll('.answer').length") == 1 + 2 * len(METHODS)
    assert page.run("document.querySelector('.answer .text').innerText") == "full says 4711"
    assert page.run("document.querySelector('.pane .prompt').children.length") == 60
    assert page.run("document.querySelector('a').getAttribute('href')") == "../report.html"


@pytest.mark.parametrize("width", WIDTHS)
def test_a_comparison_fits_any_window(page: Page, tmp_path: Path, width: int) -> None:
    rows = [row(name, 64, 0.5, sample=str(at)) for name in ("snapkv", "lookaheadkv") for at in range(3)]
    runs = [Run(tmp_path / f"run-{name}", rows, SETTINGS | {"adapter": f"runs/{name}"}) for name in "abc"]
    write_comparison(runs, tmp_path)
    page.open(tmp_path / "compare.html", width)
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert (page.problems, page.overflowing(), page.run(CUT_LABELS)) == ([], [], [])
    assert page.run("document.querySelector('h1').innerText") == "a against b against c"
    assert _column(page, "b - a", "score") == ["0.0", "0.0"]
    page.run("document.querySelectorAll('.chip')[0].click()")
    assert _column(page, "method", "score") == ["snapkv"]


@pytest.mark.parametrize("width", WIDTHS)
def test_inspect(page: Page, tmp_path: Path, width: int) -> None:
    """One head of two keeps the first tokens; a character of three tokens stands with the last of them."""
    kept = np.zeros((3, 2, 40), bool)
    kept[:, 0, :4] = kept[1, :, 20] = True
    tokens = ["<s>", *(f" w{number}" for number in range(1, 18)), "", "", "語", *["\n"] * 19]
    methods = {"lookaheadkv": kept, "snapkv": ~kept}
    write_inspect_page(
        tmp_path / "page.html",
        tokens,
        methods,
        "Tiny-1B: lookaheadkv at budget 4",
        {},
        {"full": "a b", "snapkv": "a c"},
    )
    page.open(tmp_path / "page.html", width, ready=DRAWN)
    assert page.problems == []
    assert page.overflowing() == []
    assert page.run("document.title") == "Tiny-1B: lookaheadkv at budget 4"
    shade = "getComputedStyle(document.querySelectorAll('.pane .prompt > span')[%d]).backgroundColor"
    assert page.run(shade % 10) == "rgba(0, 114, 178, 0)"
    weak = float(page.run(shade % 2).split()[-1].rstrip(")"))
    assert weak >= 0.2
    assert page.run(shade % 20) != page.run(shade % 10)
    assert page.run("document.getElementById('lines').innerText").split() == ["lookaheadkv", "snapkv"]
    page.run("document.getElementById('difference').click()")
    alone = [page.run(shade % (at + pane)) for pane in (0, 40) for at in (2, 5)]
    assert alone[0] == page.run(shade % 10) and float(alone[3].split()[-1].rstrip(")")) > 0.5  # w5: snapkv's alone
    page.run("document.getElementById('difference').click()")
    page.run(NOTE_THE_MAPS_LABELS)
    page.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}))")
    assert {"0", "1", "2", "layer by position", "40"} == {*page.run("written")}
    assert page.run("document.getElementById('shown').innerText") == "0 (0 to 2)"
    assert page.run(shade % 20) == "rgba(0, 114, 178, 0)"  # layer 0 keeps no part of the character
    words = "[...document.querySelectorAll('.answer .text')].map((each) => each.innerText)"
    assert page.run(words) == ["a b", "a c"]
    drawn = "[...document.querySelectorAll('canvas')].every((each) => each.width && each.getContext('2d')"
    drawn += ".getImageData(0, 0, each.width, each.height).data.some((value) => value))"
    assert page.run(drawn)


@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_text_on_shades_can_be_read(page: Page, folder: Path, scheme: str) -> None:
    page.prefer(scheme)
    page.open(next((folder / "samples").glob("*.html")), ready=DRAWN)
    contrasts = page.run(CONTRASTS)
    assert len(contrasts) > 60 and min(contrasts) >= 4.4 and max(contrasts) > 2 * min(contrasts)  # 4.5, rounded colours
    page.prefer("light")


def test_a_page_has_one_main_part_and_answers_can_be_reached_by_keys(page: Page, folder: Path) -> None:
    for path in (folder / "report.html", next((folder / "samples").glob("*.html"))):
        page.open(path)
        assert page.run("document.querySelectorAll('main').length") == 1
        assert page.run("document.querySelectorAll('.answer header').length") == 0
        texts = "[...document.querySelectorAll('.answer .text')]"
        assert page.run(f"{texts}.length && {texts}.every((text) => text.tabIndex == 0 && text.ariaLabel)")


def test_the_leaderboard_filters_and_sorts(page: Page, tmp_path: Path) -> None:
    leaderboard = runpy.run_path(str(Path(__file__).resolve().parents[3] / "docs" / "leaderboard.py"))
    path = tmp_path / "index.html"
    path.write_text(leaderboard["page"](), "utf-8")
    names = "[...document.querySelectorAll('tbody tr')].map((row) => row.cells[0].innerText)"
    losses = "[...document.querySelectorAll('tbody tr')].map((row) => parseFloat(row.cells[1].innerText))"
    for width in WIDTHS:
        page.open(path, width, ready="document.querySelectorAll('tbody tr').length")
        assert page.problems == []
    assert page.run("document.getElementById('budget').value") == "128"
    shown = page.run(losses)
    assert len(shown) > 30 and shown == sorted(shown)
    assert {"full", "lookaheadkv", "snapkv", "kvgrad"} <= set(page.run(names))
    page.run("document.querySelector('th[data-field=cost] button').click()")
    costs = page.run("[...document.querySelectorAll('tbody tr')].map((row) => parseFloat(row.cells[4].innerText))")
    assert costs == sorted(costs)
    choose = "{ const field = document.getElementById(%r); field.value = %r; field.dispatchEvent(new Event(%r)); }"
    page.run(choose % ("test", "all_ruler", "change"))
    page.run(choose % ("name", "lookahead", "input"))
    assert page.run(names) and all("lookahead" in name for name in page.run(names))


def test_a_phone_shows_the_first_columns_and_a_table_of_contents(page: Page, folder: Path) -> None:
    page.open(folder / "report.html", 400)
    headings = page.run("[...document.querySelectorAll('main > h2')].map((heading) => heading.id)")
    assert page.run("[...document.querySelectorAll('#contents a')].map((link) => link.hash.slice(1))") == headings
    cells = "[...document.querySelectorAll('#table-overall tbody tr:first-child td')]"
    shown = f"{cells}.filter((cell) => cell.offsetParent)"
    first = page.run(f"{shown}.map((cell) => cell.dataset.label)")
    assert first == ["budget", "method", "score", "excess NLL"]
    height = "document.getElementById('table-overall').offsetHeight"
    short = page.run(height)
    page.run("[...document.querySelectorAll('.sort input')].forEach((box) => box.click())")
    assert len(page.run(f"{shown}.map((cell) => cell.dataset.label)")) > 8
    assert page.run(height) > 1.5 * short
