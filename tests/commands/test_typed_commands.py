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
OTHERS = [each for page in ("README.md", *GUIDES) for each in lines(page)]
FROM_GUIDES = [each for each in dict.fromkeys(OTHERS) if each not in (*START, *LAUNCHED)]
TYPED = [each for each in FROM_GUIDES if command_of(each) and command_of(each)[0] != "serve"]
"""tests/commands/test_serving_commands.py and tests/serving/vllm/test_page.py serve."""
NEEDS = {"zero3": "deepspeed", "nf4": "bitsandbytes"}
LONG = "The ship sailed on. " * 60
ADDED = {
    "mixture=paper": "mixture=offline",  # its data sets are on the Hub
    "data recipe=smollm2-135m": "mixture=offline rows=null",
    "fit recipe=smollm2-135m": "mixture=offline",
    "fit recipe=qwen2.5-coder-0.5b": "train.batch_size=1",
    "tasks=[ruler": "tasks=[ruler_vt,longbench] lengths=[800]",
    "preset=lookaheadkv-longbench": "longbench.dir=data/longbench draft.id=null",
    "preset=specache-throughput": "methods=[{name:specache,group:32}] batch=2",
    "finetune method=snapkv": "options={window:2,allocate:{name:global,floor:0.2}}",
    "milebench.dir": "model.id=runs/vl draft.id=runs/vl-draft draft.layers=null",
}
"""What else a test adds to lines with these words."""


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
        make_models()
        for name, text in text_files().items():
            write_text(Path(name), text)
        question = {"question_id": 111, "category": "math", "turns": ["Add.", "Now subtract."], "reference": ["3", "1"]}
        write_lines(Path("question.jsonl"), [question])
        write_lines(Path("gpt-4.jsonl"), [{"question_id": 121, "choices": [{"turns": ["def", "assert"]}]}])
        write_lines(Path("my_prompts.jsonl"), [{"prompt": f"{number}. {LONG}"} for number in range(6)])
        papers = [{"input": "Who sailed?", "context": LONG, "answers": ["a ship"], "_id": "1", "all_classes": None}]
        write_lines(Path("data/longbench/qasper.jsonl"), papers)
        for name in ("SlideVQA", "TQA"):
            rows = [row(0, "{image#1} " + LONG, ["a.png"], "a tree", ["a tree", "a house"])]
            write_data_set(Path("data/MileBench"), name, "multi-choice", rows)
    return folder


def make_models() -> None:
    """A target deep enough for a draft head, with modules of each kind, its data, and two models that read images."""
    save_tiny_target(Path("runs/model"), num_hidden_layers=7, head_dim=32)
    target = load_target("runs/model", device="cpu", dtype="float32")
    shape = replace(SHAPE, floor=0.25, sharing="model")
    for adapter in ("runs/adapter", "runs/weighted", "runs/smollm2/adapter"):
        save(random_on(target.model, shape), Path(adapter), "runs/model")
    size = {"vocab_size": target.model.config.vocab_size, "max_position_embeddings": 4096}
    tiny_draft_head(**size).save(Path("runs/draft-head"), Provenance("runs/model"), "# Card\n")
    tiny_retrieval_head(**size).save(Path("runs/retrieval"), Provenance("runs/model"), "# Card\n")
    write_data(Path("runs/data"), target)
    save_pictured_target(Path("runs/vl"))
    save_pictured_target(Path("runs/vl-draft"), seed=7)


def text_files() -> dict[str, str]:
    """What README and the guides let a reader write, and a task of lm-evaluation-harness."""
    (own_method,) = re.findall(r"```python\n(.*?)```", text_of("docs/own_method.md"), re.DOTALL)
    rows, tasks = re.findall(r"```json\n(.*?)```", text_of("docs/evaluation.md"), re.DOTALL)
    (mixture,) = re.findall(r"```yaml\n(.*?)```", text_of("docs/data.md"), re.DOTALL)
    return {
        "file.txt": LONG,
        "docs/images/inspect.txt": LONG,
        "my_methods.py": own_method.rstrip("\n").rpartition("\n")[0],
        "mine/contracts.jsonl": rows,
        "mine/tasks.json": tasks,
        "my_mixture.yaml": mixture,
        "runs/snapkv/head_weights.json": json.dumps([[1.5, 0.5]] * 7),
        "gsm8k.jsonl": '{"question": "1 + 1?", "answer": "2"}\n',
        "gsm8k.yaml": "task: gsm8k\ndataset_path: json\ndataset_kwargs: {data_files: {test: gsm8k.jsonl}}\n"
        'test_split: test\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\noutput_type: generate_until\n'
        "generation_kwargs: {until: [x], max_gen_toks: 4}\nmetric_list: [{metric: exact_match}]\n",
    }


