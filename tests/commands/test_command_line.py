"""The command line: commands, keys, help and errors; every text arrives as it was typed, and errors are one line."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from keepsight import LookaheadKV, SnapKV, __version__, make_method, recipes
from keepsight.commands import from_recipe
from keepsight.commands.cli import configuration, main
from keepsight.commands.config import COMMANDS, Data, Eval, Fit, Inspect, Push, Train
from keepsight.commands.config_bench import Plan
from keepsight.commands.parse import compose_config, keys_of, overrides_of, parse, parse_cells
from keepsight.commands.recipe import say_once
from keepsight.errors import Code, UserError, printable
from keepsight.files import write_json
from keepsight.models import model_files, targets
from keepsight.models.card import LICENSES, Provenance
from keepsight.models.identity import Identity
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.models.targets import load_target
from keepsight.runtime.methods import METHODS
from tests.commands.commands import DATA, NEEDLES, WITH_MODEL, CommandLine, tree
from tests.families import fresh_model
from tests.refused import refused
from tests.tiny import tiny_model, tiny_tokenizer
from tests.train.runs import write_data

pytestmark = pytest.mark.usefixtures("here")
ROOT = Path(__file__).resolve().parents[2]
SHIPPED = [path.parent.name for path in (ROOT / "checkpoints").glob("*/README.md")]
TINY = ("model.id=tiny", "model.device=cpu")
RECIPES = {path.stem: path for path in sorted((Path(recipes.__file__).parent / "recipe").glob("*.yaml"))}


def test_overviews_name_every_command(keepsight: CommandLine) -> None:
    assert keepsight() == keepsight("--help") == keepsight("-h")
    printed, benchmarks = keepsight(), keepsight("bench", "--help")
    for name in COMMANDS:
        shown = name.removeprefix("bench ")
        assert " " in shown or f"\n  {shown} " in (benchmarks if name.startswith("bench ") else printed)
    assert keepsight("train-draft-head", "--help") == keepsight("train_draft_head", "--help")
    assert keepsight("--version") == f"keepsight {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_key_and_fits_a_screen(
    keepsight: CommandLine, command: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    schema, _ = COMMANDS[command]
    notes = {key.name: key.note for key in keys_of(schema)}
    assert all(notes.values())
    whole, short = (keepsight(*command.split(), "--help", *more) for more in (["all"], []))
    assert whole.startswith(f"keepsight {command}: ") and max(map(len, whole.splitlines())) <= 100
    assert {*re.findall(r"shipped:([\w.-]+)", short)} <= {"NAME", *SHIPPED}
    assert [name for name in notes if f"\n  {name}=" not in whole] == []
    shown = re.findall(r"^  ([\w.]+)=", short, flags=re.MULTILINE)
    assert {*shown} <= {*notes, "recipe"} and len(short.splitlines()) <= 50
    assert ("recipe" in shown) == ("model.id" in notes) == ("keepsight help recipes lists them." in short)
    behind = short.partition("--help all shows these too: ")[2].replace("\n", " ")
    assert all(name in shown or name.split(".")[0] in behind for name in notes)


def test_methods_are_listed_with_their_papers_and_costs(
    keepsight: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, keepsight("methods").splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "110")
    text = keepsight("methods")
    assert sorted(re.findall(r"^  (\S+) ", text, flags=re.MULTILINE)) == sorted(METHODS)
    assert "https://arxiv.org/abs/2404.14469" in text and "cost: soft tokens in the prefill; a trained module" in text
    assert keepsight("help", "methods") == text
    assert "keepsight.make_method(NAME, budget)" in text and make_method("snapkv", 64) == SnapKV(64)
    keepsight.refuses("snapkv", "unknown", "methods", "snapkv")


def test_help_shows_the_values_that_the_command_would_use(keepsight: CommandLine) -> None:
    def values(*arguments: str) -> dict[str, str]:
        return dict(re.findall(r"^  ([\w.]+)=(\S*)", keepsight(*arguments, "--help", "all"), flags=re.MULTILINE))

    small, large = (values("train", f"recipe={name}") for name in ("smollm2-135m", "llama3.1-8b"))
    assert (small["lookahead.tokens"], small["train.precision"]) == ("24", "no")
    assert (large["lookahead.tokens"], large["train.precision"], large["recipe"]) == ("32", "bf16", "llama3.1-8b")
    assert [*small].index("data") < [*small].index("title") < [*small].index("model.id")
    assert (small["data"], small["init"], small["model.trust_remote_code"]) == ("required", "null", "false")
    named = values("fit", "meta-llama/Llama-3.1-8B-Instruct", "out=a", "--limit", "7")
    assert [named[key] for key in ("recipe", "train.precision", "out", "limit")] == ["llama3.1-8b", "bf16", "a", "7"]
    assert values("fit")["model.id"] == "required"


@pytest.mark.parametrize("command", ["--help", "eval --help all"])
def test_help_imports_nothing_heavy(command: str) -> None:
    """Importing torch and transformers takes seconds; help takes 0.7 s of processor time."""
    heavy = {"torch", "transformers", "peft", "accelerate", "datasets", "numpy", "pandas", "safetensors", "openai"}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "keepsight", *command.split()],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert done.returncode == 0
    assert "keepsight" in imported
    assert not imported & heavy


def test_a_reader_that_is_gone_is_no_traceback() -> None:
    """As in `keepsight --help | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "keepsight", "--help"], stdout=writer, stderr=subprocess.PIPE, cwd=ROOT
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_an_interrupt_during_imports(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, str(ROOT / "train_lookahead.py"), "data=a", "out=b"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("keepsight: error: interrupted; ") and "Trace" not in done.stderr


def test_every_recipe_is_read() -> None:
    for recipe, path in RECIPES.items():
        config = parse(Data, [f"recipe={recipe}", "out=a"])
        own = yaml.safe_load(path.read_text("utf-8")).get("model")
        assert own is None or config.model.id == own["id"]
        assert config.model.id in LICENSES


def test_arguments_are_above_the_recipe_and_it_above_the_defaults() -> None:
    config = parse(Train, ["data=a", "out=b", "model.dtype=float32", "train.learning_rate=2e-4"])
    assert (config.model.dtype, config.train.learning_rate, config.train.replays) == ("float32", 2e-4, 8)
    assert config.model.id == "HuggingFaceTB/SmolLM2-135M-Instruct" and config.max_prompt_tokens == 0


def test_a_recipe_is_inferred_from_the_model(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of the id whole, one of the architecture and size for training alone; else the defaults."""
    say_once.cache_clear()
    given = ["data=a", "out=b"]
    known = parse(Eval, ["out=b", "model.id=HuggingFaceTB/SmolLM2-135M-Instruct"])
    assert known.adapter == "shipped:smollm2-135m-lookahead" and known.draft.layers
    other = parse(Train, [*given, "model.id=ours"])
    assert (other.lookahead.tokens, other.train.replays, other.model.packaged) == (32, 1, None)
    assert parse(Eval, ["out=b", "model.id=ours"]).adapter is None
    (here / "mine").mkdir()
    shape = '"hidden_size": 576, "num_hidden_layers": 30'
    (here / "mine" / "config.json").write_text(f'{{"model_type": "llama", {shape}}}')
    similar = parse(Train, [*given, "model.id=mine"])
    assert (similar.lookahead.tokens, similar.train.replays, similar.model.packaged) == (24, 8, None)
    assert parse(Eval, ["out=b", "model.id=mine"]).adapter is None
    parse(Plan, [])
    said = capsys.readouterr().err
    assert "recipe=smollm2-135m, as neither recipe= nor model.id= is set" in said
    assert "ours: no recipe" in said and "mine: training settings of recipe=smollm2-135m" in said
    with refused("model.id", "missing"):
        parse(Fit, ["out=b"])


TEXTS = ["a,b", "a[b]{c}(d)", "it's", 'say "so"', "C:\\a\\", "\\'", "two\nlines", "  padded  ", "${HOME}", "=a=b", "["]
TEXTS += ["007", "1e3", "true", "#1", "What is it, really?", "größer …", "key: value", "'", "a\\'b\\"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_arrives_as_it_was_typed(text: str) -> None:
    config = parse(Inspect, ["model.id=a", f"prompt={text}", f"out={text}"])
    assert (config.prompt, config.out) == (text, text)
    if "=" not in text and "$" not in text:  # a key, and a variable of a list
        assert configuration("report", [text, "out=o"]).runs == [text]


def test_a_model_that_is_on_the_hub_alone_takes_the_same_recipe_in_its_first_run(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its configuration is fetched, or the second run, which finds it in the cache, would be another training."""
    (here / "fetched.json").write_text('{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32}')
    monkeypatch.setattr(model_files, "hub_answers", lambda: True)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(here / "fetched.json"))
    assert parse(Train, ["data=a", "out=b", "model.id=ada/like-llama"]).train.precision == "bf16"


def test_words_after_dashes_are_values_of_keys() -> None:
    def read(schema: type, words: list[str]) -> list[str]:
        return overrides_of(schema, [*keys_of(schema)], words)

    given = ["--tasks", "niah", "--out", "a", "--budgets=64", "--model.trust-remote-code", "methods=h2o"]
    expected = ["tasks=niah", "out=a", "budgets=64", "model.trust_remote_code=true", "methods=h2o"]
    assert read(Eval, given) == expected
    assert read(Push, ["a", "ada/x", "--dry-run"]) == ["folder=a", "repo=ada/x", "dry_run=true"]
    with refused("tasks", "missing"):
        read(Eval, ["--tasks"])
    with refused("taks", "unknown") as error:
        read(Eval, ["--taks", "niah"])
    assert "did you mean 'tasks'?" in str(error.value)


def test_lists_and_options_arrive_with_their_types() -> None:
    config = parse(Eval, ["out='a, b'", "budgets=[64,0.1]", "methods=[full,{name: snapkv, kernel: 5}]", "adapter=null"])
    assert config.out == "a, b" and config.adapter is None
    assert config.budgets == [64, 0.1] and [type(budget) for budget in config.budgets] == [int, float]
    assert config.methods == ["full", {"name": "snapkv", "kernel": 5}]
    assert parse(Inspect, ["prompt=a", "options={kernel: 5, group: max}"]).options == {"kernel": 5, "group": "max"}
    bare = parse(Eval, ["out=a", "tasks=niah,jsonl", "budgets=64", "methods={name: snapkv, window: 8},h2o"])
    assert (bare.tasks, bare.budgets) == (["niah", "jsonl"], [64])
    assert bare.methods == [{"name": "snapkv", "window": 8}, "h2o"]
    layers = [parse(Eval, ["out=a", f"draft.layers={each}"]).draft.layers for each in ("0,3", "null")]
    assert layers == [[0, 3], None]


def test_every_combination_of_several_values_is_a_cell() -> None:
    given = ["data=a", "out=b", "lookahead.tokens=[2,4]", "train.far=0,0.5", "lookahead.rank=3"]
    cells = parse_cells(Train, [*given, "lookahead.targets=[qv]"])
    assert [*cells] == ["tokens2-far0", "tokens2-far0.5", "tokens4-far0", "tokens4-far0.5"]
    shapes = [(each.lookahead.tokens, each.lookahead.rank, each.train.far) for _, each in cells.values()]
    assert shapes == [(2, 3, 0), (2, 3, 0.5), (4, 3, 0), (4, 3, 0.5)]
    lists = parse_cells(Train, ["data=a", "out=b", "lookahead.targets=[[none],[qv],[q_proj, up_proj]]"])
    assert [*lists] == ["targetsnone", "targetsqv", "targetsq_proj+up_proj"]
    assert lists["targetsq_proj+up_proj"][1].lookahead.targets == ["q_proj", "up_proj"]
    assert parse_cells(Train, ["data=a", "out=b", "lookahead.targets=[q_proj,up_proj]"]) == {}


WRONG: dict[str, tuple[str, Code]] = {
    "dta": ("command", "unknown"),
    "bench both": ("command", "unknown"),
    "data outt=data": ("outt", "unknown"),
    "eval out=a draft=a": ("draft", "unknown"),
    "data a ~out": ("arguments", "unknown"),
    "report finetune.train.steps=5": ("finetune.train.steps", "unknown"),
    "data out=data recipe=smollm": ("recipe", "unknown"),
    "train out=a data=a lookahead.tokens=[2,4": ("lookahead.tokens", "type"),
    "train out=a data=a lookahead.tokens=[8,8]": ("lookahead.tokens", "conflict"),
    "train out=a data=a lookahead.tokens=[8,0]": ("lookahead.tokens", "range"),
    "train out=a data=a train.steps=[1,2]": ("train.steps", "type"),
    "data limit=3": ("out", "missing"),
    "data out=": ("out", "missing"),
    "push adapter ada/x more": ("arguments", "unknown"),
    "push none ada/x": ("folder", "missing"),
    "data out=data limit=many": ("limit", "type"),
    "data out=data limit=1,2": ("limit", "type"),
    "data out=data limit=0": ("limit", "range"),
    "data out=data limit=99999999999999999999": ("limit", "range"),
    "data out=data limit=1000000000000": ("limit", "memory"),
    "data out=data model.trust_remote_code=2": ("model.trust_remote_code", "type"),
    "data out=null": ("out", "type"),
    "data out=a\udcff": ("out", "type"),
    "data out=data model.id=nowhere/": ("model.id", "unknown"),
    "data out=data backend=none": ("backend", "unknown"),
    "data out=data model.template={a:[]}": ("model.template", "type"),
    "data out=data model.dtype=int8": ("model.dtype", "unknown"),
    "data out=data model.device=abacus": ("model.device", "unknown"),
    "train data=a out=b train.learning_rate=nan": ("train.learning_rate", "range"),
    "train data=a out=b lookahead.kernel=6": ("lookahead.kernel", "range"),
    "train_retrieval_head data=a out=b retrieval_head.features=foo": ("retrieval_head.features", "unknown"),
    "eval out=out methods=[snapkw]": ("method", "unknown"),
    "eval out=out methods=[full]": ("methods", "range"),
    "eval out=out methods=[{name:snapkv,windw:8}]": ("windw", "unknown"),
    "eval out=out methods=[{name:snapkv,label:full}]": ("methods", "conflict"),
    "eval out=out methods=[oracle] budgets=[64,0]": ("budget", "range"),
    "eval out=out methods=[snapkv,snapkv]": ("methods", "conflict"),
    "eval out=out methods=[speckv]": ("draft", "missing"),
    "eval out=out methods=[lookaheadkv]": ("adapter", "missing"),
    "eval out=out adapter=shipped:none": ("artifact", "unknown"),
    "eval out=out methods=[snapkv] budgets=[32]": ("budget", "range"),
    "eval out=out question=heard": ("question", "unknown"),
    "eval out=out methods=[snapkv] samples=-1": ("samples", "range"),
    "eval out=out methods=[snapkv] tasks=[niah_one]": ("tasks", "unknown"),
    "eval out=out methods=[snapkv] lengths=[20]": ("lengths", "range"),
    "inspect prompt=Hello method=full out=out": ("method", "model"),
    "inspect prompt=@/dev/zero method=snapkv out=out": ("zero", "file"),
    "inspect prompt=@none.txt method=snapkv out=out": ("prompt", "file"),
    "inspect prompt=Hello method=snapkv out=mixture.yaml": ("out", "file"),
    "inspect prompt=Hello method=snapkv out=out": ("budget", "range"),
}


@pytest.mark.parametrize("line", WRONG)
def test_bad_input_ends_in_one_line(keepsight: CommandLine, line: str, here: Path) -> None:
    before = tree(here)
    command, *given = line.split(" ")
    tiny = [key for key in TINY if command in WITH_MODEL and key.partition("=")[0] not in line]
    keepsight.refuses(*WRONG[line], command, *given, *tiny)
    assert tree(here) == before


ANSWERED = "data=answered out=o"
BEFORE_WEIGHTS: dict[str, tuple[str, Code]] = {
    "data out=o mixture=none": ("mixture", "unknown"),
    "data out=answered mixture=mixture.yaml seed=7": ("seed", "conflict"),
    "data out=rows.jsonl": ("out", "file"),
    "data out=o backend=server": ("server.url", "missing"),
    "train data=none out=o": ("manifest.json", "missing"),
    "train data=answered out=o model.id=other": ("model", "conflict"),
    f"train {ANSWERED} base=a/b/c": ("artifact", "unknown"),
    f"train {ANSWERED} init=none": ("artifact", "unknown"),
    f"train {ANSWERED} init=adapter lookahead.rank=3": ("tokens", "conflict"),
    f"train {ANSWERED} replay.dir=rows.jsonl": ("replay.dir", "file"),
    f"train {ANSWERED} 'lookahead.tokens=[2,4]' init=adapter": ("tokens", "conflict"),
    f"finetune {ANSWERED}": ("adapter", "missing"),
    f"finetune {ANSWERED} adapter=none": ("artifact", "unknown"),
    f"train_draft_head {ANSWERED} init=adapter": ("model.safetensors", "missing"),
    f"train_draft_head {ANSWERED} features=rows.jsonl": ("features", "file"),
    f"train_retrieval_head {ANSWERED} head=adapter": ("retrieval_head.safetensors", "missing"),
    "fit out=o mixture=none": ("mixture", "unknown"),
    "fit out=o base=a/b/c": ("artifact", "unknown"),
    "fit out=o tasks=niah_one": ("tasks", "unknown"),
    "fit out=o methods=snapkw": ("method", "unknown"),
    "fit out=o 'methods=[{name: lookaheadkv, windw: 3}]'": ("windw", "unknown"),
    "fit out=o budgets=0.1,many": ("budget", "type"),
    "fit out=o adapter=mine": ("adapter", "unknown"),
    "eval out=o tasks=jsonl jsonl.dir=none": ("jsonl.dir", "missing"),
    "fit out=o tests=1000000000": ("tests", "range"),
    "eval out=o samples=1000000000000": ("samples", "range"),
    "fit out=/dev/null": ("out", "file"),
    "train data=answered out=/dev/null": ("out", "file"),
    "fit out=o plugins=absent_module": ("plugins", "missing"),
    "inspect prompt=Hello out=o plugins=absent_module": ("plugins", "missing"),
    "serve plugins=absent_module": ("plugins", "missing"),
    "prefix prompt=Hello out=o plugins=absent_module": ("plugins", "missing"),
    "bench evict plugins=absent_module": ("plugins", "missing"),
    "plan out=/dev/null": ("out", "file"),
    "plan out=.": ("out", "file"),
    "data stats answered out=.": ("out", "file"),
}


def test_keys_files_and_folders_are_checked_before_weights_are_read(
    keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_data(here / "answered", load_target("tiny", device="cpu"), count=20)
    before = tree(here)
    monkeypatch.setattr(from_recipe, "load_target", lambda *_, **__: pytest.fail("the weights are read"))
    for line, refusal in BEFORE_WEIGHTS.items():
        tiny = [key for key in TINY if "stats" not in line and key.partition("=")[0] not in line]
        keepsight.refuses(*refusal, *shlex.split(line), *tiny)
    assert tree(here) == before


TASKS = "'tasks=[jsonl]' jsonl.dir=rated"
WITH_CONFIGURATION: dict[str, tuple[str, Code]] = {
    "eval out=o methods=snapkv lengths=5000": ("lengths", "range"),
    f"eval out=o methods=snapkv {TASKS}": ("jsonl.files", "data"),
    f"eval out=o methods=snapkv {TASKS} 'jsonl.files=[rated]'": ("jsonl.files", "data"),
    "eval out=o methods=speckv draft.id=none": ("model.id", "missing"),
    "eval out=o methods=speckv draft.layers=[2,1]": ("draft.layers", "conflict"),
    "eval out=o methods=specpc draft.head=none": ("artifact", "unknown"),
    "bench hits out=o methods=quest budgets=64 lengths=5000": ("lengths", "range"),
    "bench importance out=o methods=[snapkv] lengths=5000": ("lengths", "range"),
    "bench evict methods=snapkw": ("method", "unknown"),
    "bench decode methods=speckv draft.id=none": ("model.id", "missing"),
    "bench speculate draft.head=none draft.layers=null": ("artifact", "unknown"),
    "serve method=speckv draft.id=none": ("model.id", "missing"),
    "inspect prompt=Hello out=p.html method=speckv draft.id=none": ("model.id", "missing"),
    "data out=o mixture=demo limit=1000000000000": ("limit", "memory"),
    "data out=o mixture=demo max_new_tokens=100000": ("max_new_tokens", "range"),
    "bench train tokens=1000000000": ("tokens", "range"),
    "bench decode methods=snapkv tokens=1000000000": ("tokens", "range"),
    "bench evict methods=snapkv lengths=[1000000000]": ("tokens", "range"),
    "bench specache tokens=1000000000": ("tokens", "range"),
    "bench queries tokens=1000000000": ("tokens", "range"),
    "bench queries data=none": ("manifest.json", "missing"),
    "fit out=o mixture=demo limit=1000000000000": ("limit", "memory"),
    "fit out=o mixture=demo lengths=5000": ("lengths", "range"),
}


@pytest.mark.parametrize("line", WITH_CONFIGURATION)
def test_tasks_and_drafts_are_checked_before_weights_are_read(
    keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    (here / "rated").mkdir()
    (here / "rated/rated.jsonl").write_text("{}\n")
    entry = {"layout": "longbench", "prompt": "{context}{input}", "metric": "stars", "max_new_tokens": 4}
    (here / "rated/tasks.json").write_text(json.dumps({"rated": entry}))
    before = tree(here)
    monkeypatch.setattr(targets, "_read", lambda *_: pytest.fail("weights are read"))
    monkeypatch.setattr(model_files, "hub_answers", lambda: False)
    keepsight.refuses(*WITH_CONFIGURATION[line], *shlex.split(line), *TINY)
    assert tree(here) == before


VALIDATORS = re.compile(
    r"could not be converted|not Optional|validation|[Ii]nput should|List should|pydantic|of type '"
)


def test_odd_values_are_refused_in_our_own_words() -> None:
    """No validator's own words reach a user, whatever is written for a key."""
    refusals = 0
    for key in keys_of(Eval):
        try:
            compose_config(Eval, [f"{key.name}=maybe"])
        except UserError as error:
            assert not VALIDATORS.search(str(error)) and "\n" not in str(error)
            refusals += 1
    assert refusals > 10


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("eval samples=x", "a whole number"),
        ("eval lengths=[x]", "a list of whole numbers"),
        ("fit train.learning_rate=fast", "a number"),
        ("serve budget=x", "a number"),
        ("plan train tokens=1e9", "a whole number, or null"),
        ("serve options=[1]", "a mapping, as {key: value}"),
        ("serve vllm=maybe", "true or false"),
    ],
)
def test_what_a_key_takes_is_said(keepsight: CommandLine, line: str, words: str) -> None:
    *_, value = line.split()
    key = value.partition("=")[0]
    assert keepsight.refuses(key, "type", *line.split()).endswith(f"{value} must be {words}")


def test_a_key_is_given_once() -> None:
    with refused("limit", "conflict"):
        parse(Data, ["out=a", "limit=3", "limit=4"])


def test_no_text_steers_the_terminal(keepsight: CommandLine) -> None:
    assert printable("a\u200fb\u061c\u200e") == "a\\u200fb\\u061c\\u200e"
    assert printable("\x1b[2Ja\u202eb\ud800\r\tc\n", lines=True) == "\\x1b[2Ja\\u202eb\\ud800\\r\tc\n"
    assert keepsight.fails("push", "\x1b[2J", "ada/x").startswith("\\x1b[2J: has nothing")


def test_samples_are_not_counted_twice(keepsight: CommandLine) -> None:
    for twice in ("lengths=[512,512]", "tasks=[niah_single,niah_single]", "tasks=[niah,niah_multikey]"):
        keys = [each for each in ("lengths=[512]", "tasks=[niah_single]") if each.partition("=")[0] not in twice]
        keepsight.refuses("tasks", "conflict", "eval", *TINY, "methods=[snapkv]", *keys, "samples=1", twice, "out=out")


def test_prompts_longer_than_the_context(keepsight: CommandLine, here: Path) -> None:
    given = [each for each in DATA if "max_new_tokens" not in each]
    keepsight.refuses("max_new_tokens", "range", "data", *TINY, *given, "max_new_tokens=4090")
    assert not list((here / "data").glob("shard-*"))
    (here / "long.txt").write_text("word " * 5000)
    keepsight.refuses("prompt", "range", "inspect", *TINY, "method=snapkv", "prompt=@long.txt")
    assert not (here / "runs").exists()
    keepsight("data", *TINY, *DATA)  # a run that ends without a result leaves no settings to disagree with


def test_an_adapter_of_another_model(keepsight: CommandLine, here: Path) -> None:
    tiny_model(vocab_size=512, hidden_size=48, max_position_embeddings=4096).save_pretrained("tiny")
    tiny_tokenizer().save_pretrained("tiny")
    keepsight.refuses(
        "adapter", "model", "eval", *TINY, "adapter=adapter", *NEEDLES, "methods=[lookaheadkv]", "out=eval"
    )
    assert not (here / "eval/report.html").exists()


def test_push_shows_what_it_would_send(keepsight: CommandLine, here: Path) -> None:
    (here / "adapter" / "notes.txt").write_text("mine")
    printed = keepsight("push", "adapter", "ada/x", "--dry-run")
    assert printed == keepsight("push", "folder=adapter", "repo=ada/x", "dry_run=true")
    assert printed.startswith("to https://") and printed.endswith(
        "\ndry run: nothing was uploaded; to upload it, leave out --dry-run\n"
    )
    for name in ("adapter_model.safetensors", "lookahead_config.json", "README.md"):
        size = (here / "adapter" / name).stat().st_size
        assert f"{size:,} bytes" in next(line for line in printed.splitlines() if line.endswith(f"adapter/{name}"))
    assert "  left out: adapter/notes.txt\n" in printed


def test_a_tilde_is_the_home_folder_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/a b")
    config = configuration("eval", ["out=~/o", "adapter=~/a", "tasks=jsonl", "jsonl.dir=~/d", "reuse=~/r,~/s", *TINY])
    assert (config.out, config.adapter, config.jsonl.dir) == ("/home/a b/o", "/home/a b/a", "/home/a b/d")
    assert config.reuse == ["/home/a b/r", "/home/a b/s"]
    methods = "methods=[{name: kvzap, scorer: ~/s, budget: 9}]"
    quoted = configuration("eval", ["out='~/o'", "reuse=['~/r', 'x~y']", methods])
    assert (quoted.out, quoted.reuse) == ("/home/a b/o", ["/home/a b/r", "x~y"])
    assert quoted.methods == [{"name": "kvzap", "scorer": "/home/a b/s", "budget": 9}]
    assert configuration("compare", ["~/r", "~/s"]).runs == ["/home/a b/r", "/home/a b/s"]
    served = configuration("serve", ["options={weights: ~/w.json}", "model.id=~/m"])
    assert (served.options, served.model.id) == ({"weights": "/home/a b/w.json"}, "/home/a b/m")
    texts = configuration("prefix", ["prompt=~/no path", "system=~/none", "out=~/o"])
    assert (texts.prompt, texts.system, texts.out) == ("~/no path", "~/none", "/home/a b/o")


def test_commands_and_functions_write_to_the_home_folder(
    keepsight: CommandLine, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / "texts").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    for name in ("tiny", "adapter"):
        (here / name).rename(home / name)
    (home / "texts/a.txt").write_text("A sea is calm. " * 40)
    (home / "rows.jsonl").write_text((here / "rows.jsonl").read_text())
    (here / "mixture.yaml").write_text(
        "min_tokens: 100\nmax_tokens: 400\nsources:\n  - {kind: local_jsonl, path: ~/rows.jsonl}\n"
    )
    model = ("model.id=~/tiny", "model.device=cpu")
    keepsight("data", *model, "mixture=mixture.yaml", "limit=2", "max_new_tokens=2", "out=~/data")
    keepsight(
        "inspect", *model, "adapter=~/adapter", "prompt=@~/texts/a.txt", "budget=40", "max_new_tokens=2", "out=~/i.html"
    )
    keepsight("push", "~/adapter", "ada/x", "--dry-run")
    assert (home / "data/manifest.json").is_file() and (home / "i.html").is_file()
    assert load_target("~/tiny", device="cpu").name == str(home / "tiny")
    assert LookaheadKV.from_pretrained("~/adapter", 40).budget == 40
    assert not (here / "~").exists()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_shows_what_it_can(here: Path, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, written = "\u9002\u914d\u5668", io.BytesIO()
    (here / "adapter").rename(here / shown)
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding))
    assert main(["push", shown, "ada/x", "--dry-run"]) == 0
    sys.stdout.flush()
    assert (shown if encoding == "utf-8" else "???") in written.getvalue().decode(encoding)


def adapter_of(base_model: str, base_version: str, folder: Path) -> None:
    """Save a tiny adapter that names a base model."""
    settings = LookaheadSettings(tokens=2, rank=1)
    model = fresh_model("Llama 3")
    Lookahead(model, settings).adapter().save(folder, Provenance(base_model, Identity(base_version)))


def test_the_base_model_is_the_adapter_s_where_no_model_is_named(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    adapter_of("Qwen/Qwen3-8B", f"{commit} quantised by bitsandbytes 4bit", tmp_path / "fitted" / "adapter")
    write_json(tmp_path / "fitted" / "fit.json", {})
    for reference in (tmp_path / "fitted" / "adapter", tmp_path / "fitted"):  # `fit`'s own `out`, too
        composed, choice = compose_config(Eval, ["out=a", f"adapter={reference}"])
        assert choice.name == "qwen3-8b"
        assert "was trained for this model" in choice.note
        assert composed.model.id == "Qwen/Qwen3-8B"
        assert composed.model.revision == commit
        assert composed.model.quantize == "nf4"

    named, choice = compose_config(Eval, ["out=a", f"adapter={tmp_path / 'fitted'}", "recipe=llama8b"])
    assert choice.name == "llama8b"
    assert named.model.id != "Qwen/Qwen3-8B"


def test_an_adapter_of_a_folder_needs_the_folder(tmp_path: Path) -> None:
    adapter_of("my_model", "unknown", tmp_path / "adapter")
    with refused("model.id", "missing"):
        compose_config(Eval, ["out=a", f"adapter={tmp_path / 'adapter'}"])


def test_the_first_word_is_a_recipe_or_a_model() -> None:
    by_key = configuration("eval", ["out=a", "recipe=qwen3-8b"])
    for words in (["qwen3-8b", "out=a"], ["out=a", "model=qwen3-8b"], ["Qwen/Qwen3-8B", "out=a"]):
        assert configuration("eval", words) == by_key
    assert configuration("fit", ["tiny", "out=a"]).model.id == "tiny"  # a folder here
    with refused("model.id", "conflict"):
        configuration("eval", ["tiny", "out=a", "model.id=other"])


def test_help_is_a_command_too(keepsight: CommandLine) -> None:
    assert keepsight("help") == keepsight("--help")
    assert keepsight("help", "eval") == keepsight("eval", "--help")
    assert keepsight("help", "bench") == keepsight("bench", "--help")
    recipes_text = keepsight("help", "recipes")
    assert re.search(r"qwen3-8b +Qwen/Qwen3-8B\n", recipes_text)
