"""The README's commands for several processes, DeepSpeed, quantised targets and servers, run as they stand."""

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from keepsight.files import read_json
from keepsight.models.lookahead_files import load_lookahead
from keepsight.models.targets import load_target
from tests.data_gen.serving import free_port, serving
from tests.launch import ROOT
from tests.tiny import save_tiny_target
from tests.train.runs import write_data

pytestmark = pytest.mark.slow
BLOCK = re.search(r"```\n(accelerate launch --config_file .*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
COMMANDS = {line.rpartition("out=runs/")[2]: line for line in BLOCK[1].splitlines()} if BLOCK else {}
PROGRAMS = {
    "accelerate": ["-m", "accelerate.commands.accelerate_cli"],
    "keepsight": ["-m", "keepsight"],
    "python": [],
}
SHORT = ["lookahead.tokens=4", *(f"train.{key}" for key in ("steps=2", "held_out=2", "budget=6", "report_to=[]"))]
MIXTURE = {"min_tokens": 100, "max_tokens": 140, "sources": [{"kind": "key_values"}]}
NEEDS = {"zero2": "deepspeed", "zero3": "deepspeed", "nf4": "bitsandbytes", "served": "fastapi"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a clone of the repository, with a model and its data in runs/."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("recipes", "train_lookahead.py"):
        (folder / name).symlink_to(ROOT / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        save_tiny_target(Path("runs/model"), hidden_size=64, intermediate_size=128, head_dim=16)
        write_data(Path("runs/data"), load_target("runs/model", device="cpu"))
    return folder


def run(line: str, place: Path, *more: str) -> None:
    """A line as a shell in the folder runs it, with further keys that make it short."""
    program, *words = shlex.split(line)
    given = [sys.executable, *PROGRAMS[program], *words, "model.device=cpu", *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(given, cwd=place, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]


def needs(name: str) -> None:
    if find_spec(NEEDS.get(name, "torch")) is None:
        pytest.skip(f"needs the package {NEEDS[name]}")


@pytest.mark.parametrize("name", ["ddp", "zero2", "zero3", "fsdp2", "nf4"])
def test_a_training(name: str, place: Path) -> None:
    needs(name)
    run(COMMANDS[name], place, *SHORT)
    processes = 1 if name == "nf4" else 2
    assert read_json(place / "runs" / name / "training/settings.json")["launch.processes"] == processes
    trained = load_lookahead(place / "runs" / name)
    assert trained.provenance.training["steps"] == 2
    assert trained.tokens.shape == (4, 64)
    assert trained.lora and all(each.count_nonzero() for each in trained.lora.values())


def test_answers_of_a_server(place: Path) -> None:
    needs("served")
    (place / "keys.yaml").write_text(yaml.safe_dump(MIXTURE))
    with serving(Path("runs/model"), port := free_port(), place):
        run(COMMANDS["served"].replace(":8000", f":{port}"), place, "mixture=keys.yaml", "max_new_tokens=4")
    assert read_json(place / "runs/served/manifest.json")["samples"] == 20
