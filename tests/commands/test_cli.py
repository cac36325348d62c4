"""The command line as a user types it: what it prints, and what it says to bad input."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from keepsight import __version__
from keepsight.commands import bench
from keepsight.commands.cli import COMMANDS
from keepsight.commands.terminal import printable
from tests.commands.commands import ALL_COMMANDS, DATA, NEEDLES, WITHOUT_RECIPE, CommandLine, tree
from tests.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("here")
ROOT = Path(__file__).resolve().parents[2]
TINY = ("model.id=tiny", "model.device=cpu", "adapter=null", "draft.layers=null")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_the_overview_names_every_command(keepsight: CommandLine, arguments: list[str]) -> None:
    printed = keepsight(*arguments)
    assert "usage: keepsight COMMAND key=value" in printed
    assert all(f"\n  {name} " in printed for name in COMMANDS)


def test_a_command_may_be_written_with_hyphens(keepsight: CommandLine) -> None:
    assert keepsight("train-draft-head", "--help") == keepsight("train_draft_head", "--help")


def test_the_overview_of_the_benchmarks_names_each(keepsight: CommandLine) -> None:
    printed = keepsight("bench", "--help")
    assert printed == keepsight("bench")
    assert "usage: keepsight bench COMMAND key=value" in printed
    assert all(f"\n  {name} " in printed for name in bench.COMMANDS)


@pytest.mark.parametrize("command", [name for name in ALL_COMMANDS if name not in WITHOUT_RECIPE])
def test_help_shows_the_keys(keepsight: CommandLine, command: str, here: Path) -> None:
    printed = keepsight(*command.split(), "out=runs/a", "--help", "all")
    assert printed.startswith(f"keepsight {command}: ")
    assert "\n  model.id=required\n" in printed and "\n      Hub id or local folder.\n" in printed
    assert max(map(len, printed.splitlines())) <= 120
    folded = keepsight(*command.split(), "out=runs/a", "--help")
    own, _, recipes = folded.partition("keys that the recipe sets (--help all shows each):")
    assert printed.startswith(own)
    assert "\n  train.*\n      Optimisation of a lookahead module.\n" in recipes and "train.warmup" not in folded
    assert len(folded.splitlines()) < len(printed.splitlines()) - 40
    assert not (here / "runs").exists()


def test_help_of_push_shows_what_push_reads(keepsight: CommandLine) -> None:
    printed = keepsight("push", "--help")
    assert printed == keepsight("push", "--help", "all")
    assert "\n  public=False\n" in printed and "recipe" not in printed and "model.id" not in printed


def test_the_version(keepsight: CommandLine) -> None:
    assert keepsight("--version") == f"keepsight {__version__}\n"


@pytest.mark.parametrize("arguments", ["--help", "eval --help all", "--version"])
def test_help_that_is_not_read_to_its_end(arguments: str) -> None:
    """As in `keepsight --help | head -1`: whoever reads has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "keepsight", *arguments.split()]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("script", ["train_lookahead.py", "train_draft_head.py", "train_retrieval_head.py"])
