"""What a data folder holds: counts, lengths, duplicates and truncated answers, by source."""

from collections.abc import Sequence
from dataclasses import dataclass

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


def stats_of(samples: Sequence[TrainingSample], max_new_tokens: int) -> dict[str, SourceStats]:
    """Statistics by source, the largest first, and of all samples under `all`, last.

    Args:
        samples: A data folder's; one at least.
        max_new_tokens: Longest answer allowed. The tokens that end shorter answers are those that end an answer.
    """
    ends = {sample.answer_ids[-1] for sample in samples if len(sample.answer_ids) < max_new_tokens}
    first: dict[tuple[int, ...], int] = {}
    for sample in samples:
        first.setdefault(tuple(sample.prompt_ids), sample.index)

    def stats(own: Sequence[TrainingSample]) -> SourceStats:
        return SourceStats(
            tuple(sorted(len(sample.prompt_ids) for sample in own)),
            tuple(sorted(len(sample.answer_ids) for sample in own)),
            sum(first[tuple(sample.prompt_ids)] != sample.index for sample in own),
            sum(len(each.answer_ids) >= max_new_tokens and each.answer_ids[-1] not in ends for each in own),
        )

    by_source: dict[str, list[TrainingSample]] = {}
    for sample in samples:
        by_source.setdefault(sample.source, []).append(sample)
    ordered = sorted(by_source.items(), key=lambda pair: (-len(pair[1]), pair[0]))
    return {source: stats(own) for source, own in ordered} | {ALL: stats(samples)}


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
