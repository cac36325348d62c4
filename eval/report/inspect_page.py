"""The page of `keepsight inspect`: which tokens of a prompt each layer's heads kept, two methods side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepsight.eval.kept_tokens import encode_counts
from keepsight.eval.report.examples import Answer, answers_of
from keepsight.eval.report.html import flatten, render_page
from keepsight.eval.report.styles import styles_of
from keepsight.eval.results import FULL
from keepsight.files import write_text


@dataclass(frozen=True)
class KeptCounts:
    """What one method kept.

    Attributes:
        name: As the page shows it.
        colour: `#rrggbb`.
        counts: How many heads kept each token, as `encode_counts` gives it.
    """

    name: str
    colour: str
    counts: str


def write_inspect_page(
    path: Path,
    tokens: list[str],
    kept: dict[str, NDArray[np.bool_]],
    title: str,
    settings: dict[str, Any],
    answers: Mapping[str, str] | None = None,
) -> None:
    """Write one HTML file that shades every token of a prompt by how many heads kept it.

    Args:
        path: The file to write.
        tokens: Text of each prompt token, N of them; empty for a token that is only a part of a character, whose text
            stands with the last of its tokens.
        kept: For each method a bool array [layers, kv_heads, N]; the first two methods are shown at the start, the
            others can be chosen.
        title: Heading of the page.
        settings: What was run; shown below the page.
        answers: For each method, and for the full cache first, what it answered.

    Raises:
        ValueError: `kept` is empty, or its arrays do not all have the shape [layers, kv_heads, N].
    """
    shape = _shape(kept, len(tokens))
    styles = styles_of([*kept, FULL])
    rows = [{"method": method, "answer": answer} for method, answer in (answers or {}).items()]
    page = render_kept_page(
        title=title,
        subtitle="",
        tokens=tokens,
        shape=shape,
        kept=[KeptCounts(name, styles[name].colour, encode_counts(array)) for name, array in kept.items()],
        facts={},
        answers=[(each.row["method"], styles[each.row["method"]].colour, each) for each in answers_of(rows)],
        back="",
        settings=settings,
    )
    write_text(path, page)


def render_kept_page(
    *,
    title: str,
    subtitle: str,
    tokens: Sequence[str],
    shape: tuple[int, int],
    kept: Sequence[KeptCounts],
    facts: Mapping[str, str],
    answers: Sequence[tuple[str, str, Answer]],
    back: str,
    settings: Mapping[str, Any],
) -> str:
    """The page as text.

    Args:
        title: Heading.
        subtitle: The line below it; empty for none.
        tokens: As for `write_inspect_page`.
        shape: Number of layers and of KV heads.
        kept: What each method kept.
        facts: About the prompt, by name.
        answers: Name, colour and answer of each method.
        back: A page to go back to; empty for none.
        settings: What was run.
    """
    layers, heads = shape
    data = {"layers": layers, "heads": heads, "tokens": tokens, "methods": [asdict(each) for each in kept]}
    return render_page(
        "inspect.html.j2",
        title=title,
        subtitle=subtitle,
        data=data,
        facts=facts,
        answers=answers,
        back=back,
        settings=flatten(settings),
    )


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
