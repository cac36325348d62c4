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


def kept_positions(method, model, ids):
    """For each layer and KV head, the set of indices that a method keeps of ids [1, N]."""
    return [[set(head) for head in layer] for layer in kept_entries(method, model, ids)[0]]


def observed_by(queries, keys, rows, columns, over_queries="mean", over_heads="mean"):
    """Importance [K, columns] of a layer's keys [K, S, d] to some rows of its queries [H, S, d], which see causally."""
    row_queries = [queries[:, row] for row in rows]
    visible = [range(row + 1) for row in rows]
    return observed(row_queries, visible, keys, columns, over_queries, over_heads)


def continued(model, ids, count, see=None):
    """ids [1, N] and `count` greedy tokens after them, each from a dense pass over everything before."""
    for _ in range(count):
        token = run_dense(model, ids, see)[1][-1].argmax()
        ids = torch.cat([ids, token[None, None]], dim=1)
    return ids


def published_speckv(model, ids, draft, capacity, window):
    """Facts 2.2 and 2.3 in the published sizes: what is selected of 0 .. N-W-2, and the window N-W-1 .. N-2."""
    length = ids.shape[1]
    candidates = length - window - 1
    rows = range(candidates, length + draft.shape[1])
    selected = []
    for queries, keys in run_dense(model, torch.cat([ids, draft], dim=1))[0]:
        importance = observed_by(queries, keys, rows, candidates, "max", "max")
        selected.append(best(pooled(importance), min(capacity - window, candidates)))
    return selected, set(range(candidates, length - 1))


@pytest.mark.parametrize(("family", "drafted"), [*zip(FAMILIES, [1, 7], strict=True)])
def test_speckv_keeps_the_published_set(family, drafted):
    """Published capacity 20 and window 8 are 21 and 9 here: the token that is read again, N - 1, is counted."""
    model = tiny_model(family)
    ids = prompt_ids(60)[0]
    draft = prompt_ids(drafted, seed=5)[0]
    method = SpecKV(21, DraftObserver(FixedDraft(DraftIds(draft)), window=None), window=9)
    selected, window = published_speckv(model, ids, draft, 20, 8)
    assert max(window) == 58
    expected = [[head | window | {59} for head in layer] for layer in selected]
    assert kept_positions(method, model, ids) == expected


def test_the_draft_is_the_draft_models_greedy_answer():
    model = tiny_model("qwen3")
    ids, mask = prompt_ids(40, 23)
    draft = ModelDrafter(DRAFT, 6)(model, prefill(model, ids, mask))
    draft_model: Any = DRAFT.of(model)
    expected = draft_model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)[:, 40:]
    real = torch.ones_like(draft.ids, dtype=torch.bool) if draft.mask is None else draft.mask
    assert torch.equal(draft.ids * real, expected * real)
    for row in range(2):
        answer = expected[row].tolist()
        assert real[row].sum() == (answer.index(2) + 1 if 2 in answer else 6)


def first_kept(model, ids, budget, window):
    """Facts B1, 1: for each layer and KV head, what SnapKV keeps."""
    length = ids.shape[1]
    rows = range(length - window, length)
    kept = []
    for queries, keys in run_dense(model, ids)[0]:
        importance = observed_by(queries, keys, rows, length - window)
        kept.append([head | set(rows) for head in best(pooled(importance), budget - window)])
    return kept


def guessed(model, ids, budget, first_window, count):
    """Facts B1, 2 and 3: the queries [H, d] by layer of `count` greedy tokens that see SnapKV's cache only.

    Returns, for each layer, these queries and the prompt's keys [K, N, d].
    """
    length = ids.shape[1]
    kept = first_kept(model, ids, budget, first_window)

    def see(layer, query, key):
        visible = torch.ones(query.shape[1], query.shape[1]).tril().bool().repeat(len(key), 1, 1)
        for head, positions in enumerate(kept[layer]):
            evicted = [position for position in range(length) if position not in positions]
            visible[head][length:, evicted] = False
        return visible

    guess = continued(model, ids, count, see)
    guessed_rows = range(length, length + count)
    layers = []
    for queries, keys in run_dense(model, guess, see)[0]:
        layers.append(([queries[:, row] for row in guessed_rows], keys[:, :length]))
    return layers


@pytest.mark.parametrize(
    ("family", "mask", "window"),
    [("llama", "published", 4), ("qwen3", "corrected", 4), ("qwen3", "published", 0)],
)
def test_laq_keeps_the_published_set(family, mask, window):
    """Facts B1, 4: softmax over the prompt's keys alone; the queries are those of the small cache's hidden states."""
    model = tiny_model(family, eos_token_id=None)
    ids = prompt_ids(50)[0]
    method = LAQ(20, QueryCache(lookahead=5, window=window, first_window=8, mask=mask), window=window)
    window_rows = range(50 - window, 50)
    if mask == "published":
        visible = [range(50 - window - 5 + row + 1) for row in range(window + 5)]
    else:
        visible = [range(row + 1) for row in window_rows] + [range(50)] * 5
    expected = []
    for (prompt_queries, _), (guess_queries, keys) in zip(
        run_dense(model, ids)[0], guessed(model, ids, 20, 8, 5), strict=True
    ):
        queries = [prompt_queries[:, row] for row in window_rows] + guess_queries
        importance = pooled(observed(queries, visible, keys, 50)[:, : 50 - window])
        expected.append([head | set(window_rows) for head in best(importance, 20 - window)])
    assert kept_positions(method, model, ids) == expected