@pytest.fixture(scope="module")
def servers(things: Path) -> Iterator[dict[str, str]]:
    """A server that answers as the target, and a judge, as additions to the lines that name one."""
    target = load_target(str(things / "runs/model"), device="cpu", dtype="float32")
    with server(speaks(target)) as completions, endpoint(lambda _: "[[5]]") as judge:
        yield {
            "backend=server": f"server.url={completions.url} server.model=served limit=4",
            "judge.url": f"judge.url={judge.url}",
        }


@pytest.fixture
def place(things: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder to work in; nothing is asked of the Hub, and `METHODS` is as before afterwards."""
    monkeypatch.chdir(shutil.copytree(things, tmp_path / "clone", symlinks=True))
    monkeypatch.setattr("keepsight.eval.tasks.benchmark.hub_reachable", lambda: False)
    monkeypatch.setitem(METHODS, "value_norm", METHODS["evict"])
    monkeypatch.delitem(sys.modules, "my_methods", raising=False)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    without_videos(monkeypatch)
    return Path.cwd()


def type_line(line: str, keepsight: CommandLine, added: dict[str, str]) -> None:
    """Run a line, in this process where it is a command of keepsight; what it makes is there afterwards, and new."""
    given = command_of(line)
    out = next((Path(word.removeprefix("out=")) for word in given if word.startswith("out=")), None)
    if out is not None:
        shutil.rmtree(out, ignore_errors=True)
    more = [*small(line), *(word for part, words in added.items() if part in line for word in words.split())]
    if line.startswith("keepsight"):
        keepsight(*(word for word in given if word != "..."), *more)
    else:
        type_in(line, Path.cwd(), *more, warm=True)
    assert out is None or out.exists()


@pytest.mark.slow
def test_the_demo_that_make_runs(keepsight: CommandLine, place: Path) -> None:
    # A make around the tests would add lines.
    asked = ["make", "-n", "--no-print-directory", *DEMO.split("#")[0].split()[1:]]
    told = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    _, _, typed = told.stdout.strip().rpartition("\n")[2].partition(" -m ")
    type_line(typed, keepsight, {})
    assert (place / "runs/demo/eval/report.html").is_file()


def test_the_quick_start(keepsight: CommandLine, place: Path) -> None:
    """Line after line, each with what those before have made."""
    shutil.rmtree("runs/data")
    shutil.rmtree("runs/adapter")
    for line in QUICK_START:
        type_line(line, keepsight, {})
    assert len(QUICK_START) == 6 and Path("runs/inspect.html").is_file()


def test_answers_of_a_server(keepsight: CommandLine, place: Path, servers: dict[str, str]) -> None:
    (line,) = (line for line in LAUNCHED if "backend=server" in line)
    type_line(line, keepsight, servers)


def marked(line: str) -> object:
    """Of each command the first line runs in `make test`; tests/test_docs.py parses all.

    Evaluations take seconds each, since their plots are drawn; other programs start anew.
    """
    is_slow = not line.startswith("keepsight") or command_of(line)[0] in ("eval", "report", "compare", "ablate")
    is_slow = is_slow or line != next(other for other in TYPED if name_of(other) == name_of(line))
    marks = [pytest.mark.slow] if is_slow else []
    missing = [package for part, package in NEEDS.items() if part in line and find_spec(package) is None]
    marks += [pytest.mark.skip(f"needs the package {name}") for name in missing]
    return pytest.param(line, marks=marks)


def name_of(line: str) -> str:
    """The command that a line runs, such as `data` or `bench decode`."""
    name, _ = cli.command_of(command_of(line))
    return name


@pytest.mark.parametrize("line", [marked(line) for line in TYPED])
def test_a_line_of_a_guide(line: str, keepsight: CommandLine, place: Path, servers: dict[str, str]) -> None:
    if command_of(line)[0] in ("report", "compare"):
        keepsight(*f"eval tasks=niah_single methods=snapkv out=runs/eval {SMALL['eval']}".split())
        shutil.copytree("runs/eval", "runs/other")
    type_line(line, keepsight, ADDED | servers)


@pytest.mark.slow
def test_lm_eval(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = (line for line in FROM_GUIDES if line.startswith("keepsight-lm-eval "))
    more = ["--model_args", "pretrained=runs/model,dtype=float32", "--include_path", ".", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", [*shlex.split(line), *more, "--output_path", "out.json"])
    assert run_harness() == 0
    assert list(place.glob("out*.json"))


def test_only_these_are_not_typed() -> None:
    """They install something, or start a server that needs a GPU."""
    typed = {*QUICK_START, *LAUNCHED, *TYPED}
    rest = {*START, *FROM_GUIDES} - typed - {DEMO}
    commands = {"curl", "make", "vllm", "python", "keepsight-lm-eval", "keepsight"}
    assert {line.split()[0] for line in rest} == commands and SETUP in rest
    assert len(LAUNCHED) == 6
