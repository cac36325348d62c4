"""What a data folder holds: counts, lengths, duplicates and truncated answers, by source."""

import hashlib
from collections.abc import Iterable
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from keepsight.data_gen.store import TrainingSample
from keepsight.errors import printable


def stats_of(samples: Iterable[TrainingSample], max_new_tokens: int) -> pd.DataFrame:
    """A row for each sample, with the columns source, prompt and answer (tokens), duplicate and truncated (bool).

    Args:
        samples: A data folder's; one at least. A sample is a duplicate if an earlier one has its prompt.
        max_new_tokens: Longest answer allowed. Any last token of a shorter answer counts as an end token.
    """
    rows = [
        (each.source, len(each.prompt_ids), len(each.answer_ids), each.answer_ids[-1], _digest(each.prompt_ids))
        for each in samples
    ]
    frame = pd.DataFrame(rows, columns=["source", "prompt", "answer", "last", "digest"])
    ends = frame["last"][frame["answer"] < max_new_tokens]
    frame["truncated"] = (frame["answer"] >= max_new_tokens) & ~frame["last"].isin(ends)
    frame["duplicate"] = frame["digest"].duplicated()
    return frame.drop(columns=["last", "digest"])


def _digest(ids: list[int]) -> bytes:
    return hashlib.sha256(str(ids).encode()).digest()


def stats_table(frame: pd.DataFrame) -> str:
    """A table of the sources, the largest first, and of all samples; lengths as shortest / median / longest."""
    groups = sorted(frame.groupby("source"), key=lambda pair: (-len(pair[1]), str(pair[0])))
    rows = [
        (name, len(own), _span(own["prompt"]), _span(own["answer"]), own["duplicate"].sum(), own["truncated"].sum())
        for name, own in [*((printable(str(name)), own) for name, own in groups), ("all", frame)]
    ]
    columns = ["source", "samples", "prompt tokens", "answer tokens", "duplicates", "truncated"]
    return pd.DataFrame(rows, columns=columns).to_string(index=False)


def _span(lengths: Any) -> str:
    return f"{lengths.min()} / {lengths.quantile(0.5, interpolation='higher'):.0f} / {lengths.max()}"


def stats_figure(frame: pd.DataFrame) -> Figure:
    """Histograms of the lengths of prompts and answers."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for panel, name in zip(figure.subplots(1, 2), ("prompt", "answer"), strict=True):
        panel.hist(frame[name], bins=40, color="#0072B2")
        panel.set(xlabel=f"{name} tokens", ylabel="samples")
        panel.spines[["top", "right"]].set_visible(False)
    return figure
