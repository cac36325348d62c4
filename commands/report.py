"""keepsight report, compare and push: pages of finished evaluations, and the upload of an artifact."""

from pathlib import Path

from keepsight.commands.config import Compare, Push, Report
from keepsight.errors import UserError, printable
from keepsight.eval.report.pages import verdict_of, write_comparison, write_outputs
from keepsight.eval.results import comparable, parts_of_one, read_run
from keepsight.models.hub import plan_upload
from keepsight.models.hub import push as upload_to_hub

OPEN = "open the page in a browser"
"""What to do after a command that writes a page."""


def report(config: Report) -> str:
    """Write the page, plots and tables; returns what to do next."""
    runs = parts_of_one([read_run(folder) for folder in config.runs])
    if config.out:
        out = Path(config.out)
    elif len(runs) == 1:
        out = Path(config.runs[0])
    else:
        out = Path("runs/report")
    summary = write_outputs(runs, out)
    for sentence in verdict_of(runs, summary):
        print(f"{printable(sentence)}\n")
    print(f"report: {out / 'report.html'}")
    return OPEN


def compare(config: Compare) -> str:
    """Print one table per measure and write the comparison page; returns what to do next."""
    if len(config.runs) < 2:
        raise UserError(
            f"runs={config.runs}: name at least two evaluations, such as keepsight compare runs/a runs/b",
            field="runs",
            code="range",
        )
    if len(set(config.runs)) < len(config.runs):
        raise UserError(f"runs={config.runs}: a folder is named twice", field="runs", code="conflict")
    runs = comparable([read_run(folder) for folder in config.runs], config.allow)
    tables = write_comparison(runs, Path(config.out))
    for table in tables:
        print(table.markdown())
    print(f"report: {Path(config.out) / 'compare.html'}")
    return OPEN


def push(config: Push) -> str | None:
    """Print the files, then upload them; returns what to do next, unless it is a dry run."""
    upload = plan_upload(Path(config.folder), config.repo, public=config.public, revision=config.revision)
    print(upload.describe())
    if config.dry_run:
        print("dry run: nothing was uploaded; to upload it, leave out --dry-run")
        return None
    print(f"uploaded: {upload_to_hub(upload)}")
    return f"use it by its id {config.repo}, as in keepsight eval"
