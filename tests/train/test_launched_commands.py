"""The commands of docs/cluster.md for several processes, DeepSpeed, quantised targets and servers, run as they stand.

Each starts its processes anew, unlike those of `tests/launch.py`.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from keepsight.files import read_json
from keepsight.models.lookahead import LookaheadAdapter
from keepsight.models.targets import load_target
from tests.data_gen.served import free_port, serving
from tests.tiny import save_tiny_target
from tests.train.runs import write_data
from tests.typed import ROOT, lines, type_in

pytestmark = pytest.mark.slow
COMMANDS = {line.rpartition("out=runs/")[2]: line for line in lines("docs/cluster.md") if "model.id=runs/model" in line}
"""By the name of their folder in runs/."""
SHORT = ["lookahead.tokens=4", "train.steps=2", "train.held_out=2", "train.budget=6", "train.report_to=[]"]
MIXTURE = {"min_tokens": 100, "max_tokens": 140, "sources": [{"kind": "key_values"}]}
NEEDS = {"zero2": "deepspeed", "zero3": "deepspeed", "nf4": "bitsandbytes", "served": "fastapi"}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a clone of the repository, with a model and its data in runs/."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("recipes", "train_lookahead.py"):
        (folder / name).symlink_to(ROOT / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        save_tiny_target(Path("runs/model"), hidden_size=64, intermediate_size=128, head_dim=16)
        write_data(Path("runs/data"), load_target("runs/model", device="cpu"))
    return folder


def needs(name: str) -> None:
    if find_spec(NEEDS.get(name, "torch")) is None:
        pytest.skip(f"needs the package {NEEDS[name]}, which `make test-slow` installs")


@pytest.mark.parametrize("name", ["ddp", "zero2", "zero3", "fsdp2", "nf4"])
def test_a_training(name: str, workspace: Path) -> None:
    needs(name)
    type_in(COMMANDS[name], workspace, "model.device=cpu", *SHORT)
    out = workspace / "runs" / name
    processes = 1 if name == "nf4" else 2
    assert read_json(out / "training/settings.json")["settings"]["launch.processes"] == processes
    adapter = LookaheadAdapter.load(out)
    assert adapter.provenance.training["steps"] == 2
    assert adapter.tokens.shape == (4, 64)
    assert adapter.lora
    assert all(tensor.count_nonzero() for tensor in adapter.lora.values())


def test_answers_of_a_server(workspace: Path) -> None:
    needs("served")
    (workspace / "keys.yaml").write_text(yaml.safe_dump(MIXTURE))
    port = free_port()
    with serving(Path("runs/model"), port, workspace):
        line = COMMANDS["served"].replace(":8000", f":{port}")
        type_in(line, workspace, "model.device=cpu", "mixture=keys.yaml", "max_new_tokens=4")
    assert read_json(workspace / "runs/served/manifest.json")["samples"] == 20
