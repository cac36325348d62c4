"""`keepsight bench hits` end to end on a tiny model."""

import re
from pathlib import Path

import pytest

from keepsight.files import read_jsonl
from keepsight.models.card import Provenance
from keepsight.models.retrieval_head import RetrievalHead
from keepsight.models.targets import load_target
from tests.commands.commands import CommandLine
from tests.models.retrieval_heads import tiny_draft_head, tiny_retrieval_head

pytestmark = pytest.mark.usefixtures("here")
TINY = ("model.id=tiny", "model.device=cpu", "model.dtype=float32", "out=out", "tasks=[niah_single]", "lengths=[320]")
SHORT = ("samples=1", "max_new_tokens=4")


@pytest.fixture
def heads(here: Path) -> Path:
    """`retrieval`, a retrieval head for `tiny`, and `draft`, a draft head for it."""
    vocabulary = load_target(str(here / "tiny"), device="cpu").model.config.vocab_size
    shape = {"vocab_size": vocabulary, "max_position_embeddings": 4096}
    tiny_retrieval_head(**shape).save(here / "retrieval", Provenance("tiny"), "# Card\n")
    tiny_draft_head(**shape).save(here / "draft", Provenance("tiny"), "# Card\n")
    return here


@pytest.mark.usefixtures("drawn")
def test_methods_heads_and_bounds_have_a_row_each(keepsight: CommandLine, here: Path, heads: Path) -> None:
    options = "retrieval=retrieval", "budgets=[64,128,1000]", "heads={pruned: draft}", *SHORT
    printed = keepsight("bench", "hits", *TINY, *options)
    rows = list(read_jsonl(here / "out" / "hits.jsonl"))
    names = {"best shared", "specontext", "quest", "exact_topk", "pruned"}
    assert {(row["name"], row["budget"]) for row in rows} == {(name, budget) for name in names for budget in (64, 128)}
    by_name = {row["name"]: row for row in rows if row["budget"] == 64}
    assert by_name["exact_topk"]["hit"] > max(by_name[name]["hit"] for name in ("specontext", "pruned", "quest"))
    assert all(0 < row["hit"] <= 1 and 0 < row["mass"] <= 1 for row in rows)
    assert (here / "out" / "hits.png").stat().st_size > 1000
    assert (here / "out" / "hits.csv").read_text().count("\n") == 1 + len(names) * 2
    assert re.search(r"\| niah_single \| +320 \| exact_topk +\| +64 \| +1 \|", printed)


def test_groups_of_layers_have_a_bound_of_their_own(keepsight: CommandLine, here: Path, heads: Path) -> None:
    head = RetrievalHead.load(heads / "retrieval").grouped(2)
    head.save(heads / "groups", Provenance("tiny"), "# Card\n")
    options = "methods=[specontext]", "retrieval=retrieval", "heads={groups: groups}", "budgets=[64]", *SHORT
    keepsight("bench", "hits", *TINY, *options)
    rows = {row["name"]: row for row in read_jsonl(here / "out" / "hits.jsonl")}
    assert rows.keys() == {"best shared", "best shared by 2 groups", "specontext", "groups"}
    assert rows["best shared"]["mass"] < rows["best shared by 2 groups"]["mass"]
    assert rows["groups"]["hit"] == rows["specontext"]["hit"], "the groups begin alike"


def test_a_second_run_measures_nothing_twice(keepsight: CommandLine, here: Path, heads: Path) -> None:
    options = "methods=[exact_topk]", "budgets=[64]", *SHORT
    keepsight("bench", "hits", *TINY, *options)
    before = (here / "out" / "hits.jsonl").read_text()
    keepsight("bench", "hits", *TINY, *options)
    assert (here / "out" / "hits.jsonl").read_text() == before


def test_a_head_does_not_take_the_name_of_a_bound(keepsight: CommandLine, here: Path, heads: Path) -> None:
    given = "methods=[specontext]", "retrieval=retrieval", "heads={best shared by 2 groups: retrieval}", *SHORT
    refused = keepsight.fails("bench", "hits", *TINY, *given)
    assert "heads= names 'best shared by 2 groups', which is another row's name" in refused


def test_bad_input(keepsight: CommandLine, here: Path) -> None:
    assert "does not select entries at each step" in keepsight.fails("bench", "hits", *TINY, "methods=[snapkv]", *SHORT)
    assert "budgets=[0.5]" in keepsight.fails("bench", "hits", *TINY, "methods=[quest]", "budgets=[0.5]", *SHORT)
