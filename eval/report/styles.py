"""How each method is named and drawn, the same in every plot and page."""

import zlib
from dataclasses import dataclass

from keepsight.eval.results import FULL


@dataclass(frozen=True)
class Style:
    """Colour, marker and line of a method, as matplotlib takes them."""

    colour: str
    marker: str
    line: str = "-"


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
_COLOURS, _MARKERS = (_PURPLE, _SKY, _ORANGE, _GREY), ("<", ">", "h", "*", "p", "d", "H")


def label_of(method: str) -> str:
    """A method's name in plots and pages. The oracle is no upper bound: it pools, and is beaten here and there."""
    return "oracle attention" if method == "oracle" else method


def style_of(method: str) -> Style:
    """The fixed style of a method; one that has no style of its own gets one by a checksum of its name."""
    digest = zlib.crc32(method.encode())
    return STYLES.get(method) or Style(_COLOURS[digest % len(_COLOURS)], _MARKERS[digest % len(_MARKERS)], "-.")
