"""A short run of the campaign; `make faults` is the long one."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_short_campaign_ends_as_it_may() -> None:
    counts = {"kills": 2, "full disks": 1, "removed folders": 1, "two writers": 1, "damaged files": 6, "inputs": 15}
    counts |= {
        "threads": 3,
        "rows": 15,
        "servers": 5,
        "paths": 5,
        "sinks": 15,
        "rope": 8,
        "stops": 15,
        "tokenizers": 15,
        "pasts": 4,
        "turns": 4,
    }
    given = [f"{name.replace(' ', '_')}={number}" for name, number in counts.items()]
    command = [sys.executable, "-m", "tests.faults", *given, "plots=0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    lines = {line[:16].strip(): line[16:].split()[:1] for line in done.stdout.splitlines()}
    assert {name: lines[name] for name in counts} == {name: [str(number)] for name, number in counts.items()}
