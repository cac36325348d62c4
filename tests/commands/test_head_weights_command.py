"""`keepsight finetune` with the module frozen: an adapter with weights of heads, and weights that are damaged."""

from pathlib import Path

import pytest
import torch

from keepsight import LookaheadKV
from keepsight.errors import UserError
from keepsight.files import read_json, write_json
from keepsight.models.lookahead import ADAPTER, CONFIG, TOKENS, LookaheadAdapter
from keepsight.models.targets import load_target
from keepsight.runtime.allocate import Global
from keepsight.runtime.state import prefill
from tests.commands.commands import CommandLine
from tests.tiny import prompt_ids
from tests.train.runs import write_data

TARGET = ["model.id=tiny", "model.dtype=float32", "data=data"]
STEPS = [f"{{key}}.{each}" for each in ("steps=2", "held_out=2", "report_to=[]")]
SHARED = ["lookahead.floor=0.25", "lookahead.sharing=model", "lookahead.tokens=4", "lookahead.rank=2"]
FROZEN = ["finetune.freeze_module=true", "finetune.head_weights_rate=0.5"]
GIVEN = ["finetune", *TARGET, "adapter=adapter", "out=weighted", "finetune.budgets=[6,9]", *FROZEN]
LEARN = [each.format(key="finetune.train") for each in STEPS]


@pytest.fixture
def adapter(keepsight: CommandLine, here: Path) -> Path:
    write_data(here / "data", load_target("tiny", device="cpu"))
    keepsight("train", *TARGET, "out=adapter", *SHARED, *(each.format(key="train") for each in STEPS))
    return here / "adapter"


def test_the_adapter_gets_weights_that_every_command_takes(keepsight: CommandLine, adapter: Path) -> None:
    printed = keepsight(*GIVEN, *LEARN)
    assert "adapter after step 2 in weighted: excess_nll_at_6" in printed
    plain, weighted = LookaheadAdapter.load(adapter), LookaheadAdapter.load(Path("weighted"))
    assert plain.head_weights is None and weighted.head_weights is not None
    weights = torch.tensor(weighted.head_weights)
    assert weights.shape == (3, 2) and weights.std() > 0.01
    assert weights.log().mean().item() == pytest.approx(0, abs=1e-5)
    for name in (ADAPTER, TOKENS, "training.png"):
        assert Path("weighted", name).read_bytes() == (adapter / name).read_bytes()
    assert Path("weighted/head_weights.png").read_bytes().startswith(b"\x89PNG")
    assert weighted.digest != plain.digest
    assert weighted.provenance.training["head weights, steps"] == 2
    assert weighted.provenance.trained_on != plain.provenance.trained_on or plain.provenance.trained_on
    card = Path("weighted/README.md").read_text()
    assert card.startswith((adapter / "README.md").read_text().rstrip()) and card.count("## Weights of heads") == 1
    assert "| 6 entries | " in card and "| 9 entries | " in card

    model = load_target("tiny", device="cpu").model
    methods = [LookaheadKV.from_pretrained(folder, budget=8) for folder in (adapter, "weighted")]
    assert [method.allocate for method in methods] == [Global(0.25), Global(0.25, weighted.head_weights)]
    with torch.no_grad():
        state = prefill(model, prompt_ids(60)[0])
        counts = [[each.sum(dim=-1).tolist() for each in m.select(state, m.importance(model, state))] for m in methods]
    assert counts[0] != counts[1]
    assert keepsight("push", "weighted", "ada/x", "--dry-run").count("head_weights.png") == 1

    again = keepsight(*GIVEN, *LEARN, "adapter=weighted", "out=twice")
    assert "in twice" in again
    assert Path("twice/README.md").read_text().count("## Weights of heads") == 1


def test_a_finished_training_is_not_done_again_and_another_is_refused(keepsight: CommandLine, adapter: Path) -> None:
    keepsight(*GIVEN, *LEARN)
    first = Path("weighted", CONFIG).read_bytes()
    keepsight(*GIVEN, *LEARN)
    assert Path("weighted", CONFIG).read_bytes() == first
    assert "finetune.temperature" in keepsight.fails(*GIVEN, *LEARN, "finetune.temperature=1")


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ([], "must be a row for each layer, of a finite number above 0"),
        ([[1.0, 2.0], [1.0]], "must be a row for each layer, of a finite number above 0"),
        ([[1.0, 0.0]], "must be a row for each layer, of a finite number above 0"),
        ([[1.0, -1.0]], "must be a row for each layer, of a finite number above 0"),
        ([[1.0, 1e400]], "head_weights"),
        ([[1.0, 1e300]], "must be a row for each layer"),
        ([[1.0, 1e-60]], "must be a row for each layer"),
        ("high", "head_weights"),
    ],
)
def test_damaged_weights_are_named(adapter: Path, weights: object, problem: str) -> None:
    write_json(adapter / CONFIG, read_json(adapter / CONFIG) | {"head_weights": weights})
    with pytest.raises(UserError, match=problem) as refused:
        LookaheadAdapter.load(adapter)
    assert str(adapter / CONFIG) in str(refused.value) and "\n" not in str(refused.value)


def test_weights_for_another_model_are_refused_where_they_are_used(adapter: Path) -> None:
    write_json(adapter / CONFIG, read_json(adapter / CONFIG) | {"head_weights": [[1.0, 2.0]]})
    model = load_target("tiny", device="cpu").model
    with pytest.raises(UserError, match=r"weights has shape \[1, 2\], this model's layers and KV heads are \[3, 2\]$"):
        LookaheadKV.from_pretrained(adapter, budget=8).start(model, prompt_ids(60)[0])
