"""`keepsight finetune`: the adapter's tensors and its heads' weights learn, or the weights alone; and bad input."""

import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from keepsight import LookaheadKV
from keepsight.commands.cli import main
from keepsight.errors import Code
from keepsight.files import read_json, write_json
from keepsight.models.lookahead import ADAPTER, CONFIG, TOKENS, LookaheadAdapter
from keepsight.models.lookahead_settings import SELECTIONS
from keepsight.models.targets import load_target
from keepsight.runtime.allocate import Global, Uniform
from keepsight.runtime.methods import Resources, make_method
from keepsight.runtime.state import prefill
from tests.commands.commands import CommandLine, last_of_each_key
from tests.refused import refused
from tests.tiny import prompt_ids
from tests.train.runs import write_data

TARGET = ["model.id=tiny", "model.dtype=float32", "data=data"]
STEPS = [f"{{key}}.{each}" for each in ("steps=2", "held_out=2", "report_to=[]")]
SHARED = ["lookahead.floor=0.25", "lookahead.sharing=model", "lookahead.tokens=4", "lookahead.rank=2"]
LEARN = [each.format(key="finetune.train") for each in STEPS]
FROZEN = ["finetune.freeze_module=true", "finetune.head_weights_rate=0.5"]
WEIGHTS = ["finetune", *TARGET, "adapter=adapter", "out=weighted", "finetune.budgets=[6,9]", *FROZEN, *LEARN]
TUNE = ["finetune", *TARGET, "adapter=adapter", "out=finetuned", "finetune.budgets=[6,9]", *LEARN]
TUNE += ["finetune.train.learning_rate=0.05"]


@pytest.fixture(scope="module")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `data` that `tiny` answered, and an `adapter` whose heads share one budget."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(shutil.copytree(prepared, folder / "work"))
        write_data(Path("data"), load_target("tiny", device="cpu"))
        keys = [*SHARED, *(each.format(key="train") for each in STEPS)]
        assert main(["train", *TARGET, "out=adapter", *keys]) == 0
    return folder / "work"


