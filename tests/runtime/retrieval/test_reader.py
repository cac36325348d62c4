"""SpeContext, Quest, ClusterKV and exact top-k against the plain model, against slow loops, and in batches."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from keepsight import generate
from keepsight.runtime.generate import FullCache, Method
from keepsight.runtime.methods.window import SnapKV
from keepsight.runtime.retrieval.specontext import SpeContext
from keepsight.runtime.sparse_read.clusterkv import ClusterKV
from keepsight.runtime.sparse_read.selection import ExactTopK, Quest
from keepsight.runtime.state import Needs, prefill, read
from tests.close import assert_close
from tests.models.retrieval_heads import grouped_retrieval_head, tiny_deepseek
from tests.refused import refused
from tests.runtime.sparse_read.slow_selection import SlowReader, everything, top_attention, top_clusters, top_pages
from tests.tiny import prompt_ids, tiny_model

FEATURES = ["none", "previous-step"]
NAMES = [
    "specontext",
    "specontext of embeddings",
    "specontext in groups",
    "quest",
    "quest with dense layers",
    "exact",
    "clusterkv",
    "clusterkv with dense layers",
]


def method_of(name: str, budget: int | float, kv_heads: int = 2, **options: Any) -> Any:
    dense_layers = 1 if "dense" in name else 0
    if name.startswith("specontext"):
        features = "none" if "embeddings" in name else "previous-step"
        groups = 2 if "groups" in name else 1
        head = grouped_retrieval_head(groups, features, kv_heads=kv_heads, max_position_embeddings=1024)
        return SpeContext(budget, head, **options)
    if name.startswith("quest"):
        quest_options = {"page": 4, "dense_layers": dense_layers}
        return Quest(budget, **(quest_options | options))
    if name.startswith("clusterkv"):
        cluster_options = {"sinks": 3, "tokens": 4, "window": 8, "dense_layers": dense_layers}
        return ClusterKV(budget, **(cluster_options | options))
    return ExactTopK(budget, **options)


every_method = pytest.mark.parametrize("name", NAMES)


def model_of(kv_heads: int, latent: bool = False) -> Any:
    return tiny_deepseek() if latent else tiny_model("qwen3", num_key_value_heads=kv_heads)


def answer_of(*lengths: int) -> torch.Tensor:
    return prompt_ids(*lengths, seed=1)[0]


@every_method
@pytest.mark.parametrize(("kv_heads", "latent"), [(1, False), (4, True)])
def test_a_budget_for_all_entries_gives_full_attention(kv_heads: int, latent: bool, name: str) -> None:
    """Also of rows of different lengths, and of the entries that the answer adds."""
    model = model_of(kv_heads, latent)
    method = method_of(name, 1000, kv_heads)
    ids, mask = prompt_ids(50, 33, 41)
    answer = answer_of(30, 30, 30)
    expected = read(model, FullCache().start(model, ids, mask), answer)[1]
    logits = read(method.reader(model), method.start(model, ids, mask, chunk=7), answer)[1]
    assert_close(logits, expected)


def slow_reader(model: Any, ids: torch.Tensor, method: Any) -> SlowReader:
    layers = model.config.num_hidden_layers
    if isinstance(method, Quest):
        pages = top_pages(method.budget_for(30), method.page)
        dense = method.dense_layers
        return SlowReader(model, ids, [everything] * dense + [pages] * (layers - dense))
    if isinstance(method, ClusterKV):
        clusters = top_clusters(method.budget_for(30), method.sinks, method.tokens, method.window, 30)
        dense = method.dense_layers
        return SlowReader(model, ids, [everything] * dense + [clusters] * (layers - dense))
    choose = top_attention(method.budget, method.sinks, method.window)
    return SlowReader(model, ids, [choose] * layers, getattr(method, "head", None))


@every_method
@pytest.mark.parametrize(
    ("kv_heads", "latent", "options"), [(2, False, {}), (4, False, {"sinks": 2, "window": 3}), (4, True, {})]
)
def test_few_entries_equal_slow_loops(options: dict[str, int], latent: bool, kv_heads: int, name: str) -> None:
    """Over several pages of generated tokens; of latents over the keys and values of every head."""
    if options and "quest" in name:
        options = {"page": 5}
    model = model_of(kv_heads, latent)
    method = method_of(name, 12, kv_heads, **options)
    ids = prompt_ids(30)[0]
    slow = slow_reader(model, ids, method)
    reader = method.reader(model)
    state = method.start(model, ids)
    full_cache = FullCache().start(model, ids)
    differs = False
    for token in answer_of(20).split(1, dim=1):
        state, logits = read(reader, state, token)
        full_cache, full_logits = read(model, full_cache, token)
        assert_close(logits, slow.read(token))
        differs |= not torch.allclose(logits, full_logits, atol=1e-3)
    assert differs


@every_method
def test_a_copy_goes_on_by_itself(name: str) -> None:
    """Whichever of the two reads first, and on through pages that fill."""
    model = tiny_model()
    method = method_of(name, 14)
    reader = method.reader(model)
    ids, mask = prompt_ids(40, 29)
    prefix = answer_of(21, 21)
    copy_answer = prompt_ids(21, 21, seed=7)[0]
    expected_of_copy = read(reader, method.start(model, ids, mask), torch.cat([prefix, copy_answer], dim=1))[1]
    expected = read(reader, method.start(model, ids, mask), torch.cat([prefix, prefix], dim=1))[1]

    state = read(reader, method.start(model, ids, mask), prefix)[0]
    copy = state.copy()
    assert copy.kv_bytes == state.kv_bytes
    assert_close(read(reader, copy, copy_answer)[1], expected_of_copy[:, 21:])
    assert_close(read(reader, state, prefix)[1], expected[:, 21:])


@pytest.mark.parametrize("name", ["specontext", "quest", "exact", "clusterkv"])
def test_bfloat16(name: str) -> None:
    model = tiny_model().to(torch.bfloat16)
    method = method_of(name, 1000)
    if isinstance(method, SpeContext):
        method = replace(method, head=method.head.to(torch.bfloat16))
    ids, mask = prompt_ids(40, 25)
    expected = read(model, FullCache().start(model, ids, mask), answer_of(9, 9))[1]
    logits = read(method.reader(model), method.start(model, ids, mask), answer_of(9, 9))[1]
    assert_close(logits, expected, torch.bfloat16)
    answer = generate(model, ids, replace(method, budget=12), attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert answer.shape[0] == 2


def test_kv_bytes_count_all_that_is_held() -> None:
    """3 layers of 2 KV heads; keys and values of 8 numbers in 4 bytes."""
    model = tiny_model()
    ids = prompt_ids(40)[0]
    entries = 3 * 2 * 40 * 2 * 8 * 4
    assert method_of("exact", 8).start(model, ids).kv_bytes == entries
    assert method_of("specontext", 8).start(model, ids).kv_bytes == entries + 2 * 40 * 8 * 4
    assert method_of("quest", 8).start(model, ids).kv_bytes == entries + 3 * 2 * 10 * (2 * 8 * 4)
    clusters = 3 * 2 * (10 * (8 * 4 + 2 * 8) + 37 * 4)  # centroids, sizes and first members of 10, and 37 members
    assert method_of("clusterkv", 8).start(model, ids).kv_bytes == entries + clusters
    state, _ = read(model, method_of("quest", 8).start(model, ids), answer_of(5))  # a page more
    assert state.kv_bytes == entries // 40 * 45 + 3 * 2 * 11 * (2 * 8 * 4)
    assert int(state.counts().min()) == 45


REFUSED: list[tuple[Any, str]] = [
    (lambda: ExactTopK(0), "budget"),
    (lambda: method_of("specontext", 10, sinks=4, window=6), "budget"),
    (lambda: Quest(20), "budget"),
    (lambda: Quest(64, page=0), "page"),
    (lambda: Quest(64).check(300, 256), "prompt"),
]


@pytest.mark.parametrize(("make", "field"), REFUSED)
def test_bad_values_are_refused(make: Any, field: str) -> None:
    with refused(field, "range"):
        make()


def test_a_head_for_another_model_is_refused_before_it_runs() -> None:
    model = tiny_model(vocab_size=200)
    method = method_of("specontext", 12)
    model.forward = None  # nothing may run
    with refused("retrieval", "model"):
        method.start(model, prompt_ids(40)[0])


def test_states_that_cannot_be_chosen_from_are_refused() -> None:
    model = tiny_model()
    ids = prompt_ids(60)[0]
    evicted = SnapKV(40, window=4).start(model, ids)
    for method in (method_of("exact", 12), method_of("quest", 12)):
        with refused("budget", "state"):
            method.compress_state(model, evicted)
    with refused("state", "state"):
        method_of("specontext", 12).compress_state(model, prefill(model, ids, needs=Needs()))


def test_another_model_than_the_reader_is_refused() -> None:
    model = tiny_model()
    ids = prompt_ids(40)[0]
    method: Method = method_of("specontext", 12)
    with refused("state", "state"):
        read(model, method.start(model, ids), answer_of(2))
    with refused("state", "state"):
        read(method.reader(model), FullCache().start(model, ids), answer_of(2))
