"""`key=value` arguments: every text arrives as it was typed, and what is wrong is named in one line."""

import importlib
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from keepsight import recipes
from keepsight.commands import data, push
from keepsight.commands import eval as evaluation
from keepsight.commands import inspect as inspection
from keepsight.commands.config import Recipe, parse
from keepsight.commands.config_keys import describe
from keepsight.errors import UserError
from keepsight.models.card import LICENSES
from keepsight.train import settings
from tests.commands.commands import ALL_COMMANDS, WITHOUT_RECIPE

RECIPES = sorted(path.stem for path in (Path(recipes.__file__).parent / "recipe").glob("*.yaml"))


def test_the_recipe_is_below_what_is_given() -> None:
    config = parse(data.Config, ["out=runs/a", "limit=7", "model.dtype=float32", "train.learning_rate=2e-4"])
    assert isinstance(config, data.Config)
    assert (config.out, config.limit, config.model.dtype, config.train.learning_rate) == ("runs/a", 7, "float32", 2e-4)
    assert config.model.id == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert config.shard_size == data.Config().shard_size


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_read(recipe: str) -> None:
    text = (Path(recipes.__file__).parent / "recipe" / f"{recipe}.yaml").read_text("utf-8")
    config = parse(data.Config, [f"recipe={recipe}", "out=a"])
    if recipe != "llama8b":  # another name of llama3.1-8b
        assert config.model.id == yaml.safe_load(text)["model"]["id"]
    assert config.model.id.count("/") == 1
    assert config.model.id in LICENSES


