"""DuoAttention: which heads stream, against a loop over the sorted scores of a pattern."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from keepsight import generate
from keepsight.runtime.methods import DuoAttention, Resources, StreamingLLM, make_method
from keepsight.runtime.state import prefill
from tests.refused import refused
from tests.tiny import prompt_ids, tiny_model

LENGTH, RECENT, SINKS = 60, 9, 3
SCORES = [[0.2, 1.3], [0.9, -0.5], [0.4, 0.1]]
STREAM_FIRST = [(1, 1), (2, 1), (0, 0), (2, 0), (1, 0), (0, 1)]


def write_pattern(folder: Path, scores: list[list[float]], **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    lines = ["\t".join(map(str, row)) for row in scores]
    (folder / "full_attention_heads.tsv").write_text("\n".join(lines) + "\n")
    if settings:
        (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def pattern(tmp_path: Path) -> Path:
    return write_pattern(tmp_path / "pattern", SCORES, sink_size=SINKS, recent_size=RECENT)


@pytest.mark.parametrize("budget", [8, 20, 30, 50, 58])
def test_the_lowest_scores_stream_and_the_others_keep_all(budget: int, pattern: Path) -> None:
    model = tiny_model()
    ids, _ = prompt_ids(LENGTH)
    method: Any = make_method("duoattention", budget, Resources(scorer=pattern, target=model))
    assert (method.sinks, method.allocate.recent) == (SINKS, RECENT)

    short = min(SINKS + RECENT, budget // 2)
    streaming = 0
    while streaming * short + (6 - streaming) * LENGTH > 6 * budget:
        streaming += 1
    left = 6 * budget - (6 - streaming) * LENGTH

    state = method.start(model, ids)
    assert int(state.counts().sum()) == 6 * budget
    whole = prefill(model, ids).entries()
    streaming_counts = []
    for rank, (layer, head) in enumerate(STREAM_FIRST):
        entries = state.entries()[layer]
        real = slice(None) if entries.real is None else entries.real[0, min(head, entries.real.shape[1] - 1)]
        keys = entries.keys[0, head][real]
        kept = torch.cdist(keys, whole[layer].keys[0, head]).argmin(dim=1).tolist()
        count = len(kept)
        if rank < streaming:
            streaming_counts.append(count)
            assert kept == [*range(SINKS), *range(LENGTH - count + SINKS, LENGTH)]
        else:
            assert kept == [*range(LENGTH)]
    assert sum(streaming_counts) == left
    assert max(streaming_counts) - min(streaming_counts) <= 1


def test_a_budget_below_every_pattern_is_streamingllm(tmp_path: Path) -> None:
    model = tiny_model()
    ids, mask = prompt_ids(LENGTH, 50)
    folder = write_pattern(tmp_path / "bare", [[0.5, 0.5]] * 3)
    method: Any = DuoAttention.from_pretrained(folder / "full_attention_heads.tsv", 6, sinks=5)
    assert method.allocate.recent == 256
    state = method.start(model, ids, mask)
    expected = StreamingLLM(6, sinks=5).start(model, ids, mask)
    for one, other in zip(state.entries(), expected.entries(), strict=True):
        assert torch.equal(one.keys, other.keys)


def test_an_option_changes_the_pattern_s_recent_entries(pattern: Path) -> None:
    method: Any = make_method("duoattention", 20, Resources(scorer=pattern), allocate={"recent": 4}, sinks=2)
    assert (method.sinks, method.allocate.recent, method.allocate.pattern.recent) == (2, 4, RECENT)


def test_what_is_no_pattern_of_the_model_is_refused(pattern: Path, tmp_path: Path) -> None:
    with refused("scorer", "missing"):
        DuoAttention.from_pretrained(tmp_path / "nothing", 20)
    for text in ("a\tb\n", "1\t2\n3\n", "", "nan\t1\n", "\ud800"):
        file = tmp_path / "wrong.tsv"
        file.write_bytes(text.encode("utf-16", "surrogatepass"))
        with refused("scorer", "file"):
            DuoAttention.from_pretrained(file, 20)
    with refused("scorer", "type"):
        DuoAttention.from_pretrained(write_pattern(tmp_path / "settings", SCORES, sink_size="4"), 20)
    with refused("allocate", "conflict"):
        DuoAttention(20)
    with refused("scorer", "model"):
        make_method("duoattention", 20, Resources(scorer=pattern, target=tiny_model(num_hidden_layers=2)))
    with refused("scorer", "model"):
        method = DuoAttention.from_pretrained(pattern, 20)
        generate(tiny_model(num_hidden_layers=2), prompt_ids(40)[0], method, max_new_tokens=1)
