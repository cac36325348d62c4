"""LAQ, DapQ and SpecKV against their definitions, written out with dense attention and loops."""

from typing import Any

import pytest
import torch

from keepsight.models.draft_sources import LayerSubset
from keepsight.runtime.allocate import Adaptive
from keepsight.runtime.drafting.observer import DraftIds, DraftObserver, FixedDraft
from keepsight.runtime.drafting.speckv import ModelDrafter, SpecKV
from keepsight.runtime.importance import Pool, Reduce
from keepsight.runtime.methods.drafts import ConstantText, DapQ, PromptEnds, RandomTokens
from keepsight.runtime.methods.laq import LAQ, LAQPlus, QueryCache
from keepsight.runtime.state import prefill
from tests.close import assert_close
from tests.refused import refused
from tests.runtime.dense import best, observed, pooled, run_dense
from tests.runtime.scoring import kept_entries
from tests.tiny import FAMILIES, prompt_ids, tiny_model

DRAFT = LayerSubset((0, 2))
SMALL_LAQ: Any = {"first_window": 8, "lookahead": 5}
METHODS = {
    "laq": LAQ(16, QueryCache(**SMALL_LAQ)),
    "laq++": LAQPlus(16, QueryCache(window=4, **SMALL_LAQ), window=4),
    "dapq": DapQ(16),
    "dapq random": DapQ(16, DraftObserver(RandomTokens(8)), pool=Pool()),
    "dapq text": DapQ(16, DraftObserver(ConstantText((5, 9, 77)))),
    "speckv": SpecKV.with_draft(DRAFT, 16, 5, window=9),
    "speckv mean": SpecKV.with_draft(DRAFT, 16, 5, window=9, reduce=Reduce()),
    "ada-speckv": SpecKV.with_draft(DRAFT, 16, 5, window=9, allocate=Adaptive()),
}


def kept(method, model, ids):
    """For each layer and KV head, the indices that a method keeps of ids [1, N]."""
    return [[set(head) for head in layer] for layer in kept_entries(method, model, ids)[0]]


def continued(model, ids, count, see=None):
    """ids [1, N] and `count` greedy tokens after them, each from a dense pass over everything before."""
    for _ in range(count):
        ids = torch.cat([ids, run_dense(model, ids, see)[1][-1].argmax()[None, None]], dim=1)
    return ids


def published_speckv(model, ids, draft, capacity, window):
    """Facts 2.2 and 2.3 in the published sizes: what is selected of 0 .. N-W-2, and the window N-W-1 .. N-2."""
    length, drafted = ids.shape[1], draft.shape[1]
    candidates, total = length - window - 1, length + drafted
    result = []
    for queries, keys in run_dense(model, torch.cat([ids, draft], dim=1))[0]:
        rows = range(length - window - 1, total)
        importance = observed(
            [queries[:, row] for row in rows], [range(row + 1) for row in rows], keys, candidates, "max", "max"
        )
        result.append(best(pooled(importance), min(capacity - window, candidates)))
    return result, set(range(length - window - 1, length - 1))


@pytest.mark.parametrize(("family", "drafted"), [*zip(FAMILIES, [1, 7], strict=True)])
def test_speckv_keeps_the_published_set(family, drafted):
    """Published capacity 20 and window 8 are 21 and 9 here: the token that is read again, N - 1, is counted."""
    model, ids, draft = tiny_model(family), prompt_ids(60)[0], prompt_ids(drafted, seed=5)[0]
    method = SpecKV(21, DraftObserver(FixedDraft(DraftIds(draft)), window=None), window=9)
    selected, window = published_speckv(model, ids, draft, 20, 8)
    assert max(window) == 58
    for ours, theirs in zip(kept(method, model, ids), selected, strict=True):
        assert ours == [head | window | {59} for head in theirs]


def test_the_draft_is_the_draft_models_greedy_answer():
    model, (ids, mask) = tiny_model("qwen3"), prompt_ids(40, 23)
    draft = ModelDrafter(DRAFT, 6)(model, prefill(model, ids, mask))
    drafting: Any = DRAFT.of(model)
    expected = drafting.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)[:, 40:]
    real = torch.ones_like(draft.ids, dtype=torch.bool) if draft.mask is None else draft.mask
    assert torch.equal(draft.ids * real, expected * real)
    for row in range(2):
        answer = expected[row].tolist()
        assert real[row].sum() == (answer.index(2) + 1 if 2 in answer else 6)