TEXTS = [
    *("a,b", "a[b]{c}(d)", "it's", 'say "so"', "C:\\a\\", "\\'", "two\nlines", "", "  padded  ", "${HOME}", "$5"),
    *(
        "007",
        "1e3",
        "true",
        "=a=b",
        "#1",
        "What is it, really?",
        "100 %",
        "größer …",
        "key: value",
        "[",
        "'",
        "a\\'b\\",
    ),
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_arrives_as_it_was_typed(text: str) -> None:
    config = parse(inspection.Config, ["model.id=a", f"prompt={text}", f"out={text}"])
    assert (config.prompt, config.out) == (text, text)


def test_a_quoted_text_arrives_without_its_quotes() -> None:
    assert parse(inspection.Config, ["prompt='a, b'"]).prompt == "a, b"
    assert parse(inspection.Config, ['prompt="a, b"']).prompt == "a, b"
    assert parse(evaluation.Config, ["out=a", "adapter=null"]).adapter is None


def test_lists_and_options_arrive_with_their_types() -> None:
    config = parse(evaluation.Config, ["out=a", "budgets=[64,0.1]", "methods=[full,{name: snapkv, kernel: 5}]"])
    assert config.budgets == [64, 0.1] and [type(budget) for budget in config.budgets] == [int, float]
    assert config.methods == ["full", {"name": "snapkv", "kernel": 5}]
    assert parse(inspection.Config, ["prompt=a", "options={kernel: 5, group: max}"]).options == {
        "kernel": 5,
        "group": "max",
    }
    assert parse(evaluation.Config, ["out=a", "jsonl.files=[trec,hotpotqa]"]).jsonl.files == ["trec", "hotpotqa"]


WRONG = {
    ("out=a", "model.trust_remote_code=2"): "model.trust_remote_code=2 must be true or false",
    ("outt=a",): "'outt' is no key of this command; did you mean 'out'?",
    ("out=a", "model.idd=a"): "'model.idd' is no key of this command; did you mean 'model.id'?",
    ("out=a", "+new=1"): "'+new' is no key of this command; see --help",
    ("~out",): "'~out' is no key of this command; did you mean 'out'?",
    ("out=a", "qqqqq.zzz=1"): "'qqqqq.zzz' is no key of this command; see --help",
    ("out=a", "model=a"): "'model' is no key of this command; it holds model.id, model.revision, model.packaged,",
    (
        "out=a",
        "recipe=smollm",
    ): "recipe=smollm is unknown; choose one of gemma3-27b, gemma3-4b, gpt-oss-20b,",
    ("limit=3",): "out= is required; see --help",
    ("out=a", "limit=abc"): "limit=abc: Value 'abc' of type 'str' could not be converted to Integer",
    ("out=a", "limit=1.5"): "limit=1.5: Value '1.5' of type 'float' could not be converted to Integer",
    ("out=a", "limit=1,2"): "limit=1,2: this key takes one value",
    ("out=a", "limit=99999999999999999999"): "limit: 99999999999999999999 is too large; the limit is 1099511627776",
    ("out=a\udcff",): "out= is no UTF-8 text: 'a\\udcff'",
    ("out=a", "limit=[1"): "'limit=[1' cannot be read; write key=value, a list as key=[a,b]",
    ("out=null",): "out=null: field 'out' is not Optional",
    ("out=a", "model.trust_remote_code=abc"): "model.trust_remote_code=abc must be true or false",
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_what_is_wrong_is_named_in_one_line(arguments: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        parse(data.Config, list(arguments))
    assert str(caught.value).startswith(WRONG[arguments])
    assert "\n" not in str(caught.value) and "hydra" not in str(caught.value).lower()


def test_a_recipe_that_is_unknown_lists_the_known() -> None:
    with pytest.raises(UserError) as caught:
        parse(data.Config, ["out=a", "recipe=smollm"])
    assert str(caught.value).endswith(f"choose one of {', '.join(RECIPES)}")


def test_a_list_needs_no_brackets() -> None:
    """Which some shells take for a pattern."""
    given = ["out=a", "tasks=niah,jsonl", "budgets=64", "lengths=512,1024", "methods={name: snapkv, window: 8},h2o"]
    config = parse(evaluation.Config, given)
    assert (config.tasks, config.budgets, config.lengths) == (["niah", "jsonl"], [64], [512, 1024])
    assert config.methods == [{"name": "snapkv", "window": 8}, "h2o"]
    assert parse(evaluation.Config, ["out=a", "draft.layers=0,3"]).draft.layers == [0, 3]
    assert parse(evaluation.Config, ["out=a", "draft.layers=null"]).draft.layers is None


OUT_OF_RANGE = {
    **dict.fromkeys(
        ("train.learning_rate=-1", "train.learning_rate=nan", "train.learning_rate=0"), "above 0 and up to"
    ),
    **dict.fromkeys(("train.warmup=-1", "train.warmup=2", "train.min_learning_rate=-1"), "from 0 and up to 1"),
    **dict.fromkeys(("train.seed=-1", "train.seed=4294967296"), "from 0 and up to 4294967295"),
    **dict.fromkeys(("train.clip=0", "train.epochs=-1"), "above 0 and up to"),
    "train.report_to=[nope]": "'nope'; choose from tensorboard, trackio, wandb, or [] for none",
    "train.report_to=[nowhere,tensorboard]": "'nowhere'; choose from",
    **dict.fromkeys(("lookahead.tokens=0", "lookahead.tokens=-1", "lookahead.tokens=1000000"), "from 1 to 4096"),
    "lookahead.rank=-1": "from 0 to 4096",
    **dict.fromkeys(("lookahead.dropout=1.5", "lookahead.dropout=nan"), "at least 0 and below 1"),
    "lookahead.alpha=0": "above 0",
    **{"lookahead.pooling=foo": "choose max or avg", "lookahead.group=foo": "choose mean or max"},
    "lookahead.queries=foo": "choose mean or max",
    **{"lookahead.kernel=0": "from 1 to 4095", "lookahead.kernel=6": "must be odd"},
    **{"lookahead.floor=1.5": "must be from 0 to 1", "lookahead.floor=-0.1": "must be from 0 to 1"},
    "draft_head.train.learning_rate=-1": "above 0 and up to",
    "draft_head.vocabulary=0": "at least 1",
    "draft_head.decay=2": "at most 1",
    "retrieval_head.train.seed=-1": "from 0 and up to",
    **{"retrieval_head.features=foo": "choose one of previous-step, none", "retrieval_head.temperature=nan": "above 0"},
}


@pytest.mark.parametrize("argument", OUT_OF_RANGE)
def test_values_out_of_range_end_before_anything_else(argument: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(data.Config, ["out=a", argument])
    assert str(caught.value).startswith(argument.partition("=")[0])
    assert OUT_OF_RANGE[argument] in str(caught.value) and "\n" not in str(caught.value)


def test_a_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "find_spec", lambda name: name != "wandb" or None)
    with pytest.raises(UserError, match=r"train.report_to: wandb is not installed; run `pip install wandb`"):
        parse(data.Config, ["out=a", "train.report_to=[wandb]"])


def test_every_key_has_a_default_and_a_meaning() -> None:
    rows = {key: (default, note) for key, default, note in describe(push.Config)}
    assert rows["folder"] == ("required", "The lookahead adapter, draft head or retrieval head.")
    rows = {key: (default, note) for key, default, note in describe(data.Config)}
    assert rows["mixture"][0] == "offline"
    assert rows["model.dtype"] == ("auto", "auto, float32, bfloat16 or float16.")
    assert rows["model.revision"][0] == "None"
    assert {"train.steps", "lookahead.tokens", "adapter"} <= rows.keys()
    assert "defaults" not in rows
    assert len(rows) > len(fields(data.Config))


@pytest.mark.parametrize("command", ALL_COMMANDS)
def test_no_key_lacks_a_meaning(command: str) -> None:
    module = importlib.import_module(f"keepsight.commands.{command.replace(' ', '.')}")
    assert issubclass(module.Config, Recipe) == (command not in WITHOUT_RECIPE)
    assert [key for key, _, note in describe(module.Config) if not note] == []


def test_configurations_are_read_without_the_trainer() -> None:
    heavy = ["peft", "torch", "transformers", "transformers.trainer"]
    code = f"import sys, keepsight.commands.config; print([name for name in {heavy} if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True) == "[]\n"