def test_an_interrupt_during_imports(script: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, str(ROOT / script), "data=a", "out=b"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith("keepsight: error: interrupted; ") and done.stderr.count("\n") == 1


WRONG = {
    "dta": "'dta' is no command of keepsight; choose one of data, train, ablate, train_draft_head, ",
    "data outt=data": "'outt' is no key of this command; did you mean 'out'?",
    "data out=data recipe=smollm": "recipe=smollm is unknown; choose one of gemma3-27b, ",
    "data out=data stray": "'stray' is not understood; arguments are written key=value, see --help",
    "data --limt=3": "'limt' is no key of this command; did you mean 'limit'?",
    "data limit=3": "out= is required; see --help",
    "push adapter": "repo= is required; see --help",
    "push adapter ada/x more": "'more' is not understood; ",
    "data out=data limit=many": "limit=many: Value 'many' of type 'str' could not be converted to Integer",
    "data out=data limit=1000000000000": "limit=1000000000000: that many samples take more than ",
    "data out=data limit=0": "limit=0 must be at least 1",
    "data out=data shard_size=0": "shard_size=0 must be at least 1",
    "data out=data max_new_tokens=0": "max_new_tokens=0 must be at least 1",
    "data out=data mixture=none": "mixture=none is neither a file nor one of demo, offline",
    "data out=data model.id=nowhere/": "model 'nowhere/' is neither a folder nor a Hub id; ",
    "data out=data backend=none": "backend=none is unknown; choose one of transformers, vllm, server",
    "data out=data backend=server": "backend=server needs server.url=, such as http://localhost:8000/v1",
    "data out=data backend=server server.url=ftp://a": "server.url=ftp://a must begin with http:// or https://",
    "data out=data model.template={a:[]}": "model.template: a=[] must be a name with a text, a number, true or false",
    "data out=data model.dtype=int8": "dtype 'int8' is unknown; choose auto or one of float32, ",
    "data out=data model.device=abacus": "device 'abacus' cannot be used ",
    "eval out=out methods=[snapkw]": "method 'snapkw' is unknown; choose one of full, oracle, lookaheadkv, ",
    "eval out=out methods=[7]": "methods=7: expected a method's name, or {name: NAME, option: value}",
    "eval out=out methods=[full]": "methods= and budgets= must name at least one method that evicts, and one budget",
    "eval out=out methods=[{name:snapkv,windw:8}]": "method 'snapkv': there is no option 'windw'; it takes observer, ",
    "eval out=out methods=[{name:snapkv,pool:{kernel:4}}]": "method 'snapkv': pool: kernel 4 must be odd ",
    "eval out=out methods=[{name:snapkv,pool:{kernel:x}}]": "method 'snapkv': pool: kernel 'x' must be odd ",
    "eval out=out methods=[{window:8}]": "method '' is unknown; choose one of ",
    "eval out=out methods=[{name:snapkv,budget:64}]": "methods={'name': 'snapkv', 'budget': 64}: there is no option ",
    "eval out=out methods=[{name:full,window:8}]": "methods={'name': 'full', 'window': 8}: 'full' is the full cache, ",
    "eval out=out methods=[{name:snapkv,label:full}]": "methods={'name': 'snapkv', 'label': 'full'}: 'full' is the ",
    "eval out=out methods=[snapkv,snapkv]": "methods= and budgets= name 'snapkv' at budget 64 twice; name it once",
    "eval out=out methods=[snapkv] budgets=[64,64]": "methods= and budgets= name 'snapkv' at budget 64 twice; ",
    "eval out=out methods=[{name:tova,label:a},{name:h2o,label:a}]": "methods= and budgets= name 'a' at budget 64 ",
    "eval out=out methods=[{name:snapkv,allocate:ada}]": "method 'snapkv': allocate: 'ada' is unknown; choose one of ",
    "eval out=out methods=[{name:adakv,window:0,observer:{size:4}}] budgets=[4]": "adakv: budget 4 with ",
    "eval out=out methods=[{name:evict}]": "method 'evict': option 'observer' is missing, one of ",
    "eval out=out methods=[{name:evict,observer:prompt}]": "method 'evict': observer: 'prompt' is unknown; ",
    "eval out=out methods=[{name:dapq,observer:{drafter:it}}]": "method 'dapq': observer: drafter: 'it' is unknown; ",
    "eval out=out methods=[speckv]": "method 'speckv': needs a draft: set draft.layers=[...] ",
    "eval out=out methods=[specpc]": "method 'specpc': needs a draft: set draft.layers=[...] ",
    "eval out=out methods=[specpc] draft.layers=[0] budgets=[64]": "SpecPC: budget 64 must be above the window of 64 ",
    "eval out=out methods=[llmlingua2] budgets=[64]": "LLMLingua2: budget 64 must be above the window of 64 ",
    "eval out=out methods=[laq] budgets=[16]": "LAQ: budget 16 must be above the first_window 32 ",
    "eval out=out question=heard": "question=heard is unknown; choose one of seen, unseen, multi",
    "eval out=out max_batch_tokens=-1": "max_batch_tokens=-1 must be at least 0, which leaves it to keepsight",
    "eval out=out max_new_tokens=-1": "max_new_tokens=-1 must be at least 0, which leaves it to keepsight",
    "eval out=out methods=[snapkv] budgets=[]": "methods= and budgets= must name at least one method that evicts",
    "eval out=out methods=[lookaheadkv]": "method 'lookaheadkv': needs adapter=FOLDER_OR_HUB_ID; ",
    "eval out=out adapter=./none": "method 'lookaheadkv': './none' is neither a folder nor a Hub id; ",
    "inspect prompt=Hello method=full out=out": "method 'full' evicts nothing from the cache, so there is nothing ",
    "inspect prompt=Hello method=specpc out=out draft.layers=[0] budget=65": "method 'specpc' evicts nothing from ",
    "inspect prompt=Hello method=speckv out=out": "method 'speckv': needs a draft: set draft.layers=[...] ",
    "inspect prompt=Hello method=snapkv options={kernel:3} out=out": "method 'snapkv': there is no option 'kernel'; ",
    "eval out=out methods=[snapkv] budgets=[0]": "SnapKV: budget 0 is below 1; ",
    "eval out=out methods=[snapkv] budgets=[-3]": "SnapKV: budget -3 is below 1; ",
    "eval out=out methods=[snapkv] budgets=[32]": "SnapKV: budget 32 must be above the 32 protected entries ",
    "eval out=out methods=[streamingllm] budgets=[4]": "StreamingLLM: budget 4 must be above the 4 protected entries ",
    "eval out=out methods=[snapkv] budgets=[1.5]": "SnapKV: budget 1.5 is not a ratio in (0, 1]; ",
    "eval out=out methods=[snapkv] budgets=[many]": "SnapKV: budget 'many' must be a whole number of entries, or a ",
    "eval out=out adapter=shipped:none": "method 'lookaheadkv': shipped:none: keepsight ships no such artifact; it ",
    "eval out=out methods=[snapkv] samples=0": "tasks= and samples= leave no sample to evaluate",
    "eval out=out methods=[snapkv] tasks=[niah_one]": "task 'niah_one' is unknown; niah has niah_single, ",
    "eval out=out methods=[snapkv] lengths=[20]": "niah_single: length 20 is too short; its needles alone need ",
    "eval out=out methods=[snapkv] niah.haystack=none.txt": "none.txt: cannot be read ",
    "eval out=out methods=[snapkv] tasks=[jsonl]": "tasks=[jsonl] needs jsonl.dir=FOLDER ",
    "eval out=out methods=[snapkv] tasks=[jsonl] jsonl.dir=none": "none: no such folder; ",
    "inspect prompt=@none.txt method=snapkv out=out": "prompt=@none.txt: cannot be read as UTF-8 text ",
    "inspect prompt=Hello method=snapkv out=mixture.yaml": "out=mixture.yaml is a file but no page; choose another ",
    "inspect prompt=Hello method=snapkv out=out": "budget=64 keeps all 7 prompt tokens; lower it",
    "bench both": "'both' is no command of keepsight bench; choose one of train, eval, evict, decode, ops, ",
    "bench eval samples=0": "samples=0 must be at least 1",
    "train data=none out=out": "none: no manifest.json; make the data with `keepsight data out=none`",
    "push none ada/x": "none: holds nothing that can be pushed ",
    "push adapter ada": "'ada' is neither a folder nor a Hub id; ",
}


@pytest.mark.parametrize("line", WRONG)
def test_bad_input_ends_with_one_line(keepsight: CommandLine, line: str, here: Path) -> None:
    before = tree(here)
    command, *given = line.split(" ")
    tiny = [key for key in TINY if key.partition("=")[0] not in line and command != "push"]
    assert keepsight.fails(command, *given, *tiny).startswith(WRONG[line])
    assert tree(here) == before


def test_no_text_steers_the_terminal(keepsight: CommandLine) -> None:
    assert printable("\x1b[2Ja\u202eb\ud800\r\tc\n") == "\\x1b[2Ja\\u202eb\\ud800\\r\tc\n"
    assert keepsight.fails("push", "\x1b[2J", "ada/x").startswith("\\x1b[2J: holds nothing")


EARLY = [
    line for line, said in WRONG.items() if re.match("eval|inspect", line) and not re.match("tasks=|task |niah", said)
]


@pytest.mark.parametrize(
    "line", [line for line in EARLY if not re.search("tasks=|haystack=|prompt=@|method=snapkv out", line)]
)
def test_it_ends_before_the_target_is_loaded(keepsight: CommandLine, line: str) -> None:
    command, *given = line.split(" ")
    missing = [key for key in ("adapter=null", "draft.layers=null") if key.partition("=")[0] not in line]
    assert keepsight.fails(command, "model.id=nowhere/", *missing, *given).startswith(WRONG[line])


def test_samples_are_not_counted_twice(keepsight: CommandLine) -> None:
    for twice in ("lengths=[320,320]", "tasks=[niah_single,niah_single]", "tasks=[niah,niah_multikey]"):
        message = keepsight.fails("eval", *TINY, "methods=[snapkv]", "lengths=[512]", "samples=1", twice, "out=out")
        assert message == "tasks=, lengths= and jsonl.files= name some samples twice; name each once"


def test_prompts_longer_than_the_context(keepsight: CommandLine, here: Path) -> None:
    assert "more than the context of 4096; lower the mixture's max_tokens" in keepsight.fails(
        "data", *TINY, *DATA, "max_new_tokens=4090"
    )
    assert not list((here / "data").glob("shard-*"))
    message = keepsight.fails("eval", *TINY, *NEEDLES, "methods=[snapkv]", "lengths=[5000]", "out=eval")
    assert "for the answer more than the context of 4096; lower lengths= or max_tokens=" in message
    assert not (here / "eval").exists()
    (here / "long.txt").write_text("word " * 5000)
    assert "this model takes 1 to 4096" in keepsight.fails("inspect", *TINY, "method=snapkv", "prompt=@long.txt")
    (here / "long.txt").write_text("word " * 1360)
    message = keepsight.fails("inspect", *TINY, "method=dapq", "prompt=@long.txt", "template=false")
    assert "DapQ: 32 observing tokens after a prompt of 40" in message
    assert not (here / "runs").exists()
    # What ends without a result leaves no settings to disagree with.
    keepsight("data", *TINY, *DATA)


def other_model(adapter: Path) -> None:
    tiny_model(vocab_size=512, hidden_size=48, max_position_embeddings=4096).save_pretrained("tiny")
    tiny_tokenizer().save_pretrained("tiny")


def other_digest(adapter: Path) -> None:
    content = bytearray((adapter / "lookahead_tokens.safetensors").read_bytes())
    content[-1] ^= 1
    (adapter / "lookahead_tokens.safetensors").write_bytes(content)


ADAPTERS = {
    "another model": (other_model, "this adapter is for 'tiny'"),
    "wrong digest": (other_digest, "adapter/lookahead_tokens.safetensors: its digest is sha256:"),
    "missing file": (lambda adapter: (adapter / "adapter_model.safetensors").unlink(), "adapter_model.safetensors is"),
    "corrupt file": (lambda adapter: (adapter / "lookahead_config.json").write_text("{"), "lookahead_config.json: not"),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_that_does_not_fit(keepsight: CommandLine, here: Path, name: str) -> None:
    spoil, message = ADAPTERS[name]
    spoil(here / "adapter")
    given = (*TINY[:2], "adapter=adapter")
    assert message in keepsight.fails("eval", *given, *NEEDLES, "methods=[lookaheadkv]", "out=eval")
    assert set(tree(here / "eval") if (here / "eval").exists() else []) <= {"settings.json"}
    (here / "text.txt").write_text("word " * 200)
    assert message in keepsight.fails("inspect", *given, "prompt=@text.txt", "out=page.html")
    assert not (here / "page.html").exists()


def test_push_shows_what_it_would_send(keepsight: CommandLine, here: Path) -> None:
    (here / "adapter" / "notes.txt").write_text("mine")
    printed = keepsight("push", "adapter", "ada/x", "--dry-run")
    assert printed == keepsight("push", "folder=adapter", "repo=ada/x", "dry_run=true")
    assert printed.startswith("to https://") and printed.endswith("\ndry run: nothing was uploaded\n")
    for name in ("adapter_model.safetensors", "lookahead_config.json", "README.md"):
        size = (here / "adapter" / name).stat().st_size
        assert f"{size:,} bytes" in next(line for line in printed.splitlines() if line.endswith(f"adapter/{name}"))
    assert "  left out: adapter/notes.txt\n" in printed


def test_the_message_stands_on_a_line_of_its_own_after_the_progress_bar(keepsight: CommandLine, here: Path) -> None:
    keepsight("data", *TINY, *DATA)
    code = (
        "import sys, keepsight.train.resume as resume\n"
        "def full(*_): raise OSError(28, 'No space left on device')\n"
        "resume.sync = full\n"
        "from keepsight.commands.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    given = ["train.steps=1", "train.held_out=2", "train.report_to=[]", "data=data", "out=adapter2"]
    command = [sys.executable, "-c", code, "train", *TINY, *given]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=here, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("keepsight: error: adapter2/training/checkpoint-1: the checkpoint cannot be written ")