def guessed(model, ids, budget, first_window, count):
    """Facts B1, 1 to 3: SnapKV's cache, and the queries [H, d] by layer of `count` greedy tokens that see only it."""
    length = ids.shape[1]
    rows, first = range(length - first_window, length), []
    for queries, keys in run_dense(model, ids)[0]:
        importance = observed(
            [queries[:, row] for row in rows], [range(row + 1) for row in rows], keys, length - first_window
        )
        first.append([head | set(rows) for head in best(pooled(importance), budget - first_window)])

    def see(layer, query, key):
        visible = torch.ones(query.shape[1], query.shape[1]).tril().bool().repeat(len(key), 1, 1)
        for head, held in enumerate(first[layer]):
            gone = [entry for entry in range(length) if entry not in held]
            visible[head][length:, gone] = False
        return visible

    written = continued(model, ids, count, see)
    return [
        ([queries[:, row] for row in range(length, length + count)], keys[:, :length])
        for queries, keys in run_dense(model, written, see)[0]
    ]


@pytest.mark.parametrize(
    ("family", "mask", "window"),
    [("llama", "published", 4), ("qwen3", "corrected", 4), ("qwen3", "published", 0)],
)
def test_laq_keeps_the_published_set(family, mask, window):
    """Facts B1, 4: softmax over the prompt's keys alone; the queries are those of the small cache's hidden states."""
    model, ids = tiny_model(family, eos_token_id=None), prompt_ids(50)[0]
    method = LAQ(20, QueryCache(lookahead=5, window=window, first_window=8, mask=mask), window=window)
    prompt = run_dense(model, ids)[0]
    for ours, (queries, keys), (before, _) in zip(
        kept(method, model, ids), guessed(model, ids, 20, 8, 5), prompt, strict=True
    ):
        queries = [before[:, row] for row in range(50 - window, 50)] + queries
        if mask == "published":
            visible = [range(50 - window - 5 + row + 1) for row in range(window + 5)]
        else:
            visible = [range(row + 1) for row in range(50 - window, 50)] + [range(50)] * 5
        importance = pooled(observed(queries, visible, keys, 50)[:, : 50 - window])
        assert ours == [head | set(range(50 - window, 50)) for head in best(importance, 20 - window)]


def test_laq_stops_guessing_at_an_end_token():
    """A row whose guess ends early observes with the tokens up to its end, as it does alone."""
    model, (ids, mask) = tiny_model(), prompt_ids(40, 33)
    second = int(continued(model, ids[:1], 2)[0, -1])
    model.generation_config.eos_token_id = second
    for mode in ("corrected", "published"):
        observer = QueryCache(budget=39, first_window=8, window=4, mask=mode, lookahead=6)
        together = observer(model, prefill(model, ids, mask), Reduce())
        for row, length in enumerate([40, 33]):
            alone = observer(model, prefill(model, ids[row : row + 1, -length:]), Reduce())
            for both, one in zip(together, alone, strict=True):
                assert_close(both[row, :, -length:], one[0])


@pytest.mark.parametrize(
    ("kernel", "drafter", "pseudo"),
    [
        (7, PromptEnds(2, 30), lambda ids: [*ids[:2], *ids[-30:]]),
        (
            1,
            RandomTokens(9, seed=4),
            lambda ids: torch.randint(128, (1, 9), generator=torch.Generator().manual_seed(4))[0].tolist(),
        ),
        (7, ConstantText([7, 8, 9]), lambda ids: [7, 8, 9]),
    ],
    ids=["2+30", "random", "text"],
)
def test_dapq_keeps_what_the_pseudo_tokens_attend_to(kernel, drafter, pseudo):
    model, ids = tiny_model("qwen3"), prompt_ids(60)[0]
    extra = torch.tensor([pseudo(ids[0].tolist())])
    rows = range(60, 60 + extra.shape[1])
    method = DapQ(16, DraftObserver(drafter), pool=Pool(kernel=kernel))
    layers = run_dense(model, torch.cat([ids, extra], dim=1))[0]
    for ours, (queries, keys) in zip(kept(method, model, ids), layers, strict=True):
        importance = observed([queries[:, row] for row in rows], [range(row + 1) for row in rows], keys, 60)
        assert ours == best(pooled(importance, kernel), 16)


