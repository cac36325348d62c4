"""Kept KV entries and greedy answers of every method, index for index, as released on 2026-11-24.

`python -m tests.golden.test_golden` writes `golden.json` anew: only when a change of what is kept is intended.
Since then: SpeCache and exact top-k read the first of entries with equal attention (six answers changed).
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from keepsight.models.draft_sources import LoadedDraft
from keepsight.runtime.generate import generate
from keepsight.runtime.methods import METHODS, Resources, make_method
from keepsight.runtime.registry import has_field
from keepsight.runtime.state import prefill
from tests.models.modules import SHAPE, random_on, save
from tests.models.retrieval_heads import tiny_retrieval_head
from tests.tiny import prompt_ids, tiny_model

FILE = Path(__file__).parent / "golden.json"
LENGTHS = (41, 57, 64, 83, 120)
BATCH = (41, 64, 57)
BUDGETS = (16, 24, 0.5)
ANSWER = 8
OPTIONS: dict[str, dict[str, Any]] = {
    "laq": {"observer": {"lookahead": 4, "first_window": 4}},
    "laq++": {"observer": {"lookahead": 4, "first_window": 4, "window": 4}},
    "oracle": {"observer": {"drafter": {"max_new_tokens": 5}}},
    "speckv": {"window": 8, "observer": {"drafter": {"lookahead": 5}}},
    "snapkv": {"window": 8},
    "pyramidkv": {"window": 8},
    "adakv": {"window": 8},
    "h2o": {"window": 4},
    "specpc": {"window": 8, "kernel": 4},
    "speckvpc": {"window": 8, "prompt_window": 8, "kernel": 4, "lookahead": 5, "prompt_budget": 30},
    "clusterkv": {"sinks": 4, "tokens": 4, "window": 4},
    "infllm": {"block": 1, "window": 8, "step": 4},
    "shadowkv": {"chunk": 2, "local": 2, "rank": 6},
    "kivi": {"bits": 2, "group": 8, "residual": 8},
    "specache": {"bits": 1, "group": 8, "residual": 8, "topk": 16, "speculative": False},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "snapkv, max": ("snapkv", {"window": 8, "reduce": "max", "pool": {"kind": "avg", "kernel": 5}}),
    "snapkv, global": ("snapkv", {"window": 8, "allocate": {"name": "global", "floor": 0.3}}),
    "snapkv, value norm": ("snapkv", {"window": 8, "value_norm": True, "allocate": {"name": "adakv", "blend": False}}),
    "h2o, every 4": ("h2o", {"window": 4, "every": 4}),
    "tova, every 1": ("tova", {"every": 1}),
}
CASES = [*json.loads(FILE.read_text())]
"""Methods of the release, and variants; later ones have references of their own."""


@cache
def _resources() -> Resources:
    module = random_on(tiny_model(), replace(SHAPE, queries="max", floor=0.25, sharing="model", value_norm=True))
    return Resources(
        adapter=save(module, Path(_folder().name) / "adapter"),
        draft=LoadedDraft("tiny", "1", tiny_model(seed=3)),
        target=tiny_model(),
    )


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


def _method(case: str, budget: int | float) -> Any:
    name, options = VARIANTS.get(case, (case, OPTIONS.get(case, {})))
    if name in ("quest", "specontext"):  # they read a page, or a window, beside what they choose
        budget = {16: 40, 24: 48, 0.5: 0.9}[budget]
    if name == "specontext":
        return METHODS[name](budget, tiny_retrieval_head("none", kv_heads=2, max_position_embeddings=1024))
    if has_field(name, "every") and options.get("every") and isinstance(budget, float):
        budget = 32
    return make_method(name, budget if has_field(name, "budget") else None, _resources(), **options)


def observed(case: str, budget: int | float, *lengths: int) -> dict[str, Any]:
    """What a method keeps and answers for random prompts of these lengths, padded on the left to a batch."""
    model, method = tiny_model(), _method(case, budget)
    ids, mask = prompt_ids(*lengths, seed=len(lengths) + lengths[0])
    padding = None if len(lengths) == 1 else mask
    torch.manual_seed(0)
    state = method.start(model, ids, padding)
    result: dict[str, Any] = {"bytes": state.kv_bytes}
    if state.tokens.shape != ids.shape:
        result["tokens"] = state.tokens.tolist()
    elif state.has_plain_entries:
        result["kept"] = _kept(state, prefill(model, ids, padding))
    answers = generate(model, ids, method, attention_mask=padding, max_new_tokens=ANSWER, eos_token_id=None)
    return result | {"answers": answers.tolist()}


def _kept(state: Any, whole: Any) -> str:
    """Which of the prompt's entries a state holds: the bits of [L, B, K, N], as hexadecimal digits."""
    bits = []
    for layer, full in zip(state.entries(), whole.entries(), strict=True):
        kept = torch.zeros(full.keys.shape[:3], dtype=torch.bool)
        for row in range(kept.shape[0]):
            for head in range(kept.shape[1]):
                keys = layer.keys[row, head]
                real = keys if layer.real is None else keys[layer.real[row, layer.real.shape[1] - 1 and head]]
                kept[row, head, _places(real, full.keys[row, head])] = True
        bits.append(kept if full.real is None else kept & full.real)
    return np.packbits(torch.stack(bits).numpy()).tobytes().hex()


def _places(keys: Tensor, among: Tensor) -> Tensor:
    nearest = torch.cdist(keys, among, compute_mode="donot_use_mm_for_euclid_dist").min(dim=1)
    assert nearest.values.max() < 1e-3 and len(nearest.indices.unique()) == len(keys)
    return nearest.indices


def _inputs(case: str) -> dict[str, tuple[Any, ...]]:
    alone = {f"{length} tokens, budget {budget}": (budget, length) for length in LENGTHS for budget in BUDGETS}
    batch = {f"batch, budget {budget}": (budget, *BATCH) for budget in BUDGETS}
    packed = METHODS[VARIANTS.get(case, (case, {}))[0]]
    return alone | ({} if packed.selects_each_step or packed.__name__ in _ALONE else batch)


_ALONE = {"SpeCache", "SpecPC", "SpecKVPC", "Truncation", "Kivi"}


@pytest.mark.parametrize("case", CASES)
def test_kept_entries_and_answers_are_those_of_the_release(case: str) -> None:
    golden = json.loads(FILE.read_text())[case]
    found = {name: observed(case, *inputs) for name, inputs in _inputs(case).items()}
    assert golden.keys() == found.keys()
    for name, expected in golden.items():
        assert found[name] == expected, name


if __name__ == "__main__":
    golden = {case: {name: observed(case, *inputs) for name, inputs in _inputs(case).items()} for case in CASES}
    lines = ",\n".join(
        f"{json.dumps(case)}: {json.dumps(each, separators=(',', ':'))}" for case, each in golden.items()
    )
    FILE.write_text("{\n" + lines + "\n}\n")
