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
from tests.commands.commands import COMMANDS_WITH_MODEL, DATA, NEEDLES, CommandLine, key_of, tree
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
    overview = keepsight()
    overview_of_bench = keepsight("bench", "--help")
    for name in COMMANDS:
        if name.startswith("bench "):
            assert f"\n  {name.removeprefix('bench ')} " in overview_of_bench
        elif " " not in name:
            assert f"\n  {name} " in overview
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
    help_all = keepsight(*command.split(), "--help", "all")
    assert help_all.startswith(f"keepsight {command}: ")
    assert max(map(len, help_all.splitlines())) <= 100
    assert [name for name in notes if f"\n  {name}=" not in help_all] == []

    short_help = keepsight(*command.split(), "--help")
    assert len(short_help.splitlines()) <= 50
    assert {*re.findall(r"shipped:([\w.-]+)", short_help)} <= {"NAME", *SHIPPED}
    explained = re.findall(r"^  ([\w.]+)=", short_help, flags=re.MULTILINE)
    assert {*explained} <= {*notes, "recipe"}
    takes_recipe = "model.id" in notes
    assert ("recipe" in explained) == takes_recipe
    assert ("keepsight help recipes lists them." in short_help) == takes_recipe
    listed = short_help.partition("--help all shows these too: ")[2].replace("\n", " ")
    for name in notes:
        assert name in explained or name.split(".")[0] in listed


def test_methods_are_listed_with_their_papers_and_costs(
    keepsight: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, keepsight("methods").splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "110")
    text = keepsight("methods")
    assert sorted(re.findall(r"^  (\S+) ", text, flags=re.MULTILINE)) == sorted(METHODS)
    assert "https://arxiv.org/abs/2404.14469" in text
    assert "cost: soft tokens in the prefill; a trained module" in text
    assert keepsight("help", "methods") == text
    assert "keepsight.make_method(NAME, budget)" in text
    assert make_method("snapkv", 64) == SnapKV(64)
    keepsight.refuses("snapkv", "unknown", "methods", "snapkv")


def test_help_shows_the_values_that_the_command_would_use(keepsight: CommandLine) -> None:
    def values(*arguments: str) -> dict[str, str]:
        printed = keepsight(*arguments, "--help", "all")
        return dict(re.findall(r"^  ([\w.]+)=(\S*)", printed, flags=re.MULTILINE))

    small = values("train", "recipe=smollm2-135m")
    assert (small["lookahead.tokens"], small["train.precision"]) == ("24", "no")
    assert (small["data"], small["init"], small["model.trust_remote_code"]) == ("required", "null", "false")
    keys = [*small]
    assert keys.index("data") < keys.index("title") < keys.index("model.id")
    large = values("train", "recipe=llama3.1-8b")
    assert (large["lookahead.tokens"], large["train.precision"], large["recipe"]) == ("32", "bf16", "llama3.1-8b")
    fit = values("fit", "meta-llama/Llama-3.1-8B-Instruct", "out=a", "--limit", "7")
    assert (fit["recipe"], fit["train.precision"], fit["out"], fit["limit"]) == ("llama3.1-8b", "bf16", "a", "7")
    assert values("fit")["model.id"] == "required"


