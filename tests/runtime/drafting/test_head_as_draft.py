"""A draft head as SpecKV's and SpecPC's draft, against chains and attention written out row by row."""

from typing import Any

import pytest
import torch

from keepsight import SpecKV, SpecPC, generate
from keepsight.errors import UserError
from keepsight.models.draft_sources import DraftHeadSource
from keepsight.runtime.drafting.observer import DraftIds, DraftObserver, GivenDraft
from keepsight.runtime.drafting.speckv import ModelDrafter, SparsePrefill
from keepsight.runtime.methods.make import Resources, make_method
from keepsight.runtime.state import Needs, prefill
from tests.close import assert_close
from tests.runtime.retrieval.heads import LAYERS, slow_chain, tiny_head
from tests.tiny import prompt_ids, tiny_model

HEAD = DraftHeadSource("head", LAYERS, tiny_head())


def four_layers(**changes):
    """The head reads layers before the last: transformers shows those outputs, and the last one only normed."""
    return tiny_model(num_hidden_layers=4, **changes)


@pytest.mark.parametrize("rows", [7, 1024])
def test_the_draft_begins_with_the_models_token_and_goes_on_with_the_heads(rows, monkeypatch):
    """However many rows the head reads at once."""
    monkeypatch.setattr("keepsight.runtime.drafting.speculative._ROWS_AT_ONCE", rows)
    model, (ids, mask) = four_layers(eos_token_id=None), prompt_ids(40, 23)
    state = prefill(model, ids, mask, needs=ModelDrafter(HEAD).needs())
    draft = ModelDrafter(HEAD, 6)(model, state)
    assert draft.mask is None
    for row in range(2):
        first = state.logits[row].argmax()
        chain = slow_chain(HEAD.head, model, ids[row : row + 1, mask[row] > 0], first, 5)[0]
        assert draft.ids[row].tolist() == [int(first), *chain]
    (only,) = ModelDrafter(HEAD, 1)(model, state).ids.T
    assert torch.equal(only, state.logits.argmax(dim=-1))
    tokens = draft.ids[0].tolist()
    model.generation_config.eos_token_id = tokens[2]
    ended = ModelDrafter(HEAD, 6)(model, state).mask
    assert ended is not None and ended[0].tolist() == [place <= tokens.index(tokens[2]) for place in range(6)]


def test_speckv_keeps_what_the_heads_draft_observes():
    model, (ids, mask) = four_layers(), prompt_ids(60, 60)
    method = SpecKV.with_draft(HEAD, 20, 5, window=8)
    draft = ModelDrafter(HEAD, 5)(model, prefill(model, ids, needs=method.needs()))
    given = SpecKV(20, DraftObserver(GivenDraft(draft), window=None), window=8)
    for ours, theirs in zip(method.start(model, ids).entries(), given.start(model, ids).entries(), strict=True):
        assert torch.equal(ours.keys, theirs.keys)
    other = SpecKV(20, DraftObserver(GivenDraft(DraftIds(draft.ids.flip(1))), window=None), window=8).start(model, ids)
    assert not torch.equal(method.start(model, ids).entries()[0].keys, other.entries()[0].keys)
    made = make_method("speckv", 20, Resources(draft=HEAD), window=8, observer={"drafter": {"lookahead": 5}})
    assert made == method
    options: Any = {"max_new_tokens": 5, "do_sample": False, "attention_mask": mask}
    assert torch.equal(generate(model, ids, made, **options), generate(model, ids, given, **options))


def slow_scores(model, ids, window, drafted, reduction):
    """Scores [N] of a prompt from the head's attention, row by row: row t is for token t + 1."""
    length, read = ids.shape[1], len(drafted) - 1
    first = torch.tensor(drafted[0])
    queries, keys = slow_chain(HEAD.head, model, ids, first, max(read, 1))[1]
    rows, best = length - 1 + read, torch.zeros(length)
    for place, row in enumerate(range(rows - read - window, rows)):
        weight = place / (window - 1) if place < window else 1.0
        for head in range(4):
            logits = keys[head // 2, : row + 1] @ queries[head, row] / 8**0.5
            seen = torch.zeros(length)
            attention = logits.softmax(0)[: length - 1]
            seen[1 : len(attention) + 1] = weight * attention
            seen[0] = seen[1]
            best = torch.maximum(best, seen) if reduction == "max" else best + seen
    return best


@torch.no_grad()
@pytest.mark.parametrize(("reduction", "lookahead"), [("max", 1), ("sum", 5)])
def test_specpc_scores_are_the_heads_attention(reduction, lookahead):
    model, ids = four_layers(eos_token_id=None), prompt_ids(50)[0]
    method = SpecPC(20, 4, draft=HEAD, lookahead=lookahead, reduction=reduction, kernel=4)
    scores, generated = method.look(model, ids[0])
    state = prefill(model, ids, needs=Needs(features=LAYERS))
    assert generated.tolist() == ModelDrafter(HEAD, lookahead)(model, state).ids[0].tolist()
    expected = slow_scores(model, ids, 4, generated.tolist(), reduction)
    assert_close(scores, expected)
    if lookahead == 5:  # an end token cuts the draft, and with it what observes
        model.generation_config.eos_token_id = int(generated[2])
        cut = generated[: generated.tolist().index(int(generated[2])) + 1]
        scores, generated = method.look(model, ids[0])
        assert torch.equal(generated, cut)
        expected = slow_scores(model, ids, 4, cut.tolist(), reduction)
        assert_close(scores, expected)


def test_what_a_head_cannot_do():
    with pytest.raises(UserError, match="a draft that is a model: a draft head reads what the model has read"):
        SpecKV.with_draft(HEAD, 20, 5, window=8, sparse=SparsePrefill(16, 64))
    with pytest.raises(UserError, match="choose a draft model"):
        ModelDrafter(HEAD).write(tiny_model(), prompt_ids(20)[0])
    with pytest.raises(UserError, match="SpecPC: a draft head has one layer; leave out first_layer"):
        SpecPC(20, 4, draft=HEAD, first_layer=0).look(tiny_model(), prompt_ids(50)[0][0])
    with pytest.raises(UserError, match="were not recorded: prefill with needs=Needs"):
        ModelDrafter(HEAD)(tiny_model(), prefill(tiny_model(), prompt_ids(20)[0]))
