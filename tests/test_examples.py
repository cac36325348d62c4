"""The examples run offline as they stand, on the packaged model, which all of them share here.

Its weights are dequantised into the user's own cache, once, as for whoever runs an example.
"""

import json
import os
import re
import runpy
import subprocess
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import matplotlib.pyplot as plt
import pytest
from huggingface_hub import constants

from keepsight.models import targets
from tests.typed import ROOT

EXAMPLES = Path(__file__).parent.parent / "examples"
NUMBER = "4719203"


@pytest.fixture(scope="module", autouse=True)
def _one_target_without_a_network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub")))
        patch.setattr(targets, "load_target", cache(targets.load_target))
        yield


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the prose around the needle, which is enough for what is claimed of it."""
    monkeypatch.setitem(topics, "import", topics["import"][:1000])


@pytest.fixture
def printed(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> str:
    """What a script prints."""
    runpy.run_path(str(EXAMPLES / request.param))
    return capsys.readouterr().out


def script(name: str) -> Any:
    return pytest.mark.parametrize("printed", [name], indirect=True)


@pytest.mark.usefixtures("short")
@script("compare_methods.py")
def test_trained_tokens_find_the_needle_and_snapkv_does_not(printed: str) -> None:
    _, *lines = printed.splitlines()
    finds_number = {line.split()[0]: NUMBER in line for line in lines}
    assert finds_number == {
        "FullCache": True,
        "Oracle": True,
        "LookaheadKV": True,
        "SnapKV": False,
        "StreamingLLM": False,
    }
    sizes = {line.split()[1] for line in lines[1:]}
    assert len(sizes) == 1, "at one budget all are of one size"


@script("own_method.py")
def test_grep_finds_the_needle(printed: str) -> None:
    assert [NUMBER in line for line in printed.splitlines()] == [True, True, False]


@script("read_once_ask_often.py")
def test_a_saved_text_answers_two_questions(printed: str) -> None:
    assert printed.count("\n- ") == 2
    assert "while" in printed.partition("\n- ")[2]


@script("which_tokens.py")
def test_tokens_are_shown_by_how_many_heads_keep_them(printed: str) -> None:
    shown, total = map(int, re.findall(r"(\d+) of (\d+) tokens", printed)[0])
    assert 10 < shown < 64 < total
    assert printed.count("\033[0;1m") == shown


@script("train_by_hand.py")
def test_a_module_learns(printed: str) -> None:
    divergence = [float(number) for number in re.findall(r"KL ([\d.]+)", printed)]
    assert len(divergence) == 12
    assert divergence[-1] < divergence[0] / 4


@pytest.mark.usefixtures("short")
def test_the_notebook_runs_and_shows_what_it_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cells run in order, as a kernel would run them; plots are drawn and not shown."""
    plt.switch_backend("agg")
    figures: list[Any] = []

    def show() -> None:
        figures.append(plt.gcf().axes)
        plt.close()

    monkeypatch.setattr(plt, "show", show)
    names: dict[str, Any] = {}
    for cell in _cells("code"):
        exec("".join(cell["source"]), names)
    assert NUMBER in capsys.readouterr().out
    observers, (curves,) = figures
    assert [axes.get_title() for axes in observers] == ["oracle", "LookaheadKV", "SnapKV"]
    heights = {line.get_label(): line.get_ydata() for line in curves.lines}
    assert heights["SnapKV"][1] > 0.5
    assert heights["LookaheadKV"][1] < 0.1


def _cells(kind: str) -> list[dict[str, Any]]:
    notebook = json.loads((EXAMPLES / "what_the_answer_reads.ipynb").read_text("utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_the_readmes_first_snippet_runs_as_pasted_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    readme = (EXAMPLES.parent / "README.md").read_text("utf-8")
    snippet = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)[0]
    expected = re.findall(r"```text\n(.*?)```", readme, flags=re.DOTALL)[0].splitlines()
    exec(snippet, {})
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line in expected] == expected


SRUN = 'for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done'


def test_two_nodes_of_a_stand_in(tmp_path: Path) -> None:
    programs = {"srun": SRUN, "scontrol": "echo one; echo two", "accelerate": "printf '<%s> ' \"$@\"; echo"}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_NODELIST": "n[1-2]"}
    arguments = ["recipe=llama3.1-8b", "out=a folder", "methods=[full,{name: snapkv}]"]
    process = subprocess.run(
        ["bash", str(ROOT / "examples/fit.sbatch"), *arguments],
        env=os.environ | job | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    launches = [line.strip(" <>").split("> <") for line in process.stdout.splitlines()]
    assert len(launches) == 2
    for rank, words in enumerate(launches):
        options = dict(pairwise(words))
        assert options["--num_processes"] == "8"
        assert options["--machine_rank"] == str(rank)
        assert options["--main_process_ip"] == "one"
        assert words[-4:] == ["fit", *arguments]
