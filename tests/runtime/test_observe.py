"""What observers hand on: scores by KV head, reduced in each layer before the next one is scored."""

import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from keepsight.runtime import importance, observe
from keepsight.runtime.drafting.observer import DraftObserver
from keepsight.runtime.evict import Evict
from keepsight.runtime.methods import LAQ, DapQ, LAQPlus, LookaheadKV, Oracle, SnapKV, laq
from keepsight.runtime.methods.drafts import PromptEnds
from keepsight.runtime.state import prefill
from tests.models.modules import random_module, save
from tests.tiny import prompt_ids, tiny_model

LAYERS, KV_HEADS, LENGTH = 3, 2, 70
METHODS = {"snapkv": SnapKV(40), "dapq": DapQ(40), "oracle": Oracle(40), "laq": LAQ(40)}
METHODS |= {"laq++": LAQPlus(40), "dapq, window": DapQ(40, DraftObserver(PromptEnds(), window=6))}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", [*METHODS, "lookaheadkv"])
def test_scores_by_query_head_are_those_of_one_layer(
    name: str, padded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's [B, H, N] are gone, but for the last one's, when the next layer's are reduced."""
    adapter = save(random_module(), tmp_path) if name == "lookaheadkv" else None
    method: Evict = LookaheadKV.from_pretrained(adapter, 40) if adapter else METHODS[name]
    model, (ids, mask) = tiny_model(), prompt_ids(LENGTH, LENGTH - 9 if padded else LENGTH)
    state = prefill(model, ids, mask if padded else None, needs=method.needs())
    seen: list[weakref.ref[Tensor]] = []

    def noting(scores: Tensor, kv_heads: int, heads: str) -> Tensor:
        assert scores.shape == (2, 2 * KV_HEADS, LENGTH)
        assert sum(each() is not None for each in seen) <= 1
        seen.append(weakref.ref(scores))
        return importance.reduce_group(scores, kv_heads, heads)

    for module in (observe, laq):
        monkeypatch.setattr(module, "reduce_group", noting)
    with torch.no_grad():
        scores = method.bound_observer(model, state, method.reduce)
    assert len(seen) >= LAYERS
    assert [each.shape for each in scores] == [(2, KV_HEADS, LENGTH)] * LAYERS
