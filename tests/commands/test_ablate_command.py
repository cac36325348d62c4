"""`keepsight train` with several values for a key: an adapter for each combination, a table and a plot."""

import csv
from pathlib import Path
from typing import Any

import pytest

from keepsight.errors import Code
from keepsight.models.lookahead import LookaheadAdapter
from keepsight.models.targets import load_target
from tests.commands.commands import CommandLine, tree
from tests.train.runs import rows, same, write_data

SHORT = ["train.steps=2", "train.held_out=2", "train.budget=6", "train.report_to=[]", "lookahead.alpha=8"]
TRAIN = ["train", "model.id=tiny", "model.dtype=float32", "data=data", *SHORT]
ABLATE = [*TRAIN, "out=ablation"]
CELLS = Path("ablation/cells")


@pytest.fixture
def data(here: Path) -> Path:
    write_data(here / "data", load_target("tiny", device="cpu"))
    return here


def table_of_cells() -> list[dict[str, str]]:
    with Path("ablation/ablation.csv").open() as stream:
        return list(csv.DictReader(stream))


def weights_of_cells() -> dict[str, bytes]:
    """The files with the weights of every cell, by name."""
    return {name: (CELLS / name).read_bytes() for name in tree(CELLS) if name.endswith(".safetensors")}


def tensors_of(adapter: LookaheadAdapter) -> dict[str, Any]:
    return {**adapter.lora, "tokens": adapter.tokens}


def test_it_leaves_an_adapter_for_each_cell_a_table_and_a_plot(keepsight: CommandLine, data: Path) -> None:
    ablate = [*ABLATE, "train.held_out=11"]
    grid = ["lookahead.tokens=[2,4]", "lookahead.rank=0,2"]
    printed = keepsight(*ablate, *grid)
    names = ["tokens2-rank0", "tokens2-rank2", "tokens4-rank0", "tokens4-rank2"]
    assert sorted(path.name for path in CELLS.iterdir()) == names
    for name in names:
        adapter = LookaheadAdapter.load(CELLS / name)
        assert name == f"tokens{adapter.settings.tokens}-rank{adapter.settings.rank}"
        assert adapter.provenance.training["steps"] == 2
        assert f": {name}" in (CELLS / name / "README.md").read_text()
        assert (CELLS / name / "training.png").read_bytes().startswith(b"\x89PNG")

    table = table_of_cells()
    assert [row["cell"] for row in table] == names
    assert [row["parameters"] for row in table[::2]] == ["64", "128"]
    for row in table:
        last_measurement = rows(CELLS / row["cell"] / "training/fidelity.jsonl")[-1]
        for metric in ("kl", "recall", "tau"):
            assert float(row[metric]) == pytest.approx(last_measurement[f"eval_{metric}"], abs=1e-5)
    assert Path("ablation/ablation.md").read_text().strip() in printed
    assert "after 2 steps on held-out samples (11, none of them trained on before)." in printed
    assert Path("ablation/ablation.png").read_bytes().startswith(b"\x89PNG")

    weights = weights_of_cells()
    printed_again = keepsight(*ablate, *grid)
    assert Path("ablation/ablation.md").read_text().strip() in printed_again
    assert weights_of_cells() == weights, "what is finished is not trained again"

    printed = keepsight(*ablate, "lookahead.tokens=2,8", "lookahead.rank=0,2")
    assert "tokens8-rank2" in printed
    assert weights_of_cells().items() >= weights.items()

    config = CELLS / "tokens2-rank0/config.yaml"
    config_before = config.read_bytes()
    message = keepsight.refuses("train.seed", "conflict", *ablate, *grid, "train.seed=9")
    assert message.startswith("ablation/cells/tokens2-rank0")
    assert config.read_bytes() == config_before


def test_a_cell_is_the_module_that_is_trained_alone(keepsight: CommandLine, data: Path) -> None:
    keepsight(*ABLATE, "lookahead.tokens=[2,4]", "lookahead.rank=2")
    keepsight(*TRAIN, "out=alone", "lookahead.tokens=4", "lookahead.rank=2")
    cell = LookaheadAdapter.load(CELLS / "tokens4")
    alone = LookaheadAdapter.load(Path("alone"))
    assert same(tensors_of(cell), tensors_of(alone))


def test_lengths_of_prompts_can_vary_and_a_pass_is_timed(keepsight: CommandLine, data: Path) -> None:
    keepsight(*ABLATE, "lookahead.tokens=4", "lookahead.rank=2", "max_prompt_tokens=[20,60]", "timed_tokens=64")
    short, long = table_of_cells()
    assert short["max_prompt_tokens"] == "20"
    assert long["max_prompt_tokens"] == "60"
    for row in (short, long):
        assert 0 < float(row["overhead"]) < 10_000
    trained_short = LookaheadAdapter.load(CELLS / short["cell"]).provenance.training
    trained_long = LookaheadAdapter.load(CELLS / long["cell"]).provenance.training
    assert trained_short != trained_long
    keepsight.refuses("tokens", "range", *ABLATE, "lookahead.tokens=[2,4]", "timed_tokens=1000000000")


def test_the_modules_that_get_a_lora_can_vary(keepsight: CommandLine, data: Path) -> None:
    targets = "lookahead.targets=[[none],[qv],[all],[q_proj,up_proj]]"
    keepsight(*ABLATE, "lookahead.tokens=4", "lookahead.rank=2", targets)
    expected: dict[str, set[str] | None] = {
        "none": set(),
        "qv": {"q_proj", "v_proj"},
        "all": None,
        "q_proj+up_proj": {"q_proj", "up_proj"},
    }
    for name, modules in expected.items():
        adapter = LookaheadAdapter.load(CELLS / f"targets{name}")
        assert name == "+".join(adapter.settings.targets)
        adapted = {tensor.rpartition(".lora_")[0].rpartition(".")[2] for tensor in adapter.lora}
        if modules is None:
            assert len(adapted) == 7
        else:
            assert adapted == modules
    card = (CELLS / "targetsnone/README.md").read_text()
    assert "4 soft tokens and no LoRA" in card
    assert "modules with a LoRA: none" in card


WRONG: dict[str, tuple[str, Code]] = {
    "lookahead.targets=[[all],[q_prj]]": ("lookahead.targets", "unknown"),
    "lookahead.targets=[[qv],[all,q_proj]]": ("lookahead.targets", "conflict"),
}


def test_bad_input_ends_in_one_line(keepsight: CommandLine, data: Path) -> None:
    for arguments, refusal in WRONG.items():
        keepsight.refuses(*refusal, *ABLATE, *arguments.split())
    assert not CELLS.exists()