def test_short_prompts_repeat_their_ends():
    model, (ids, mask) = tiny_model(), prompt_ids(10, 3)
    drafted = PromptEnds(4, 6)(model, prefill(model, ids, mask)).ids
    first, second = ids[0].tolist(), ids[1, 7:].tolist()
    assert drafted[0].tolist() == [*first[:4], *first[-6:]]
    assert drafted[1].tolist() == [*second, second[2], *[second[0]] * 3, *second]


@pytest.mark.parametrize(
    ("make", "field", "code"),
    [
        (lambda: QueryCache(mask="none"), "mask", "unknown"),
        (lambda: PromptEnds(0, 0), "first", "range"),
        (lambda: ModelDrafter(DRAFT, 0), "lookahead", "range"),
        (lambda: DapQ(4, DraftObserver(ConstantText([500]))).start(tiny_model(), prompt_ids(9)[0]), "ids", "range"),
    ],
)
def test_bad_values_are_named(make, field, code):
    with refused(field, code):
        make()


def test_dot_products_beyond_float16():
    """The entries kept in float16 are finite in score, and those of float32 arithmetic on the same weights."""
    model, ids = tiny_model(num_hidden_layers=1), prompt_ids(60)[0]
    with torch.no_grad():
        for each in (model.model.layers[0].self_attn.q_proj, model.model.layers[0].self_attn.k_proj):
            each.weight.mul_(400)
    method = SpecKV(20, DraftObserver(FixedDraft(DraftIds(prompt_ids(5, seed=5)[0])), window=None), window=9)
    wide, narrow = kept(method, model, ids)[0], kept(method, model.half(), ids)[0]
    assert [len(head) for head in narrow] == [20, 20]
    assert all(len(one & other) >= 18 for one, other in zip(wide, narrow, strict=True))


def test_a_draft_within_the_prompt_sees_what_comes_before_it():
    model, (ids, mask) = tiny_model("qwen3"), prompt_ids(40, 29)
    text = ConstantText((5, 9, 77))
    state = prefill(model, ids, mask)
    within = DraftObserver(text, start=-12)(model, state, Reduce())
    before = DraftObserver(text)(model, prefill(model, ids[:, :-12], mask[:, :-12]), Reduce())
    for ours, expected in zip(within, before, strict=True):
        assert_close(ours[..., :-12], expected)
        assert not ours[..., -12:].any()


def test_a_draft_further_ahead_has_later_positions():
    model, (ids, mask) = tiny_model("llama"), prompt_ids(40)
    draft = torch.tensor([[5, 9, 77]])
    observer = DraftObserver(FixedDraft(DraftIds(draft)), start=100)
    assert observer.positions() == 103
    ahead = observer(model, prefill(model, ids, mask), Reduce())
    positions = torch.cat([torch.arange(40), torch.arange(140, 143)])[None]
    model.set_attn_implementation("eager")
    attention = model(torch.cat([ids, draft], 1), position_ids=positions, output_attentions=True).attentions
    for ours, of_layer in zip(ahead, attention, strict=True):
        heads = of_layer[:, :, 40:, :40].mean(dim=2)
        assert_close(ours, heads.view(1, ours.shape[1], -1, 40).mean(dim=2))


def test_a_draft_elsewhere_needs_all_entries_and_a_place_in_the_prompt():
    model, (ids, mask) = tiny_model("llama"), prompt_ids(40)
    method = DapQ(16, DraftObserver(PromptEnds(), start=-8))
    state = method.start(model, ids, mask)
    with refused("start", "state"):
        method.importance(model, state)
    with refused("start", "range"):
        DraftObserver(PromptEnds(), start=-40)(model, prefill(model, ids, mask), Reduce())
