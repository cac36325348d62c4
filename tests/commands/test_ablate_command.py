"""`keepsight train` with several values for a key: an adapter for each combination, a table and a plot."""

import csv
from pathlib import Path

import pytest

from keepsight.errors import Code
from keepsight.models.lookahead import LookaheadAdapter
from keepsight.models.targets import load_target
from tests.commands.commands import CommandLine, tree
from tests.train.runs import rows, same, write_data

TRAIN = ["train.steps=2", "train.held_out=2", "train.budget=6", "train.report_to=[]", "lookahead.alpha=8"]
GIVEN = ["train", "model.id=tiny", "model.dtype=float32", "data=data", "out=ablation", *TRAIN]
GRID = ["lookahead.tokens=[2,4]", "lookahead.rank=0,2"]


@pytest.fixture
def data(here: Path) -> Path:
    write_data(here / "data", load_target("tiny", device="cpu"))
    return here


def test_it_leaves_an_adapter_for_each_cell_a_table_and_a_plot(keepsight: CommandLine, data: Path) -> None:
    given = [*GIVEN, *GRID, "train.held_out=11"]
    printed = keepsight(*given)
    names = ["tokens2-rank0", "tokens2-rank2", "tokens4-rank0", "tokens4-rank2"]
    assert sorted(path.name for path in Path("ablation/cells").iterdir()) == names
    for name in names:
        artifact = LookaheadAdapter.load(Path("ablation/cells", name))
        assert name == f"tokens{artifact.settings.tokens}-rank{artifact.settings.rank}"
        assert artifact.provenance.training["steps"] == 2
        assert f": {name}" in Path("ablation/cells", name, "README.md").read_text()
        assert Path("ablation/cells", name, "training.png").read_bytes().startswith(b"\x89PNG")
    with Path("ablation/ablation.csv").open() as stream:
        table = list(csv.DictReader(stream))
    assert [row["cell"] for row in table] == names
    assert [row["parameters"] for row in table[::2]] == ["64", "128"]
    for row in table:
        measured = rows(Path("ablation/cells", row["cell"], "training/fidelity.jsonl"))[-1]
        for key in ("kl", "recall", "tau"):
            assert float(row[key]) == pytest.approx(measured[f"eval_{key}"], abs=1e-5)
    assert Path("ablation/ablation.md").read_text().strip() in printed
    assert "after 2 steps on held-out samples (11, none of them trained on before)." in printed
    assert Path("ablation/ablation.png").read_bytes().startswith(b"\x89PNG")

    weights = [Path("ablation/cells", name) for name in tree(Path("ablation/cells")) if name.endswith(".safetensors")]
    before = [path.read_bytes() for path in weights]
    assert Path("ablation/ablation.md").read_text().strip() in keepsight(*given)  # finished: trained no more
    assert [path.read_bytes() for path in weights] == before
    more = keepsight(*GIVEN, "train.held_out=11", "lookahead.tokens=2,8", "lookahead.rank=0,2")
    assert "tokens8-rank2" in more and [path.read_bytes() for path in weights] == before
    settings = Path("ablation/cells/tokens2-rank0/config.yaml").read_bytes()
    other = keepsight.refuses("train.seed", "conflict", *given, "train.seed=9")
    assert other.startswith("ablation/cells/tokens2-rank0")
    assert Path("ablation/cells/tokens2-rank0/config.yaml").read_bytes() == settings


def test_a_cell_is_the_module_that_is_trained_alone(keepsight: CommandLine, data: Path) -> None:
    keepsight(*GIVEN, "lookahead.tokens=[2,4]", "lookahead.rank=2")
    alone_arguments = [argument.replace("out=ablation", "out=alone") for argument in GIVEN]
    keepsight(*alone_arguments, "lookahead.tokens=4", "lookahead.rank=2")
    together = LookaheadAdapter.load(Path("ablation/cells/tokens4"))
    alone = LookaheadAdapter.load(Path("alone"))
    assert same({**together.lora, "tokens": together.tokens}, {**alone.lora, "tokens": alone.tokens})


def test_lengths_of_prompts_can_vary_and_a_pass_is_timed(keepsight: CommandLine, data: Path) -> None:
    keepsight(*GIVEN, "lookahead.tokens=4", "lookahead.rank=2", "max_prompt_tokens=[20,60]", "timed_tokens=64")
    with Path("ablation/ablation.csv").open() as stream:
        table = list(csv.DictReader(stream))
    assert [row["max_prompt_tokens"] for row in table] == ["20", "60"]
    assert all(0 < float(row["overhead"]) < 10_000 for row in table)
    trained = [LookaheadAdapter.load(Path("ablation/cells", row["cell"])).provenance.training for row in table]
    assert trained[0] != trained[1]
    keepsight.refuses("tokens", "range", *GIVEN, "lookahead.tokens=[2,4]", "timed_tokens=1000000000")


def test_the_modules_that_get_a_lora_can_vary(keepsight: CommandLine, data: Path) -> None:
    given = ["lookahead.tokens=4", "lookahead.targets=[[none],[qv],[all],[q_proj,up_proj]]", "lookahead.rank=2"]
    keepsight(*GIVEN, *given)
    names = {"none": set(), "qv": {"q_proj", "v_proj"}, "all": None, "q_proj+up_proj": {"q_proj", "up_proj"}}
    for name, expected in names.items():
        artifact = LookaheadAdapter.load(Path("ablation/cells", f"targets{name}"))
        assert name == "+".join(artifact.settings.targets)
        adapted = {tensor.rpartition(".lora_")[0].rpartition(".")[2] for tensor in artifact.lora}
        assert len(adapted) == 7 if expected is None else adapted == expected
    card = Path("ablation/cells/targetsnone/README.md").read_text()
    assert "4 soft tokens and no LoRA" in card and "modules with a LoRA: none" in card


WRONG: dict[str, tuple[str, Code]] = {
    "lookahead.targets=[[all],[q_prj]]": ("lookahead.targets", "unknown"),
    "lookahead.targets=[[qv],[all,q_proj]]": ("lookahead.targets", "conflict"),
}


def test_bad_input_ends_in_one_line(keepsight: CommandLine, data: Path) -> None:
    for arguments, refusal in WRONG.items():
        keepsight.refuses(*refusal, *GIVEN, *arguments.split())
    assert not Path("ablation/cells").exists()
