"""Importance that is multiplied by the norm of each entry's value (`value_norm`)."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from keepsight.models.lookahead import LookaheadAdapter
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import NO_POOL
from keepsight.runtime.latents import holds_latents
from keepsight.runtime.methods import SnapKV
from keepsight.runtime.methods.lookaheadkv import LookaheadKV
from keepsight.runtime.state import prefill
from keepsight.runtime.state import State
from tests.close import assert_close
from tests.families import family_model
from tests.models.modules import SHAPE, random_on, save
from tests.tiny import prompt_ids, tiny_model

SNAPKV = SnapKV(12, window=4, pool=NO_POOL)


def importances(method: Evict, model: Any, lengths: tuple[int, ...]) -> tuple[State, list[Tensor], list[Tensor]]:
    """A prompt's state, and its importance without and with the norms."""
    state = prefill(model, *prompt_ids(*lengths), needs=method.needs())
    plain, weighed = (replace(method, value_norm=each).importance(model, state) for each in (False, True))
    return state, plain, weighed


@pytest.mark.parametrize("lengths", [(40,), (40, 21)], ids=["alone", "padded"])
def test_each_entry_counts_by_the_length_of_its_value(lengths: tuple[int, ...]) -> None:
    state, plain, weighed = importances(SNAPKV, tiny_model(), lengths)
    for held, before, after in zip(state.entries(), plain, weighed, strict=True):
        lengths_of_values = held.values.double().pow(2).sum(dim=-1).sqrt().float()
        free = torch.isfinite(before)
        assert free.any()
        assert torch.equal(after[~free], before[~free])  # protected entries and padding
        assert_close(after[free], (before * lengths_of_values)[free])


def test_of_latents_it_is_the_mean_length_of_the_values_of_all_heads() -> None:
    model = family_model("DeepSeek-V3")
    state, plain, weighed = importances(SNAPKV, model, (40,))
    assert holds_latents(model, state)
    for layer, held, before, after in zip(model.model.layers, state.entries(), plain, weighed, strict=True):
        attention = layer.self_attn
        by_head = attention.kv_b_proj(held.keys[:, 0]).unflatten(-1, (attention.num_heads, -1))
        of_all = by_head[..., attention.qk_nope_head_dim :].norm(dim=-1).mean(dim=-1)
        free = torch.isfinite(before)
        assert_close(after[free], (before * of_all[:, None])[free])


def test_other_entries_stay() -> None:
    model, (ids, mask) = tiny_model(), prompt_ids(40)
    plain, weighed = (replace(SNAPKV, value_norm=each).start(model, ids, mask).entries() for each in (False, True))
    assert any(not torch.equal(one.keys, other.keys) for one, other in zip(plain, weighed, strict=True))


def test_a_module_says_whether_its_importance_is_weighed(tmp_path: Any) -> None:
    shape = replace(SHAPE, value_norm=True)
    folder = save(random_on(tiny_model(), shape), tmp_path / "adapter")
    assert LookaheadAdapter.load(folder).settings.value_norm
    assert LookaheadKV.from_pretrained(folder, 12).value_norm
    assert not LookaheadKV.from_pretrained(folder, 12, value_norm=False).value_norm
