"""A target with a layer and the head on the disk until they run: what comes of it is what comes of a whole one."""

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from keepsight import DapQ, Quest, SnapKV, generate
from keepsight.files import read_jsonl
from keepsight.models import targets
from keepsight.models.targets import load_target
from keepsight.runtime.method import Method
from keepsight.runtime.saved import weights_digest
from tests.close import assert_close
from tests.commands.commands import CommandLine
from tests.eval.rows import CLOCKS, comparable
from tests.tiny import prompt_ids, save_tiny_target
from tests.train.runs import write_data

TINY = ["model.id=tiny", "model.device=cpu"]
SHORT = ("steps=3", "held_out=2", "measure_every=3", "report_to=[]", "learning_rate=0.01")
LOOKAHEAD = ["train", "lookahead.tokens=4", "train.budget=6", *(f"train.{each}" for each in SHORT)]
DRAFT_HEAD = ["train_draft_head", "draft_head.vocabulary=96", *(f"draft_head.train.{each}" for each in SHORT)]
TRAININGS = {
    "lookahead": (LOOKAHEAD, "adapter_model.safetensors"),
    "lookahead, layers run twice": ([*LOOKAHEAD, "train.gradient_checkpointing=true"], "adapter_model.safetensors"),
    "draft head": (DRAFT_HEAD, "model.safetensors"),
}
NEEDLES = [
    "tasks=[niah_single]",
    "lengths=[320]",
    "samples=1",
    "budgets=[40]",
    "max_new_tokens=4",
    "draft.layers=[0,2]",
]
METHODS = "methods=[full,oracle,lookaheadkv,speckv,quest]"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with `tiny` and the `data` that it answered."""
    monkeypatch.chdir(tmp_path)
    save_tiny_target(Path("tiny"), num_hidden_layers=7)
    write_data(Path("data"), load_target("tiny", device="cpu"))
    return tmp_path


@pytest.fixture
def offload(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on targets are loaded in parts, two of which stay in their file."""
    layers = {f"model.layers.{place}": "cpu" for place in range(7)}
    parts = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    spread = {"device_map": parts | layers | {"model.layers.1": "disk"}}
    return lambda: monkeypatch.setattr(targets, "placement", lambda *_: spread)


@pytest.mark.parametrize("training", TRAININGS)
def test_a_training(keepsight: CommandLine, here: Path, offload: Callable[[], None], training: str) -> None:
    (command, *keys), weights = TRAININGS[training]
    keepsight(command, *TINY, *keys, "data=data", "out=whole")
    offload()
    keepsight(command, *TINY, *keys, "data=data", "out=parts")
    whole, parts = (load_file(here / out / weights) for out in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    for name, value in whole.items():
        assert_close(parts[name].float(), value.float())


@pytest.mark.slow
def test_an_evaluation(keepsight: CommandLine, here: Path, offload: Callable[[], None]) -> None:
    keepsight(*LOOKAHEAD, *TINY, "data=data", "out=adapter")
    for out in ("whole", "parts"):
        keepsight("eval", *TINY, *NEEDLES, METHODS, "adapter=adapter", f"out={out}")
        offload()
    whole, parts = ([row | CLOCKS for row in read_jsonl(here / out / "results.jsonl")] for out in ("whole", "parts"))
    assert len(whole) == 5 and parts == comparable(whole)


@pytest.mark.parametrize("method", [SnapKV(16, window=8), DapQ(16), Quest(32, page=4), None], ids=str)
def test_an_answer(here: Path, offload: Callable[[], None], method: Method | None) -> None:
    prompt = prompt_ids(60)[0]
    whole = load_target("tiny", device="cpu").model
    offload()
    parts = load_target("tiny", device="cpu").model
    assert weights_digest(parts) == weights_digest(whole)
    answers = [generate(each, prompt, method, max_new_tokens=6).tolist() for each in (whole, parts)]
    assert answers[0] == answers[1]


def test_a_weight_on_the_disk_that_is_not_finite(
    keepsight: CommandLine, here: Path, offload: Callable[[], None]
) -> None:
    file = here / "tiny/model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"][0, 3] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    offload()
    assert "weight 'model.layers.1.mlp.up_proj.weight' is not finite" in keepsight.fails(
        *LOOKAHEAD, *TINY, "data=data", "out=out"
    )
