"""Figures: rows of panels, saved as one figure or put on a page one drawing a panel, and the style of each method."""

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.markers import MarkerStyle
from matplotlib.path import Path as Outline

from keepsight.eval.results import FULL
from keepsight.files import DPI, atomic_file

Line = Literal["-", "--", "-.", ":"]


@dataclass(frozen=True)
class Style:
    """Colour, marker and line of a method, as matplotlib takes them."""

    colour: str
    marker: str
    line: Line = "-"


# The Okabe-Ito palette, which stays apart under the common colour-vision deficiencies, less its pale yellow.
_BLUE, _VERMILLION, _GREEN, _ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
_SKY, _PURPLE, _GREY = "#56B4E9", "#CC79A7", "#8A8A8A"
_INDIGO, _WINE, _TEAL, _OLIVE = "#332288", "#882255", "#44AA99", "#999933"  # Tol's muted palette, for further methods
STYLES = {
    FULL: Style("#6A6A6A", "", "--"),
    "oracle": Style(_GREEN, "D", ":"),
    "lookaheadkv": Style(_BLUE, "o"),
    "snapkv": Style(_VERMILLION, "s"),
    "streamingllm": Style(_GREY, "v"),
    "laq": Style(_PURPLE, "^"),
    "speckv": Style(_SKY, "P"),
    "dapq": Style(_ORANGE, "X"),
    "specontext": Style(_INDIGO, "h"),
    "quest": Style(_WINE, "p"),
    "exact_topk": Style(_TEAL, "D", ":"),
    "best shared": Style(_OLIVE, "d", ":"),
}
_FURTHER = ("#8C510A", "#6A3D9A", "#B2182B", "#1B7837", "#E7298A", "#B8860B", "#00838F", "#5A6B00")
_MARKERS = ("<", ">", "*", "H", "d", "8")
_LINES: tuple[Line, ...] = ("-", "-.", "--", ":")
_DASHES = {"-": "", "--": "4 2", ":": "1.5 2", "-.": "5 2 1 2"}


def label_of(method: str) -> str:
    """A method's name in plots and pages. The oracle is no upper bound: it pools, and is beaten here and there."""
    return "oracle attention" if method == "oracle" else method


def in_order(methods: Iterable[str]) -> list[str]:
    """Methods, each once: those with a style of their own first, in the order of `STYLES`."""
    named = list(STYLES)
    return sorted(set(methods), key=lambda method: (named.index(method) if method in STYLES else len(named), method))


