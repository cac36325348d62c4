"""Presets: every table of a paper names tasks, methods and budgets that are there; one is measured on a tiny model."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from keepsight import recipes
from keepsight.commands.config import COMMANDS
from keepsight.commands.config_shared import TaskKeys
from keepsight.commands.from_recipe import resources_of, without_weights
from keepsight.commands.parse import parse
from keepsight.commands.recipe import presets, table_of
from keepsight.commands.variants import variants_of
from keepsight.eval.tasks.benchmark import protocol_named
from keepsight.eval.tasks.registry import Benchmarks, tasks_of
from keepsight.files import read_json
from keepsight.models.card import Provenance
from keepsight.models.retrieval_head import RetrievalHead
from tests.commands.commands import CommandLine, results_of
from tests.eval.judging import endpoint
from tests.runtime.retrieval.heads import tiny_head

FILES = {path.stem: path for path in sorted((Path(recipes.__file__).parent / "preset").glob("*.yaml"))}
TINY = ("model.id=tiny", "model.device=cpu", "adapter=adapter", "draft.layers=[0,2]", "max_new_tokens=4", "pages=0")
pytestmark = pytest.mark.usefixtures("here")


def config_with(preset: str, *keys: str) -> Any:
    """The configuration of the preset's command."""
    schema, _ = COMMANDS[presets()[preset].command]
    out = ["out=out"] if issubclass(schema, TaskKeys) else []
    return parse(schema, ["recipe=smollm2-135m", f"preset={preset}", *out, *keys])


def presets_of(command: str) -> list[str]:
    return [name for name, preset in presets().items() if preset.command == command]


@pytest.fixture
def milebench(here: Path) -> Path:
    """A folder with empty data sets of MileBench."""
    folder = here / "milebench"
    (folder / "NAME").mkdir(parents=True)
    for data_set in ("EgocentricNavigation", "MovingDirection", "SceneTransition", "SlideVQA", "TQA", "WebQA"):
        (folder / data_set).mkdir()
        (folder / data_set / f"{data_set}.json").write_text("{}")
    return folder


@pytest.mark.parametrize("name", FILES)
def test_every_table_names_tasks_methods_and_budgets_that_exist(name: str, milebench: Path) -> None:
    config = config_with(name)
    table = yaml.safe_load(FILES[name].read_text("utf-8"))["table"]
    assert presets()[name].table == table
    assert table_of(config) == table
    if hasattr(config, "methods"):
        bits = getattr(config, "bits", [])
        resources = resources_of(config, without_weights(config))
        variants = variants_of(config.methods, config.budgets, bits, resources)
        assert variants
        assert len({variant.cell for variant in variants}) == len(variants)
        assert {variant.budget for variant in variants} <= {None, *config.budgets}
    if isinstance(config, Benchmarks):
        config.milebench.dir = str(milebench)
        protocol = protocol_named(getattr(config, "protocol", "reference"))
        tasks: list[str] = getattr(config, "tasks")  # noqa: B009 - Benchmarks alone has none
        for task in tasks:
            assert tasks_of(config, task, protocol)


def test_arguments_are_above_the_preset_and_it_above_the_recipe() -> None:
    config = config_with("lookaheadkv-mt-bench", "budgets=32", "judge.mode=pairwise", "seed=7")
    assert config.budgets == [32]
    assert config.judge.mode == "pairwise"
    assert config.judge.model == "Qwen/Qwen3-235B-A22B"
    assert table_of(config) == "LookaheadKV (arXiv 2603.10899), table 2: MT-Bench; with other budgets, judge.mode"
    assert config.adapter == "shipped:smollm2-135m-lookahead"


def test_help_lists_those_of_a_command(keepsight: CommandLine) -> None:
    listed = keepsight("eval", "--help").partition("presets: ")[2]
    assert listed.replace(",", "").split() == presets_of("eval")
    help_of_decode = " ".join(keepsight("bench", "decode", "--help").split())
    assert f"presets: {', '.join(presets_of('bench decode'))}" in help_of_decode
    help_with_preset = keepsight("eval", "--help", "preset=dapq-niah")
    assert "\n  tasks=[niah_depth] " in help_with_preset
    assert "\n  preset=dapq-niah " in help_with_preset


def test_unknown_ones_and_those_of_other_commands_are_refused(keepsight: CommandLine) -> None:
    message = keepsight.refuses("preset", "unknown", "bench", "decode", "preset=dapq-niah")
    assert "keepsight eval has it" in message
    keepsight.refuses("preset", "unknown", "eval", "out=out", "preset=a")


