"""SpeContext, Quest and exact top-k against the plain model, against slow loops, and in batches."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from keepsight import generate
from keepsight.errors import UserError
from keepsight.runtime.generate import FullCache, Method, decode, stop_after
from keepsight.runtime.methods.window import SnapKV
from keepsight.runtime.retrieval.specontext import SpeContext, retrieval_cache
from keepsight.runtime.sparse_read.cache import SelectedLayer, Selection
from keepsight.runtime.sparse_read.selection import ExactTopK, Quest
from keepsight.runtime.state import Needs, prefill, read
from tests.close import assert_close
from tests.models.retrieval_heads import grouped_retrieval_head, tiny_retrieval_head
from tests.runtime.scoring import score_answer
from tests.runtime.sparse_read.slow_selection import SlowReader, everything, top_attention, top_pages
from tests.tiny import FAMILIES, prompt_ids, tiny_model

FEATURES = ["none", "previous-step"]
HEADS = {"mha": 4, "gqa": 2, "mqa": 1}
NAMES = ["specontext", "specontext of embeddings", "specontext in groups", "quest", "quest with dense layers", "exact"]


def method_of(name: str, budget: int | float, kv_heads: int = 2, **options: Any) -> Any:
    if name.startswith("specontext"):
        features = "none" if "embeddings" in name else "previous-step"
        groups = 2 if "groups" in name else 1
        head = grouped_retrieval_head(groups, features, kv_heads=kv_heads, max_position_embeddings=1024)
        return SpeContext(budget, head, **options)
    if name.startswith("quest"):
        return Quest(budget, **{"page": 4, "dense_layers": 1 if "dense" in name else 0} | options)
    return ExactTopK(budget, **options)


def watched(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Selection]:
    """What a method of all layers is called with from here on."""
    calls: list[Selection] = []
    original = getattr(SelectedLayer, name)

    def watching(layer: SelectedLayer, chosen: Selection) -> Any:
        calls.append(chosen)
        return original(layer, chosen)

    monkeypatch.setattr(SelectedLayer, name, watching)
    return calls


each_method = pytest.mark.parametrize("name", NAMES)


def answer_of(*lengths: int) -> torch.Tensor:
    return prompt_ids(*lengths, seed=1)[0]


@each_method
@pytest.mark.parametrize("kv_heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_budget_for_all_entries_gives_full_attention(family: str, kv_heads: int, name: str) -> None:
    """Also of rows of different lengths, and of the entries that the answer adds."""
    model, method = tiny_model(family, num_key_value_heads=kv_heads), method_of(name, 1000, kv_heads)
    ids, mask = prompt_ids(50, 33, 41)
    expected = read(model, FullCache().start(model, ids, mask), answer_of(30, 30, 30))[1]
    logits = read(method.reader(model), method.start(model, ids, mask), answer_of(30, 30, 30))[1]
    assert_close(logits, expected)


@each_method
def test_greedy_and_sampled_answers_of_full_attention(name: str) -> None:
    model, method = tiny_model(), method_of(name, 1000)
    ids, mask = prompt_ids(40, 25)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 20, "eos_token_id": None}
    for sample in (False, True):
        answers = []
        for each in (FullCache(), method):
            torch.manual_seed(0)
            answers.append(generate(model, ids, each, do_sample=sample, **options))
        assert torch.equal(*answers)
    hooked = model.generate(ids, custom_generate=method, do_sample=False, **options)
    assert torch.equal(hooked[:, 40:], generate(model, ids, do_sample=False, **options))


def slow_of(name: str, model: Any, ids: torch.Tensor, method: Any) -> SlowReader:
    layers = model.config.num_hidden_layers
    if isinstance(method, Quest):
        pages = top_pages(method.budget_for(30), method.page)
        dense = method.dense_layers
        return SlowReader(model, ids, [everything] * dense + [pages] * (layers - dense))
    choose = top_attention(method.budget, method.sinks, method.window)
    return SlowReader(model, ids, [choose] * layers, getattr(method, "head", None))


@each_method
@pytest.mark.parametrize("kv_heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("options", [{}, {"sinks": 2, "window": 3}], ids=["plain", "sinks and window"])
def test_few_entries_equal_slow_loops(options: dict[str, int], kv_heads: int, name: str) -> None:
    """Over several pages of generated tokens."""
    if options and "quest" in name:
        options = {"page": 5}
    model, method = tiny_model(num_key_value_heads=kv_heads), method_of(name, 12, kv_heads, **options)
    ids, answer = prompt_ids(30)[0], answer_of(20)
    slow, state, reader = slow_of(name, model, ids, method), method.start(model, ids), method.reader(model)
    plain = FullCache().start(model, ids)
    differs = False
    for token in answer.split(1, dim=1):
        state, logits = read(reader, state, token)
        plain, dense = read(model, plain, token)
        assert_close(logits, slow.read(token))
        differs |= not torch.allclose(logits, dense, atol=1e-3)
    assert differs


@each_method
def test_generated_tokens_are_candidates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are chosen although the prompt alone would fill the budget, and not only the last ones."""
    model, method = tiny_model(), method_of(name, 12)
    state, chosen = method.start(model, prompt_ids(30)[0]), watched(monkeypatch, "gather")
    read(method.reader(model), state, answer_of(25))
    places = torch.cat([each.indices.flatten() for each in chosen[-3:]])
    assert bool(((places >= 30) & (places < 54 - 4)).any())
    assert max(int(each.indices.max()) for each in chosen) < 54  # the last token's own entry is no candidate
    assert {each.indices.shape[2] for each in chosen} <= set(range(9, 13))


