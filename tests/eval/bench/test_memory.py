"""How many bytes of KV entries are held at once while a prompt is read."""

from typing import Any

import pytest

from keepsight.eval.bench.measure import peak_kv_bytes
from keepsight.runtime.generate import FullCache
from keepsight.runtime.methods import SnapKV
from tests.tiny import prompt_ids, tiny_model

OF_ENTRY = 2 * 8 * 2 * 4  # KV heads, dimensions, keys and values, bytes
PEAKS: dict[str, tuple[Any, int]] = {
    "nothing is evicted": (FullCache(), 3 * 200),
    "all fits the budget": (SnapKV(200), 3 * 200),
    "one layer whole, and what stays of all": (SnapKV(20, window=6), 200 + 3 * 20),
    "all whole, and what stays of all": (SnapKV(20, window=6, during_prefill=False), 3 * 200 + 3 * 20),
}


@pytest.mark.parametrize("case", PEAKS)
def test_the_peak(case: str) -> None:
    (method, entries), model, ids = PEAKS[case], tiny_model(), prompt_ids(200)[0]
    assert peak_kv_bytes(model, lambda: method.start(model, ids)) == entries * OF_ENTRY
    assert not model._forward_pre_hooks
