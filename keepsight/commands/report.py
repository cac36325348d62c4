"""keepsight report: the page, plots and tables of an evaluation again, or of several as one.

    keepsight report runs/eval
    keepsight report runs/ruler runs/longbench out=runs/report

Several runs are shown as one where they have the same target and no sample and method in common, such as tasks or
methods that were run apart; `keepsight compare` sets runs side by side. `out` gets report.html, which needs nothing
beside it; samples/ with a page for each sample whose kept tokens were stored; plots/ as PNG, SVG and PDF; tables/ as
Markdown, LaTeX and CSV; and summary.csv.
"""

from dataclasses import dataclass, field
from pathlib import Path

from keepsight.commands.config import Recipe, at_least_one
from keepsight.eval.report.report import write_outputs
from keepsight.eval.runs import parts_of_one, read_run

POSITIONAL_LIST = "runs"


@dataclass
class Config(Recipe):
    """Keys of `keepsight report`.

    Attributes:
        runs: Folders that keepsight eval has written.
        out: Folder for the page; by default that of the run, or runs/report for several.
    """

    runs: list[str] = field(default_factory=list)
    out: str | None = None


def run(config: Config) -> None:
    """Write everything, and say where."""
    at_least_one(config, "runs")
    runs = parts_of_one([read_run(folder) for folder in config.runs])
    out = Path(config.out or (config.runs[0] if len(runs) == 1 else "runs/report"))
    write_outputs(runs, out)
    print(f"report: {out / 'report.html'}")
