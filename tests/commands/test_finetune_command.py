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
from tests.commands.commands import CommandLine, key_of
from tests.refused import refused
from tests.tiny import prompt_ids
from tests.train.runs import write_data

TARGET = ["model.id=tiny", "model.dtype=float32", "data=data"]
LOOKAHEAD = ["lookahead.floor=0.25", "lookahead.sharing=model", "lookahead.tokens=4", "lookahead.rank=2"]
TRAIN = ["train", *TARGET, *LOOKAHEAD, "train.steps=2", "train.held_out=2", "train.report_to=[]"]
FINETUNE = ["finetune", *TARGET, "finetune.budgets=[6,9]"]
FINETUNE += ["finetune.train.steps=2", "finetune.train.held_out=2", "finetune.train.report_to=[]"]
FREEZE = ["finetune.freeze_module=true", "finetune.head_weights_rate=0.5"]
TUNE_WEIGHTS = [*FINETUNE, "adapter=adapter", "out=weighted", *FREEZE]
TUNE = [*FINETUNE, "adapter=adapter", "out=finetuned", "finetune.train.learning_rate=0.05"]


@pytest.fixture(scope="module")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `data` that `tiny` answered, and an `adapter` whose heads share one budget."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(shutil.copytree(prepared, folder / "work"))
        write_data(Path("data"), load_target("tiny", device="cpu"))
        assert main([*TRAIN, "out=adapter"]) == 0
    return folder / "work"


