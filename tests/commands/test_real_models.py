"""The recipes with real models, on the weights that `make models` makes: needles, a small fit, an evaluation each."""

from pathlib import Path

import pytest

from keepsight.commands.config import Eval
from keepsight.commands.from_recipe import draft_of, target_of
from keepsight.commands.make_models import in_parts
from keepsight.commands.parse import parse
from keepsight.models.lookahead import LookaheadAdapter
from keepsight.models.model_files import dequantised_folder
from tests.commands.commands import CommandLine, results_of
from tests.refused import refused

pytestmark = pytest.mark.models
NEEDLES = ["tasks=[niah_single]", "lengths=[400]", "samples=1", "pages=0", "model.device=cpu"]
SMALL = [
    "model.device=cpu",
    "mixture=mixture.yaml",
    "limit=6",
    "max_new_tokens=4",
    "batch_tokens=1024",
    "train.steps=2",
    "train.held_out=2",
    "train.replays=1",
    "train.batch_size=1",
    "train.samples_per_step=1",
    "train.unseen=0",
    "train.report_to=[]",
    "finetune.train.steps=2",
    "finetune.train.held_out=2",
    "finetune.train.replays=1",
    "finetune.train.samples_per_step=1",
    "finetune.train.report_to=[]",
    "finetune.unseen=0",
    "finetune.budgets=[40]",
    "tasks=[niah_single]",
    "lengths=[400]",
    "tests=1",
    "budgets=[64]",
    "methods=[full,lookaheadkv]",
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mixture.yaml").write_text(
        "min_tokens: 100\nmax_tokens: 200\nsources:\n  - {kind: needles, truthful: true}\n  - {kind: everyday}\n"
    )
    return tmp_path


@pytest.mark.parametrize("recipe", in_parts())
def test_it_finds_a_needle_with_the_full_cache(keepsight: CommandLine, recipe: str) -> None:
    config = parse(Eval, [f"recipe={recipe}", "out=run"])
    digest = config.model.packaged_digest
    assert digest is not None
    assert (dequantised_folder(digest) / "config.json").is_file(), "run make models"
    keepsight("eval", f"recipe={recipe}", *NEEDLES, "methods=[full,snapkv]", "budgets=[64]", "out=run")
    (row_of_full_cache,) = [row for row in results_of(Path("run")) if row["method"] == "full"]
    assert row_of_full_cache["score"] == 1.0


@pytest.mark.parametrize("recipe", in_parts())
def test_a_module_is_trained_and_evaluated(keepsight: CommandLine, recipe: str) -> None:
    keepsight("fit", f"recipe={recipe}", *SMALL, "out=fitted")
    module = LookaheadAdapter.load(Path("fitted/adapter"))
    config = parse(Eval, [f"recipe={recipe}", "out=run"])
    assert module.provenance.identity.model == config.model.packaged_digest
    methods = {row["method"] for row in results_of(Path("fitted/eval"))}
    assert methods == {"full", "lookaheadkv"}


def test_the_small_model_is_the_large_ones_draft() -> None:
    config = parse(Eval, ["recipe=qwen2.5-coder-1.5b", "model.device=cpu", "out=run"])
    target = target_of(config)
    draft = draft_of(config, target)
    assert draft is not None
    assert draft.name == "Qwen/Qwen2.5-Coder-0.5B-Instruct"
    config.draft.id = "google/gemma-3-270m"
    with refused("draft", "model"):
        draft_of(config, target)
