"""Selection per query head, by a model whose KV heads are repeated."""

import runpy
from typing import Any

import pytest
import torch

from keepsight.runtime.importance import NO_POOL
from keepsight.runtime.methods import SnapKV
from keepsight.runtime.state import prefill
from tests.families import fresh_model
from tests.refused import refused
from tests.runtime.dense import best_of
from tests.runtime.scoring import kept_entries
from tests.tiny import prompt_ids
from tests.typed import ROOT

SCRIPT = runpy.run_path(str(ROOT / "docs" / "repeated_heads.py"))
METHOD = SnapKV(14, window=4, pool=NO_POOL)


@pytest.mark.parametrize("family", ["Llama 3", "Qwen2, Qwen2.5", "Qwen3", "Gemma 2"])
def test_the_model_computes_the_same_and_each_query_head_selects(family: str) -> None:
    """Qwen2 has biases, Qwen3 a norm of keys. Entries are ranked by what each query head pays to them, in a loop."""
    model: Any = fresh_model(family)
    repeated = SCRIPT["with_repeated_heads"](model)
    ids = prompt_ids(40, seed=5)[0]
    with torch.no_grad():
        torch.testing.assert_close(repeated(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)

    full_cache = prefill(model, ids, needs=METHOD.needs())
    kept = kept_entries(METHOD, repeated, ids)[0]
    for layer, heads in zip(full_cache.layers, kept, strict=True):
        attention = METHOD.bound_observer.score(layer, "mean")[0]  # type: ignore[attr-defined]
        assert len(heads) == len(attention) == 4
        for entries, scores in zip(heads, attention.tolist(), strict=True):
            assert entries == [*sorted(best_of(scores[:36], 10)), 36, 37, 38, 39]
    by_query_head = METHOD.compress_state(repeated, prefill(repeated, ids, needs=METHOD.needs()))
    by_kv_head = METHOD.compress_state(model, full_cache)
    if family != "Gemma 2":  # whose windows are not evicted from
        assert by_query_head.kv_bytes == 2 * by_kv_head.kv_bytes


def test_a_model_without_such_projections_is_refused_in_one_line() -> None:
    with refused("model", "model"):
        SCRIPT["with_repeated_heads"](fresh_model("GPT-2"))
