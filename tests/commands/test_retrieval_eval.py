"""`keepsight eval` with the methods that read a few entries a step."""

from pathlib import Path

import pytest

from keepsight.files import file_digest, read_json, read_jsonl
from keepsight.models.card import Provenance
from keepsight.models.retrieval_head import RetrievalHead
from keepsight.models.targets import load_target
from tests.commands.commands import CommandLine
from tests.models.retrieval_heads import tiny_draft_head, tiny_retrieval_head

pytestmark = pytest.mark.usefixtures("here")
TINY = ("model.id=tiny", "model.device=cpu", "model.dtype=float32", "out=out", "tasks=[niah_single]", "lengths=[320]")
METHODS = "methods=[full,specontext,{name: specontext, sinks: 2, window: 8},quest,exact_topk]"


@pytest.fixture
def head(here: Path) -> Path:
    """A retrieval head for `tiny`."""
    vocabulary = load_target(str(here / "tiny"), device="cpu").model.config.vocab_size
    made = tiny_retrieval_head(vocab_size=vocabulary, max_position_embeddings=4096)
    made.save(here / "head", Provenance("tiny"), "# Card\n")
    return here / "head"


@pytest.mark.parametrize("question", ["seen", "multi"])
def test_every_method_and_budget_has_a_row(keepsight: CommandLine, here: Path, head: Path, question: str) -> None:
    """All entries are held; with a budget for all of them the answer is that of the full cache."""
    options = METHODS, "retrieval=head", "budgets=[64,1000]", "samples=2", "max_new_tokens=6", f"question={question}"
    keepsight("eval", *TINY, *options)
    rows = list(read_jsonl(here / "out" / "results.jsonl"))
    full = {row["sample"]: row for row in rows if row["method"] == "full"}
    labels = {"specontext", "specontext sinks=2 window=8", "quest", "exact_topk"}
    assert {(row["method"], row["budget"]) for row in rows} == {
        ("full", None),
        *((label, budget) for label in labels for budget in (64, 1000)),
    }
    for row in rows:
        assert row["kept"] == full[row["sample"]]["kept"]
        assert (row["kv_bytes"] > full[row["sample"]]["kv_bytes"]) == (
            "spec" in row["method"] or row["method"] == "quest"
        )
        if row["budget"] == 1000:
            assert row["answer"] == full[row["sample"]]["answer"] and abs(row["excess_nll"]) < 1e-4
    assert any(abs(row["excess_nll"]) > 1e-3 for row in rows if row["budget"] == 64)
    settings = read_json(here / "out" / "settings.json")
    assert settings["retrieval"] == "head" and settings["retrieval_digest"].startswith("sha256:")


def test_a_draft_head_is_a_draft(keepsight: CommandLine, here: Path) -> None:
    vocabulary = load_target(str(here / "tiny"), device="cpu").model.config.vocab_size
    tiny_draft_head(vocab_size=vocabulary).save(here / "draft", Provenance("tiny"), "# Card\n")
    speckv = *TINY, "methods=[speckv]", "budgets=[40]", "samples=1", "max_new_tokens=4", "draft.head=draft"
    keepsight("eval", *speckv, "draft.layers=null")
    assert [row["method"] for row in read_jsonl(here / "out" / "results.jsonl")] == ["full", "speckv"]
    keepsight.refuses("draft.layers", "conflict", "eval", *speckv, "draft.layers=[0,2]")


def test_a_draft_head_selects_as_the_head_that_is_pruned_from_it(keepsight: CommandLine, here: Path) -> None:
    vocabulary = load_target(str(here / "tiny"), device="cpu").model.config.vocab_size
    draft = tiny_draft_head(vocab_size=vocabulary, max_position_embeddings=4096)
    draft.save(here / "draft", Provenance("tiny"), "# Card\n")
    pruned = RetrievalHead.from_draft(draft, "previous-step")
    pruned.save(here / "pruned", Provenance("tiny"), "# Card\n")
    methods = "methods=[specontext,{name: specontext, retrieval: pruned, label: saved}]"
    keepsight("eval", *TINY, methods, "retrieval=draft", "budgets=[64]", "samples=1", "max_new_tokens=6")
    rows = {row["method"]: row for row in read_jsonl(here / "out" / "results.jsonl")}
    assert rows["specontext"]["answer"] == rows["saved"]["answer"]
    assert rows["specontext"]["excess_nll"] == rows["saved"]["excess_nll"]
    digests = read_json(here / "out" / "settings.json")["retrieval_digest"].split(", ")
    assert digests == [
        file_digest(here / "draft" / "model.safetensors"),
        file_digest(here / "pruned" / "retrieval_head.safetensors"),
    ]
