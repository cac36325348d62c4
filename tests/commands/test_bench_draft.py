"""`keepsight bench draft`: the search from the command line."""

import json
import re
from pathlib import Path

import pytest

from keepsight.commands.config import Eval
from keepsight.commands.parse import parse
from keepsight.errors import Code
from tests.commands.commands import DATA, CommandLine, tree

pytestmark = pytest.mark.usefixtures("here")
TINY = ("model.id=tiny", "model.device=cpu")
TEXTS = ("mixture=mixture.yaml", "prompt_tokens=[100,300]", "samples=2", "held_out=3", "answer_tokens=4", "out=draft")
FILES = ["data/manifest.json", "data/shard-00000.arrow", "draft.csv", "draft.json", "draft.png", "drafts.jsonl"]
FILES += ["search.jsonl", "settings.json"]


@pytest.mark.usefixtures("drawn")
def test_a_table_the_recipes_lines_and_the_files(keepsight: CommandLine, here: Path) -> None:
    printed = keepsight("bench", "draft", *TINY, *TEXTS, "keep=[2,1]")
    assert [re.sub("-[0-9a-f]{16}", "", name) for name in tree(here / "draft")] == FILES
    found = json.loads((here / "draft" / "draft.json").read_text())
    assert [len(each["layers"]) for each in found["drafts"]] == [2, 1]
    title, heads, *rows = printed.partition("\n\n")[0].splitlines()
    assert title == "3 held-out texts, at most 4 answer tokens of each"
    assert heads.split("  ")[0] == "layers" and [row.split()[0] for row in rows] == ["2", "1"]
    assert [row.split()[1] for row in rows] == [f"{each['agreement']:.3f}" for each in found["drafts"]]
    lines = [f"draft: {{layers: {each['layers']}}}" for each in found["drafts"]]
    assert printed.splitlines()[-3:] == ["for the recipe:", *lines]
    table = (here / "draft" / "draft.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in table] == ["size", "2", "1"]
    assert set(found["drafts"][1]["layers"]) < set(found["drafts"][0]["layers"]) < {0, 1, 2}
    assert (
        parse(Eval, ["out=a", f"draft.layers={found['drafts'][0]['layers']}"]).draft.layers
        == (found["drafts"][0]["layers"])
    )


def test_the_same_command_goes_on(keepsight: CommandLine, here: Path) -> None:
    keepsight("bench", "draft", *TINY, *TEXTS, "keep=[2]")
    log = (here / "draft" / "search.jsonl").read_text()
    keepsight("bench", "draft", *TINY, *TEXTS, "keep=[1]")
    assert (here / "draft" / "search.jsonl").read_text().startswith(log)
    other = ("keep=[1]", "answer_tokens=3", "data=draft/data")
    keepsight.refuses("out", "conflict", "bench", "draft", *TINY, *TEXTS, *other)


def test_texts_of_a_data_folder(keepsight: CommandLine, here: Path) -> None:
    keepsight("data", *TINY, *DATA)
    keepsight("bench", "draft", *TINY, *TEXTS, "data=data", "prompt_tokens=[1,4000]", "keep=[2]")
    assert tree(here / "draft") == [name for name in FILES if not name.startswith("data")]
    short = ("data=data", "prompt_tokens=[1,30]", "keep=[2]", "out=other")
    keepsight.refuses("samples", "range", "bench", "draft", *TINY, *TEXTS, *short)


WRONG: dict[str, tuple[str, Code]] = {
    "keep=[3]": ("keep", "range"),
    "prompt_tokens=[100]": ("prompt_tokens", "range"),
    "data=none": ("manifest.json", "missing"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_bad_input(keepsight: CommandLine, here: Path, wrong: str) -> None:
    before = tree(here)
    given = [each for each in (*TEXTS, "keep=[2]") if each.partition("=")[0] != wrong.partition("=")[0]]
    keepsight.refuses(*WRONG[wrong], "bench", "draft", *TINY, *given, wrong)
    assert tree(here) == before
