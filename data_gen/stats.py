"""What a data folder holds: counts, lengths, duplicates and truncated answers, by source."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from matplotlib.figure import Figure

from keepsight.data_gen.shards import TrainingSample

ALL = "all"
_COLUMNS = ("source", "samples", "prompt tokens", "answer tokens", "duplicates", "truncated")


@dataclass(frozen=True)
class SourceStats:
    """Of the samples of one source.

    Attributes:
        prompts: Their prompts' tokens, ascending.
        answers: Their answers' tokens, ascending.
        duplicates: Samples whose prompt an earlier one has, of whatever source.
        truncated: Answers that reached the longest length allowed before they ended.
    """

    prompts: tuple[int, ...]
    answers: tuple[int, ...]
    duplicates: int
    truncated: int


class _Counted(NamedTuple):
    """What counts of a sample."""

    prompt: int
    answer: int
    last: int
    is_duplicate: bool


def stats_of(samples: Iterable[TrainingSample], max_new_tokens: int) -> dict[str, SourceStats]:
    """Statistics by source, the largest first, and of all samples under `all`, last.

    Args:
        samples: A data folder's; one at least.
        max_new_tokens: Longest answer allowed. The tokens that end shorter answers are those that end an answer.
    """
    by_source, prompts = defaultdict[str, list[_Counted]](list), set[bytes]()
    for sample in samples:
        prompt = hashlib.sha256(str(sample.prompt_ids).encode()).digest()
        lengths = len(sample.prompt_ids), len(sample.answer_ids)
        by_source[sample.source].append(_Counted(*lengths, sample.answer_ids[-1], prompt in prompts))
        prompts.add(prompt)
    every = [*chain.from_iterable(by_source.values())]
    ends = {each.last for each in every if each.answer < max_new_tokens}

    def stats(own: Sequence[_Counted]) -> SourceStats:
        return SourceStats(
            tuple(sorted(each.prompt for each in own)),
            tuple(sorted(each.answer for each in own)),
            sum(each.is_duplicate for each in own),
            sum(each.answer >= max_new_tokens and each.last not in ends for each in own),
        )

    ordered = sorted(by_source.items(), key=lambda pair: (-len(pair[1]), pair[0]))
    return {source: stats(own) for source, own in ordered} | {ALL: stats(every)}


def stats_table(stats: dict[str, SourceStats]) -> str:
    """A table in columns; lengths as shortest / median / longest."""
    rows = [_COLUMNS, *((source, *_cells(own)) for source, own in stats.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _cells(own: SourceStats) -> tuple[str, ...]:
    spans = (f"{each[0]} / {each[len(each) // 2]} / {each[-1]}" for each in (own.prompts, own.answers))
    return (str(len(own.prompts)), *spans, str(own.duplicates), str(own.truncated))


def stats_figure(stats: dict[str, SourceStats]) -> Figure:
    """Histograms of the lengths of prompts and answers."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, lengths, label in zip(
        panels, (stats[ALL].prompts, stats[ALL].answers), ("prompt", "answer"), strict=True
    ):
        panel.hist(lengths, bins=40, color="#0072B2")
        panel.set(xlabel=f"{label} tokens", ylabel="samples")
        panel.spines[["top", "right"]].set_visible(False)
    return figure
