"""`keepsight bench hits` end to end on a tiny model."""

import re
from itertools import product
from pathlib import Path

import pytest

from keepsight.files import read_jsonl
from keepsight.models.card import Provenance
from keepsight.models.targets import load_target
from tests.commands.commands import CommandLine
from tests.models.retrieval_heads import tiny_draft_head, tiny_retrieval_head

pytestmark = pytest.mark.usefixtures("here")
TINY = ("model.id=tiny", "model.device=cpu", "model.dtype=float32", "out=out")
NEEDLE = ("tasks=[niah_single]", "lengths=[320]", "samples=1", "max_new_tokens=4")
HITS = ("bench", "hits", *TINY, *NEEDLE)


@pytest.fixture
def heads(here: Path) -> Path:
    """`retrieval`, a retrieval head, `groups`, the same for two groups of layers, and `draft`, a draft head."""
    vocabulary = load_target(str(here / "tiny"), device="cpu").model.config.vocab_size
    shape = {"vocab_size": vocabulary, "max_position_embeddings": 4096}
    head = tiny_retrieval_head(**shape)
    head.save(here / "retrieval", Provenance("tiny"), "# Card\n")
    head.grouped(2).save(here / "groups", Provenance("tiny"), "# Card\n")
    tiny_draft_head(**shape).save(here / "draft", Provenance("tiny"), "# Card\n")
    return here


@pytest.mark.usefixtures("drawn")
def test_methods_heads_and_bounds_have_a_row_each(keepsight: CommandLine, here: Path, heads: Path) -> None:
    hits = (*HITS, "retrieval=retrieval", "budgets=[64,128,1000]", "heads={pruned: draft,groups: groups}")
    printed = keepsight(*hits)
    rows = list(read_jsonl(here / "out" / "hits.jsonl"))
    names = {"best shared", "best shared by 2 groups", "specontext", "quest", "exact_topk", "pruned", "groups"}
    assert {(row["name"], row["budget"]) for row in rows} == set(product(names, (64, 128)))
    for row in rows:
        assert 0 < row["hit"] <= 1
        assert 0 < row["mass"] <= 1
    by_name = {row["name"]: row for row in rows if row["budget"] == 64}
    for name in ("specontext", "pruned", "quest"):
        assert by_name["exact_topk"]["hit"] > by_name[name]["hit"]
    assert by_name["best shared"]["mass"] < by_name["best shared by 2 groups"]["mass"]
    assert by_name["groups"]["hit"] == by_name["specontext"]["hit"], "the groups begin alike"

    assert (here / "out" / "hits.png").stat().st_size > 1000
    assert (here / "out" / "hits.csv").read_text().count("\n") == 1 + len(names) * 2
    assert re.search(r"\| niah_single \| +320 \| exact_topk +\| +64 \| +1 \|", printed)
    results = (here / "out" / "hits.jsonl").read_text()
    keepsight(*hits)
    assert (here / "out" / "hits.jsonl").read_text() == results, "a second run measures nothing twice"

    named_as_a_bound = "heads={best shared by 2 groups: retrieval}"
    keepsight.refuses("heads", "conflict", *HITS, "methods=[specontext]", "retrieval=retrieval", named_as_a_bound)


def test_methods_that_evict_stand_beside_those_that_read(keepsight: CommandLine, here: Path) -> None:
    methods = "methods=[exact_topk,{name: oracle, pool: none, label: oracle},{name: h2o, window: 0}]"
    keepsight(*HITS, methods, "budgets=[64]")
    by_name = {row["name"]: row for row in read_jsonl(here / "out" / "hits.jsonl")}
    oracle = by_name["oracle"]
    exact_topk = by_name["exact_topk"]
    assert oracle["read"] == 64 + 1.5, "the prompt's entries, and the answer's 0 to 3 before each token"
    assert exact_topk["mass"] > oracle["mass"] > 0
    assert oracle["overlap"] > exact_topk["overlap"], "what is kept stays"


def test_bad_input(keepsight: CommandLine, here: Path) -> None:
    keepsight.refuses("methods", "model", *HITS, "methods=[full,{name: snapkv, every: 4}]")
    keepsight.refuses("methods", "model", *HITS, "methods=[{name: kivi, group: 8, bits: 2}]")
    keepsight.refuses("budgets", "type", *HITS, "methods=[quest]", "budgets=[0.5]")
