"""Private names of transformers are touched in one file, and each still means what is asked of it."""

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.cache_utils import DynamicCache
from transformers.generation.streamers import BaseStreamer

from keepsight import SnapKV
from keepsight.errors import UserError
from keepsight.models import transformers_internals as internals
from keepsight.runtime.generate import CustomGenerate
from tests.package_files import package_modules
from tests.tiny import prompt_ids, tiny_model

FILE = Path(inspect.getfile(internals)).resolve()
OF_TRANSFORMERS = {
    "_attn_implementation",
    "_can_set_attn_implementation",
    "_commit_hash",
    "_is_user_defined",
    "_n_gpu",
}
PUBLIC_METHODS = {name for name in vars(Trainer) if not name.startswith("_")}


def private_names(path: Path) -> set[str]:
    """Private attributes of other objects that a file reads or sets, also by `getattr` and its like."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    names.add(argument.value)
    return {name for name in names if name.startswith("_")}


def test_no_other_file_touches_a_private_name_of_transformers() -> None:
    """Names of classes of transformers that start with one underscore and are none of our own."""
    assert private_names(FILE) >= OF_TRANSFORMERS
    for module in package_modules().values():
        path = Path(module).resolve()
        if path != FILE:
            assert not private_names(path) & OF_TRANSFORMERS, path
            assert "f_locals" not in path.read_text("utf-8"), path


def test_a_custom_generate_sees_what_its_caller_asked_for() -> None:
    """The streamer, the assistant, the mask of ones and the caller's own cache, none of which `generate` passes on."""
    arguments: dict[str, Any] = {}

    class NoteArguments(CustomGenerate):
        def answer(self, model: Any, request: Any) -> Any:
            raise AssertionError("`__call__` answers in its place")

        def __call__(self, model: Any, input_ids: Any, **options: Any) -> Any:  # type: ignore[override]
            arguments.update(internals.arguments_of_generate())
            arguments["cache"] = options.get("past_key_values", options.get("cache"))
            return input_ids

    class Streamer(BaseStreamer):
        def put(self, value: Any) -> None: ...

        def end(self) -> None: ...

    assert internals.arguments_of_generate() == {}
    model = tiny_model()
    ids, _ = prompt_ids(20)
    streamer = Streamer()
    mask = torch.ones_like(ids)
    cache = DynamicCache()
    model.generate(ids, custom_generate=NoteArguments(), streamer=streamer, attention_mask=mask, past_key_values=cache)
    assert arguments["self"] is model
    assert arguments["streamer"] is streamer
    assert arguments["kwargs"]["attention_mask"] is mask
    assert internals.is_of_caller(arguments["cache"])

    model.generate(ids, custom_generate=NoteArguments())
    assert arguments["streamer"] is None
    assert not (arguments["cache"] and internals.is_of_caller(arguments["cache"]))
    with pytest.raises(UserError, match="assisted generation"):
        model.generate(ids, custom_generate=SnapKV(64), assistant_model=tiny_model())


def test_configurations_name_the_attention_and_the_commit() -> None:
    model = tiny_model()
    config = model.config
    internals.set_attention_of_config(config, "not_loaded")
    assert internals.attention_of_config(config) == "not_loaded"
    internals.set_attention_of_config(config, "sdpa")
    assert internals.commit_of(config) is None
    config._commit_hash = "0123"
    assert internals.commit_of(config) == "0123"
    assert "_commit_hash" in inspect.getsource(PreTrainedModel.from_pretrained)
    assert internals.replaces_attention(model.model)


def test_the_trainer_still_has_its_hooks(tmp_path: Path) -> None:
    for name in internals.TRAINER_HOOKS:
        assert callable(vars(Trainer)[name])
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    internals.use_one_gpu(arguments)
    assert arguments.n_gpu == 1
    tree = ast.parse((FILE.parents[1] / "train" / "trainer.py").read_text("utf-8"))
    our_functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    overridden = {name for name in our_functions & vars(Trainer).keys() if not name.startswith("__")}
    assert overridden - PUBLIC_METHODS == {*internals.TRAINER_HOOKS} - {"_prepare_inputs"}
