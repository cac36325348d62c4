"""Presets: every table of a paper names tasks, methods and budgets that are there; one is measured on a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from keepsight import recipes
from keepsight.commands.config import COMMANDS
from keepsight.commands.config_shared import TaskKeys
from keepsight.commands.from_recipe import resources_of, without_weights
from keepsight.commands.parse import parse
from keepsight.commands.recipe import Preset, presets, table_of
from keepsight.commands.variants import variants_of
from keepsight.eval.tasks.benchmark import protocol_named
from keepsight.eval.tasks.registry import Benchmarks, tasks_of
from keepsight.files import read_json, read_jsonl
from keepsight.models.card import Provenance
from keepsight.models.retrieval_head import RetrievalHead
from tests.commands.commands import CommandLine
from tests.eval.judging import endpoint
from tests.runtime.retrieval.heads import tiny_head

FILES = {path.stem: path for path in sorted((Path(recipes.__file__).parent / "preset").glob("*.yaml"))}
TINY = ("model.id=tiny", "model.device=cpu", "adapter=adapter", "draft.layers=[0,2]", "max_new_tokens=4", "pages=0")
pytestmark = pytest.mark.usefixtures("here")


def parsed(name: str, *more: str) -> tuple[Preset, Any]:
    preset = presets()[name]
    schema = COMMANDS[preset.command][0]
    out = ["out=out"] if issubclass(schema, TaskKeys) else []
    return preset, parse(schema, ["recipe=smollm2-135m", f"preset={name}", *out, *more])


@pytest.mark.parametrize("name", FILES)
def test_every_table_names_what_is_there(name: str) -> None:
    (Path("milebench") / "NAME").mkdir(parents=True)
    for data_set in ("EgocentricNavigation", "MovingDirection", "SceneTransition", "SlideVQA", "TQA", "WebQA"):
        (Path("milebench") / data_set).mkdir()
        (Path("milebench") / data_set / f"{data_set}.json").write_text("{}")
    preset, config = parsed(name)
    assert table_of(config) == preset.table == yaml.safe_load(FILES[name].read_text("utf-8"))["table"]
    if hasattr(config, "methods"):
        bits = getattr(config, "bits", [])
        variants = variants_of(config.methods, config.budgets, bits, resources_of(config, without_weights(config)))
        assert len({each.cell for each in variants}) == len(variants) > 0
        assert {each.budget for each in variants} <= {None, *config.budgets}
    if isinstance(config, Benchmarks):
        config.milebench.dir = "milebench"
        tasks: list[str] = getattr(config, "tasks")  # noqa: B009 - Benchmarks alone has none
        protocol = protocol_named(getattr(config, "protocol", "reference"))
        assert all(tasks_of(config, task, protocol) for task in tasks)


def test_arguments_are_above_the_preset_and_it_above_the_recipe() -> None:
    _, config = parsed("lookaheadkv-mt-bench", "budgets=32", "judge.mode=pairwise", "seed=7")
    assert (config.budgets, config.judge.mode, config.judge.model) == ([32], "pairwise", "Qwen/Qwen3-235B-A22B")
    assert table_of(config) == "LookaheadKV (arXiv 2603.10899), table 2: MT-Bench; with other budgets, judge.mode"
    assert config.adapter == "shipped:smollm2-135m-lookahead"


def test_help_lists_those_of_a_command(keepsight: CommandLine) -> None:
    listed = keepsight("eval", "--help").partition("presets: ")[2]
    own = [name for name, each in presets().items() if each.command == "eval"]
    assert listed.replace(",", "").split() == own
    decoding = [name for name, each in presets().items() if each.command == "bench decode"]
    assert f"presets: {', '.join(decoding)}" in " ".join(keepsight("bench", "decode", "--help").split())
    shown = keepsight("eval", "--help", "preset=dapq-niah")
    assert "\n  tasks=[niah_depth] " in shown and "\n  preset=dapq-niah " in shown


def test_unknown_ones_and_those_of_other_commands_are_refused(keepsight: CommandLine) -> None:
    assert "keepsight eval has it" in keepsight.refuses("preset", "unknown", "bench", "decode", "preset=dapq-niah")
    keepsight.refuses("preset", "unknown", "eval", "out=out", "preset=a")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("lookaheadkv-longbench", "longbench.dir=FOLDER"),
        ("dapq-longbench-v2", "longbench_v2.file=FILE"),
        ("speckv-milebench", "milebench.dir=FOLDER"),
        ("specontext-longwriter", "longwriter.file=FILE"),
        ("lookaheadkv-mt-bench", "judge.url=http://HOST:PORT/v1"),
    ],
)
def test_what_a_user_brings_is_named_before_the_model_is_loaded(
    keepsight: CommandLine, monkeypatch: pytest.MonkeyPatch, name: str, wanted: str
) -> None:
    monkeypatch.setattr("keepsight.commands.eval.target_of", lambda _: pytest.fail("loaded"))
    assert wanted in keepsight.fails("eval", *TINY, f"preset={name}", "out=out")


def test_a_table_is_measured(keepsight: CommandLine, here: Path) -> None:
    """MT-Bench with every method of the paper's table; both turns are evicted from and judged."""
    long = "The lease begins in May and ends after nine years. " * 6
    question = {"question_id": 81, "category": "writing", "turns": [f"{long}When?", "Where?"]}
    Path("question.jsonl").write_text(json.dumps(question))
    with endpoint(lambda body: "[[7]]") as judge:
        given = (*TINY, "preset=lookaheadkv-mt-bench", "mt_bench.file=question.jsonl", "budgets=[40]")
        printed = keepsight("eval", *given, f"judge.url={judge.url}", "out=out")
    table = "LookaheadKV (arXiv 2603.10899), table 2: MT-Bench; with other budgets"
    assert printed.rstrip().endswith(f"table: {table}")
    assert read_json(here / "out" / "settings.json")["table"] == table
    assert f"<dd>{table}" in (here / "out" / "report.html").read_text("utf-8")
    rows = [*read_jsonl(here / "out" / "results.jsonl")]
    names = ["full", "pyramidkv", "snapkv", "streamingllm", "speckv", "laq", "lookaheadkv"]
    assert [(row["task"][-1], row["method"]) for row in rows] == [(turn, name) for turn in "12" for name in names]
    assert {row["kept"] for row in rows if row["budget"]} == {40.0} and {row["score"] for row in rows} == {0.7}


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
    lines = keepsight("bench", "decode", "model.id=tiny", "model.device=cpu", f"preset={name}", *small).splitlines()
    values = presets()[name].values
    names = ["full cache", *(f"{each} 64" for each in values["methods"])]
    names += [f"full cache, {each}" for each in values.get("attention", [])]
    assert [line.split("  ")[0] for line in lines[2:-1]] == names
    assert lines[-1].startswith(f"table: {table}")


@pytest.mark.parametrize("name", ["speckv-ttft", "specpc-ttft"])
def test_a_table_of_first_tokens_is_measured(keepsight: CommandLine, name: str) -> None:
    """CPC with its own encoder, since the preset's needs another package, as LLMLingua-2 does."""
    cpc = "{name: sentence_similarity, similarity: {name: contextual, model: tiny}, label: cpc}"
    small = ["tokens=320", "budgets=[90]", "draft.layers=[0,2]"]
    small += [f"methods=[{cpc},specpc]"] * (name == "specpc-ttft")
    lines = keepsight("bench", "serve", "model.id=tiny", "model.device=cpu", f"preset={name}", *small).splitlines()
    names = {"speckv-ttft": ["snapkv 90", "speckv, densely 90", "speckv 90"], "specpc-ttft": ["cpc 90", "specpc 90"]}
    assert [line.split("  ")[0] for line in lines[2:-1]] == ["full cache", *names[name]]
    assert "figure 6: time to first token" in lines[-1]
