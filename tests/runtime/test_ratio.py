"""A ratio is one of each prompt's own length: a row keeps and reads the same alone and in any batch."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from keepsight import generate
from keepsight.errors import UserError
from keepsight.runtime.methods import LaCache, SnapKV, StreamingLLM
from keepsight.runtime.sparse_read.selection import ExactTopK
from keepsight.runtime.state import read
from tests.close import assert_close
from tests.runtime.drafting.test_draft_methods import METHODS as DRAFTED
from tests.runtime.prompt_compression.prompts import small_cascade, small_specpc
from tests.runtime.retrieval.test_reader import NAMES, method_of
from tests.runtime.test_window_methods import METHODS as EVICTING
from tests.tiny import prompt_ids, tiny_model

LENGTHS = 60, 20, 41
METHODS: dict[str, Any] = {name: replace(method, budget=0.5) for name, method in (EVICTING | DRAFTED).items()}
READING: dict[str, Any] = {name: method_of(name, 0.5) for name in NAMES}
OTHERS: dict[str, Any] = {
    "specpc": small_specpc(0.5),
    "cascade": small_cascade(budget=0.25, prompt_budget=40, window=3),
}


@pytest.mark.parametrize(
    "method", [*METHODS.values(), *READING.values(), *OTHERS.values()], ids=[*METHODS, *READING, *OTHERS]
)
def test_a_row_is_the_same_alone_and_in_a_batch(method: Any) -> None:
    model, (ids, mask) = tiny_model(), prompt_ids(*LENGTHS)
    answer = prompt_ids(9, 9, 9, seed=1)[0]
    state = method.start(model, ids, mask)
    held, logits = state.counts(), read(method.reader(model), state, answer)[1]
    if method in METHODS.values():
        assert held.sum(dim=(0, 2)).tolist() == [6 * 30, 6 * 10, 6 * 20]  # 20.5 is rounded to the even number
    for row, length in enumerate(LENGTHS):
        alone = method.start(model, ids[row : row + 1, -length:])
        assert torch.equal(held[:, row], alone.counts()[:, 0])
        assert_close(logits[row : row + 1], read(method.reader(model), alone, answer[row : row + 1])[1])


def test_the_cascade_counts_the_whole_prompt() -> None:
    """Not the 40 tokens that are left of the longest."""
    assert OTHERS["cascade"].start(tiny_model(), *prompt_ids(*LENGTHS)).counts()[0, :, 0].tolist() == [15, 5, 10]


def test_a_row_whose_share_is_too_small_is_refused_beside_a_long_one() -> None:
    model, (ids, mask) = tiny_model(), prompt_ids(60, 8)
    for method in (SnapKV(0.5, window=4), StreamingLLM(0.5), LaCache(0.5)):
        with pytest.raises(UserError, match="leaves 4 entries, which must be above the 4 protected"):
            generate(model, ids, method, attention_mask=mask, max_new_tokens=2)
    with pytest.raises(UserError, match=r"budget 0\.5 leaves 4 entries, which is below 5"):
        generate(model, ids, ExactTopK(0.5, sinks=4), attention_mask=mask, max_new_tokens=2)
