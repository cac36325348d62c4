"""Every recipe: its modules are trained, saved, loaded and evaluated on a tiny random model of its architecture."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepsight import files, recipes
from keepsight.commands.config_shared import UsesMethods
from keepsight.commands.from_recipe import resources_of, target_of
from keepsight.commands.parse import parse
from keepsight.runtime.generate import generate
from keepsight.runtime.methods import make_method
from tests.commands.commands import CommandLine
from tests.commands.test_planned_recipes import PUBLISHED
from tests.families import fresh_model
from tests.tiny import prompt_ids, tiny_tokenizer
from tests.train.runs import write_data

FOLDER = Path(recipes.__file__).parent / "recipe"
TRAINED_ON_A_CPU = {"smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"}
"""Recipes with settings of their own."""
FAMILY_OF = {
    "gemma3-270m": "Gemma 3 (text)",
    "gemma3-27b": "Gemma 3 (multimodal class, text)",
    "gemma3-4b": "Gemma 3 (multimodal class, text)",
    "gpt-oss-20b": "GPT-OSS",
    "llama3.1-70b": "Llama 3",
    "llama3.1-8b": "Llama 3",
    "llama3.2-1b": "Llama 3",
    "llama3.2-3b": "Llama 3",
    "llama3.3-70b": "Llama 3",
    "llama8b": "Llama 3",
    "mistral-7b": "Mistral",
    "phi-4": "Phi-3, Phi-4",
    "qwen2.5-14b": "Qwen2, Qwen2.5",
    "qwen2.5-7b": "Qwen2, Qwen2.5",
    "qwen2.5-coder-0.5b": "Qwen2, Qwen2.5",
    "qwen2.5-coder-1.5b": "Qwen2, Qwen2.5",
    "qwen3-1.7b": "Qwen3",
    "qwen3-4b": "Qwen3",
    "qwen3-8b": "Qwen3",
    "qwen3-30b-a3b": "Qwen3-MoE",
    "smollm2-135m": "Llama 3",
}
"""The architecture of each recipe's model, in `tests.families`."""
FIRST_RECIPE_OF = {family: recipe for recipe, family in reversed(FAMILY_OF.items())}
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 8,  # an EAGLE-3 head reads three layers in the middle
    "vocab_size": 520,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
}
LAYER_TYPES = ["sliding_attention", "full_attention"] * 4
SHAPE_OF_FAMILY: dict[str, dict[str, Any]] = {
    "GPT-OSS": {"layer_types": LAYER_TYPES},
    "Gemma 3 (text)": {"layer_types": LAYER_TYPES},
    "Gemma 3 (multimodal class, text)": {
        "layer_types": LAYER_TYPES,
        "image_token_index": 517,  # the tokenizer never gives this one and the next two
        "boi_token_index": 518,
        "eoi_token_index": 519,
    },
}
SHORT = {
    "steps": "3",
    "samples_per_step": "2",
    "precision": "no",
    "held_out": "2",
    "measure_every": "3",
    "budget": "16",
    "report_to": "[]",
}


def short_training(section: str) -> list[str]:
    return [f"{section}.{key}={value}" for key, value in SHORT.items()]


def test_recipes_of_one_architecture_differ_in_the_model_alone() -> None:
    """So that what is trained below, with the first of them, stands for all."""
    recipes_here = {path.stem for path in FOLDER.glob("*.yaml")} - {"demo"}
    assert recipes_here == FAMILY_OF.keys() | PUBLISHED.keys()
    for name in FAMILY_OF.keys() - TRAINED_ON_A_CPU:
        config = parse(UsesMethods, [f"recipe={name}"])
        first = parse(UsesMethods, [f"recipe={FIRST_RECIPE_OF[FAMILY_OF[name]]}"])
        model = replace(config.model, id=first.model.id)
        assert replace(config, model=model) == first, name


FAST = ("Llama 3", "GPT-OSS", "Gemma 3 (multimodal class, text)")
"""They differ most: full attention, sinks beside sliding windows, a model that reads images."""


@pytest.mark.parametrize(
    "family", [family if family in FAST else pytest.param(family, marks=pytest.mark.slow) for family in FIRST_RECIPE_OF]
)
def test_its_modules_are_trained_and_evaluated(
    keepsight: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "write_png", lambda *_: None)  # takes as long as the training, and has its tests
    fresh_model(family, **SHAPE, **SHAPE_OF_FAMILY.get(family, {})).save_pretrained("tiny")
    tiny_tokenizer().save_pretrained("tiny")
    recipe = [f"recipe={FIRST_RECIPE_OF[family]}", "model.id=tiny", "model.device=cpu"]
    write_data(Path("data"), target_of(parse(UsesMethods, recipe)))
    lookahead = ["lookahead.tokens=4", *short_training("train")]
    keepsight("train", *recipe, "data=data", "out=adapter", *lookahead)
    draft_head = ["draft_head.vocabulary=64", *short_training("draft_head.train")]
    keepsight("train_draft_head", *recipe, "data=data", "out=head", *draft_head)
    retrieval_head = ["retrieval_head.queries=8", *short_training("retrieval_head.train")]
    keepsight("train_retrieval_head", *recipe, "data=data", "head=head", "out=retrieval", *retrieval_head)

    artifacts = ["adapter=adapter", "retrieval=retrieval", "draft.head=head", "draft.layers=null"]
    config = parse(UsesMethods, [*recipe, *artifacts])
    target = target_of(config)
    resources = resources_of(config, target)
    prompt, _ = prompt_ids(60)
    full = generate(target.model, prompt, make_method("full", None), max_new_tokens=6)
    for name in ("lookaheadkv", "specontext", "speckv"):
        evicting = make_method(name, 40, resources)
        answer = generate(target.model, prompt, evicting, max_new_tokens=6)
        assert answer.shape[1] <= 6, name
        keeping_all = make_method(name, 80, resources)
        answer = generate(target.model, prompt, keeping_all, max_new_tokens=6)
        assert answer.tolist() == full.tolist(), name