@pytest.mark.parametrize("command", ["--help", "eval --help all"])
def test_help_imports_nothing_heavy(command: str) -> None:
    """Importing torch and transformers takes seconds; help takes 0.7 s of processor time."""
    heavy = {"torch", "transformers", "peft", "accelerate", "datasets", "numpy", "pandas", "safetensors", "openai"}
    python = [sys.executable, "-X", "importtime", "-m", "keepsight", *command.split()]
    result = subprocess.run(python, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0
    imported: set[str] = set()
    for line in result.stderr.splitlines():
        module = line.rpartition("|")[2].strip()
        imported.add(module.partition(".")[0])
    assert "keepsight" in imported
    assert not imported & heavy


def test_a_reader_that_is_gone_is_no_traceback() -> None:
    """As in `keepsight --help | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "keepsight", "--help"]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, b"")


def test_an_interrupt_during_imports_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, str(ROOT / "train_lookahead.py"), "data=a", "out=b"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("keepsight: error: interrupted; ")
    assert "Trace" not in result.stderr


def test_every_recipe_is_read() -> None:
    for recipe, path in RECIPES.items():
        config = parse(Data, [f"recipe={recipe}", "out=a"])
        model = yaml.safe_load(path.read_text("utf-8")).get("model")
        assert model is None or config.model.id == model["id"]
        assert config.model.id in LICENSES


def test_arguments_are_above_the_recipe_and_it_above_the_defaults() -> None:
    config = parse(Train, ["data=a", "out=b", "model.dtype=float32", "train.learning_rate=2e-4"])
    assert (config.model.dtype, config.train.learning_rate, config.train.replays) == ("float32", 2e-4, 8)
    assert config.model.id == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert config.max_prompt_tokens == 0


def test_a_recipe_is_inferred_from_the_model(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That of the same id in full, that of the same architecture and size for training alone; else the defaults."""
    say_once.cache_clear()
    same_id = parse(Eval, ["out=b", "model.id=HuggingFaceTB/SmolLM2-135M-Instruct"])
    assert same_id.adapter == "shipped:smollm2-135m-lookahead"
    assert same_id.draft.layers

    unknown = parse(Train, ["data=a", "out=b", "model.id=ours"])
    assert (unknown.lookahead.tokens, unknown.train.replays, unknown.model.packaged) == (32, 1, None)
    assert parse(Eval, ["out=b", "model.id=ours"]).adapter is None

    (here / "mine").mkdir()
    write_json(here / "mine" / "config.json", {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30})
    same_size = parse(Train, ["data=a", "out=b", "model.id=mine"])
    assert (same_size.lookahead.tokens, same_size.train.replays, same_size.model.packaged) == (24, 8, None)
    assert parse(Eval, ["out=b", "model.id=mine"]).adapter is None

    parse(Plan, [])
    messages = capsys.readouterr().err
    assert "recipe=smollm2-135m, as neither recipe= nor model.id= is set" in messages
    assert "ours: no recipe" in messages
    assert "mine: training settings of recipe=smollm2-135m" in messages
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
    write_json(here / "fetched.json", {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32})
    monkeypatch.setattr(model_files, "hub_answers", lambda: True)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(here / "fetched.json"))
    assert parse(Train, ["data=a", "out=b", "model.id=ada/like-llama"]).train.precision == "bf16"


def test_words_after_dashes_are_values_of_keys() -> None:
    def overrides(schema: type, words: list[str]) -> list[str]:
        return overrides_of(schema, [*keys_of(schema)], words)

    words = ["--tasks", "niah", "--out", "a", "--budgets=64", "--model.trust-remote-code", "methods=h2o"]
    expected = ["tasks=niah", "out=a", "budgets=64", "model.trust_remote_code=true", "methods=h2o"]
    assert overrides(Eval, words) == expected
    assert overrides(Push, ["a", "ada/x", "--dry-run"]) == ["folder=a", "repo=ada/x", "dry_run=true"]
    with refused("tasks", "missing"):
        overrides(Eval, ["--tasks"])
    with refused("taks", "unknown") as error:
        overrides(Eval, ["--taks", "niah"])
    assert "did you mean 'tasks'?" in str(error.value)


def test_lists_and_options_arrive_with_their_types() -> None:
    config = parse(Eval, ["out='a, b'", "budgets=[64,0.1]", "methods=[full,{name: snapkv, kernel: 5}]", "adapter=null"])
    assert config.out == "a, b"
    assert config.adapter is None
    assert config.budgets == [64, 0.1]
    assert [type(budget) for budget in config.budgets] == [int, float]
    assert config.methods == ["full", {"name": "snapkv", "kernel": 5}]
    assert parse(Inspect, ["prompt=a", "options={kernel: 5, group: max}"]).options == {"kernel": 5, "group": "max"}
    without_brackets = parse(Eval, ["out=a", "tasks=niah,jsonl", "budgets=64", "methods={name: snapkv, window: 8},h2o"])
    assert without_brackets.tasks == ["niah", "jsonl"]
    assert without_brackets.budgets == [64]
    assert without_brackets.methods == [{"name": "snapkv", "window": 8}, "h2o"]
    assert parse(Eval, ["out=a", "draft.layers=0,3"]).draft.layers == [0, 3]
    assert parse(Eval, ["out=a", "draft.layers=null"]).draft.layers is None


def test_every_combination_of_several_values_is_a_cell() -> None:
    keys = ["data=a", "out=b", "lookahead.tokens=[2,4]", "train.far=0,0.5", "lookahead.rank=3"]
    cells = parse_cells(Train, [*keys, "lookahead.targets=[qv]"])
    assert [*cells] == ["tokens2-far0", "tokens2-far0.5", "tokens4-far0", "tokens4-far0.5"]
    settings = [(config.lookahead.tokens, config.lookahead.rank, config.train.far) for _, config in cells.values()]
    assert settings == [(2, 3, 0), (2, 3, 0.5), (4, 3, 0), (4, 3, 0.5)]

    cells = parse_cells(Train, ["data=a", "out=b", "lookahead.targets=[[none],[qv],[q_proj, up_proj]]"])
    assert [*cells] == ["targetsnone", "targetsqv", "targetsq_proj+up_proj"]
    _, config = cells["targetsq_proj+up_proj"]
    assert config.lookahead.targets == ["q_proj", "up_proj"]
    assert parse_cells(Train, ["data=a", "out=b", "lookahead.targets=[q_proj,up_proj]"]) == {}


