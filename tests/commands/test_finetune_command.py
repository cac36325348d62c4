"""`keepsight finetune` as a user types it: an adapter whose tensors and weights have learned, and bad input."""

from pathlib import Path
from typing import Any

import pytest
import torch

from keepsight import LookaheadKV
from keepsight.files import read_json, write_json
from keepsight.models.lookahead import ADAPTER, CONFIG, TOKENS, LookaheadAdapter
from keepsight.models.targets import load_target
from keepsight.runtime.allocate import Global
from keepsight.runtime.state import prefill
from tests.commands.commands import CommandLine
from tests.commands.test_head_weights_command import GIVEN as WEIGHTS
from tests.commands.test_head_weights_command import LEARN, STEPS, TARGET, adapter  # noqa: F401  a fixture
from tests.tiny import prompt_ids

GIVEN = ["finetune", *TARGET, "adapter=adapter", "out=finetuned", "finetune.budgets=[6,9]"]
TUNE = [each.format(key="finetune.train") for each in [*STEPS, "{key}.learning_rate=0.05"]]


@pytest.mark.usefixtures("adapter")
def test_tensors_and_weights_learn_and_every_command_takes_the_adapter(keepsight: CommandLine) -> None:
    keepsight(*WEIGHTS, *LEARN)
    printed = keepsight(*GIVEN, *TUNE, "adapter=weighted")
    assert "adapter after step 2 in finetuned: excess_nll_at_6" in printed
    before, after = LookaheadAdapter.load(Path("weighted")), LookaheadAdapter.load(Path("finetuned"))
    assert before.head_weights != after.head_weights and not torch.equal(before.tokens, after.tokens)
    assert {*before.lora} == {*after.lora}
    assert any(not torch.equal(each, after.lora[name]) for name, each in before.lora.items())
    assert before.settings == after.settings
    for picture in ("training.png", "head_weights.png"):  # the card's other sections show them
        assert Path("finetuned", picture).read_bytes() == Path("weighted", picture).read_bytes()
    assert Path("finetuned/finetuning.png").read_bytes().startswith(b"\x89PNG")
    card, weighted_card = Path("finetuned/README.md").read_text(), Path("weighted/README.md").read_text()
    assert card.startswith(weighted_card.rstrip()) and card.count("## Fine-tuning on answers") == 1
    assert after.provenance.training["fine-tuning, steps"] == after.provenance.training["head weights, steps"] == 2

    model = load_target("tiny", device="cpu").model
    with torch.no_grad():
        state = prefill(model, prompt_ids(60)[0])
        scored = [
            LookaheadKV.from_pretrained(folder, budget=8).importance(model, state)
            for folder in ("weighted", "finetuned")
        ]
    assert not torch.allclose(scored[0][0], scored[1][0])
    assert keepsight("push", "finetuned", "ada/x", "--dry-run").count("finetuning.png") == 1


@pytest.mark.usefixtures("adapter")
def test_cards_keep_the_sections_of_other_trainings(keepsight: CommandLine) -> None:
    """Without weights to begin with; then weights alone, which follow; then fine-tuned once more."""
    keepsight(*GIVEN, *TUNE)
    keepsight(*WEIGHTS, *LEARN, "adapter=finetuned")
    keepsight(*GIVEN, *TUNE, "adapter=weighted", "out=again")
    headings = [line for line in Path("again/README.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[-2:] == ["## Weights of heads", "## Fine-tuning on answers"]
    assert headings.count("## Fine-tuning on answers") == 1 and "## Data" in headings

    card = Path("again/README.md")
    card.write_text(card.read_text() + "```\n## Fine-tuning on answers\n## Data\n```\n\n## Mine\n")
    keepsight(*GIVEN, *TUNE, "adapter=again", "out=once_more")
    once_more = Path("once_more/README.md").read_text()
    assert "```\n## Fine-tuning" not in once_more and once_more.count("\n## Data") == 1 and "\n## Mine\n" in once_more


@pytest.mark.usefixtures("adapter")
def test_a_finished_training_is_not_done_again_and_another_is_refused(keepsight: CommandLine) -> None:
    keepsight(*GIVEN, *TUNE)
    first = {name: Path("finetuned", name).read_bytes() for name in (ADAPTER, TOKENS, CONFIG)}
    keepsight(*GIVEN, *TUNE)
    assert {name: Path("finetuned", name).read_bytes() for name in first} == first
    assert "finetune.head_weights_rate" in keepsight.fails(*GIVEN, *TUNE, "finetune.head_weights_rate=1")
    assert "finetune.budgets" in keepsight.fails(*GIVEN, *TUNE, "finetune.budgets=[6]")


def test_bad_input_is_one_line(keepsight: CommandLine, adapter: Path) -> None:  # noqa: F811
    assert "'title' is no key of this command" in keepsight.fails(*GIVEN, "title=Mine")
    assert "adapter= is required" in keepsight.fails(*GIVEN, "adapter=null")
    assert "the longest prompt has 31 tokens" in keepsight.fails(*GIVEN, "finetune.budgets=[64]")
    for wrong in (f"budgets=[{10**9}]", "budgets=[]", "temperature=0", "head_weights_rate=0"):
        said = keepsight.fails(*GIVEN, f"finetune.{wrong}")
        assert said.startswith(f"finetune.{wrong.partition('=')[0]}=") and " must " in said, said
    assert "out=adapter is the folder of the adapter" in keepsight.fails(*GIVEN, "out=adapter")
    assert not Path("finetuned").exists() or not any(Path("finetuned").iterdir())


@pytest.mark.parametrize(
    ("before", "floor"), [({"floor": None, "sharing": "layer", "kernel": 7}, 0.2), ({"sharing": "layer"}, 0.25)]
)
def test_an_adapter_of_any_selection_is_trained_and_shares_afterwards(
    keepsight: CommandLine,
    adapter: Path,  # noqa: F811
    before: dict[str, Any],
    floor: float,
) -> None:
    config = read_json(adapter / CONFIG)
    write_json(adapter / CONFIG, config | {"settings": config["settings"] | before})
    said = keepsight(*GIVEN, *TUNE)
    assert f"share one budget (lookahead.floor={floor} lookahead.sharing=model)" in said
    settings = LookaheadAdapter.load(Path("finetuned")).settings
    assert vars(settings) == config["settings"] | before | {"floor": floor, "sharing": "model"}
    method = LookaheadKV.from_pretrained("finetuned", budget=8)
    assert isinstance(method.allocate, Global) and method.allocate.weights is not None
