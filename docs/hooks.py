"""Hooks of mkdocs: every key of every command, RESULTS.md and `results/` as pages, a search that works from disk."""

import functools
import json
import operator
import runpy
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from omegaconf import OmegaConf

from keepsight.commands.config import COMMANDS
from keepsight.commands.parse import keys_of
from keepsight.tables import escape_pipes, markdown_table

ROOT = Path(__file__).resolve().parents[1]
_WORKER = """if (location.protocol === "file:") {
  const source = URL.createObjectURL(new Blob([%s]));
  window.Worker = class extends Worker { constructor() { super(source); } };
}
"""


def keys_page() -> str:
    """A section per command: its sentence, and a table of its keys with defaults and meanings."""
    sections = []
    for name, (schema, _) in COMMANDS.items():
        about = str(schema.__doc__).partition("\n")[0].partition(": ")[2]
        defaults: Any = OmegaConf.to_container(OmegaConf.structured(schema))
        rows = []
        for key in keys_of(schema):
            value = functools.reduce(operator.getitem, key.name.split("."), defaults)
            written = "required" if value == "???" else f"`{json.dumps(value)}`"
            rows.append([f"`{key.name}`", escape_pipes(written), escape_pipes(key.note)])
        table = markdown_table(rows, ["key", "default", "meaning"])
        sections.append(f"## {name}\n\n{about[:1].upper()}{about[1:]}\n\n{table}")
    return "\n".join(sections)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Hook that mkdocs calls for every page: fills in generated parts, and rewrites links between folders."""
    if "<!-- keys -->" in markdown:
        return markdown.replace("<!-- keys -->", keys_page())
    if page.file.src_uri == "results.md":
        return (ROOT / "RESULTS.md").read_text("utf-8").replace("](docs/", "](")
    if page.file.src_uri.startswith("results/"):
        return markdown.replace("](../docs/", "](../").replace("](../RESULTS.md", "](../results.md")
    return markdown.replace("](../results/", "](results/").replace("](../RESULTS.md", "](results.md")


def on_files(files: Files, config: Any) -> None:
    """Called by mkdocs once: the pages and files of `results/` lie beside the others, and so does the leaderboard."""
    for path in sorted((ROOT / "results").iterdir()):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    leaderboard = runpy.run_path(str(ROOT / "docs" / "leaderboard.py"))
    files.append(File.generated(config, "leaderboard.html", content=leaderboard["page"]()))


def on_post_build(config: Any) -> None:
    """Called by mkdocs at the end: the search's index and worker as scripts, as a page from disk can load neither."""
    site = Path(config.site_dir)
    index = site / "search" / "search_index.json"
    index.with_suffix(".js").write_text(f"var __index = {index.read_text('utf-8')}", "utf-8")
    (worker,) = (site / "assets" / "javascripts" / "workers").glob("search.*.js")
    (site / "search" / "worker.js").write_text(_WORKER % json.dumps(worker.read_text("utf-8")), "utf-8")