def missing_keys_of_tiny(line: str) -> list[str]:
    """The keys of `TINY` that a line does not set itself."""
    return [argument for argument in TINY if key_of(argument) not in line]


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
    files = tree(here)
    command, *arguments = line.split(" ")
    if command in COMMANDS_WITH_MODEL:
        arguments += missing_keys_of_tiny(line)
    keepsight.refuses(*WRONG[line], command, *arguments)
    assert tree(here) == files


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
    files = tree(here)
    monkeypatch.setattr(from_recipe, "load_target", lambda *_, **__: pytest.fail("the weights are read"))
    for line, refusal in BEFORE_WEIGHTS.items():
        arguments = shlex.split(line)
        if "stats" not in line:
            arguments += missing_keys_of_tiny(line)
        keepsight.refuses(*refusal, *arguments)
    assert tree(here) == files


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
    task = {"layout": "longbench", "prompt": "{context}{input}", "metric": "stars", "max_new_tokens": 4}
    (here / "rated/tasks.json").write_text(json.dumps({"rated": task}))
    files = tree(here)
    monkeypatch.setattr(targets, "_read", lambda *_: pytest.fail("weights are read"))
    monkeypatch.setattr(model_files, "hub_answers", lambda: False)
    keepsight.refuses(*WITH_CONFIGURATION[line], *shlex.split(line), *TINY)
    assert tree(here) == files


WORDS_OF_VALIDATORS = re.compile(
    r"could not be converted|not Optional|validation|[Ii]nput should|List should|pydantic|of type '"
)


def test_bad_values_are_refused_in_our_own_words() -> None:
    """No validator's own words reach a user, whatever is written for a key."""
    refusals = 0
    for key in keys_of(Eval):
        try:
            compose_config(Eval, [f"{key.name}=maybe"])
        except UserError as error:
            message = str(error)
            assert not WORDS_OF_VALIDATORS.search(message)
            assert "\n" not in message
            refusals += 1
    assert refusals > 10


