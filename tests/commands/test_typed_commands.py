"""What README and the guides tell a reader to type runs as it stands, on a tiny model and with the values of SMALL."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from keepsight.commands import cli
from keepsight.commands.lm_eval import run_harness
from keepsight.files import write_lines, write_text
from keepsight.models.card import Provenance
from keepsight.models.targets import load_target
from keepsight.runtime.methods import METHODS
from tests.commands.commands import CommandLine
from tests.data_gen.served import server, speaks
from tests.eval.judging import endpoint
from tests.eval.pictured import row, save_pictured_target, without_videos, write_data_set
from tests.models.modules import SHAPE, random_on, save
from tests.models.retrieval_heads import tiny_draft_head, tiny_retrieval_head
from tests.tiny import save_tiny_target
from tests.train.runs import write_data
from tests.typed import ROOT, SMALL, command_of, lines, small, text_of, type_in

GUIDES = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").glob("*.md"))]
START = lines("docs/quickstart.md")
SETUP, DEMO, *QUICK_START = START
LAUNCHED = [line for line in lines("docs/cluster.md") if "model.id=runs/model" in line]
"""Those with several processes, DeepSpeed, nf4 and a server: tests/train/test_launched_commands.py runs them too."""
ALL_LINES = [line for page in ("README.md", *GUIDES) for line in lines(page)]
FROM_GUIDES = [line for line in dict.fromkeys(ALL_LINES) if line not in (*START, *LAUNCHED)]
TYPED = [line for line in FROM_GUIDES if command_of(line) and command_of(line)[0] != "serve"]
"""tests/commands/test_serving_commands.py and tests/serving/vllm/test_page.py serve."""
NEEDS = {"zero3": "deepspeed", "nf4": "bitsandbytes"}
LONG = "The ship sailed on. " * 60
ADDED = {
    "mixture=paper": "mixture=offline",  # its data sets are on the Hub
    "data recipe=smollm2-135m": "mixture=offline rows=null",
    "fit recipe=smollm2-135m": "mixture=offline",
    "fit recipe=qwen2.5-coder-0.5b": "train.batch_size=1",
    "tasks=ruler,": "tasks=[ruler_vt,longbench] lengths=[800]",
    "preset=lookaheadkv-longbench": "longbench.dir=data/longbench draft.id=null",
    "preset=specache-throughput": "methods=[{name:specache,group:32}] batch=2",
    "finetune method=snapkv": "options={window:2,allocate:{name:global,floor:0.2}}",
    "milebench.dir": "model.id=runs/vl draft.id=runs/vl-draft draft.layers=null",
}
"""What else a test adds to lines with these words."""


TASK_OF_LM_EVAL = """
task: gsm8k
dataset_path: json
dataset_kwargs: {data_files: {test: gsm8k.jsonl}}
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
output_type: generate_until
generation_kwargs: {until: [x], max_gen_toks: 4}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a clone of the repository, with what lines read and do not make."""
    folder = tmp_path_factory.mktemp("clone")
    for script in ROOT.glob("train_*.py"):
        (folder / script.name).symlink_to(script)
    (folder / "checkpoints").symlink_to(ROOT / "checkpoints")
    for settings in ROOT.glob("recipes/accelerate/*.yaml"):
        text = re.sub("num_processes: .*", "num_processes: 2", settings.read_text("utf-8"))
        write_text(folder / "recipes/accelerate" / settings.name, text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_models()
        write_files_of_guides()
        write_benchmarks()
    return folder


def write_models() -> None:
    """A target deep enough for a draft head, with modules of each kind, its data, and two models that read images."""
    save_tiny_target(Path("runs/model"), num_hidden_layers=7, head_dim=32)
    target = load_target("runs/model", device="cpu", dtype="float32")
    shape = replace(SHAPE, floor=0.25, sharing="model")
    for adapter in ("runs/adapter", "runs/weighted", "runs/smollm2/adapter"):
        save(random_on(target.model, shape), Path(adapter), "runs/model")
    size = {"vocab_size": target.model.config.vocab_size, "max_position_embeddings": 4096}
    tiny_draft_head(**size).save(Path("runs/draft-head"), Provenance("runs/model"), "# Card\n")
    tiny_retrieval_head(**size).save(Path("runs/retrieval"), Provenance("runs/model"), "# Card\n")
    write_text(Path("runs/snapkv/head_weights.json"), json.dumps([[1.5, 0.5]] * 7))
    write_data(Path("runs/data"), target)
    save_pictured_target(Path("runs/vl"))
    save_pictured_target(Path("runs/vl-draft"), seed=7)


def write_files_of_guides() -> None:
    """What README and the guides let a reader write."""
    (own_method,) = re.findall(r"```python\n(.*?)```", text_of("docs/own_method.md"), re.DOTALL)
    rows, tasks = re.findall(r"```json\n(.*?)```", text_of("docs/evaluation.md"), re.DOTALL)
    (mixture,) = re.findall(r"```yaml\n(.*?)```", text_of("docs/data.md"), re.DOTALL)
    write_text(Path("file.txt"), LONG)
    write_text(Path("docs/images/inspect.txt"), LONG)
    write_text(Path("my_methods.py"), own_method.rstrip("\n").rpartition("\n")[0])
    write_text(Path("mine/contracts.jsonl"), rows)
    write_text(Path("mine/tasks.json"), tasks)
    write_text(Path("my_mixture.yaml"), mixture)
    write_lines(Path("my_prompts.jsonl"), [{"prompt": f"{number}. {LONG}"} for number in range(6)])


def write_benchmarks() -> None:
    """A row or two of each that lines name, and a task of lm-evaluation-harness."""
    question = {"question_id": 111, "category": "math", "turns": ["Add.", "Now subtract."], "reference": ["3", "1"]}
    write_lines(Path("question.jsonl"), [question])
    write_lines(Path("gpt-4.jsonl"), [{"question_id": 121, "choices": [{"turns": ["def", "assert"]}]}])
    paper = {"input": "Who sailed?", "context": LONG, "answers": ["a ship"], "_id": "1", "all_classes": None}
    write_lines(Path("data/longbench/qasper.jsonl"), [paper])
    for data_set in ("SlideVQA", "TQA"):
        rows = [row(0, "{image#1} " + LONG, ["a.png"], "a tree", ["a tree", "a house"])]
        write_data_set(Path("data/MileBench"), data_set, "multi-choice", rows)
    write_lines(Path("gsm8k.jsonl"), [{"question": "1 + 1?", "answer": "2"}])
    write_text(Path("gsm8k.yaml"), TASK_OF_LM_EVAL)


@pytest.fixture(scope="module")
def servers(clone: Path) -> Iterator[dict[str, str]]:
    """A server that answers as the target, and a judge, as additions to the lines that name one."""
    target = load_target(str(clone / "runs/model"), device="cpu", dtype="float32")
    with server(speaks(target)) as completions, endpoint(lambda _: "[[5]]") as judge:
        yield {
            "backend=server": f"server.url={completions.url} server.model=served limit=4",
            "judge.url": f"judge.url={judge.url}",
        }


@pytest.fixture
def here(clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a copy of the clone; nothing is asked of the Hub, and `METHODS` is as before afterwards."""
    monkeypatch.chdir(shutil.copytree(clone, tmp_path / "clone", symlinks=True))
    monkeypatch.setattr("keepsight.eval.tasks.benchmark.hub_reachable", lambda: False)
    monkeypatch.setitem(METHODS, "value_norm", METHODS["evict"])
    monkeypatch.delitem(sys.modules, "my_methods", raising=False)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    without_videos(monkeypatch)
    return Path.cwd()


