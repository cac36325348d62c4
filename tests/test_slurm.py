"""The Slurm file starts a launcher on each node with the job's numbers, and passes its arguments on as they are."""

import os
import subprocess
from itertools import pairwise
from pathlib import Path

from tests.typed import ROOT

SRUN = 'for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done'


def test_two_nodes_of_a_stand_in(tmp_path: Path) -> None:
    programs = {"srun": SRUN, "scontrol": "echo one; echo two", "accelerate": "printf '<%s> ' \"$@\"; echo"}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_NODELIST": "n[1-2]"}
    given = ["recipe=llama3.1-8b", "out=a folder", "methods=[full,{name: snapkv}]"]
    done = subprocess.run(
        ["bash", str(ROOT / "examples/fit.sbatch"), *given],
        env=os.environ | job | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    launched = [line.strip(" <>").split("> <") for line in done.stdout.splitlines()]
    assert len(launched) == 2
    for rank, words in enumerate(launched):
        told = dict(pairwise(words))
        assert told["--num_processes"] == "8" and told["--machine_rank"] == str(rank)
        assert told["--main_process_ip"] == "one" and words[-4:] == ["fit", *given]
