"""Measurements on tiny models, where what they must say is known: bytes in memory, repeats, steps, draft heads."""

from typing import Any

import pytest

from keepsight.eval.bench import measure
from keepsight.eval.bench.decoding import bench_speculate
from keepsight.eval.bench.measure import peak_kv_bytes
from keepsight.eval.bench.offload import bench_specache
from keepsight.models.targets import Target
from keepsight.runtime.generate import FullCache, decode, stop_after
from keepsight.runtime.methods import SnapKV, SpeCache
from keepsight.runtime.state import prefill
from tests.runtime.retrieval.heads import Oracle
from tests.tiny import prompt_ids, tiny_model, tiny_tokenizer

OF_ENTRY = 2 * 8 * 2 * 4  # KV heads, dimensions, keys and values, bytes
PEAKS: dict[str, tuple[Any, int]] = {
    "nothing is evicted": (FullCache(), 3 * 200),
    "all fits the budget": (SnapKV(200), 3 * 200),
    "one layer whole, and what stays of all": (SnapKV(20, window=6), 200 + 3 * 20),
    "all whole, and what stays of all": (SnapKV(20, window=6, during_prefill=False), 3 * 200 + 3 * 20),
}


@pytest.mark.parametrize("case", PEAKS)
def test_the_peak_of_kv_entries(case: str) -> None:
    (method, entries), model, ids = PEAKS[case], tiny_model(), prompt_ids(200)[0]
    assert peak_kv_bytes(model, lambda: method.start(model, ids)) == entries * OF_ENTRY
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(("repeats", "least", "runs"), [(3, 0.0, 3), (3, 2.0, 5), (7, 2.0, 7)])
def test_short_actions_are_timed_more_often(
    repeats: int, least: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed, warm = list[object](), list[int]()

    def seconds_of(action: object) -> float:
        timed.append(action)
        return 0.4

    monkeypatch.setattr(measure, "seconds_of", seconds_of)
    assert measure.median_seconds(lambda: warm.append(1), repeats, least) == 0.4
    assert len(timed) == runs and warm == [1]


def test_every_cache_and_every_part_of_specache_has_a_line():
    target = Target(tiny_model(), tiny_tokenizer(), "tiny", "0")
    lines = list(bench_specache(target, SpeCache(2, 8, 8, topk=4), tokens=40, batch=2, steps=5))
    caches = {line[:22].strip(): line[22:].split() for line in lines[2:6]}
    assert list(caches) == ["full", "KIVI", "SpeCache", "no guess"]
    megabytes = {name: float(columns[2]) for name, columns in caches.items()}
    # 48 tokens x 2 rows x 3 layers x 2 KV heads x 8 dimensions x 2 x 4 bytes, as two decimals show it
    assert megabytes["full"] == round(48 * 2 * 3 * 2 * 8 * 2 * 4 / 1e6, 2)
    assert megabytes["KIVI"] <= megabytes["SpeCache"] == megabytes["no guess"]
    # Of each step 4 entries a head come back; tokens 41 to 48 are packed and offloaded in the last of 5 steps.
    moved = round((4 + 8 / 5) * 2 * 3 * 2 * 8 * 2 * 4 / 1e6, 2)
    assert float(caches["SpeCache"][3]) == float(caches["no guess"][3]) == moved
    parts = ["dequantise", "attention, with it", "select", "select and fetch"]
    assert [line[:22].strip() for line in lines[6:]] == parts


def speculated(head, prompts, answer_tokens, draft_tokens):
    target = Target(tiny_model(eos_token_id=None), tiny_tokenizer(), "tiny", "0")
    return list(bench_speculate(target, head, prompts, answer_tokens, draft_tokens))


def test_a_head_that_knows_half_of_each_draft():
    ids = prompt_ids(50)[0]
    model = tiny_model(eos_token_id=None)
    answer = decode(model, prefill(model, ids), stop_after(13, None), pad_token=0).ids[0]
    # After the first token: 2 of 4 drafts right and a token of the target's own, four times.
    title, heads, plain, speculative, ratio, length, shares, same = speculated(
        Oracle(answer, {3, 6, 9, 12}), ids.tolist(), 13, 4
    )
    assert title.startswith("1 prompts of 50 to 50 tokens, answers of at most 13, drafts of 4, torch.float32, ")
    assert heads.split() == ["decoding", "tokens", "seconds", "tokens/s"]
    assert plain.split()[:2] == ["plain", "13"] and speculative.split()[:2] == ["speculative", "13"]
    assert float(ratio.split()[1]) > 0
    assert length.startswith("acceptance length 3.00 tokens")
    assert shares.endswith(": 1.00 1.00 0.00 0.00")
    assert same == "1 of 1 answers are the same, token for token"
