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

LENGTH = 60
RECENT = 9
SINKS = 3
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


def real_keys(entries: Any, head: int) -> torch.Tensor:
    """The keys of one head, [n, d], without padding."""
    keys: torch.Tensor = entries.keys[0, head]
    if entries.real is None:
        return keys
    shared_mask = entries.real.shape[1] == 1
    return keys[entries.real[0, 0 if shared_mask else head]]


@pytest.mark.parametrize("budget", [8, 20, 30, 50, 58])
def test_the_lowest_scores_stream_and_the_others_keep_all(budget: int, pattern: Path) -> None:
    model = tiny_model()
    ids, _ = prompt_ids(LENGTH)
    method: Any = make_method("duoattention", budget, Resources(scorer=pattern, target=model))
    assert (method.sinks, method.allocate.recent) == (SINKS, RECENT)

    shortest = min(SINKS + RECENT, budget // 2)
    streaming_heads = 0
    while streaming_heads * shortest + (6 - streaming_heads) * LENGTH > 6 * budget:
        streaming_heads += 1
    streaming_total = 6 * budget - (6 - streaming_heads) * LENGTH

    state = method.start(model, ids)
    assert int(state.counts().sum()) == 6 * budget
    full_entries = prefill(model, ids).entries()
    streaming_counts = []
    for rank, (layer, head) in enumerate(STREAM_FIRST):
        keys = real_keys(state.entries()[layer], head)
        kept = torch.cdist(keys, full_entries[layer].keys[0, head]).argmin(dim=1).tolist()
        if rank >= streaming_heads:
            assert kept == [*range(LENGTH)]
            continue
        count = len(kept)
        streaming_counts.append(count)
        assert kept == [*range(SINKS), *range(LENGTH - count + SINKS, LENGTH)]
    assert sum(streaming_counts) == streaming_total
    assert max(streaming_counts) - min(streaming_counts) <= 1


def test_a_budget_below_every_pattern_is_streamingllm(tmp_path: Path) -> None:
    model = tiny_model()
    ids, mask = prompt_ids(LENGTH, 50)
    folder = write_pattern(tmp_path / "bare", [[0.5, 0.5]] * 3)
    method: Any = DuoAttention.from_pretrained(folder / "full_attention_heads.tsv", 6, sinks=5)
    assert method.allocate.recent == 256
    state = method.start(model, ids, mask)
    expected = StreamingLLM(6, sinks=5).start(model, ids, mask)
    for layer, expected_layer in zip(state.entries(), expected.entries(), strict=True):
        assert torch.equal(layer.keys, expected_layer.keys)


def test_an_option_changes_the_pattern_s_recent_entries(pattern: Path) -> None:
    method: Any = make_method("duoattention", 20, Resources(scorer=pattern), allocate={"recent": 4}, sinks=2)
    assert method.sinks == 2
    assert method.allocate.recent == 4
    assert method.allocate.pattern.recent == RECENT


def test_a_file_that_is_no_pattern_of_the_model_is_refused(pattern: Path, tmp_path: Path) -> None:
    with refused("scorer", "missing"):
        DuoAttention.from_pretrained(tmp_path / "nothing", 20)
    file = tmp_path / "wrong.tsv"
    for text in ("a\tb\n", "1\t2\n3\n", "", "nan\t1\n", "\ud800"):
        file.write_bytes(text.encode("utf-16", "surrogatepass"))
        with refused("scorer", "file"):
            DuoAttention.from_pretrained(file, 20)
    wrong_settings = write_pattern(tmp_path / "settings", SCORES, sink_size="4")
    with refused("scorer", "type"):
        DuoAttention.from_pretrained(wrong_settings, 20)
    with refused("allocate", "conflict"):
        DuoAttention(20)
    two_layers = tiny_model(num_hidden_layers=2)
    with refused("scorer", "model"):
        make_method("duoattention", 20, Resources(scorer=pattern, target=two_layers))
    method = DuoAttention.from_pretrained(pattern, 20)
    with refused("scorer", "model"):
        generate(two_layers, prompt_ids(40)[0], method, max_new_tokens=1)
