"""Measurements on tiny models, where what they must say is known: bytes in memory, repeats, steps, draft heads."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from keepsight.eval.bench import measure
from keepsight.eval.bench.decoding import bench_speculate
from keepsight.eval.bench.measure import peak_kv_bytes
from keepsight.eval.bench.offload import bench_specache, size_lines, step_lines, text_prompts, traffic_lines
from keepsight.eval.bench.runner import Runner
from keepsight.models.retrieval_head import RetrievalHead
from keepsight.models.targets import Target
from keepsight.runtime.generate import FullCache, decode, stop_after
from keepsight.runtime.methods import SnapKV, SpeCache
from keepsight.runtime.state import prefill
from tests.runtime.retrieval.heads import Oracle
from tests.tiny import prompt_ids, tiny_model, tiny_tokenizer

ENTRY_BYTES = 2 * 8 * 2 * 4  # KV heads, dimensions, keys and values, bytes
PEAKS: dict[str, tuple[Any, int]] = {
    "nothing is evicted": (FullCache(), 3 * 200),
    "all fits the budget": (SnapKV(200), 3 * 200),
    "one layer whole, and what stays of all": (SnapKV(20, window=6), 200 + 3 * 20),
    "all whole, and what stays of all": (SnapKV(20, window=6, during_prefill=False), 3 * 200 + 3 * 20),
}


@pytest.mark.parametrize("case", PEAKS)
def test_the_peak_of_kv_entries(case: str) -> None:
    method, entries = PEAKS[case]
    model = tiny_model()
    ids, _ = prompt_ids(200)
    assert peak_kv_bytes(model, lambda: method.start(model, ids)) == entries * ENTRY_BYTES
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(("repeats", "least", "runs"), [(3, 0.0, 3), (3, 2.0, 5), (7, 2.0, 7)])
def test_short_actions_are_timed_more_often(
    repeats: int, least: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[object] = []
    warm_ups: list[int] = []

    def seconds_of(action: object) -> float:
        timed.append(action)
        return 0.4

    monkeypatch.setattr(measure, "seconds_of", seconds_of)
    assert measure.median_seconds(lambda: warm_ups.append(1), repeats, least) == 0.4
    assert len(timed) == runs
    assert len(warm_ups) == 1


def cells(line: str) -> list[str]:
    """The cells of a line that are not blank."""
    return re.split(" {2,}", line.strip())


def test_every_cache_and_every_part_of_specache_has_a_line(tmp_path: Path):
    target = Target(tiny_model(), tiny_tokenizer(), "tiny", "0")
    method = SpeCache(2, 8, 8, topk=4)
    lines = list(bench_specache(Runner(tmp_path), target, method, 40, batch=2, steps=5))
    lines_of_resumed_run = list(bench_specache(Runner(tmp_path), target, method, 40, batch=2, steps=5))
    assert lines_of_resumed_run == lines
    assert {path.name for path in tmp_path.glob("*.csv")} == {"steps_2_bits.csv", "parts_2_bits.csv"}
    figures: dict[str, list[str]] = {}
    for line in lines[2:6]:
        cache, *columns = cells(line)
        figures[cache] = columns
    assert list(figures) == ["full", "KIVI", "SpeCache", "not speculative"]
    megabytes = {cache: float(columns[2]) for cache, columns in figures.items()}
    # 48 tokens x 2 rows x 3 layers x 2 KV heads x 8 dimensions x 2 x 4 bytes, as two decimals show it
    assert megabytes["full"] == round(48 * 2 * 3 * 2 * 8 * 2 * 4 / 1e6, 2)
    assert megabytes["KIVI"] <= megabytes["SpeCache"] == megabytes["not speculative"]
    # Of each step 4 entries a head come back; tokens 41 to 48 are packed and offloaded in the last of 5 steps.
    moved_megabytes = round((4 + 8 / 5) * 2 * 3 * 2 * 8 * 2 * 4 / 1e6, 2)
    assert float(figures["SpeCache"][3]) == moved_megabytes
    assert float(figures["not speculative"][3]) == moved_megabytes
    assert lines[6] == "its parts, in 3 layers"
    assert [cells(line)[0] for line in lines[7:]] == [
        "part",
        "dequantise",
        "attention, with it",
        "select",
        "select and fetch",
        "load all entries",
        "load 1 % in a row",
        "load 1 % scattered",
    ]


def speculated(head, prompts, answer_tokens, draft_tokens):
    target = Target(tiny_model(eos_token_id=None), tiny_tokenizer(), "tiny", "0")
    return list(bench_speculate(Runner(), target, head, prompts, answer_tokens, draft_tokens))


def test_a_head_that_knows_half_of_each_draft():
    ids = prompt_ids(50)[0]
    model = tiny_model(eos_token_id=None)
    answer = decode(model, prefill(model, ids), stop_after(13, None), pad_token=0).ids[0]
    # After the first token: 2 of 4 drafts right and a token of the target's own, four times.
    title, heads, plain, speculative, length, shares, same = speculated(
        Oracle(answer, {3, 6, 9, 12}), ids.tolist(), 13, 4
    )
    assert title.startswith("1 prompts of 50 to 50 tokens, answers of at most 13, drafts of 4, torch.float32, ")
    assert cells(heads) == ["method", "answer tokens", "seconds", "tokens/s", "of plain"]
    assert cells(plain)[:2] == ["plain", "13"]
    assert cells(plain)[-1] == "1.00"
    assert cells(speculative)[:2] == ["speculative", "13"]
    assert float(cells(speculative)[-1]) > 0
    assert length.startswith("acceptance length 3.00 tokens")
    assert shares.endswith(": 1.00 1.00 0.00 0.00")
    assert same == "1 of 1 answers are the same, token for token"


ENTRY = 2 * 8 * 4 * 2 * 8  # bytes of one entry of each KV head: key and value, 8 dimensions, float32, 2 heads, 8 layers


@pytest.fixture(scope="module")
def target():
    tokenizer = tiny_tokenizer()
    model = tiny_model(num_hidden_layers=8, vocab_size=len(tokenizer), max_position_embeddings=1024)
    return Target(model, tokenizer, "tiny", "0")


@pytest.fixture(scope="module", params=["previous-step", "none"])
def head(request, target):
    torch.manual_seed(1)
    head = RetrievalHead.untrained(target.model, request.param, 1024)
    for weight in (head.q_proj.weight, head.k_proj.weight):
        torch.nn.init.normal_(weight)  # chooses apart from one step to the next
    return head


def test_parameters_and_bytes(target):
    head = RetrievalHead.untrained(target.model, "previous-step", 1024)
    norms = 2 * 32
    fc = 3 * 32 * 32
    projections = 64 * (32 + 16)
    of_head = norms + fc + projections
    of_model = sum(parameter.numel() for parameter in target.model.parameters())
    (line,) = size_lines(target, head, None)
    size = f": {of_head:,} parameters, {of_head * 4:,} bytes as float32, "
    share = f"{of_head / of_model:.2%} of the model's {of_model:,}; "
    assert size + share in line
    assert line.endswith("; 64 bytes of keys a token")  # 2 KV heads of 8 dimensions in float32


def test_a_line_for_each_length_and_method(target, head):
    title, names, *lines = step_lines(Runner(), target, head, 40, [100, 1500], batch=2, repeats=2)
    assert title.startswith("2 rows of random entries, budget 40, float32, 2 steps, ")
    assert names.split()[:2] == ["tokens", "method"]
    assert lines.pop().startswith("beyond the model's context of 1024 tokens")
    assert [tuple(cells(line)[:2]) for line in lines] == [
        (length, name)
        for length in ("100", "1500")
        for name in ("full", "quest", "specontext", "specontext, offloaded")
    ]
    columns = [[float(figure) for figure in cells(line)[2:]] for line in lines]
    assert [len(figures) for figures in columns] == [3, 3, 6, 4] * 2
    assert columns[0][2] == columns[4][2] == 1  # against itself
    for step in (columns[2], columns[6]):
        assert sum(step[3:]) == pytest.approx(step[0], abs=0.02)
    # At most the budget's entries of both rows are loaded; the first step loads no fewer.
    for step in (columns[3], columns[7]):
        assert 0 < step[3] <= round(40 * 2 * ENTRY / 1e6, 3)


def test_elastic_loading_moves_less(target, head):
    prompts = [ids.tolist() for ids in (prompt_ids(150)[0][0], prompt_ids(120, seed=1)[0][0])]
    title, names, *lines = traffic_lines(Runner(), target, head, [8, 40], prompts, 5)
    assert title == "2 texts of 120 to 150 tokens, 5 steps each, all layers on the CPU"
    assert names.split()[0] == "budget"
    for budget, line in zip((8, 40), lines, strict=True):
        first, elastic, reloading, saved, sent = line.split()
        assert int(first) == budget
        assert float(reloading) == round(budget * ENTRY / 1e6, 3)
        assert 0 < float(elastic) <= float(reloading)
        assert float(saved[:-1]) / 100 == pytest.approx(1 - float(elastic) / float(reloading), abs=0.06)
        assert float(sent) == round(ENTRY / 1e6, 3)


def test_where_all_is_chosen_only_what_is_new_is_loaded(target, head):
    _, _, line = traffic_lines(Runner(), target, head, [500], [prompt_ids(300)[0][0].tolist()], 6)
    _, elastic, reloading, _, _ = line.split()
    assert float(elastic) == round(ENTRY / 1e6, 3)  # the token of the step before
    # 301 entries in the first counted step, whose prompt has 300 and a token that filled the slots; then one more each.
    assert float(reloading) == round((301 + 306) / 2 * ENTRY / 1e6, 3)


def test_texts_have_about_the_length_that_is_asked_for(target):
    prompts = text_prompts(target, 600, 3)
    for prompt in prompts:
        assert 500 < len(prompt) <= 600
    assert len({tuple(prompt[:100]) for prompt in prompts}) == 3
    text = target.tokenizer.decode(prompts[0])
    assert text.endswith("Summarize the text above.<|end|><|assistant|>")