@each_method
def test_batch_equals_single(name: str) -> None:
    """Rows of different lengths, one of them shorter than the budget."""
    model, method = tiny_model(), method_of(name, 16)
    lengths = 45, 11, 30
    ids, mask = prompt_ids(*lengths)
    answer = answer_of(24, 24, 24)
    together = read(method.reader(model), method.start(model, ids, mask), answer)[1]
    for row, length in enumerate(lengths):
        state = method.start(model, ids[row : row + 1, -length:])
        alone = read(method.reader(model), state, answer[row : row + 1])[1]
        assert_close(together[row : row + 1], alone)


@each_method
def test_several_tokens_at_once_equal_one_by_one(name: str) -> None:
    model, method = tiny_model(), method_of(name, 14)
    ids, mask = prompt_ids(40, 29)
    state, reader, answer = method.start(model, ids, mask), method.reader(model), answer_of(21, 21)
    at_once, expected = read(reader, state.copy(), answer)
    parts = []
    for token in answer.split(1, dim=1):
        state, logits = read(reader, state, token)
        parts.append(logits)
    assert_close(torch.cat(parts, dim=1), expected)
    assert torch.equal(state.lengths, at_once.lengths) and state.length == at_once.length == 61


@each_method
def test_a_chunked_prefill_changes_nothing(name: str) -> None:
    model, method = tiny_model(), method_of(name, 14)
    ids, mask = prompt_ids(40, 29)
    whole, chunked = (method.start(model, ids, mask, chunk=chunk) for chunk in (None, 7))
    expected, logits = (read(method.reader(model), each, answer_of(9, 9))[1] for each in (whole, chunked))
    assert_close(logits, expected)


@each_method
def test_a_copy_goes_on_by_itself(name: str) -> None:
    """Whichever of the two reads first, and on through pages that fill."""
    model, method = tiny_model(), method_of(name, 14)
    ids, mask = prompt_ids(40, 29)
    reader = method.reader(model)
    one, other = answer_of(21, 21), prompt_ids(21, 21, seed=7)[0]
    expected = [
        read(reader, method.start(model, ids, mask), torch.cat(pair, 1))[1] for pair in ((one, other), (one, one))
    ]
    state = read(reader, method.start(model, ids, mask), one)[0]
    copy = state.copy()
    assert copy.kv_bytes == state.kv_bytes
    logits = read(reader, copy, other)[1], read(reader, state, one)[1]
    for each, wanted in zip(logits, expected, strict=True):
        assert_close(each, wanted[:, 21:])


