"""How each method is named and drawn, the same in every plot and page of a run."""

from collections.abc import Iterable
from itertools import product

import numpy as np
from markupsafe import Markup
from matplotlib.markers import MarkerStyle
from matplotlib.path import Path as Outline

import keepsight.runtime.methods  # noqa: F401 - methods register how they are drawn
from keepsight.runtime import registry
from keepsight.runtime.registry import LABELS, PLACES, Line, Style

# The Okabe-Ito palette, which stays apart under the common colour-vision deficiencies, and Tol's muted palette.
STYLES = {**registry.STYLES, "best shared": Style("#999933", "d", ":")}
_FURTHER = ("#8C510A", "#6A3D9A", "#B2182B", "#1B7837", "#E7298A", "#B8860B", "#00838F", "#5A6B00")
_MARKERS = ("<", ">", "*", "H", "d", "8")
_LINES: tuple[Line, ...] = ("-", "-.", "--", ":")
_DASHES = {"-": "", "--": "4 2", ":": "1.5 2", "-.": "5 2 1 2"}


def label_of(method: str) -> str:
    """A method's name in plots and pages."""
    return LABELS.get(method, method)


def in_order(methods: Iterable[str]) -> list[str]:
    """Methods, each once: those that have a place first, the others by name."""
    return sorted(set(methods), key=lambda method: (PLACES.get(method, len(PLACES)), method))


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
