"""Budgets and options may be numpy's numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from keepsight import generate
from keepsight.models.draft_sources import LayerSubset
from keepsight.runtime.drafting.speckv import SparsePrefill, SpecKV
from keepsight.runtime.drafting.speculative import Speculative
from keepsight.runtime.methods import ExactTopK, Kivi, Quest, SpeCache, SpeContext, Truncation
from tests.models.retrieval_heads import tiny_retrieval_head
from tests.runtime.prompt_compression.prompts import small_cascade, small_specpc, tiny_draft
from tests.runtime.retrieval.heads import tiny_head
from tests.tiny import prompt_ids, tiny_model

HEAD, CHAIN, DRAFT, SUBSET = tiny_retrieval_head(), tiny_head(), tiny_draft(), LayerSubset((0, 2))
Make = Callable[[Any], Any]
METHODS: dict[str, Make] = {
    "kivi": lambda number: Kivi(number(2), number(8), number(16)),
    "specache": lambda number: SpeCache(number(2), number(8), number(16), number(6)),
    "quest": lambda number: Quest(number(12), number(4), number(1)),
    "exact": lambda number: ExactTopK(number(12), number(1), number(2)),
    "specontext": lambda number: SpeContext(number(12), HEAD, number(1), number(1), number(1)),
    "speckv": lambda number: SpecKV.with_draft(
        SUBSET, number(16), number(5), window=number(9), sparse=SparsePrefill(number(32), number(64))
    ),
    "specpc": lambda number: small_specpc(
        number(20), window=number(4), kernel=number(4), lookahead=number(3), neighbors=number(2), draft=DRAFT
    ),
    "cascade": lambda number: small_cascade(budget=number(16), prompt_budget=number(40), draft=DRAFT),
    "truncation": lambda number: Truncation(number(20)),
    "speculative": lambda number: Speculative(CHAIN, tokens=number(3)),
}


@pytest.mark.parametrize("name", METHODS)
def test_numpys_numbers_are_pythons(name: str) -> None:
    model, ids = tiny_model(head_dim=16 if name in ("kivi", "specache") else 8), prompt_ids(120)[0]
    plain, given = METHODS[name](int), METHODS[name](np.int64)
    assert plain == given and repr(plain) == repr(given)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(generate(model, ids, given, **options), generate(model, ids, plain, **options))
    ratio = np.float32(0.25)
    if name in ("quest", "exact", "truncation"):
        assert type(METHODS[name](lambda number: ratio if number >= 12 else number).budget) is float