def styles_of(methods: Iterable[str]) -> dict[str, Style]:
    """A style for each of the methods, no two alike, in the order of `in_order`.

    Those without a style of their own take the colours that are left over; once every colour is taken, another marker
    and line tell them apart.
    """
    ordered = in_order(methods)
    styles = {method: STYLES[method] for method in ordered if method in STYLES}
    taken = {style.colour for style in styles.values()}
    free = [colour for colour in (*_FURTHER, *(style.colour for style in STYLES.values())) if colour not in taken]
    colours = free + sorted(taken)
    looks = (
        Style(colour, _MARKERS[(turn + place) % len(_MARKERS)], _LINES[turn // len(_MARKERS) % len(_LINES)])
        for turn, (place, colour) in product(range(len(_MARKERS) * len(_LINES)), enumerate(colours))
    )
    return {method: styles.get(method) or next(looks) for method in ordered}


def glyph(style: Style) -> Markup:
    """A short line with the marker, for the legend of a page."""
    dashes = f'stroke-dasharray="{_DASHES[style.line]}"' if _DASHES[style.line] else ""
    line = f'<path d="M1 6H27" stroke="{style.colour}" stroke-width="1.8" {dashes}/>'
    mark = MarkerStyle(style.marker) if style.marker else None
    outline = mark.get_path().transformed(mark.get_transform()) if mark else None
    marker = f'<path d="{_path(outline)}" fill="{style.colour}"/>' if outline is not None else ""
    size = 'viewBox="0 0 28 12" width="28" height="12"'
    return Markup(f'<svg class="glyph" {size} aria-hidden="true">{line}{marker}</svg>')


def _path(outline: Outline) -> str:
    """An outline of about one unit as SVG path data, in the middle of the legend's line."""
    polygons = [np.asarray(corners, float).tolist() for corners in outline.to_polygons()]
    return "".join(f"M{' '.join(f'{14 + 7 * x:.1f},{6 - 7 * y:.1f}' for x, y in corners)}Z" for corners in polygons)


SIZE = (3.0, 2.35)
"""Width and height of one panel, in inches."""
MAX_COLUMNS = 4
FORMATS = ("png", "svg", "pdf")
TEXT, GRID = "#262626", "#d4d4d4"
_CHARACTER = 0.075
"""Inches of a legend's character."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: What stands above it.
        draw: Draws it, its axis labels included.
        task: The task it is about; empty for all.
        length: The prompt length it is about; 0 for all.
        method: The method it is about; empty for all.
        budget: The budget it is about; None for all.
    """

    title: str
    draw: Callable[[Axes], None]
    task: str = ""
    length: int = 0
    method: str = ""
    budget: int | float | None = None


@dataclass(frozen=True)
class Plot:
    """Panels that belong together.

    Attributes:
        name: File name without its ending.
        panels: In reading order.
        styles: What the legend shows; empty for none.
        columns: Panels beside each other in the saved figure.
    """

    name: str
    panels: Sequence[Panel]
    styles: Mapping[str, Style] = field(default_factory=dict)
    columns: int = MAX_COLUMNS

    def figure(self) -> Figure:
        """All panels with their titles and one legend."""
        columns = max(1, min(self.columns, len(self.panels)))
        rows = max(1, math.ceil(len(self.panels) / columns))
        width = max(SIZE[0] * columns + 0.3, 4.6)
        legend = self._legend_columns(width)
        height = SIZE[1] * rows + 0.2 + 0.2 * math.ceil(len(self.styles) / legend)
        figure = Figure(figsize=(width, height), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, panel in zip(grid, self.panels, strict=False):
            panel.draw(axes)
            axes.set_title(panel.title, fontsize=9, color=TEXT, parse_math=False)
            for artist in axes.get_children():
                artist.set_gid(None)  # names are for pages, where each panel is a drawing of its own
        for unused in grid[len(self.panels) :]:
            unused.remove()
        _share_labels(figure, columns)
        if self.styles:
            handles = [_handle(style) for style in self.styles.values()]
            labels = [label_of(method) for method in self.styles]
            look = {"frameon": False, "labelcolor": TEXT, "fontsize": 8.5, "ncols": legend}
            shown = figure.legend(handles, labels, loc="outside upper center", **look)
            for text in shown.get_texts():
                text.set_parse_math(False)  # a label may hold any character
        return figure

    def save(self, folder: Path) -> None:
        """Write the figure as PNG, SVG and PDF."""
        figure = self.figure()
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # it is the same in every format, and takes most of the time
        for kind in FORMATS:
            date = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
            with (
                atomic_file(folder / f"{self.name}.{kind}") as unfinished,
                matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": self.name}),
            ):
                figure.savefig(unfinished, format=kind, dpi=DPI, metadata=date)

    def drawings(self) -> list[Markup]:
        """Each panel as an `<svg>` element, without its title."""
        drawn = []
        for number, panel in enumerate(self.panels):
            figure = Figure(figsize=SIZE, layout="constrained")
            panel.draw(figure.subplots())
            drawn.append(Markup(as_svg(figure, salt=f"{self.name}{number}")))
        return drawn

    def _legend_columns(self, width: float) -> int:
        longest = max((len(label_of(method)) for method in self.styles), default=1)
        return max(1, min(len(self.styles), int(width / (0.55 + _CHARACTER * longest))))


def as_svg(figure: Figure, salt: str) -> str:
    """A figure as an `<svg>` element for a page: transparent, its text in the page's own colour and font.

    Args:
        figure: What to draw. Artists with a group id `NAME-...` become elements of the class `NAME`.
        salt: Makes the element's identifiers differ from those of the page's other figures.
    """
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r'<g id="(m\d+)-\w+">', r'<g class="\1">', svg)
    svg = re.sub(r' id="(figure|axes|patch|matplotlib\.axis|xtick|ytick|text|line2d|LineCollection)_\d+"', "", svg)
    return svg.replace(TEXT, "currentColor").replace(GRID, "var(--line)").replace("'DejaVu Sans'", "system-ui")


def look(axes: Axes) -> None:
    """The look of all axes."""
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(TEXT)
    axes.tick_params(labelsize=8, colors=TEXT)
    axes.xaxis.label.set(fontsize=8.5, color=TEXT)
    axes.yaxis.label.set(fontsize=8.5, color=TEXT)


def _handle(style: Style) -> Line2D:
    return Line2D([], [], color=style.colour, linestyle=style.line, marker=style.marker, markersize=4.5, linewidth=1.6)


def _share_labels(figure: Figure, columns: int) -> None:
    """A label that all panels have stands once, at the figure's edge."""
    panels = figure.axes
    if columns == 1 and len(panels) == 1:
        return
    for say, labels in (
        (figure.supxlabel, [axes.xaxis.label for axes in panels]),
        (figure.supylabel, [axes.yaxis.label for axes in panels]),
    ):
        texts = {label.get_text() for label in labels}
        if len(texts) == 1:
            say(texts.pop(), fontsize=9, color=TEXT)
            for label in labels:
                label.set_text("")