@pytest.fixture
def adapter(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The adapter in a copy of that folder, which is the working folder."""
    folder = Path(shutil.copytree(trained, tmp_path / "work"))
    monkeypatch.chdir(folder)
    return folder / "adapter"


def test_weights_alone_learn_and_every_command_takes_the_adapter(keepsight: CommandLine, adapter: Path) -> None:
    printed = keepsight(*WEIGHTS)
    assert re.search(r"adapter after step 2 in weighted: excess_nll_at_6 \S+ \(before: \S+\), ", printed)
    assert printed.endswith("next: keepsight eval adapter=weighted out=runs/eval model.id=tiny\n")
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


def test_tensors_and_weights_learn_and_cards_keep_the_sections_of_other_trainings(
    keepsight: CommandLine, adapter: Path
) -> None:
    keepsight(*WEIGHTS)
    keepsight(*TUNE, "adapter=weighted")
    before, after = LookaheadAdapter.load(Path("weighted")), LookaheadAdapter.load(Path("finetuned"))
    assert before.head_weights != after.head_weights and not torch.equal(before.tokens, after.tokens)
    assert {*before.lora} == {*after.lora} and before.settings == after.settings
    assert any(not torch.equal(each, after.lora[name]) for name, each in before.lora.items())
    assert Path("finetuned/head_weights.png").read_bytes() == Path("weighted/head_weights.png").read_bytes()
    assert Path("finetuned/finetuning.png").read_bytes().startswith(b"\x89PNG")
    card, weighted_card = Path("finetuned/README.md").read_text(), Path("weighted/README.md").read_text()
    assert card.startswith(weighted_card.rstrip()) and card.count("## Fine-tuning for eviction") == 1
    assert after.provenance.training["fine-tuning, steps"] == after.provenance.training["head weights, steps"] == 2
    assert keepsight("push", "finetuned", "ada/x", "--dry-run").count("finetuning.png") == 1

    own = Path("finetuned/README.md")
    own.write_text(own.read_text() + "```\n## Fine-tuning for eviction\n## Data\n```\n\n## Mine\n")
    keepsight(*TUNE, "adapter=finetuned", "out=again")
    again = Path("again/README.md").read_text()
    assert "```\n## Fine-tuning" not in again and again.count("\n## Data") == 1 and "\n## Mine\n" in again
    assert again.count("\n## Weights of heads") == 1


def test_a_finished_training_is_not_done_again_and_another_is_refused(keepsight: CommandLine, adapter: Path) -> None:
    keepsight(*TUNE)
    first = {name: Path("finetuned", name).read_bytes() for name in (ADAPTER, TOKENS, CONFIG)}
    keepsight(*TUNE)
    assert {name: Path("finetuned", name).read_bytes() for name in first} == first
    keepsight.refuses("finetune.head_weights_rate", "conflict", *TUNE, "finetune.head_weights_rate=1")
    keepsight.refuses("finetune.budgets", "conflict", *TUNE, "finetune.budgets=[6]")


def test_bad_input_is_one_line(keepsight: CommandLine, adapter: Path) -> None:
    for wrong in (f"finetune.budgets=[{10**9}]", "finetune.budgets=[]", "finetune.temperature=0"):
        keepsight.refuses(wrong.partition("=")[0], "range", *TUNE, wrong)
    keepsight.refuses("out", "conflict", *TUNE, "out=adapter")
    assert not Path("finetuned").exists() or not any(Path("finetuned").iterdir())


PAPER = {"floor": None, "sharing": "layer", "kernel": 7}


@pytest.mark.parametrize(
    ("before", "given", "after"),
    [
        (PAPER, (), {}),  # as it is used, so it is trained
        ({"sharing": "layer"}, (), {"sharing": "model"}),
        (PAPER, ("selection=shared",), SELECTIONS["shared"]),
        ({}, ("selection=uniform",), SELECTIONS["uniform"]),
    ],
)
def test_an_adapter_of_any_selection_is_trained(
    keepsight: CommandLine, adapter: Path, before: dict[str, Any], given: tuple[str, ...], after: dict[str, Any]
) -> None:
    config = read_json(adapter / CONFIG)
    write_json(adapter / CONFIG, config | {"settings": config["settings"] | before})
    said = keepsight(*TUNE, *given)
    assert ("adapter: from here on it selects with " in said) == bool(after)
    settings = LookaheadAdapter.load(Path("finetuned")).settings
    assert vars(settings) == config["settings"] | before | after
    methods = {name: LookaheadKV.from_pretrained("finetuned", budget=8, selection=name) for name in SELECTIONS}
    assert [type(each.allocate) for each in methods.values()] == [Uniform, Global, Uniform]
    weighted: Any = methods["shared"].allocate
    assert (weighted.weights is None) == (settings.floor is None) and methods["uniform"].value_norm
    named: Any = make_method("lookaheadkv", 8, Resources("finetuned"), selection="paper")
    assert replace(named, observer=methods["paper"].observer) == methods["paper"]
    own = Uniform() if settings.floor is None else Global(settings.floor, weighted.weights)
    assert LookaheadKV.from_pretrained("finetuned", budget=8).allocate == own
    with refused("selection", "unknown"):
        LookaheadKV.from_pretrained("finetuned", budget=8, selection="even")


def test_a_uniform_selection_keeps_the_head_weights_that_it_does_not_use(keepsight: CommandLine, adapter: Path) -> None:
    keepsight(*TUNE)
    keepsight(*last_of_each_key([*TUNE, "adapter=finetuned", "selection=uniform", "out=uniform"]))
    before, after = (LookaheadAdapter.load(Path(name)) for name in ("finetuned", "uniform"))
    assert after.settings.floor is None and after.head_weights == before.head_weights is not None
    assert not torch.equal(after.tokens, before.tokens)
    given = [*TUNE, "selection=uniform", "finetune.uniform_share=0.5", "out=other"]
    keepsight.refuses("finetune.uniform_share", "conflict", *last_of_each_key(given))


@pytest.mark.parametrize(
    ("weights", "field", "code"),
    [
        ([], "head_weights", "type"),
        ([[1.0, 2.0], [1.0]], "head_weights", "type"),
        ([[1.0, 0.0]], "head_weights", "type"),
        ([[1.0, 1e300]], "head_weights", "type"),
        ("high", "lookahead_config.json", "file"),
    ],
)
def test_damaged_weights_are_named(adapter: Path, weights: object, field: str, code: Code) -> None:
    write_json(adapter / CONFIG, read_json(adapter / CONFIG) | {"head_weights": weights})
    with refused(field, code) as error:
        LookaheadAdapter.load(adapter)
    assert str(adapter / CONFIG) in str(error.value)


def test_weights_for_another_model_are_refused_where_they_are_used(adapter: Path) -> None:
    write_json(adapter / CONFIG, read_json(adapter / CONFIG) | {"head_weights": [[1.0, 2.0]]})
    model = load_target("tiny", device="cpu").model
    with refused("weights", "model"):
        LookaheadKV.from_pretrained(adapter, budget=8).start(model, prompt_ids(60)[0])


SNAPKV = ["method=snapkv", "options={window: 2, value_norm: true, allocate: {name: global, floor: 0.25}}"]
OTHER = ["finetune", *TARGET, "out=other", "finetune.budgets=[6,9]", "finetune.head_weights_rate=0.5", *LEARN]


def test_weights_for_another_method_go_into_an_evaluation(keepsight: CommandLine, adapter: Path) -> None:
    printed = keepsight(*OTHER, *SNAPKV)
    assert re.search(r"head weights after step 2 in other: excess_nll_at_6 \S+ \(before: \S+\), ", printed)
    _, *following = shlex.split(printed.splitlines()[-1].removeprefix("next: "))
    weights = read_json(Path("other/head_weights.json"))
    assert torch.tensor(weights).shape == (3, 2) and torch.tensor(weights).std() > 0.01
    assert Path("other/head_weights.png").read_bytes().startswith(b"\x89PNG")
    used: list[Any] = []

    def seen(self: Global, *given: Any) -> Any:
        used.append(self.weights)
        return allocate(self, *given)

    allocate = Global.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Global, "__call__", seen)
        keepsight(*following, "tasks=niah_single", "lengths=320", "samples=1", "budgets=40", "model.dtype=float32")
    assert used and {*used} == {tuple(map(tuple, weights))}
    keepsight.refuses("method", "conflict", *OTHER, "method=h2o", "options={window: 2, allocate: global}")


def test_weights_for_methods_that_cannot_have_any_are_refused(keepsight: CommandLine, adapter: Path) -> None:
    refusals: dict[str, tuple[str, Code]] = {
        "method=full": ("method", "model"),
        "method=keydiff": ("method", "model"),
        "method=tova": ("allocate", "conflict"),
        "method=snapkv selection=paper": ("selection", "conflict"),
        "adapter=adapter options={window:2}": ("options", "conflict"),
    }
    for keys, refusal in refusals.items():
        keepsight.refuses(*refusal, *OTHER, *keys.split())


EARLY: dict[str, tuple[str, Code]] = {
    "train.held_out=2 lookahead.targets=[q_prj]": ("lookahead.targets", "unknown"),
    "train.held_out=99": ("train.held_out", "range"),
    "train.held_out=2 max_prompt_tokens=1": ("max_prompt_tokens", "range"),
    "train.replays=2 replay.dir=.": ("replay.dir", "conflict"),
}


@pytest.mark.parametrize("arguments", EARLY)
def test_keys_are_found_bad_before_weights_are_read(
    keepsight: CommandLine, adapter: Path, arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("process-0").mkdir()
    Path("process-0", "mine.txt").touch()
    monkeypatch.setattr("keepsight.commands.from_recipe.load_target", None)
    keepsight.refuses(*EARLY[arguments], "train", *TARGET, "out=new", *arguments.split())
    keepsight.refuses("finetune.budgets", "range", *TUNE, "finetune.budgets=[64]")
    assert not Path("new", "training").exists()
