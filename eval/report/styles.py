"""How each method is named and drawn, the same in every plot and page of a run."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
from markupsafe import Markup
from matplotlib.markers import MarkerStyle
from matplotlib.path import Path as Outline

from keepsight.eval.results import FULL

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
