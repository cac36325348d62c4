"""`keepsight eval` with the methods that read a few entries a step."""

from itertools import product
from pathlib import Path

import pytest

from keepsight.files import file_digest, read_json
from keepsight.models.card import Provenance
from keepsight.models.retrieval_head import RetrievalHead
from keepsight.models.targets import load_target
from tests.commands.commands import CommandLine, results_of
from tests.models.retrieval_heads import tiny_draft_head, tiny_retrieval_head

pytestmark = pytest.mark.usefixtures("here")
MODEL = ("model.id=tiny", "model.device=cpu", "model.dtype=float32")
EVAL = ("eval", *MODEL, "out=out", "tasks=[niah_single]", "lengths=[320]")
METHODS = "methods=[full,specontext,{name: specontext, sinks: 2, window: 8},quest,exact_topk]"
LABELS = ("specontext", "specontext sinks=2 window=8", "quest", "exact_topk")


@pytest.fixture
def vocabulary(here: Path) -> int:
    """The tokens of `tiny`."""
    return load_target(str(here / "tiny"), device="cpu").model.config.vocab_size


@pytest.fixture
def head(here: Path, vocabulary: int) -> Path:
    """A retrieval head for `tiny`."""
    head = tiny_retrieval_head(vocab_size=vocabulary, max_position_embeddings=4096)
    head.save(here / "head", Provenance("tiny"), "# Card\n")
    return here / "head"


@pytest.mark.parametrize("question", ["seen", "multi"])
def test_every_method_and_budget_has_a_row(keepsight: CommandLine, here: Path, head: Path, question: str) -> None:
    """All entries are held; with a budget for all of them the answer is that of the full cache."""
    keys = ("retrieval=head", "budgets=[64,1000]", "samples=2", "max_new_tokens=6", f"question={question}")
    keepsight(*EVAL, METHODS, *keys)
    rows = results_of(here / "out")
    assert {(row["method"], row["budget"]) for row in rows} == {("full", None), *product(LABELS, (64, 1000))}
    full_of_sample = {row["sample"]: row for row in rows if row["method"] == "full"}
    for row in rows:
        full = full_of_sample[row["sample"]]
        assert row["kept"] == full["kept"]
        holds_more_than_the_cache = "spec" in row["method"] or row["method"] == "quest"
        assert (row["kv_bytes"] > full["kv_bytes"]) == holds_more_than_the_cache
        if row["budget"] == 1000:
            assert row["answer"] == full["answer"]
            assert abs(row["excess_nll"]) < 1e-4
    assert any(abs(row["excess_nll"]) > 1e-3 for row in rows if row["budget"] == 64)
    settings = read_json(here / "out" / "settings.json")
    assert settings["retrieval"] == "head"
    assert settings["retrieval_digest"].startswith("sha256:")


def test_a_draft_head_is_a_draft(keepsight: CommandLine, here: Path, vocabulary: int) -> None:
    tiny_draft_head(vocab_size=vocabulary).save(here / "draft", Provenance("tiny"), "# Card\n")
    speckv = (*EVAL, "methods=[speckv]", "budgets=[40]", "samples=1", "max_new_tokens=4", "draft.head=draft")
    keepsight(*speckv, "draft.layers=null")
    assert [row["method"] for row in results_of(here / "out")] == ["full", "speckv"]
    keepsight.refuses("draft.layers", "conflict", *speckv, "draft.layers=[0,2]")


def test_a_draft_head_selects_as_the_head_that_is_pruned_from_it(
    keepsight: CommandLine, here: Path, vocabulary: int
) -> None:
    draft = tiny_draft_head(vocab_size=vocabulary, max_position_embeddings=4096)
    draft.save(here / "draft", Provenance("tiny"), "# Card\n")
    pruned = RetrievalHead.from_draft(draft, "previous-step")
    pruned.save(here / "pruned", Provenance("tiny"), "# Card\n")
    methods = "methods=[specontext,{name: specontext, retrieval: pruned, label: saved}]"
    keepsight(*EVAL, methods, "retrieval=draft", "budgets=[64]", "samples=1", "max_new_tokens=6")
    by_method = {row["method"]: row for row in results_of(here / "out")}
    assert by_method["specontext"]["answer"] == by_method["saved"]["answer"]
    assert by_method["specontext"]["excess_nll"] == by_method["saved"]["excess_nll"]
    digests = read_json(here / "out" / "settings.json")["retrieval_digest"].split(", ")
    assert digests == [
        file_digest(here / "draft" / "model.safetensors"),
        file_digest(here / "pruned" / "retrieval_head.safetensors"),
    ]