def out_of(words: list[str]) -> Path | None:
    """What a command says it writes to."""
    for word in words:
        if word.startswith("out="):
            return Path(word.removeprefix("out="))
    return None


def type_line(line: str, keepsight: CommandLine, added: dict[str, str]) -> None:
    """Run a line, in this process where it is a command of keepsight; what it makes is there afterwards, and new.

    Args:
        line: Of a page.
        keepsight: Runs commands.
        added: Further arguments for lines with some words, by these words.
    """
    words = [word for word in command_of(line) if word != "..."]
    out = out_of(words)
    if out is not None:
        shutil.rmtree(out, ignore_errors=True)
    arguments = small(line)
    for words_of_line, further in added.items():
        if words_of_line in line:
            arguments += further.split()
    if line.startswith("keepsight"):
        keepsight(*words, *arguments)
    else:
        type_in(line, Path.cwd(), *arguments, warm=True)
    assert out is None or out.exists()


@pytest.mark.slow
def test_the_demo_that_make_runs(keepsight: CommandLine, here: Path) -> None:
    # A make around the tests would add lines.
    make = ["make", "-n", "--no-print-directory", *DEMO.split("#")[0].split()[1:]]
    result = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    last_line = result.stdout.strip().splitlines()[-1]
    _, _, command = last_line.partition(" -m ")
    type_line(command, keepsight, {})
    assert (here / "runs/demo/eval/report.html").is_file()


