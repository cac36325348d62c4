"""What README and the guides tell a reader to type, and the values with which a test types it in seconds."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.commands.commands import last_of_each_key
from tests.launch import one_launch
from tests.warm import ROOT, warm_python

SCRIPTS = {
    "train_lookahead.py": "train",
    "train_draft_head.py": "train_draft_head",
    "train_retrieval_head.py": "train_retrieval_head",
}
"""The commands that scripts run."""
_PROGRAMS = {
    "accelerate": ["-m", "accelerate.commands.accelerate_cli"],
    "keepsight": ["-m", "keepsight"],
    "python": [],
}
_MODEL = "model.id=runs/model model.device=cpu model.dtype=float32"
_SHORT = "steps=2 held_out=2 budget=6 samples_per_step=2 precision=no report_to=[]"
_SAMPLES = "lengths=[500] samples=1 budgets=[80]"
_DATA = f"{_MODEL} limit=6 max_new_tokens=4"
_BENCH = f"{_MODEL} adapter=runs/adapter"


def _short(section: str) -> str:
    return " ".join(f"{section}.{key}" for key in _SHORT.split())


SMALL = {
    "data": _DATA,
    "data stats": "",
    "train": f"{_MODEL} lookahead.tokens=4 {_short('train')}",
    "train_draft_head": f"{_MODEL} draft_head.vocabulary=64 {_short('draft_head.train')}",
    "train_retrieval_head": f"{_MODEL} retrieval_head.queries=8 retrieval_head.groups=2"
    f" {_short('retrieval_head.train')}",
    "finetune": f"{_MODEL} finetune.budgets=[6] {_short('finetune.train')}",
    "eval": f"{_MODEL} adapter=runs/adapter draft.layers=[0,2] {_SAMPLES} max_new_tokens=4 pages=0",
    "bench hits": f"{_MODEL} {_SAMPLES} max_new_tokens=4",
    "bench importance": f"{_BENCH} draft.layers=[0,2] {_SAMPLES} max_new_tokens=4",
    "inspect": f"{_MODEL} adapter=runs/adapter max_new_tokens=4",
    "fit": f"{_DATA} lookahead.tokens=4 {_short('train')} {_short('finetune.train')} finetune.budgets=[6]"
    " fresh.limit=6 fresh.max_new_tokens=4 fresh.steps=2 tasks=[niah_single] tests=1 lengths=[500] budgets=[80]",
    "demo": f"{_DATA} limit=8 lookahead.tokens=4 {_short('train')} tests=1 lengths=[500]",
    "push": "",
    "report": "",
    "compare": "",
    "plan": _MODEL,
    "plan train": f"{_MODEL} tokens=300 answer=8",
    "plan ttft": f"{_MODEL} draft.id=null",
    "bench draft": f"{_MODEL} keep=[2] prompt_tokens=[100,300] samples=2 held_out=2 answer_tokens=4",
    "bench train": f"{_MODEL} tokens=60 answer_tokens=4 repeats=1",
    "bench eval": f"{_BENCH} tokens=320 answer_tokens=3 samples=1 methods=[snapkv] budgets=[48]",
    "bench evict": f"{_BENCH} lengths=[90] budgets=[48] repeats=1",
    "bench decode": f"{_BENCH} tokens=90 budgets=[48] answer_tokens=2",
    "bench retrieve": f"{_BENCH} draft.layers=null retrieval=runs/retrieval lengths=[200] budgets=[48] tokens=200"
    " samples=1 repeats=1 answer_tokens=2",
    "bench serve": f"{_BENCH} tokens=90 budgets=[48] answer_tokens=2 requests=3 rows=2",
    "prefix": f"{_MODEL} adapter=runs/adapter budget=160",
    "bench ops": f"{_BENCH} tokens=90 budgets=[48]",
    "bench specache": f"{_MODEL} tokens=90 answer_tokens=2",
    "bench speculate": f"{_MODEL} tokens=320 answer_tokens=4 samples=1",
}
"""What a test adds to a line of a command: other values of what the line, its recipe and the defaults say.

The last value of a key counts; the line itself is typed as it stands.
"""


def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def lines(page: str) -> list[str]:
    """The lines of the blocks without a language, those joined that a backslash continues."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text_of(page), flags=re.DOTALL | re.MULTILINE)
    text = "".join(block for language, block in blocks if not language).replace("\\\n", " ")
    return [line for line in text.splitlines() if shlex.split(line, comments=True)]


def command_of(line: str) -> list[str]:
    """The command of keepsight that a line runs and its arguments; [] where it runs none."""
    words = shlex.split(line, comments=True)
    for index, word in enumerate(words):
        if word == "keepsight" and (index == 0 or words[index - 1] == "-m"):
            return words[index + 1 :]
        if word in SCRIPTS:
            return [SCRIPTS[word], *words[index + 1 :]]
    return []


def small(line: str) -> list[str]:
    """What a test adds to a line."""
    command = command_of(line)
    name = " ".join(command[:2])
    if name not in SMALL:
        name = command[0]
    return SMALL[name].split()


def type_in(line: str, folder: Path, *more: str, warm: bool = False) -> None:
    """Run a line in processes of its own as a shell in the folder would, with further arguments.

    Args:
        line: Of a page.
        folder: Working directory.
        more: Further arguments.
        warm: The processes are forks of one that has the imports: `tests/warm.py`.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if warm:
        environment = warm_python()
    program, *words = shlex.split(line, comments=True)
    python = environment.get("PYTHON_EXEC", sys.executable)
    command = [python, *_PROGRAMS[program], *last_of_each_key([*words, *more])]
    with one_launch():
        process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert process.returncode == 0, process.stderr[-4000:]