@each_method
def test_bfloat16(name: str) -> None:
    model, method = tiny_model().to(torch.bfloat16), method_of(name, 1000)
    if isinstance(method, SpeContext):
        method = replace(method, head=method.head.to(torch.bfloat16))
    ids, mask = prompt_ids(40, 25)
    expected = read(model, FullCache().start(model, ids, mask), answer_of(9, 9))[1]
    logits = read(method.reader(model), method.start(model, ids, mask), answer_of(9, 9))[1]
    assert_close(logits, expected, torch.bfloat16)
    few = generate(model, ids, replace(method, budget=12), attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert few.shape[0] == 2


def test_kv_bytes_count_all_that_is_held() -> None:
    """3 layers of 2 KV heads; keys and values of 8 numbers in 4 bytes."""
    model, ids = tiny_model(), prompt_ids(40)[0]
    entries = 3 * 2 * 40 * 2 * 8 * 4
    assert method_of("exact", 8).start(model, ids).kv_bytes == entries
    assert method_of("specontext", 8).start(model, ids).kv_bytes == entries + 2 * 40 * 8 * 4
    assert method_of("quest", 8).start(model, ids).kv_bytes == entries + 3 * 2 * 10 * (2 * 8 * 4)
    state, _ = read(model, method_of("quest", 8).start(model, ids), answer_of(5))  # a page more
    assert state.kv_bytes == entries // 40 * 45 + 3 * 2 * 11 * (2 * 8 * 4)
    assert int(state.counts().min()) == 45


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_interrupted_step_changes_nothing(failing: int, features: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever layer it ends in."""
    model, ids = tiny_model(), prompt_ids(40)[0]
    method = SpeContext(12, tiny_retrieval_head(features))
    reader, answer = method.reader(model), answer_of(8)
    expected = read(reader, method.start(model, ids), answer)[1]
    state, first = read(reader, method.start(model, ids), answer[:, :3])
    calls = []
    step = SelectedLayer.step

    def fails(layer: SelectedLayer, *rest: Any, **options: Any) -> torch.Tensor:
        calls.append(layer)
        if len(calls) == failing + 1:
            raise KeyboardInterrupt
        return step(layer, *rest, **options)

    monkeypatch.setattr(SelectedLayer, "step", fails)
    with pytest.raises(KeyboardInterrupt):
        read(reader, state, answer[:, 3:4])
    monkeypatch.undo()
    assert {layer.seen for layer in retrieval_cache(state.cache).selected_layers} == {43}
    rest = read(reader, state, answer[:, 3:])[1]
    assert_close(torch.cat([first, rest], dim=1), expected)


def test_the_head_says_what_all_layers_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same entries in all of them, announced before the model runs."""
    model, ids = tiny_model(), prompt_ids(40)[0]
    method = method_of("specontext", 12)
    counts: list[tuple[int, int]] = []
    state, announced, gathered = (
        method.start(model, ids),
        watched(monkeypatch, "prepare"),
        watched(monkeypatch, "gather"),
    )
    hook = model.model.register_forward_pre_hook(lambda *_: counts.append((len(announced), len(gathered))))
    read(method.reader(model), state, answer_of(1))
    hook.remove()
    assert counts == [(3, 0)] and len(gathered) == 3
    assert len({id(each.indices) for each in (*announced, *gathered)}) == 1


def test_scores_of_an_answer_are_those_of_its_steps() -> None:
    model, ids = tiny_model(), prompt_ids(40)[0]
    for name in NAMES:
        method = method_of(name, 12)
        greedy = decode(method.reader(model), method.start(model, ids), stop_after(12, None), pad_token=0).ids
        _, hits = score_answer(method.reader(model), method.start(model, ids), greedy)
        assert bool(hits.all())


def test_ratios_count_the_prompt() -> None:
    model, ids = tiny_model(), prompt_ids(40)[0]
    for name in NAMES:
        few, ratio = (
            read(method.reader(model), method.start(model, ids), answer_of(9))[1]
            for method in (method_of(name, 20), method_of(name, 0.5))
        )
        assert_close(ratio, few)


@pytest.mark.parametrize("length, context", [(60, 64), (64, 64), (65, 128), (200, 256)])
def test_a_head_of_few_positions_is_extended(length: int, context: int) -> None:
    """It was made for 64 positions."""
    model = tiny_model()
    method = SpeContext(12, tiny_retrieval_head(max_position_embeddings=64))
    selector = retrieval_cache(method.start(model, prompt_ids(length)[0]).cache).selector
    head: Any = selector.head
    assert head.config.max_position_embeddings == context
    assert head.config.rope_parameters.get("factor", 1) == context / 64


REFUSED: dict[str, tuple[Any, str]] = {
    "a budget of nothing": (lambda: ExactTopK(0), "ExactTopK: budget 0 is below 1"),
    "a word": (lambda: Quest("many"), "Quest: budget 'many' must be a whole number of entries, or a ratio"),  # type: ignore[arg-type]
    "a ratio above 1": (lambda: ExactTopK(1.5), "ExactTopK: budget 1.5 is not a ratio"),
    "sinks and window": (
        lambda: method_of("specontext", 10, sinks=4, window=6),
        r"SpeContext: budget 10 is below 11 \(sinks \+ window \+ one entry to choose\)",
    ),
    "less than two pages": (lambda: Quest(20), "Quest: budget 20 is below 31"),
    "pages of nothing": (lambda: Quest(64, page=0), "Quest: page 0 must be a whole number of at least 1"),
    "half a sink": (lambda: ExactTopK(8, sinks=0.5), "ExactTopK: sinks 0.5 must be a whole number"),  # type: ignore[arg-type]
    "a ratio that leaves too little": (
        lambda: ExactTopK(0.1, sinks=4).check(40, 256),
        "ExactTopK: budget 0.1 leaves 4 entries, which is below 5",
    ),
    "a prompt beyond the context": (
        lambda: Quest(64).check(300, 256),
        "Quest: a prompt of 300 tokens does not fit the context of 256",
    ),
}


@pytest.mark.parametrize("make, message", REFUSED.values(), ids=REFUSED)
def test_bad_values_are_refused(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}[^\n]*$"):
        make()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_size": 64}, "hidden size 32 against 64"),
        ({"vocab_size": 200}, "vocabulary 128 against 200"),
        ({"num_key_value_heads": 4}, "KV heads 2 against 4"),
    ],
)
def test_a_head_for_another_target_is_refused_before_it_runs(change: dict[str, Any], message: str) -> None:
    model, method = tiny_model(**change), method_of("specontext", 12)
    model.forward = None  # nothing may run
    with pytest.raises(UserError, match=message):
        method.start(model, prompt_ids(40)[0])


def test_states_that_cannot_be_chosen_from_are_refused() -> None:
    model, ids = tiny_model(), prompt_ids(60)[0]
    evicted = SnapKV(40, window=4).start(model, ids)
    for method in (method_of("exact", 12), method_of("quest", 12)):
        with pytest.raises(UserError, match="selects among all 60 tokens, and the cache holds 40"):
            method.compress(model, evicted)
    with pytest.raises(UserError, match=r"did not record layer 0; give it needs=method\.needs\(\)"):
        method_of("specontext", 12).compress(model, prefill(model, ids, needs=Needs()))


def test_another_model_than_the_reader_is_refused() -> None:
    model, ids = tiny_model(), prompt_ids(40)[0]
    method: Method = method_of("specontext", 12)
    with pytest.raises(UserError, match=r"give method\.reader\(model\) for the model"):
        read(model, method.start(model, ids), answer_of(2))
    with pytest.raises(UserError, match="reads states of its own method"):
        read(method.reader(model), FullCache().start(model, ids), answer_of(2))
