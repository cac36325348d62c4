"""A page with all measured methods, of `results/methods.csv`: sortable, with a filter by test and budget, and a chart.

    python docs/leaderboard.py FOLDER

writes a self-contained `index.html` and the README.md of a static Space of the Hugging Face Hub. `make docs` puts the
same page into the site.
"""

import runpy
import sys
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from keepsight.errors import UserError
from keepsight.files import write_text

ROOT = Path(__file__).resolve().parents[1]
TESTS = {
    "all110": "110 real prompts, question seen",
    "all_seen": "11 real prompts, question seen",
    "all_unseen": "11 real prompts, question unseen",
    "all_needles": "needles at 1,024 tokens, question seen",
    "all_ruler": "RULER at 1,024 tokens, question seen",
}
"""Runs of methods.csv, and what they measured; the first is shown first."""
COLUMNS = ["method", "test", "budget", "excess_nll", "low", "high", "score", "cost", "kv_mib", "samples", "date"]
"""What the page gets of a row."""
SPACE = """---
title: keepsight leaderboard
emoji: 🔭
colorFrom: indigo
colorTo: blue
sdk: static
pinned: false
license: apache-2.0
---

What KV-cache methods cost in quality, time and memory, all measured in one runtime by keepsight. `python
docs/leaderboard.py FOLDER` makes this page.
"""


def page() -> str:
    """The page, with its data, style and script inside."""
    results = pd.read_csv(ROOT / "results" / "methods.csv", dtype={"budget": str}, keep_default_na=False)
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    results["test"] = results["run"].replace(tables["CONTINUED"])
    shown: pd.DataFrame = results.loc[results["test"].isin(TESTS), COLUMNS]
    rows = shown.to_dict("records")
    templates = Environment(
        loader=FileSystemLoader(ROOT / "docs"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return templates.get_template("leaderboard.html.j2").render(rows=rows, tests=TESTS)


def main(arguments: list[str]) -> None:
    """Write the page, as a Space takes it, into the folder that the only argument names."""
    if len(arguments) != 1:
        raise UserError("give one folder for the page, such as: python docs/leaderboard.py runs/space")
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "index.html", page())
    write_text(folder / "README.md", SPACE)
    print(f"wrote {folder / 'index.html'} and {folder / 'README.md'}")


if __name__ == "__main__":
    main(sys.argv[1:])
