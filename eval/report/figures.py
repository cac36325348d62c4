"""Figures: rows of panels, saved as one figure or put on a page one drawing a panel, and the style of each method."""

import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.markers import MarkerStyle
from matplotlib.text import Text
from matplotlib.transforms import ScaledTranslation

import keepsight.runtime.methods  # noqa: F401 - methods register how they are drawn
from keepsight.errors import printable
from keepsight.files import DPI, atomic_file
from keepsight.runtime import registry
from keepsight.runtime.registry import LABELS, Line, Style

SIZE = (3.0, 2.35)
"""Width and height of one panel, in inches."""
MAX_COLUMNS = 4
FORMATS = ("png", "svg", "pdf")
TEXT = "#262626"
GRID = "#d4d4d4"
_CHARACTER = 0.075
"""Inches of a legend's character."""


# The Okabe-Ito palette, which stays apart under the common colour-vision deficiencies, and Tol's muted palette.
STYLES = {**registry.STYLES, "best shared": Style("#AA4499", "d", ":")}
_FURTHER = ("#8C510A", "#6A3D9A", "#B2182B", "#1B7837", "#E7298A", "#B8860B", "#00838F", "#5A6B00")
_MARKERS = ("<", ">", "*", "H", "d", "8")
_NO_DATE: dict[str, dict[str, Any]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
"""Metadata of each format without its date, so that a figure drawn again is the same file."""
_MATPLOTLIB_ID = re.compile(r' id="(figure|axes|patch|matplotlib\.axis|xtick|ytick|text|line2d|LineCollection)_\d+"')
_DASHES: dict[Line, str] = {"-": "", "-.": "5 2 1 2", "--": "4 2", ":": "1.5 2"}


def label_of(method: str) -> str:
    """A method's name in plots and pages."""
    return LABELS.get(method, printable(method))


def styles_of(methods: Iterable[str]) -> dict[str, Style]:
    """A style for each of the methods, no two alike, by name.

    Those without a style of their own take the colours that are left over; once every colour is taken, another marker
    and line tell them apart.
    """
    names = sorted(set(methods))
    used_colours = set()
    for name in names:
        if name in STYLES:
            used_colours.add(STYLES[name].colour)
    free_colours = []
    for colour in (*_FURTHER, *(style.colour for style in STYLES.values())):
        if colour not in used_colours:
            free_colours.append(colour)
    further_styles = _further_styles([*free_colours, *sorted(used_colours)])
    styles = {}
    for name in names:
        styles[name] = STYLES[name] if name in STYLES else next(further_styles)
    return styles


def _further_styles(colours: Sequence[str]) -> Iterator[Style]:
    """A style of each colour, then again with another marker, and once these are used up with another line."""
    lines = list(_DASHES)
    for turn in range(len(_MARKERS) * len(lines)):
        line = lines[turn // len(_MARKERS) % len(lines)]
        for index, colour in enumerate(colours):
            yield Style(colour, _MARKERS[(turn + index) % len(_MARKERS)], line)


def glyph(style: Style) -> Markup:
    """A short line with the marker, for the legend of a page."""
    dashes = f'stroke-dasharray="{_DASHES[style.line]}"' if _DASHES[style.line] else ""
    paths = f'<path d="M1 6H27" stroke="{style.colour}" stroke-width="1.8" {dashes}/>'
    if style.marker:
        marker = MarkerStyle(style.marker)
        outline = ""
        for polygon in marker.get_path().transformed(marker.get_transform()).to_polygons():
            corners = " ".join(f"{14 + 7 * x:.1f},{6 - 7 * y:.1f}" for x, y in np.asarray(polygon, float).tolist())
            outline += f"M{corners}Z"
        paths += f'<path d="{outline}" fill="{style.colour}"/>'
    size = 'viewBox="0 0 28 12" width="28" height="12"'
    return Markup(f'<svg class="glyph" {size} aria-hidden="true">{paths}</svg>')


class Panel(NamedTuple):
    """One pair of axes: its title, a function that draws it with its labels, and what it is about (empty for all)."""

    title: str
    draw: Callable[[Axes], None]
    task: str = ""
    length: int = 0
    method: str = ""
    budget: int | float | None = None


@dataclass(frozen=True)
class Plot:
    """Several panels: one figure to save, or one drawing a panel on a page, where they can fill any width.

    `styles` are those of the legend, none for no legend; `columns` panels stand beside each other in the figure.
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
        longest = max(map(len, map(label_of, self.styles)), default=1)
        legend_columns = max(1, min(len(self.styles), int(width / (0.55 + _CHARACTER * longest))))
        height = SIZE[1] * rows + 0.2 + 0.2 * math.ceil(len(self.styles) / legend_columns)
        figure = Figure(figsize=(width, height), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, panel in zip(grid, self.panels, strict=False):
            panel.draw(axes)
            axes.set_title(printable(panel.title), fontsize=9, color=TEXT, parse_math=False)
            for artist in axes.get_children():
                artist.set_gid(None)  # names are for pages, where each panel is a drawing of its own
        for unused in grid[len(self.panels) :]:
            unused.remove()
        if len(figure.axes) > 1:
            _share_labels(figure)
        if self.styles:
            self._add_legend(figure, legend_columns)
        return figure

    def _add_legend(self, figure: Figure, columns: int) -> None:
        handles = []
        labels = []
        for method, style in self.styles.items():
            look_of_line: dict[str, Any] = {"color": style.colour, "ls": style.line, "marker": style.marker}
            handles.append(Line2D([], [], markersize=4.5, linewidth=1.6, **look_of_line))
            labels.append(label_of(method))
        legend = figure.legend(
            handles,
            labels,
            loc="outside upper center",
            frameon=False,
            labelcolor=TEXT,
            fontsize=8.5,
            ncols=columns,
        )
        for text in legend.get_texts():
            text.set_parse_math(False)  # a label may hold any character

    def save(self, folder: Path) -> None:
        """Write the figure as PNG, SVG and PDF."""
        figure = self.figure()
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # it is the same in every format, and takes most of the time
        for kind in FORMATS:
            with atomic_file(folder / f"{self.name}.{kind}") as unfinished, _svg(self.name):
                figure.savefig(unfinished, format=kind, dpi=DPI, metadata=_NO_DATE[kind])

    def drawings(self) -> list[Markup]:
        """Each panel as an `<svg>` element without its title, transparent, in the page's own text colour and font.

        Artists with a group id `mNUMBER-...` become elements of the class `mNUMBER`.
        """
        drawings = []
        for number, panel in enumerate(self.panels):
            figure = Figure(figsize=SIZE, layout="constrained")
            panel.draw(figure.subplots())
            text = io.StringIO()
            with _svg(f"{self.name}{number}"):  # the identifiers differ from those of the page's other figures
                figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
            svg = text.getvalue()
            svg = svg[svg.index("<svg") :].strip()
            svg = re.sub(r'<g id="(m\d+)-\w+">', r'<g class="\1">', svg)
            svg = _MATPLOTLIB_ID.sub("", svg)
            svg = svg.replace(TEXT, "currentColor").replace(GRID, "var(--line)").replace("'DejaVu Sans'", "system-ui")
            drawings.append(Markup(svg))
        return drawings


def look(axes: Axes) -> None:
    """Set the look that all axes share."""
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(TEXT)
    axes.tick_params(labelsize=8, colors=TEXT)
    axes.xaxis.label.set(fontsize=8.5, color=TEXT)
    axes.yaxis.label.set(fontsize=8.5, color=TEXT)


def mark_break(axes: Axes, value: float) -> None:
    """Mark a value of the y-axis with two strokes: its scale changes there, or leaves out zero."""
    stroke: dict[str, Any] = {"marker": [(-1, -0.4), (1, 0.4)], "markersize": 8, "linestyle": ""}
    for shift in (-1.5, 1.5):
        shifted = axes.get_yaxis_transform() + ScaledTranslation(0, shift / 72, axes.figure.dpi_scale_trans)
        axes.plot([0], [value], transform=shifted, zorder=5, color=TEXT, clip_on=False, **stroke)


def _svg(salt: str) -> AbstractContextManager[None]:
    return matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt})


def _share_labels(figure: Figure) -> None:
    """Show a label that all panels have once, at the figure's edge."""
    x_labels = []
    y_labels = []
    for axes in figure.axes:
        x_labels.append(axes.xaxis.label)
        y_labels.append(axes.yaxis.label)
    _share_label(x_labels, figure.supxlabel)
    _share_label(y_labels, figure.supylabel)


def _share_label(labels: Sequence[Text], set_label: Callable[..., object]) -> None:
    """Set a text that all labels have on the figure in their place."""
    texts = {label.get_text() for label in labels}
    if len(texts) == 1:
        set_label(texts.pop(), fontsize=9, color=TEXT)
        for label in labels:
            label.set_text("")