@pytest.mark.parametrize(
    ("line", "expected_type"),
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
def test_what_a_key_takes_is_said(keepsight: CommandLine, line: str, expected_type: str) -> None:
    *_, argument = line.split()
    message = keepsight.refuses(key_of(argument), "type", *line.split())
    assert message.endswith(f"{argument} must be {expected_type}")


def test_a_key_is_set_once() -> None:
    with refused("limit", "conflict"):
        parse(Data, ["out=a", "limit=3", "limit=4"])


def test_no_text_steers_the_terminal(keepsight: CommandLine) -> None:
    assert printable("a\u200fb\u061c\u200e") == "a\\u200fb\\u061c\\u200e"
    assert printable("\x1b[2Ja\u202eb\ud800\r\tc\n", lines=True) == "\\x1b[2Ja\\u202eb\\ud800\\r\tc\n"
    assert keepsight.fails("push", "\x1b[2J", "ada/x").startswith("\\x1b[2J: has nothing")


TASKS_WITH_THE_SAME_SAMPLES = [
    ("tasks=[niah_single]", "lengths=[512,512]"),
    ("lengths=[512]", "tasks=[niah_single,niah_single]"),
    ("lengths=[512]", "tasks=[niah,niah_multikey]"),
]


def test_samples_are_not_counted_twice(keepsight: CommandLine) -> None:
    for keys in TASKS_WITH_THE_SAME_SAMPLES:
        evaluation = ("eval", *TINY, "methods=[snapkv]", *keys, "samples=1", "out=out")
        keepsight.refuses("tasks", "conflict", *evaluation)


def test_prompts_longer_than_the_context_are_refused(keepsight: CommandLine, here: Path) -> None:
    other_keys = [argument for argument in DATA if key_of(argument) != "max_new_tokens"]
    keepsight.refuses("max_new_tokens", "range", "data", *TINY, *other_keys, "max_new_tokens=4090")
    assert not list((here / "data").glob("shard-*"))
    (here / "long.txt").write_text("word " * 5000)
    keepsight.refuses("prompt", "range", "inspect", *TINY, "method=snapkv", "prompt=@long.txt")
    assert not (here / "runs").exists()
    keepsight("data", *TINY, *DATA)  # a run that ends without a result leaves no settings to disagree with


def test_an_adapter_of_another_model_is_refused(keepsight: CommandLine, here: Path) -> None:
    tiny_model(vocab_size=512, hidden_size=48, max_position_embeddings=4096).save_pretrained("tiny")
    tiny_tokenizer().save_pretrained("tiny")
    evaluation = ("eval", *TINY, "adapter=adapter", *NEEDLES, "methods=[lookaheadkv]", "out=eval")
    keepsight.refuses("adapter", "model", *evaluation)
    assert not (here / "eval/report.html").exists()


def test_push_shows_what_it_would_send(keepsight: CommandLine, here: Path) -> None:
    (here / "adapter" / "notes.txt").write_text("mine")
    printed = keepsight("push", "adapter", "ada/x", "--dry-run")
    assert printed == keepsight("push", "folder=adapter", "repo=ada/x", "dry_run=true")
    assert printed.startswith("to https://")
    assert printed.endswith("\ndry run: nothing was uploaded; to upload it, leave out --dry-run\n")
    for name in ("adapter_model.safetensors", "lookahead_config.json", "README.md"):
        size = (here / "adapter" / name).stat().st_size
        first_line = next(line for line in printed.splitlines() if line.endswith(f"adapter/{name}"))
        assert f"{size:,} bytes" in first_line
    assert "  left out: adapter/notes.txt\n" in printed


def test_a_tilde_is_the_home_folder_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/a b")
    config = configuration("eval", ["out=~/o", "adapter=~/a", "tasks=jsonl", "jsonl.dir=~/d", "reuse=~/r,~/s", *TINY])
    assert (config.out, config.adapter, config.jsonl.dir) == ("/home/a b/o", "/home/a b/a", "/home/a b/d")
    assert config.reuse == ["/home/a b/r", "/home/a b/s"]

    methods = "methods=[{name: kvzap, scorer: ~/s, budget: 9}]"
    config = configuration("eval", ["out='~/o'", "reuse=['~/r', 'x~y']", methods])
    assert config.out == "/home/a b/o"
    assert config.reuse == ["/home/a b/r", "x~y"]
    assert config.methods == [{"name": "kvzap", "scorer": "/home/a b/s", "budget": 9}]

    assert configuration("compare", ["~/r", "~/s"]).runs == ["/home/a b/r", "/home/a b/s"]

    config = configuration("serve", ["options={weights: ~/w.json}", "model.id=~/m"])
    assert config.options == {"weights": "/home/a b/w.json"}
    assert config.model.id == "/home/a b/m"

    config = configuration("prefix", ["prompt=~/no path", "system=~/none", "out=~/o"])
    assert (config.prompt, config.system) == ("~/no path", "~/none")
    assert config.out == "/home/a b/o"


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
    assert (home / "data/manifest.json").is_file()
    inspect = ("inspect", *model, "adapter=~/adapter", "budget=40", "max_new_tokens=2")
    keepsight(*inspect, "prompt=@~/texts/a.txt", "out=~/i.html")
    assert (home / "i.html").is_file()
    keepsight("push", "~/adapter", "ada/x", "--dry-run")
    assert load_target("~/tiny", device="cpu").name == str(home / "tiny")
    assert LookaheadKV.from_pretrained("~/adapter", 40).budget == 40
    assert not (here / "~").exists()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_shows_what_it_can(here: Path, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "\u9002\u914d\u5668"
    (here / "adapter").rename(here / name)
    terminal = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(terminal, encoding))
    assert main(["push", name, "ada/x", "--dry-run"]) == 0
    sys.stdout.flush()
    shown_name = name if encoding == "utf-8" else "???"
    assert shown_name in terminal.getvalue().decode(encoding)


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
    expected = configuration("eval", ["out=a", "recipe=qwen3-8b"])
    for arguments in (["qwen3-8b", "out=a"], ["out=a", "model=qwen3-8b"], ["Qwen/Qwen3-8B", "out=a"]):
        assert configuration("eval", arguments) == expected
    assert configuration("fit", ["tiny", "out=a"]).model.id == "tiny"  # a folder here
    with refused("model.id", "conflict"):
        configuration("eval", ["tiny", "out=a", "model.id=other"])


def test_help_is_a_command_too(keepsight: CommandLine) -> None:
    assert keepsight("help") == keepsight("--help")
    assert keepsight("help", "eval") == keepsight("eval", "--help")
    assert keepsight("help", "bench") == keepsight("bench", "--help")
    recipes_text = keepsight("help", "recipes")
    assert re.search(r"qwen3-8b +Qwen/Qwen3-8B\n", recipes_text)
