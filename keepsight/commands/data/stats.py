"""keepsight data stats: what a data folder holds, as a table and a plot.

    keepsight data stats runs/data
    keepsight data stats runs/data out=runs/lengths.png

For each source the number of samples, the shortest, median and longest prompt and answer in tokens, the samples whose
prompt an earlier one has, and the answers that were cut off at the longest length allowed.
"""

from dataclasses import dataclass
from pathlib import Path

from keepsight.data_gen.stats import stats_figure, stats_of, stats_table
from keepsight.data_gen.store import finished_manifest, finished_samples
from keepsight.files import write_png

POSITIONAL = ("folder",)


@dataclass
class Config:
    """Keys of `keepsight data stats`.

    Attributes:
        folder: Made by `keepsight data`.
        out: The plot, a PNG; stats.png in the folder by default.
    """

    folder: str = "???"
    out: str | None = None


def run(config: Config) -> None:
    """Print the table and draw the plot."""
    folder = Path(config.folder)
    manifest = finished_manifest(folder)
    stats = stats_of(finished_samples(folder, manifest), manifest.settings.max_new_tokens)
    print(stats_table(stats))
    out = Path(config.out) if config.out else folder / "stats.png"
    write_png(out, stats_figure(stats))
    print(f"plot: {out}")
