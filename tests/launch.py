"""Commands in two processes on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What `accelerate launch` starts for several GPUs; for several processes on a CPU it starts one.
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def launch(folder: Path, *command: str, config: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script or `-m MODULE` in two processes that take turns on the CPU.

    Args:
        folder: Working directory.
        command: Script, or `-m` and a module, and its arguments.
        config: A file of recipes/accelerate/ for DeepSpeed, with which `accelerate launch` does start two processes.
    """
    launcher = TORCHRUN
    if config is not None:
        launcher = ["-m", "accelerate.commands.launch", f"--config_file={ROOT / 'recipes/accelerate' / config}.yaml"]
        launcher += ["--num_processes=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    given = [sys.executable, *launcher, *command]
    return subprocess.run(given, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
