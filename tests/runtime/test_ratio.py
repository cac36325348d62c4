"""A ratio is one of each prompt's own length: a row keeps and reads the same alone and in any batch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from pytest import LogCaptureFixture

from keepsight.runtime.methods import LaCache, SnapKV, StreamingLLM
from keepsight.runtime.sparse_read.infllm import InfLLM
from keepsight.runtime.sparse_read.selection import ExactTopK
from keepsight.runtime.state import read
from tests.close import assert_close
from tests.runtime.drafting.test_draft_methods import METHODS as DRAFTED
from tests.runtime.prompt_compression.prompts import small_cascade, small_specpc
from tests.runtime.retrieval.test_reader import NAMES, method_of
from tests.runtime.test_window_methods import METHODS as EVICTING
from tests.tiny import prompt_ids, tiny_model

LENGTHS = (60, 20, 41)
METHODS: dict[str, Any] = {name: replace(method, budget=0.5) for name, method in (EVICTING | DRAFTED).items()}
READING: dict[str, Any] = {name: method_of(name, 0.5) for name in NAMES}
SHORTENING: dict[str, Any] = {
    "specpc": small_specpc(0.5),
    "cascade": small_cascade(budget=0.25, prompt_budget=40, window=3),
}


@pytest.mark.parametrize(
    "method", [*METHODS.values(), *READING.values(), *SHORTENING.values()], ids=[*METHODS, *READING, *SHORTENING]
)
def test_a_row_is_the_same_alone_and_in_a_batch(method: Any) -> None:
    model = tiny_model()
    ids, mask = prompt_ids(*LENGTHS)
    answer = prompt_ids(9, 9, 9, seed=1)[0]
    state = method.start(model, ids, mask)
    counts = state.counts()
    logits = read(method.reader(model), state, answer)[1]
    if method in METHODS.values():
        assert counts.sum(dim=(0, 2)).tolist() == [6 * 30, 6 * 10, 6 * 20]  # 20.5 is rounded to the even number
    for row, length in enumerate(LENGTHS):
        alone = method.start(model, ids[row : row + 1, -length:])
        assert torch.equal(counts[:, row], alone.counts()[:, 0])
        assert_close(logits[row : row + 1], read(method.reader(model), alone, answer[row : row + 1])[1])


def test_the_cascade_counts_the_whole_prompt() -> None:
    """Not the 40 tokens that are left of the longest."""
    state = SHORTENING["cascade"].start(tiny_model(), *prompt_ids(*LENGTHS))
    assert state.counts()[0, :, 0].tolist() == [15, 5, 10]


def test_a_share_that_is_too_small_is_raised_to_what_the_method_needs(caplog: LogCaptureFixture) -> None:
    model = tiny_model()
    ids, mask = prompt_ids(60, 8)
    for method, least in ((SnapKV(0.5, window=4), 5), (StreamingLLM(0.5), 5), (LaCache(0.3), 5)):
        state = method.start(model, ids, mask)
        mean_entries = state.counts().double().mean(dim=(0, 2))
        assert mean_entries.tolist() == [method.budget_for(60), least]
    assert ExactTopK(0.5, sinks=4).budget_for(8) == 5
    assert InfLLM(0.01).budget_for(100) == 49
    snapkv: Any = SnapKV  # as_options adds compression_ratio
    assert snapkv(compression_ratio=0.5).budget_for(60) == 33
    lines = len(caplog.records)
    assert snapkv(compression_ratio=0.5).budget_for(50) == 33
    assert len(caplog.records) == lines, "logged once"
    assert "SnapKV: the ratio 0.5 leaves fewer entries of some prompts than it needs; it keeps 33" in caplog.text
