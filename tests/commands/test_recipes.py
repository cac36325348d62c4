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
QWEN_CODERS = "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"
OWN_SETTINGS = {"smollm2-135m", "gemma3-270m", *QWEN_CODERS}
"""Recipes for models that train on a CPU, each with settings of its own."""
FAMILY_OF = {
    "gemma3-270m": "Gemma 3 (text)",
    "gemma3-27b": "Gemma 3 (multimodal class, text)",
    "gemma3-4b": "Gemma 3 (multimodal class, text)",
    "gpt-oss-20b": "GPT-OSS",
    **dict.fromkeys(["llama3.1-70b", "llama3.1-8b", "llama3.2-1b", "llama3.2-3b", "llama3.3-70b"], "Llama 3"),
    "llama8b": "Llama 3",
    "mistral-7b": "Mistral",
    "phi-4": "Phi-3, Phi-4",
    **dict.fromkeys(["qwen2.5-14b", "qwen2.5-7b", *QWEN_CODERS], "Qwen2, Qwen2.5"),
    **dict.fromkeys(["qwen3-1.7b", "qwen3-4b", "qwen3-8b"], "Qwen3"),
    "qwen3-30b-a3b": "Qwen3-MoE",
    "smollm2-135m": "Llama 3",
}
"""The architecture of each recipe's model, in `tests.families`."""
FIRST_OF = {family: recipe for recipe, family in reversed(FAMILY_OF.items())}
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 8,  # an EAGLE-3 head reads three layers in the middle
    "vocab_size": 520,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"] * 4}
MORE: dict[str, dict[str, Any]] = {
    "GPT-OSS": LAYERS,
    "Gemma 3 (text)": LAYERS,
    "Gemma 3 (multimodal class, text)": {
        **LAYERS,
        **{"image_token_index": 517, "boi_token_index": 518, "eoi_token_index": 519},  # which the tokenizer never gives
    },
}
SHORT = {"steps": 3, "samples_per_step": 2, "precision": "no", "held_out": 2, "measure_every": 3, "budget": 16}


def overrides(section: str) -> list[str]:
    return [f"{section}.{key}={value}" for key, value in {**SHORT, "report_to": "[]"}.items()]


def test_those_of_one_architecture_differ_in_the_model_alone() -> None:
    """So that what is trained below, with the first of them, stands for all."""
    assert {path.stem for path in FOLDER.glob("*.yaml")} - {"demo"} == FAMILY_OF.keys() | PUBLISHED.keys()
    for name in FAMILY_OF.keys() - OWN_SETTINGS:
        first, own = (parse(UsesMethods, [f"recipe={each}"]) for each in (FIRST_OF[FAMILY_OF[name]], name))
        assert replace(own, model=replace(own.model, id=first.model.id)) == first, name


FAST = ("Llama 3", "GPT-OSS", "Gemma 3 (multimodal class, text)")
"""They differ most: full attention, sinks beside sliding windows, a model that reads images."""


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[] if each in FAST else [pytest.mark.slow]) for each in FIRST_OF]
)
def test_its_modules_are_trained_and_evaluated(
    keepsight: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "write_png", lambda *_: None)  # takes as long as the training, and has its tests
    fresh_model(family, **SHAPE, **MORE.get(family, {})).save_pretrained("tiny")
    tiny_tokenizer().save_pretrained("tiny")
    recipe = [f"recipe={FIRST_OF[family]}", "model.id=tiny", "model.device=cpu"]
    write_data(Path("data"), target_of(parse(UsesMethods, recipe)))
    keepsight("train", *recipe, "data=data", "out=adapter", "lookahead.tokens=4", *overrides("train"))
    head = ["draft_head.vocabulary=64", *overrides("draft_head.train")]
    keepsight("train_draft_head", *recipe, "data=data", "out=head", *head)
    retrieval = ["retrieval_head.queries=8", *overrides("retrieval_head.train")]
    keepsight("train_retrieval_head", *recipe, "data=data", "head=head", "out=retrieval", *retrieval)
    artifacts = ["adapter=adapter", "retrieval=retrieval", "draft.head=head", "draft.layers=null"]
    config = parse(UsesMethods, [*recipe, *artifacts])
    target = target_of(config)
    resources, prompt = resources_of(config, target), prompt_ids(60)[0]
    full = generate(target.model, prompt, make_method("full", None), max_new_tokens=6)
    for method in ("lookaheadkv", "specontext", "speckv"):
        answers = [
            generate(target.model, prompt, make_method(method, budget, resources), max_new_tokens=6)
            for budget in (40, 80)
        ]
        assert answers[0].shape[1] <= 6 and answers[1].tolist() == full.tolist(), method
