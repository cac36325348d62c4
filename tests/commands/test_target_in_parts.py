"""A base model over two devices, or with a layer and the LM head on disk until they run, computes as one in memory."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from keepsight import DapQ, Quest, SnapKV, generate
from keepsight.models import targets
from keepsight.models.identity import weights_digest
from keepsight.models.targets import load_target
from keepsight.runtime.generate import Method
from tests.close import assert_close
from tests.commands.commands import CommandLine, results_of
from tests.devices import FIRST, SECOND, several_devices
from tests.eval.rows import comparable, without_clocks
from tests.tiny import prompt_ids, save_tiny_target
from tests.train.runs import write_data

TINY = ["model.id=tiny", "model.device=cpu"]


def short_training(section: str) -> list[str]:
    keys = ("steps=3", "held_out=2", "measure_every=3", "report_to=[]", "learning_rate=0.01")
    return [f"{section}.{key}" for key in keys]


LOOKAHEAD = ["train", "lookahead.tokens=4", "train.budget=6", *short_training("train")]
DRAFT_HEAD = ["train_draft_head", "draft_head.vocabulary=96", *short_training("draft_head.train")]
RETRIEVAL_HEAD = ["train_retrieval_head", *short_training("retrieval_head.train")]
TRAININGS = {
    "lookahead": (LOOKAHEAD, "adapter_model.safetensors"),
    "lookahead, layers run twice": ([*LOOKAHEAD, "train.gradient_checkpointing=true"], "adapter_model.safetensors"),
    "draft head": (DRAFT_HEAD, "model.safetensors"),
    "retrieval head": (RETRIEVAL_HEAD, "retrieval_head.safetensors"),
}
FAST = [("lookahead", "disk"), ("draft head", "devices"), ("retrieval head", "devices")]
"""tests/train/test_training.py has a lookahead module over two devices, and one whose layers run twice."""
NEEDLES = ["tasks=[niah_single]", "lengths=[320]", "samples=1", "budgets=[40]", "max_new_tokens=4"]
METHODS = ["draft.layers=[0,2]", "methods=[full,oracle,lookaheadkv,speckv,quest,snapkv,adakv,h2o]"]
_LAYERS = [f"model.layers.{layer}" for layer in range(7)]
_FIRST_HALF = ["model.embed_tokens", "model.rotary_emb", *_LAYERS[:4]]
_SECOND_HALF = [*_LAYERS[4:], "model.norm", "lm_head"]
DEVICE_MAPS: dict[str, dict[str, Any]] = {
    "disk": dict.fromkeys([*_FIRST_HALF, *_SECOND_HALF], "cpu") | {"lm_head": "disk", "model.layers.1": "disk"},
    "devices": dict.fromkeys(_FIRST_HALF, FIRST) | dict.fromkeys(_SECOND_HALF, SECOND),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with `tiny` and the `data` that it answered."""
    monkeypatch.chdir(tmp_path)
    save_tiny_target(Path("tiny"), num_hidden_layers=7)
    write_data(Path("data"), load_target("tiny", device="cpu"))
    return tmp_path


@contextmanager
def loaded_in(parts: str) -> Iterator[None]:
    """Within the block targets are loaded with the device map of that name."""
    with pytest.MonkeyPatch.context() as patch, several_devices() if parts == "devices" else nullcontext():
        patch.setattr(targets, "placement", lambda *_: {"device_map": DEVICE_MAPS[parts]})
        yield


def slow_unless_fast() -> list[Any]:
    """Every training in every kind of parts."""
    params: list[Any] = []
    for training_and_parts in product(TRAININGS, DEVICE_MAPS):
        marks = [] if training_and_parts in FAST else [pytest.mark.slow]
        params.append(pytest.param(*training_and_parts, marks=marks))
    return params


@pytest.mark.parametrize(("training", "parts"), slow_unless_fast())
def test_a_training_gives_the_same_module(keepsight: CommandLine, here: Path, training: str, parts: str) -> None:
    (command, *keys), weights = TRAININGS[training]
    keepsight(command, *TINY, *keys, "data=data", "out=on_cpu")
    with loaded_in(parts):
        keepsight(command, *TINY, *keys, "data=data", "out=in_parts")
    on_cpu = load_file(here / "on_cpu" / weights)
    in_parts = load_file(here / "in_parts" / weights)
    assert on_cpu.keys() == in_parts.keys()
    for name, tensor in on_cpu.items():
        assert_close(in_parts[name].float(), tensor.float())


@pytest.mark.slow
@pytest.mark.parametrize("parts", DEVICE_MAPS)
def test_an_evaluation_gives_the_same_rows(keepsight: CommandLine, here: Path, parts: str) -> None:
    keepsight(*LOOKAHEAD, *TINY, "data=data", "out=adapter")
    evaluation = ["eval", *TINY, *NEEDLES, *METHODS, "adapter=adapter"]
    keepsight(*evaluation, "out=on_cpu")
    with loaded_in(parts):
        keepsight(*evaluation, "out=in_parts")
    on_cpu = results_of(here / "on_cpu")
    assert len(on_cpu) == 8
    in_parts = without_clocks(results_of(here / "in_parts"))
    assert in_parts == comparable(on_cpu)


@pytest.mark.parametrize("method", [SnapKV(16, window=8), DapQ(16), Quest(32, page=4), None], ids=str)
def test_an_answer_is_the_same(here: Path, method: Method | None) -> None:
    prompt, _ = prompt_ids(60)
    on_cpu = load_target("tiny", device="cpu").model
    with loaded_in("disk"):
        in_parts = load_target("tiny", device="cpu").model
    assert weights_digest(in_parts) == weights_digest(on_cpu)
    expected = generate(on_cpu, prompt, method, max_new_tokens=6)
    answer = generate(in_parts, prompt, method, max_new_tokens=6)
    assert answer.tolist() == expected.tolist()


def test_a_weight_on_the_disk_that_is_not_finite_is_refused(keepsight: CommandLine, here: Path) -> None:
    file = here / "tiny/model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"][0, 3] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    with loaded_in("disk"):
        keepsight.refuses("model.layers.1.mlp.up_proj.weight", "data", *LOOKAHEAD, *TINY, "data=data", "out=out")
