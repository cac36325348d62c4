"""`keepsight bench speculate`, and a draft head among the methods of an evaluation, from the command line."""

from pathlib import Path

import pytest

from keepsight.models.card import Provenance
from tests.commands.commands import DATA, CommandLine
from tests.runtime.retrieval.heads import tiny_head

TINY = ("model.id=tiny", "model.device=cpu")
SMALL = ("bench", "speculate", *TINY, "tokens=320", "answer_tokens=6", "samples=2", "draft_tokens=3")


@pytest.fixture(autouse=True)
def head(here: Path) -> Path:
    tiny_head(512).save(here / "head", Provenance("tiny"), "# Card\n")
    return here / "head"


def test_needles_and_prompts_of_a_data_folder(keepsight: CommandLine) -> None:
    lines = keepsight(*SMALL, "draft.head=head").splitlines()
    assert lines[0].startswith("2 prompts of ") and ", answers of at most 6, drafts of 3, " in lines[0]
    assert lines[-1] == "2 of 2 answers are the same, token for token"
    keepsight("data", *TINY, *DATA)
    lines = keepsight(*SMALL, "draft.head=head", "data=data").splitlines()
    assert lines[-1] == "2 of 2 answers are the same, token for token"
    message = keepsight.fails(*SMALL, "draft.head=head", "data=data", "samples=50")
    assert message.endswith(" prompts have at most 320 tokens, samples= needs 50; lower it, or raise tokens=")


def test_bad_values(keepsight: CommandLine) -> None:
    assert keepsight.fails(*SMALL) == (
        "bench speculate measures a draft head; name it: draft.head=FOLDER_OR_HUB_ID draft.layers=null"
    )
    assert "name two drafts" in keepsight.fails(*SMALL, "draft.head=head", "draft.layers=[0,1]")
    assert keepsight.fails(*SMALL, "draft.head=head", "draft_tokens=0") == "draft_tokens=0 must be greater than 0"
    assert "model.safetensors is missing" in keepsight.fails(*SMALL, "draft.head=tiny/..")
