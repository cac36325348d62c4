"""keepsight compare: evaluations side by side, with paired differences from the first.

    keepsight compare runs/adapter-a runs/adapter-b
    keepsight compare runs/seen runs/unseen 'allow=[samples]' out=runs/seen-unseen

Rows of one task, length, method and budget stand side by side. Where all runs have the same samples, differences are
paired: their 95 % intervals come from the samples' own differences. Runs of different targets or different samples are
refused unless allow= says otherwise; then only what all have is compared, or the means alone where they have no sample
in common. `out` gets compare.html, plots/ and tables/.
"""

from dataclasses import dataclass, field
from pathlib import Path

from keepsight.commands.config import Recipe
from keepsight.errors import UserError
from keepsight.eval.report.comparison import write_comparison
from keepsight.eval.runs import MAY_DIFFER, comparable, read_run

POSITIONAL_LIST = "runs"


@dataclass
class Config(Recipe):
    """Keys of `keepsight compare`.

    Attributes:
        runs: Folders that keepsight eval has written, at least two.
        allow: What may differ: targets, samples.
        out: Folder for the page.
    """

    runs: list[str] = field(default_factory=list)
    allow: list[str] = field(default_factory=list)
    out: str = "runs/compare"


def run(config: Config) -> None:
    """Print a table for each measure, and write the page."""
    if len(config.runs) < 2:
        raise UserError("compare needs two folders at least: keepsight compare runs/a runs/b")
    if len(set(config.runs)) < len(config.runs):
        raise UserError(f"runs={config.runs}: a folder is named twice")
    unknown = [each for each in config.allow if each not in MAY_DIFFER]
    if unknown:
        raise UserError(f"allow={config.allow}: {unknown[0]!r} is unknown; choose from {', '.join(MAY_DIFFER)}")
    runs = comparable([read_run(folder) for folder in config.runs], config.allow)
    tables = write_comparison(runs, Path(config.out))
    print("\n".join([*(table.markdown() for table in tables), f"report: {Path(config.out) / 'compare.html'}"]))