@pytest.fixture
def adapter(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The adapter in a copy of that folder, which is the working folder."""
    folder = Path(shutil.copytree(trained, tmp_path / "work"))
    monkeypatch.chdir(folder)
    return folder / "adapter"


def test_weights_alone_learn_and_every_command_takes_the_adapter(keepsight: CommandLine, adapter: Path) -> None:
    printed = keepsight(*TUNE_WEIGHTS)
    assert re.search(r"adapter after step 2 in weighted: excess_nll_at_6 \S+ \(before: \S+\), ", printed)
    assert printed.endswith("next: keepsight eval adapter=weighted out=runs/eval model.id=tiny\n")
    before = LookaheadAdapter.load(adapter)
    after = LookaheadAdapter.load(Path("weighted"))
    assert before.head_weights is None
    assert after.head_weights is not None
    weights = torch.tensor(after.head_weights)
    assert weights.shape == (3, 2)
    assert weights.std() > 0.01
    assert weights.log().mean().item() == pytest.approx(0, abs=1e-5)
    assert after.digest != before.digest
    assert after.provenance.training["head weights, steps"] == 2
    for name in (ADAPTER, TOKENS, "training.png"):
        assert Path("weighted", name).read_bytes() == (adapter / name).read_bytes()
    assert Path("weighted/head_weights.png").read_bytes().startswith(b"\x89PNG")
    card = Path("weighted/README.md").read_text()
    assert card.startswith((adapter / "README.md").read_text().rstrip())
    assert card.count("## Weights of heads") == 1
    assert "| 6 entries | " in card
    assert "| 9 entries | " in card

    unweighted_method = LookaheadKV.from_pretrained(adapter, budget=8)
    weighted_method = LookaheadKV.from_pretrained("weighted", budget=8)
    assert unweighted_method.allocate == Global(0.25)
    assert weighted_method.allocate == Global(0.25, after.head_weights)
    model = load_target("tiny", device="cpu").model
    assert kept_entries_of_heads(unweighted_method, model) != kept_entries_of_heads(weighted_method, model)


@torch.no_grad()
def kept_entries_of_heads(method: LookaheadKV, model: Any) -> list[list[list[int]]]:
    """How many entries each head of each layer keeps of a prompt."""
    state = prefill(model, prompt_ids(60)[0])
    kept = method.select(state, method.importance(model, state))
    return [kept_of_layer.sum(dim=-1).tolist() for kept_of_layer in kept]


def test_tensors_and_weights_learn_and_cards_keep_the_sections_of_other_trainings(
    keepsight: CommandLine, adapter: Path
) -> None:
    keepsight(*TUNE_WEIGHTS)
    keepsight(*TUNE, "adapter=weighted")
    before = LookaheadAdapter.load(Path("weighted"))
    after = LookaheadAdapter.load(Path("finetuned"))
    assert before.settings == after.settings
    assert before.head_weights != after.head_weights
    assert not torch.equal(before.tokens, after.tokens)
    assert {*before.lora} == {*after.lora}
    assert any(not torch.equal(tensor, after.lora[name]) for name, tensor in before.lora.items())
    assert after.provenance.training["fine-tuning, steps"] == 2
    assert after.provenance.training["head weights, steps"] == 2
    assert Path("finetuned/head_weights.png").read_bytes() == Path("weighted/head_weights.png").read_bytes()
    assert Path("finetuned/finetuning.png").read_bytes().startswith(b"\x89PNG")
    card = Path("finetuned/README.md").read_text()
    assert card.startswith(Path("weighted/README.md").read_text().rstrip())
    assert card.count("## Fine-tuning for eviction") == 1
    assert keepsight("push", "finetuned", "ada/x", "--dry-run").count("finetuning.png") == 1

    edited_card = card + "```\n## Fine-tuning for eviction\n## Data\n```\n\n## Mine\n"
    Path("finetuned/README.md").write_text(edited_card)
    keepsight(*TUNE, "adapter=finetuned", "out=again")
    card = Path("again/README.md").read_text()
    assert "```\n## Fine-tuning" not in card
    assert card.count("\n## Data") == 1
    assert card.count("\n## Weights of heads") == 1
    assert "\n## Mine\n" in card


def test_a_finished_training_is_not_done_again_and_another_is_refused(keepsight: CommandLine, adapter: Path) -> None:
    keepsight(*TUNE)
    files = {name: Path("finetuned", name).read_bytes() for name in (ADAPTER, TOKENS, CONFIG)}
    keepsight(*TUNE)
    assert {name: Path("finetuned", name).read_bytes() for name in files} == files
    keepsight.refuses("finetune.head_weights_rate", "conflict", *TUNE, "finetune.head_weights_rate=1")
    keepsight.refuses("finetune.budgets", "conflict", *TUNE, "finetune.budgets=[6]")


def test_bad_input_is_one_line(keepsight: CommandLine, adapter: Path) -> None:
    for argument in (f"finetune.budgets=[{10**9}]", "finetune.budgets=[]", "finetune.temperature=0"):
        keepsight.refuses(key_of(argument), "range", *TUNE, argument)
    keepsight.refuses("out", "conflict", *TUNE, "out=adapter")
    assert not Path("finetuned").exists() or not any(Path("finetuned").iterdir())


PAPER = {"floor": None, "sharing": "layer", "kernel": 7}


@pytest.mark.parametrize(
    ("settings_before", "keys", "changes"),
    [
        (PAPER, (), {}),  # as it is used, so it is trained
        ({"sharing": "layer"}, (), {"sharing": "model"}),
        (PAPER, ("selection=shared",), SELECTIONS["shared"]),
        ({}, ("selection=uniform",), SELECTIONS["uniform"]),
    ],
)
def test_an_adapter_of_any_selection_is_trained(
    keepsight: CommandLine,
    adapter: Path,
    settings_before: dict[str, Any],
    keys: tuple[str, ...],
    changes: dict[str, Any],
) -> None:
    config = read_json(adapter / CONFIG)
    config["settings"] |= settings_before
    write_json(adapter / CONFIG, config)
    printed = keepsight(*TUNE, *keys)
    assert ("adapter: from here on it selects with " in printed) == bool(changes)
    settings = LookaheadAdapter.load(Path("finetuned")).settings
    assert vars(settings) == config["settings"] | changes

    methods = {name: LookaheadKV.from_pretrained("finetuned", budget=8, selection=name) for name in SELECTIONS}
    assert [type(method.allocate) for method in methods.values()] == [Uniform, Global, Uniform]
    shared: Any = methods["shared"].allocate
    assert (shared.weights is None) == (settings.floor is None)
    assert methods["uniform"].value_norm
    paper: Any = make_method("lookaheadkv", 8, Resources("finetuned"), selection="paper")
    assert replace(paper, observer=methods["paper"].observer) == methods["paper"]
    default = LookaheadKV.from_pretrained("finetuned", budget=8)
    if settings.floor is None:
        assert default.allocate == Uniform()
    else:
        assert default.allocate == Global(settings.floor, shared.weights)
    with refused("selection", "unknown"):
        LookaheadKV.from_pretrained("finetuned", budget=8, selection="even")


def test_a_uniform_selection_keeps_the_head_weights_that_it_does_not_use(keepsight: CommandLine, adapter: Path) -> None:
    keepsight(*TUNE)
    keepsight(*TUNE, "adapter=finetuned", "selection=uniform", "out=uniform")
    shared = LookaheadAdapter.load(Path("finetuned"))
    uniform = LookaheadAdapter.load(Path("uniform"))
    assert uniform.settings.floor is None
    assert shared.head_weights is not None
    assert uniform.head_weights == shared.head_weights
    assert not torch.equal(uniform.tokens, shared.tokens)
    uniform_twice = ("selection=uniform", "finetune.uniform_share=0.5")
    keepsight.refuses("finetune.uniform_share", "conflict", *TUNE, *uniform_twice, "out=other")


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
TUNE_METHOD = [*FINETUNE, "out=other", "finetune.head_weights_rate=0.5"]


def test_weights_for_another_method_go_into_an_evaluation(keepsight: CommandLine, adapter: Path) -> None:
    printed = keepsight(*TUNE_METHOD, *SNAPKV)
    assert re.search(r"head weights after step 2 in other: excess_nll_at_6 \S+ \(before: \S+\), ", printed)
    head_weights = read_json(Path("other/head_weights.json"))
    assert torch.tensor(head_weights).shape == (3, 2)
    assert torch.tensor(head_weights).std() > 0.01
    assert Path("other/head_weights.png").read_bytes().startswith(b"\x89PNG")

    allocate = Global.__call__
    weights_of_calls: list[Any] = []

    def note_weights_and_allocate(self: Global, *arguments: Any) -> Any:
        weights_of_calls.append(self.weights)
        return allocate(self, *arguments)

    _, *next_command = shlex.split(printed.splitlines()[-1].removeprefix("next: "))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Global, "__call__", note_weights_and_allocate)
        keepsight(*next_command, "tasks=niah_single", "lengths=320", "samples=1", "budgets=40", "model.dtype=float32")
    assert {*weights_of_calls} == {tuple(map(tuple, head_weights))}

    another_method = ("method=h2o", "options={window: 2, allocate: global}")
    keepsight.refuses("method", "conflict", *TUNE_METHOD, *another_method)


def test_weights_for_methods_that_cannot_have_any_are_refused(keepsight: CommandLine, adapter: Path) -> None:
    refusals: dict[str, tuple[str, Code]] = {
        "method=full": ("method", "model"),
        "method=keydiff": ("method", "model"),
        "method=tova": ("allocate", "conflict"),
        "method=snapkv selection=paper": ("selection", "conflict"),
        "adapter=adapter options={window:2}": ("options", "conflict"),
    }
    for keys, refusal in refusals.items():
        keepsight.refuses(*refusal, *TUNE_METHOD, *keys.split())


BEFORE_WEIGHTS: dict[str, tuple[str, Code]] = {
    "train.held_out=2 lookahead.targets=[q_prj]": ("lookahead.targets", "unknown"),
    "train.held_out=99": ("train.held_out", "range"),
    "train.held_out=2 max_prompt_tokens=1": ("max_prompt_tokens", "range"),
    "train.replays=2 replay.dir=.": ("replay.dir", "conflict"),
}


@pytest.mark.parametrize("arguments", BEFORE_WEIGHTS)
def test_bad_keys_are_refused_before_weights_are_read(
    keepsight: CommandLine, adapter: Path, arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("process-0").mkdir()
    Path("process-0", "mine.txt").touch()
    monkeypatch.setattr("keepsight.commands.from_recipe.load_target", None)
    keepsight.refuses(*BEFORE_WEIGHTS[arguments], "train", *TARGET, "out=new", *arguments.split())
    keepsight.refuses("finetune.budgets", "range", *TUNE, "finetune.budgets=[64]")
    assert not Path("new", "training").exists()
