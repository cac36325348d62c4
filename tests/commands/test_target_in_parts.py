"""A base model with a layer and the head on disk until they run, or over two devices, gives what a whole one gives."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from keepsight import DapQ, Quest, SnapKV, generate
from keepsight.files import read_jsonl
from keepsight.models import targets
from keepsight.models.identity import weights_digest
from keepsight.models.targets import load_target
from keepsight.runtime.generate import Method
from tests.close import assert_close
from tests.commands.commands import CommandLine
from tests.devices import FIRST, SECOND, several_devices
from tests.eval.rows import CLOCKS, comparable
from tests.tiny import prompt_ids, save_tiny_target
from tests.train.runs import write_data

TINY = ["model.id=tiny", "model.device=cpu"]
SHORT = ("steps=3", "held_out=2", "measure_every=3", "report_to=[]", "learning_rate=0.01")
LOOKAHEAD = ["train", "lookahead.tokens=4", "train.budget=6", *(f"train.{each}" for each in SHORT)]
DRAFT_HEAD = ["train_draft_head", "draft_head.vocabulary=96", *(f"draft_head.train.{each}" for each in SHORT)]
RETRIEVAL_HEAD = ["train_retrieval_head", *(f"retrieval_head.train.{each}" for each in SHORT)]
TRAININGS = {
    "lookahead": (LOOKAHEAD, "adapter_model.safetensors"),
    "lookahead, layers run twice": ([*LOOKAHEAD, "train.gradient_checkpointing=true"], "adapter_model.safetensors"),
    "draft head": (DRAFT_HEAD, "model.safetensors"),
    "retrieval head": (RETRIEVAL_HEAD, "retrieval_head.safetensors"),
}
FAST = [("lookahead", "disk"), ("draft head", "devices"), ("retrieval head", "devices")]
"""tests/train/test_training.py has a lookahead module over two devices, and one whose layers run twice."""
NEEDLES = ["tasks=[niah_single]", "lengths=[320]", "samples=1", "budgets=[40]", "max_new_tokens=4"]
METHODS = "draft.layers=[0,2] methods=[full,oracle,lookaheadkv,speckv,quest,snapkv,adakv,h2o]"
_ENDS = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head")
_LAYERS = [f"model.layers.{place}" for place in range(7)]
PARTS: dict[str, Any] = {
    "disk": dict.fromkeys([*_ENDS, *_LAYERS], "cpu") | {"lm_head": "disk", "model.layers.1": "disk"},
    "devices": dict.fromkeys([*_ENDS[:2], *_LAYERS[:4]], FIRST) | dict.fromkeys([*_ENDS[2:], *_LAYERS[4:]], SECOND),
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
    """Within the block targets are loaded in `PARTS`."""
    with pytest.MonkeyPatch.context() as patch, several_devices() if parts == "devices" else nullcontext():
        patch.setattr(targets, "placement", lambda *_: {"device_map": PARTS[parts]})
        yield


@pytest.mark.parametrize(
    ("training", "parts"),
    [pytest.param(*each, marks=[] if each in FAST else [pytest.mark.slow]) for each in product(TRAININGS, PARTS)],
)
def test_a_training(keepsight: CommandLine, here: Path, training: str, parts: str) -> None:
    (command, *keys), weights = TRAININGS[training]
    keepsight(command, *TINY, *keys, "data=data", "out=whole")
    with loaded_in(parts):
        keepsight(command, *TINY, *keys, "data=data", "out=parts")
    whole, found = (load_file(here / out / weights) for out in ("whole", "parts"))
    assert whole.keys() == found.keys()
    for name, value in whole.items():
        assert_close(found[name].float(), value.float())


@pytest.mark.slow
@pytest.mark.parametrize("parts", PARTS)
def test_an_evaluation(keepsight: CommandLine, here: Path, parts: str) -> None:
    keepsight(*LOOKAHEAD, *TINY, "data=data", "out=adapter")
    asked = ["eval", *TINY, *NEEDLES, *METHODS.split(), "adapter=adapter"]
    keepsight(*asked, "out=whole")
    with loaded_in(parts):
        keepsight(*asked, "out=parts")
    whole, found = ([row | CLOCKS for row in read_jsonl(here / out / "results.jsonl")] for out in ("whole", "parts"))
    assert len(whole) == 8 and found == comparable(whole)


@pytest.mark.parametrize("method", [SnapKV(16, window=8), DapQ(16), Quest(32, page=4), None], ids=str)
def test_an_answer(here: Path, method: Method | None) -> None:
    prompt = prompt_ids(60)[0]
    whole = load_target("tiny", device="cpu").model
    with loaded_in("disk"):
        parts = load_target("tiny", device="cpu").model
    assert weights_digest(parts) == weights_digest(whole)
    answers = [generate(each, prompt, method, max_new_tokens=6).tolist() for each in (whole, parts)]
    assert answers[0] == answers[1]


def test_a_weight_on_the_disk_that_is_not_finite(keepsight: CommandLine, here: Path) -> None:
    file = here / "tiny/model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"][0, 3] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    with loaded_in("disk"):
        keepsight.refuses("model.layers.1.mlp.up_proj.weight", "data", *LOOKAHEAD, *TINY, "data=data", "out=out")