def test_laq_stops_guessing_at_an_end_token():
    """A row whose guess ends early observes with the tokens up to its end, as it does alone."""
    model = tiny_model()
    ids, mask = prompt_ids(40, 33)
    second_token = int(continued(model, ids[:1], 2)[0, -1])
    model.generation_config.eos_token_id = second_token
    for mode in ("corrected", "published"):
        observer = QueryCache(budget=39, first_window=8, window=4, mask=mode, lookahead=6)
        scores = observer(model, prefill(model, ids, mask), Reduce())
        for row, length in enumerate([40, 33]):
            scores_alone = observer(model, prefill(model, ids[row : row + 1, -length:]), Reduce())
            for layer, layer_alone in zip(scores, scores_alone, strict=True):
                assert_close(layer[row, :, -length:], layer_alone[0])


def random_ids(count, seed):
    return torch.randint(128, (1, count), generator=torch.Generator().manual_seed(seed))[0].tolist()


@pytest.mark.parametrize(
    ("kernel", "drafter", "pseudo"),
    [
        (7, PromptEnds(2, 30), lambda ids: [*ids[:2], *ids[-30:]]),
        (1, RandomTokens(9, seed=4), lambda ids: random_ids(9, seed=4)),
        (7, ConstantText([7, 8, 9]), lambda ids: [7, 8, 9]),
    ],
    ids=["2+30", "random", "text"],
)
def test_dapq_keeps_what_the_pseudo_tokens_attend_to(kernel, drafter, pseudo):
    model = tiny_model("qwen3")
    ids = prompt_ids(60)[0]
    pseudo_ids = torch.tensor([pseudo(ids[0].tolist())])
    rows = range(60, 60 + pseudo_ids.shape[1])
    method = DapQ(16, DraftObserver(drafter), pool=Pool(kernel=kernel))
    expected = []
    for queries, keys in run_dense(model, torch.cat([ids, pseudo_ids], dim=1))[0]:
        importance = observed_by(queries, keys, rows, 60)
        expected.append(best(pooled(importance, kernel), 16))
    assert kept_positions(method, model, ids) == expected


def test_short_prompts_repeat_their_ends():
    model = tiny_model()
    ids, mask = prompt_ids(10, 3)
    drafted = PromptEnds(4, 6)(model, prefill(model, ids, mask)).ids
    long = ids[0].tolist()
    short = ids[1, 7:].tolist()
    assert drafted[0].tolist() == [*long[:4], *long[-6:]]
    assert drafted[1].tolist() == [*short, short[2], *[short[0]] * 3, *short]


@pytest.mark.parametrize(
    ("make", "field", "code"),
    [
        (lambda: QueryCache(mask="none"), "mask", "unknown"),
        (lambda: PromptEnds(0, 0), "first", "range"),
        (lambda: ModelDrafter(DRAFT, 0), "lookahead", "range"),
        (lambda: DapQ(4, DraftObserver(ConstantText([500]))).start(tiny_model(), prompt_ids(9)[0]), "ids", "range"),
    ],
)
def test_bad_values_are_refused(make, field, code):
    with refused(field, code):
        make()


def test_dot_products_beyond_float16():
    """The entries kept in float16 are finite in score, and those of float32 arithmetic on the same weights."""
    model = tiny_model(num_hidden_layers=1)
    ids = prompt_ids(60)[0]
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.q_proj.weight.mul_(400)
        attention.k_proj.weight.mul_(400)
    draft = DraftIds(prompt_ids(5, seed=5)[0])
    method = SpecKV(20, DraftObserver(FixedDraft(draft), window=None), window=9)
    (in_float32,) = kept_positions(method, model, ids)
    (in_float16,) = kept_positions(method, model.half(), ids)
    assert [len(head) for head in in_float16] == [20, 20]
    for head, expected in zip(in_float16, in_float32, strict=True):
        assert len(head & expected) >= 18


def test_a_draft_within_the_prompt_sees_what_comes_before_it():
    model = tiny_model("qwen3")
    ids, mask = prompt_ids(40, 29)
    text = ConstantText((5, 9, 77))
    within = DraftObserver(text, start=-12)(model, prefill(model, ids, mask), Reduce())
    after_shorter_prompt = DraftObserver(text)(model, prefill(model, ids[:, :-12], mask[:, :-12]), Reduce())
    for scores, expected in zip(within, after_shorter_prompt, strict=True):
        assert_close(scores[..., :-12], expected)
        assert not scores[..., -12:].any()


def test_a_draft_further_ahead_has_later_positions():
    model = tiny_model("llama")
    ids, mask = prompt_ids(40)
    draft = torch.tensor([[5, 9, 77]])
    observer = DraftObserver(FixedDraft(DraftIds(draft)), start=100)
    assert observer.positions() == 103
    scores = observer(model, prefill(model, ids, mask), Reduce())
    positions = torch.cat([torch.arange(40), torch.arange(140, 143)])[None]
    model.set_attn_implementation("eager")
    attention = model(torch.cat([ids, draft], 1), position_ids=positions, output_attentions=True).attentions
    for layer, weights in zip(scores, attention, strict=True):
        by_query_head = weights[:, :, 40:, :40].mean(dim=2)
        by_kv_head = by_query_head.view(1, layer.shape[1], -1, 40).mean(dim=2)
        assert_close(layer, by_kv_head)


def test_a_draft_elsewhere_needs_all_entries_and_a_start_in_the_prompt():
    model = tiny_model("llama")
    ids, mask = prompt_ids(40)
    method = DapQ(16, DraftObserver(PromptEnds(), start=-8))
    state = method.start(model, ids, mask)
    with refused("start", "state"):
        method.importance(model, state)
    with refused("start", "range"):
        DraftObserver(PromptEnds(), start=-40)(model, prefill(model, ids, mask), Reduce())
