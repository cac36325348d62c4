"""The pages in a real browser: no complaint, nothing cut off, and what can be clicked works."""

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keepsight.eval.kept_tokens import encode_counts, path_of
from keepsight.eval.record import ResultRow
from keepsight.eval.report.pages import write_comparison, write_inspect_page, write_sample_pages
from keepsight.eval.results import Run
from keepsight.files import write_json
from tests.browser import Page, browser
from tests.eval.report.results import row, write_page

WIDTHS = (1300, 400)
DRAWN = "document.getElementById('lines').innerText"
"""True once a page of kept tokens has drawn its charts."""
CUT_LABELS = """
[...document.querySelectorAll(".panel svg text")].filter((label) => {
  const inner = label.getBoundingClientRect();
  const outer = label.closest("svg").getBoundingClientRect();
  return inner.left < outer.left - 2 || inner.right > outer.right + 2 || inner.top < outer.top - 2
    || inner.bottom > outer.bottom + 2;
}).map((label) => label.textContent)
"""
CLIPPED = """
[...document.querySelectorAll("header pre")].filter(
  (command) => command.scrollWidth > command.clientWidth || command.scrollHeight > command.clientHeight).length
"""
NOTE_THE_MAPS_LABELS = """
{
  window.written = [];
  const write = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...position) {
    if (this.canvas.className === "map") written.push(String(text));
    write.call(this, text, ...position);
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
BUDGETS = (64, 128)
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
    folder = tmp_path_factory.mktemp("run")
    rows: list[ResultRow] = []
    for task, length in (("niah_single", 512), ("niah_single", 1024), ("qa", 512)):
        for sample in range(3):
            key = {"task": task, "length": length, "sample": f"s{sample}"}
            digest = f"{task}{length}{sample}"
            rows.append(row("full", None, 1.0, sample_digest=digest, **key))
            for index, method in enumerate(METHODS):
                for budget in BUDGETS:
                    rows.append(row(method, budget, 0.1 * index, sample_digest=digest, **key))
    write_json(path_of(folder, rows[0]), kept_tokens())
    (folder / "plots").mkdir()
    (folder / "tables").mkdir()
    runs = [Run(folder, rows, SETTINGS)]
    write_page(runs, folder, write_sample_pages(runs, folder / "samples"))
    return folder


def kept_tokens() -> dict[str, Any]:
    """Of 60 tokens, at random those that each method keeps at each budget."""
    generator = np.random.default_rng(0)
    counts: dict[str, str] = {}
    for method in METHODS:
        for budget in BUDGETS:
            kept = generator.random((4, 2, 60)) < budget / 256
            counts[f"{method} {budget}"] = encode_counts(kept)
    tokens = ["<|im_start|>", *(f" word{number}" for number in range(58)), "\n"]
    return {"tokens": tokens, "layers": 4, "heads": 2, "counts": counts}


@pytest.mark.parametrize("width", WIDTHS)
def test_the_report_fits_any_window(page: Page, folder: Path, width: int) -> None:
    page.open(folder / "report.html", width)
    page.run("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    assert page.problems == []
    assert page.overflowing() == []
    scrolled = "[...document.querySelectorAll('.tall')].map((table) => table.scrollHeight > table.clientHeight + 1)"
    assert page.run(scrolled) == [width == 1300]  # a phone scrolls the page alone
    assert page.run("document.title") == "KV-cache eviction on Tiny-1B · float32, not quantized · mine · 2026-11-22"
    facts = page.run("document.querySelector('header dl').innerText")
    for fact in ("org/Tiny-1B (0123456789ab)", "runs/mine (fedcba987654)", "2026-11-22"):
        assert fact in facts
    command = page.run("document.querySelector('header pre').innerText")
    assert command.split() == SETTINGS["command"].split()
    assert page.run(CLIPPED) == 0
    assert page.run(CUT_LABELS) == []
    panel_widths = page.run("[...document.querySelectorAll('.panel svg')].map((panel) => panel.clientWidth)")
    assert min(panel_widths) >= 240
    assert max(panel_widths) <= 400
    agreements = "[...document.querySelectorAll('#table-overall [data-label=\"top-1 agreement\"]')]"
    page.run("document.querySelectorAll('.sort input').forEach((box) => { if (!box.checked) box.click(); })")
    assert page.run(f"{agreements}.filter((cell) => cell.offsetWidth).length") == 1 + 2 * len(METHODS)
    assert page.overflowing() == []


def _column(page: Page, label: str, table: str = "overall") -> list[str]:
    cells = f"[...document.querySelectorAll('#table-{table} td[data-label=\"{label}\"]')]"
    shown: list[str] = page.run(f"{cells}.filter((cell) => cell.offsetParent).map((cell) => cell.dataset.key)")
    return shown


def _scores(page: Page) -> list[float]:
    return [float(score) for score in _column(page, "score")]


def test_tables_are_sorted_by_a_click(page: Page, folder: Path) -> None:
    page.open(folder / "report.html")
    buttons = "[...document.querySelectorAll('#table-overall th button')]"
    click = f"{buttons}.find((button) => button.innerText == %r).click()"
    unsorted = _scores(page)
    downwards = sorted(unsorted, reverse=True)
    assert unsorted != downwards
    page.run(click % "score")
    assert _scores(page) == downwards
    page.run(click % "score")
    assert _scores(page) == downwards[::-1]
    page.run(click % "method")
    methods = _column(page, "method")
    assert methods == sorted(methods)
    page.run(click % "τ")
    assert _column(page, "τ")[-1] == ""  # the full cache's, which has none
    assert page.problems == []


def test_filters_leave_what_was_chosen(page: Page, folder: Path) -> None:
    page.open(folder / "report.html")
    chip = "[...document.querySelectorAll('.chip')].find((chip) => chip.textContent.trim() == 'lookaheadkv')"
    page.run(f"{chip}.click()")
    assert "lookaheadkv" not in _column(page, "method")
    line = page.run(f"{chip}.querySelector('input').value")
    assert page.run(f"[...document.querySelectorAll('.panel .{line}')].every((line) => !line.getClientRects().length)")
    choose = "{ const select = document.querySelector('[name=%s]'); select.value = %r; "
    choose += "select.dispatchEvent(new Event('change', {bubbles: true})); }"
    page.run(choose % ("budget", "64"))
    assert set(_column(page, "budget")) == {"", "64"}
    page.run(choose % ("task", "qa"))
    panels = "[...document.querySelectorAll('#plot-scores .panel')].filter((panel) => panel.offsetParent)"
    titles = page.run(f"{panels}.map((panel) => panel.innerText.split(String.fromCharCode(10))[0])")
    assert titles == ["qa, 512 tokens"]
    page.run("document.querySelector('.filters [type=reset]').click()")
    page.run("new Promise((done) => setTimeout(done, 20)).then(() => null)")
    assert len(_column(page, "method")) == 1 + 2 * len(METHODS)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_a_sample(page: Page, folder: Path, width: int) -> None:
    page.open(folder / "report.html", width)
    (link,) = page.run("[...document.querySelectorAll('.pages a')].map((link) => link.getAttribute('href'))")
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
    rows: list[ResultRow] = []
    for method in ("snapkv", "lookaheadkv"):
        rows += [row(method, 64, 0.5, sample=str(sample)) for sample in range(3)]
    runs = [Run(tmp_path / f"run-{name}", rows, SETTINGS | {"adapter": f"runs/{name}"}) for name in "abc"]
    write_comparison(runs, tmp_path)
    page.open(tmp_path / "compare.html", width)
    page.run("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    assert page.problems == []
    assert page.overflowing() == []
    assert page.run(CUT_LABELS) == []
    assert page.run("document.querySelector('h1').innerText") == "a against b against c"
    assert _column(page, "b - a", "score") == ["0.0", "0.0"]
    page.run("document.querySelectorAll('.chip')[0].click()")
    assert _column(page, "method", "score") == ["snapkv"]


@pytest.mark.parametrize("width", WIDTHS)
def test_inspect(page: Page, tmp_path: Path, width: int) -> None:
    """One head of two keeps the first tokens; a character of three tokens stands with the last of them."""
    kept = np.zeros((3, 2, 40), bool)
    kept[:, 0, :4] = True
    kept[1, :, 20] = True
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
    assert _shade(page, 10) == UNSHADED
    assert _opacity(_shade(page, 2)) >= 0.2
    assert _shade(page, 20) != UNSHADED
    assert page.run("document.getElementById('lines').innerText").split() == ["lookaheadkv", "snapkv"]
    page.run("document.getElementById('difference').click()")
    assert _shade(page, 2) == _shade(page, 10)
    assert _opacity(_shade(page, 40 + 5)) > 0.5  # w5 in snapkv's pane, which alone keeps it
    page.run("document.getElementById('difference').click()")
    page.run(NOTE_THE_MAPS_LABELS)
    page.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}))")
    assert set(page.run("written")) == {"0", "1", "2", "layer by position", "40"}
    assert page.run("document.getElementById('shown').innerText") == "0 (0 to 2)"
    assert _shade(page, 20) == UNSHADED  # layer 0 keeps no part of the character
    answers = page.run("[...document.querySelectorAll('.answer .text')].map((answer) => answer.innerText)")
    assert answers == ["a b", "a c"]
    drawn = "[...document.querySelectorAll('canvas')].every((canvas) => canvas.width && canvas.getContext('2d')"
    drawn += ".getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value))"
    assert page.run(drawn)


UNSHADED = "rgba(0, 114, 178, 0)"


def _shade(page: Page, token: int) -> str:
    """The colour behind a token; the second method's pane has tokens 40 to 79."""
    shade: str = page.run(
        f"getComputedStyle(document.querySelectorAll('.pane .prompt > span')[{token}]).backgroundColor"
    )
    return shade


