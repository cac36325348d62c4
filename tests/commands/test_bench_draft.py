"""`keepsight bench draft`: the search from the command line."""

import json
import re
from pathlib import Path

import pytest

from keepsight.commands.config import Eval
from keepsight.commands.parse import parse
from keepsight.errors import Code
from tests.commands.commands import DATA, CommandLine, key_of, tree

pytestmark = pytest.mark.usefixtures("here")
TINY = ("model.id=tiny", "model.device=cpu")
TEXTS = ("mixture=mixture.yaml", "prompt_tokens=[100,300]", "samples=2", "held_out=3", "answer_tokens=4", "out=draft")
DATA_FILES = ["data/manifest.json", "data/shard-00000.arrow"]
FILES = ["draft.csv", "draft.json", "draft.png", "drafts.jsonl", "search.jsonl", "settings.json"]


@pytest.mark.usefixtures("drawn")
def test_a_table_the_recipes_lines_and_the_files(keepsight: CommandLine, here: Path) -> None:
    printed = keepsight("bench", "draft", *TINY, *TEXTS, "keep=[2,1]")
    assert [re.sub("-[0-9a-f]{16}", "", name) for name in tree(here / "draft")] == [*DATA_FILES, *FILES]

    two_layers, one_layer = json.loads((here / "draft" / "draft.json").read_text())["drafts"]
    assert len(two_layers["layers"]) == 2
    assert len(one_layer["layers"]) == 1
    assert set(one_layer["layers"]) < set(two_layers["layers"]) < {0, 1, 2}

    title, heading, *rows = printed.partition("\n\n")[0].splitlines()
    assert title == "3 held-out texts, at most 4 answer tokens of each"
    assert heading.split("  ")[0] == "layers"
    assert [row.split()[:2] for row in rows] == [
        ["2", f"{two_layers['agreement']:.3f}"],
        ["1", f"{one_layer['agreement']:.3f}"],
    ]
    assert printed.splitlines()[-3:] == [
        "for the recipe:",
        f"draft: {{layers: {two_layers['layers']}}}",
        f"draft: {{layers: {one_layer['layers']}}}",
    ]
    table = (here / "draft" / "draft.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in table] == ["size", "2", "1"]
    config = parse(Eval, ["out=a", f"draft.layers={two_layers['layers']}"])
    assert config.draft.layers == two_layers["layers"]


def test_a_search_for_fewer_layers_extends_the_one_before(keepsight: CommandLine, here: Path) -> None:
    keepsight("bench", "draft", *TINY, *TEXTS, "keep=[2]")
    search = (here / "draft" / "search.jsonl").read_text()
    keepsight("bench", "draft", *TINY, *TEXTS, "keep=[1]")
    assert (here / "draft" / "search.jsonl").read_text().startswith(search)
    other_answers = ("keep=[1]", "answer_tokens=3", "data=draft/data")
    keepsight.refuses("out", "conflict", "bench", "draft", *TINY, *TEXTS, *other_answers)


def test_texts_of_a_data_folder(keepsight: CommandLine, here: Path) -> None:
    keepsight("data", *TINY, *DATA)
    keepsight("bench", "draft", *TINY, *TEXTS, "data=data", "prompt_tokens=[1,4000]", "keep=[2]")
    assert tree(here / "draft") == FILES
    too_short = ("data=data", "prompt_tokens=[1,30]", "keep=[2]", "out=other")
    keepsight.refuses("samples", "range", "bench", "draft", *TINY, *TEXTS, *too_short)


WRONG: dict[str, tuple[str, Code]] = {
    "keep=[3]": ("keep", "range"),
    "prompt_tokens=[100]": ("prompt_tokens", "range"),
    "data=none": ("manifest.json", "missing"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_bad_input(keepsight: CommandLine, here: Path, wrong: str) -> None:
    files = tree(here)
    other_keys = [argument for argument in (*TEXTS, "keep=[2]") if key_of(argument) != key_of(wrong)]
    keepsight.refuses(*WRONG[wrong], "bench", "draft", *TINY, *other_keys, wrong)
    assert tree(here) == files
