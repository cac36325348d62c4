"""Commands in two processes on the CPU."""

import subprocess
import tempfile
from pathlib import Path

from filelock import FileLock

from tests.warm import ROOT, warm_python

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
        config_file = ROOT / "recipes" / "accelerate" / f"{config}.yaml"
        launcher = ["-m", "accelerate.commands.launch", f"--config_file={config_file}", "--num_processes=2"]
    environment = warm_python()
    arguments = [environment["PYTHON_EXEC"], *launcher, *command]
    with one_launch():
        return subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)


def one_launch() -> FileLock:
    """Held while a test launches: `accelerate launch` takes the same port each time, and two processes both cores."""
    return FileLock(Path(tempfile.gettempdir(), "keepsight-launch.lock"))
