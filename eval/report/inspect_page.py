"""The page of `keepsight inspect`: which tokens of a prompt each layer's heads kept, two methods side by side."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepsight.eval.report.html import flatten, render_page
from keepsight.eval.report.styles import style_of
from keepsight.files import write_text


def write_inspect_page(
    path: Path, tokens: list[str], kept: dict[str, NDArray[np.bool_]], title: str, settings: dict[str, Any]
) -> None:
    """Write one HTML file that shades every token of a prompt by how many heads kept it.

    Args:
        path: The file to write.
        tokens: Text of each prompt token, N of them, as `tokenizer.decode([id])` gives it.
        kept: For each method a bool array [layers, kv_heads, N]; the first two methods are shown at the start, the
            others can be chosen.
        title: Heading of the page.
        settings: What was run; shown below the page.

    Raises:
        ValueError: `kept` is empty, or its arrays do not all have the shape [layers, kv_heads, N].
    """
    layers, heads = _shape(kept, len(tokens))
    methods = [
        {"name": name, "colour": style_of(name).colour, "counts": encode_counts(array)} for name, array in kept.items()
    ]
    data = {"layers": layers, "heads": heads, "tokens": tokens, "methods": methods}
    page = render_page("inspect.html.j2", title=title, data=data, settings=flatten(settings))
    write_text(path, page)


def encode_counts(kept: NDArray[np.bool_]) -> str:
    """How many heads kept each token, [layers, kv_heads, N] -> base64 of uint8 [layers, N] in row-major order."""
    return base64.b64encode(kept.sum(axis=1, dtype=np.uint8).tobytes()).decode("ascii")


def _shape(kept: dict[str, NDArray[np.bool_]], length: int) -> tuple[int, int]:
    """Layers and KV heads, the same for every method."""
    if not kept:
        raise ValueError("kept: at least one method is needed")
    layers, heads = next(iter(kept.values())).shape[:2]
    for name, array in kept.items():
        if array.shape != (layers, heads, length):
            raise ValueError(f"kept[{name!r}]: shape {array.shape}, expected {(layers, heads, length)}")
    if heads > np.iinfo(np.uint8).max:
        raise ValueError(f"kept: {heads} KV heads, at most 255 can be shown")
    return layers, heads