def _opacity(colour: str) -> float:
    """Of `rgba(R, G, B, OPACITY)`."""
    return float(colour.split()[-1].rstrip(")"))


@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_text_on_shades_can_be_read(page: Page, folder: Path, scheme: str) -> None:
    page.prefer(scheme)
    page.open(next((folder / "samples").glob("*.html")), ready=DRAWN)
    contrasts = page.run(CONTRASTS)
    assert len(contrasts) > 60
    assert min(contrasts) >= 4.4  # 4.5, with rounded colours
    assert max(contrasts) > 2 * min(contrasts)
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
    shown_losses = page.run(losses)
    assert len(shown_losses) > 30
    assert shown_losses == sorted(shown_losses)
    assert {"full", "lookaheadkv", "snapkv", "kvgrad"} <= set(page.run(names))
    page.run("document.querySelector('th[data-field=cost] button').click()")
    costs = page.run("[...document.querySelectorAll('tbody tr')].map((row) => parseFloat(row.cells[4].innerText))")
    assert costs == sorted(costs)
    choose = "{ const field = document.getElementById(%r); field.value = %r; field.dispatchEvent(new Event(%r)); }"
    page.run(choose % ("test", "all_ruler", "change"))
    page.run(choose % ("name", "lookahead", "input"))
    filtered = page.run(names)
    assert filtered
    for name in filtered:
        assert "lookahead" in name


def test_a_phone_shows_the_first_columns_and_a_table_of_contents(page: Page, folder: Path) -> None:
    page.open(folder / "report.html", 400)
    headings = page.run("[...document.querySelectorAll('main > h2')].map((heading) => heading.id)")
    assert page.run("[...document.querySelectorAll('#contents a')].map((link) => link.hash.slice(1))") == headings
    cells = "[...document.querySelectorAll('#table-overall tbody tr:first-child td')]"
    shown_columns = f"{cells}.filter((cell) => cell.offsetParent).map((cell) => cell.dataset.label)"
    assert page.run(shown_columns) == ["budget", "method", "score", "excess NLL"]
    height = "document.getElementById('table-overall').offsetHeight"
    height_of_four_columns = page.run(height)
    page.run("[...document.querySelectorAll('.sort input')].forEach((box) => box.click())")
    assert len(page.run(shown_columns)) > 8
    assert page.run(height) > 1.5 * height_of_four_columns
