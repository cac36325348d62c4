"""Tries every model type of the installed transformers, and makes the table of docs/model_types.md.

    python -m tests.zoo.sweep [--again] [--out FILE] [TYPE ...]

Each type has a process of its own, a fork of this one, with a limit of processor time. Its outcome is written to
`docs/model_types.csv` at once, so that a sweep that was stopped goes on where it was; with `--again`, and where types
are named, they are tried again. `python -m tests.zoo.sweep --table` makes the table from the file alone.
"""

import argparse
import csv
import io
import json
import os
import re
import resource
import signal
import sys
from collections import Counter
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path

import torch

from keepsight.tables import markdown_table
from tests.zoo.checks import FAILS, NOT_TRIED, REFUSED, WORKS, Outcome, examined
from tests.zoo.configs import MODEL_TYPES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "model_types.csv"
PAGE = ROOT / "docs" / "model_types.md"
PLACE = re.compile(r"(?<=<!-- model types -->\n).*?(?=<!-- end -->)", re.DOTALL)
EVICTED = {"full", "hybrid", "indexed", "latent"}
"""Kinds of layers from which entries are evicted, as `Outcome.layers` names them."""
LIMIT = 90
"""Seconds of processor time that a type may take."""
COLUMNS = ["transformers", *(field.name for field in fields(Outcome))]
Row = dict[str, str]


def main() -> None:
    """Try the types that have no outcome yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--again", action="store_true", help="try all types again")
    parser.add_argument("--table", action="store_true", help="make the table alone")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file of outcomes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # forks of a process with more threads hang
    rows = read_rows(arguments.out)
    if not arguments.table:
        sweep(arguments.types, rows, arguments.out, arguments.again)
    if arguments.out == RESULTS:
        page = PAGE.read_text("utf-8")
        PAGE.write_text(PLACE.sub(lambda _: table(rows), page), "utf-8")


def sweep(types: list[str], rows: dict[str, Row], out: Path, again: bool) -> None:
    """Try types, all that have no outcome of this version where none are named, and write `rows` after each."""
    installed = version("transformers")
    if not types:
        for model_type in [*rows]:
            if again or rows[model_type]["transformers"] != installed:
                del rows[model_type]
        types = [model_type for model_type in MODEL_TYPES if model_type not in rows]
    for number, model_type in enumerate(types, start=1):
        outcome = in_own_process(model_type)
        rows[model_type] = {"transformers": installed, **asdict(outcome)}
        write_rows(out, rows)
        reason = f": {outcome.line}" if outcome.line else ""
        print(f"{number}/{len(types)} {model_type}: {outcome.outcome}{reason}", flush=True)
    counts = Counter(row["outcome"] for row in rows.values())
    print(", ".join(f"{counts[outcome]} {outcome}" for outcome in (WORKS, REFUSED, NOT_TRIED, FAILS)))


def in_own_process(model_type: str) -> Outcome:
    """The outcome of a type, tried in a fork; one that dies or takes too long fails."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.close(reader)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        used = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime)
        resource.setrlimit(resource.RLIMIT_CPU, (used + LIMIT, used + LIMIT + 1))
        with os.fdopen(writer, "w") as pipe:
            json.dump(asdict(examined(model_type)), pipe)
            pipe.flush()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if text:
        return Outcome(**json.loads(text))
    ending = f"exit code {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
    return Outcome(model_type, FAILS, line=f"its process ended with {ending}")


def read_rows(file: Path) -> dict[str, Row]:
    """The rows of a file of outcomes by model type; none if there is no file."""
    if not file.exists():
        return {}
    with file.open(encoding="utf-8", newline="") as lines:
        return {row["model_type"]: row for row in csv.DictReader(lines)}


def write_rows(file: Path, rows: dict[str, Row]) -> None:
    """Write rows in the order of their types."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for model_type in sorted(rows):
        writer.writerow(rows[model_type])
    partial = file.with_suffix(".partial")
    partial.write_text(text.getvalue(), "utf-8")
    partial.replace(file)


def table(rows: dict[str, Row]) -> str:
    """The table of docs/model_types.md."""
    versions = sorted({row["transformers"] for row in rows.values()})
    by_outcome: dict[str, list[Row]] = {WORKS: [], REFUSED: [], NOT_TRIED: [], FAILS: []}
    for model_type in sorted(rows):
        by_outcome[rows[model_type]["outcome"]].append(rows[model_type])
    counts = ", ".join(f"{len(outcome_rows)} {outcome}" for outcome, outcome_rows in by_outcome.items() if outcome_rows)
    working = []
    for row in by_outcome[WORKS]:
        works = f"all but {row['without']}" if row["without"] else "all"
        if EVICTED.isdisjoint(row["layers"].split(", ")):
            works = "all, with nothing to evict"
        working.append((f"`{row['model_type']}`", row["layers"], works))
    tables = [markdown_table(working, ["model type", "layers", "works"])]
    for outcome in (REFUSED, NOT_TRIED, FAILS):
        if by_outcome[outcome]:
            reasons = [(f"`{row['model_type']}`", _cell(row["line"])) for row in by_outcome[outcome]]
            tables.append(markdown_table(reasons, [outcome, "why"]))
    return f"transformers {', '.join(versions)}: {counts}.\n\n" + "\n".join(tables)


def _cell(line: str) -> str:
    return line.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    main()
