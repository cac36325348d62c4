"""`keepsight bench retrieve` from the command line, with a head and without."""

from pathlib import Path

import pytest

from keepsight.models.card import Provenance
from keepsight.models.retrieval_head import RetrievalHead
from tests.commands.commands import CommandLine
from tests.runtime.retrieval.heads import tiny_head

TINY = ("model.id=tiny", "model.device=cpu", "adapter=null", "draft.layers=null")
SMALL = ("bench", "retrieve", *TINY, "lengths=[200]", "budgets=[40,64]", "repeats=1", "answer_tokens=3")


@pytest.fixture
def head(here: Path) -> None:
    draft = tiny_head(512)
    draft.save(here / "draft", Provenance("tiny"), "# Card\n")
    made = RetrievalHead.from_draft(draft, "previous-step")
    made.save(here / "head", Provenance("tiny"), "# Card\n")


@pytest.mark.usefixtures("head")
def test_with_a_head_and_its_draft(keepsight: CommandLine) -> None:
    lines = keepsight(*SMALL, "retrieval=head", "draft.head=draft", "tokens=300", "samples=2").splitlines()
    assert lines[0].startswith("retrieval head (features: previous-step): ")
    assert lines[1].startswith("draft head: ")
    assert lines[2].startswith("1 rows of random entries, budget 64, ")
    assert [line.split()[:2] for line in lines[4:7]] == [["200", name] for name in ("full", "quest", "specontext")]
    assert lines[8].startswith("2 texts of ") and ", 3 steps each, " in lines[8]
    assert [line.split()[0] for line in lines[9:]] == ["budget", "40", "64"]


@pytest.mark.usefixtures("here")
def test_without_a_head(keepsight: CommandLine) -> None:
    lines = keepsight(
        *SMALL, "retrieval=null", "retrieval_head.features=none", "retrieval_head.groups=2", "batch=2"
    ).splitlines()
    assert lines[0].startswith("retrieval= is not given: this head has random weights")
    assert lines[2].startswith("2 rows of random entries, budget 64, ")
    assert lines[-1].startswith("bytes moved are not measured: ")


@pytest.mark.usefixtures("here")
def test_bad_values(keepsight: CommandLine) -> None:
    assert keepsight.fails(*SMALL, "tokens=0") == "tokens=0 must be at least 1"
    assert keepsight.fails(*SMALL, "batch=0") == "batch=0 must be at least 1"
    assert keepsight.fails("bench", "retrieve", *TINY, "lengths=[]") == "lengths=[] must hold at least one value"
    assert keepsight.fails(*SMALL, "retrieval=none/").startswith("'none/' is neither a folder nor a Hub id")