@pytest.mark.parametrize(
    ("name", "missing_key"),
    [
        ("lookaheadkv-longbench", "longbench.dir=FOLDER"),
        ("dapq-longbench-v2", "longbench_v2.file=FILE"),
        ("speckv-milebench", "milebench.dir=FOLDER"),
        ("specontext-longwriter", "longwriter.file=FILE"),
        ("lookaheadkv-mt-bench", "judge.url=http://HOST:PORT/v1"),
    ],
)
def test_what_a_user_brings_is_named_before_the_model_is_loaded(
    keepsight: CommandLine, monkeypatch: pytest.MonkeyPatch, name: str, missing_key: str
) -> None:
    monkeypatch.setattr("keepsight.commands.eval.target_of", lambda _: pytest.fail("loaded"))
    assert missing_key in keepsight.fails("eval", *TINY, f"preset={name}", "out=out")


def test_a_table_is_measured(keepsight: CommandLine, here: Path) -> None:
    """MT-Bench with every method of the paper's table; both turns are evicted from and judged."""
    lease = "The lease begins in May and ends after nine years. " * 6
    question = {"question_id": 81, "category": "writing", "turns": [f"{lease}When?", "Where?"]}
    Path("question.jsonl").write_text(json.dumps(question))
    with endpoint(lambda body: "[[7]]") as judge:
        preset = ("preset=lookaheadkv-mt-bench", "mt_bench.file=question.jsonl", "budgets=[40]")
        printed = keepsight("eval", *TINY, *preset, f"judge.url={judge.url}", "out=out")
    table = "LookaheadKV (arXiv 2603.10899), table 2: MT-Bench; with other budgets"
    assert printed.rstrip().endswith(f"table: {table}")
    assert read_json(here / "out" / "settings.json")["table"] == table
    assert f"<dd>{table}" in (here / "out" / "report.html").read_text("utf-8")
    rows = results_of(here / "out")
    methods = ["full", "pyramidkv", "snapkv", "streamingllm", "speckv", "laq", "lookaheadkv"]
    turns_and_methods = [(row["task"][-1], row["method"]) for row in rows]
    assert turns_and_methods == [*product("12", methods)]
    assert {row["kept"] for row in rows if row["budget"]} == {40.0}
    assert {row["score"] for row in rows} == {0.7}


def first_cells(printed: str) -> list[str]:
    """Of the lines between the headings and the name of the table."""
    return [line.split("  ")[0] for line in printed.splitlines()[2:-1]]


def label_in(method: Any) -> str:
    """What a benchmark calls a method of a preset: its name, or the label that it is given."""
    return method if isinstance(method, str) else str(method["label"])


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("dapq-throughput", "DapQ (arXiv 2603.11564), tables 3 and 7"),
        ("specontext-throughput", "SpeContext (arXiv 2512.00722), table 3"),
        ("specontext-request", "SpeContext (arXiv 2512.00722), figure 10"),
    ],
)
def test_a_table_of_decoding_is_measured(keepsight: CommandLine, here: Path, name: str, table: str) -> None:
    draft = tiny_head(512)
    RetrievalHead.from_draft(draft, "previous-step").save(here / "head", Provenance("tiny"), "# Card\n")
    small = ("tokens=90", "answer_tokens=2", "batch=2", "budgets=[64]", "retrieval=head")
    printed = keepsight("bench", "decode", "model.id=tiny", "model.device=cpu", f"preset={name}", *small)
    values = presets()[name].values
    of_methods = [f"{label_in(method)} 64" for method in values["methods"]]
    of_attention = [f"full cache, {attention}" for attention in values.get("attention", [])]
    assert first_cells(printed) == ["full cache", *of_methods, *of_attention]
    assert printed.splitlines()[-1].startswith(f"table: {table}")


CPC = "{name: sentence_similarity, similarity: {name: contextual, model: tiny}, label: cpc}"


@pytest.mark.parametrize(
    ("name", "changes", "methods"),
    [
        pytest.param("speckv-ttft", [], ["snapkv 90", "speckv, densely 90", "speckv 90"], id="speckv-ttft"),
        pytest.param("specpc-ttft", [f"methods=[{CPC},specpc]"], ["cpc 90", "specpc 90"], id="specpc-ttft"),
    ],
)
def test_a_table_of_first_tokens_is_measured(
    keepsight: CommandLine, name: str, changes: list[str], methods: list[str]
) -> None:
    """CPC with its own encoder, since the preset's needs another package, as LLMLingua-2 does."""
    small = ["tokens=320", "budgets=[90]", "draft.layers=[0,2]", *changes]
    printed = keepsight("bench", "serve", "model.id=tiny", "model.device=cpu", f"preset={name}", *small)
    assert first_cells(printed) == ["full cache", *methods]
    assert "figure 6: time to first token" in printed.splitlines()[-1]