def test_the_quick_start(keepsight: CommandLine, here: Path) -> None:
    """Line after line, each with what those before have made."""
    shutil.rmtree("runs/data")
    shutil.rmtree("runs/adapter")
    assert len(QUICK_START) == 6
    for line in QUICK_START:
        type_line(line, keepsight, {})
    assert Path("runs/inspect.html").is_file()


def test_answers_of_a_server(keepsight: CommandLine, here: Path, servers: dict[str, str]) -> None:
    (line,) = [line for line in LAUNCHED if "backend=server" in line]
    type_line(line, keepsight, servers)


def is_slow(line: str) -> bool:
    """Of each command the first line runs in `make test`; tests/test_docs.py parses all.

    Evaluations take seconds each, since their plots are drawn; other programs start anew.
    """
    if not line.startswith("keepsight"):
        return True
    if command_of(line)[0] in ("eval", "report", "compare", "ablate"):
        return True
    first_line = next(other for other in TYPED if name_of(other) == name_of(line))
    return line != first_line


def marked(line: str) -> object:
    """The line as a parameter, skipped where a package that it needs is missing."""
    marks: list[pytest.MarkDecorator] = []
    if is_slow(line):
        marks.append(pytest.mark.slow)
    for words, package in NEEDS.items():
        if words in line and find_spec(package) is None:
            marks.append(pytest.mark.skip(f"needs the package {package}"))
    return pytest.param(line, marks=marks)


def name_of(line: str) -> str:
    """The command that a line runs, such as `data` or `bench decode`."""
    name, _ = cli.command_of(command_of(line))
    return name


@pytest.mark.parametrize("line", [marked(line) for line in TYPED])
def test_a_line_of_a_guide(line: str, keepsight: CommandLine, here: Path, servers: dict[str, str]) -> None:
    if command_of(line)[0] in ("report", "compare"):
        keepsight("eval", "tasks=niah_single", "methods=snapkv", "out=runs/eval", *SMALL["eval"].split())
        shutil.copytree("runs/eval", "runs/other")
    type_line(line, keepsight, ADDED | servers)


@pytest.mark.slow
def test_lm_eval(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = [line for line in FROM_GUIDES if line.startswith("keepsight-lm-eval ")]
    model = ["--model_args", "pretrained=runs/model,dtype=float32", "--device", "cpu"]
    files = ["--include_path", ".", "--output_path", "out.json"]
    monkeypatch.setattr(sys, "argv", [*shlex.split(line), *model, *files])
    assert run_harness() == 0
    assert list(here.glob("out*.json"))


def test_only_these_are_not_typed() -> None:
    """They install something, or start a server that needs a GPU."""
    typed = {*QUICK_START, *LAUNCHED, *TYPED}
    not_typed = {*START, *FROM_GUIDES} - typed - {DEMO}
    programs = {line.split()[0] for line in not_typed}
    assert programs == {"curl", "make", "vllm", "python", "keepsight-lm-eval", "keepsight"}
    assert SETUP in not_typed
    assert len(LAUNCHED) == 6
