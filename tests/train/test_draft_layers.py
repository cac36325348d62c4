"""The search for a draft's layers against its definition: every trial a whole model, every token by itself."""

import copy
import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from keepsight.models.draft_sources import keep_layers
from keepsight.train import draft_layers
from keepsight.train.draft_layers import Text, closeness, read_answer, search
from tests.refused import refused
from tests.tiny import prompt_ids, tiny_model

DEPTH = 4
PROMPTS = [prompt_ids(length, seed=length)[0][0].tolist() for length in (20, 9, 14)]
LENGTHS = [6, 1, 4]


@pytest.fixture
def target() -> Any:
    return tiny_model("qwen3", num_hidden_layers=DEPTH)


def answers(target: Any) -> list[list[int]]:
    """The base model's own greedy answers."""
    found = []
    for prompt, length in zip(PROMPTS, LENGTHS, strict=True):
        ids = list(prompt)
        for _ in range(length):
            ids.append(int(next_logits(target, ids).argmax()))
        found.append(ids[len(prompt) :])
    return found


def texts(target: Any) -> list[Text]:
    return [read_answer(target, prompt, answer) for prompt, answer in zip(PROMPTS, answers(target), strict=True)]


@torch.no_grad()
def next_logits(model: Any, ids: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


def without(target: Any, layers: list[int]) -> Any:
    """A copy of the base model that skips the other layers."""
    model = copy.deepcopy(target)
    model.model.layers = nn.ModuleList(model.model.layers[layer] for layer in layers)
    model.config.num_hidden_layers = len(layers)
    return model


def by_definition(target: Any, draft: Any) -> tuple[float, float, float]:
    """KL, agreement and accepted tokens, one token at a time."""
    divergences, right, runs = [], [], []
    for prompt, answer in zip(PROMPTS, answers(target), strict=True):
        hits = []
        for place in range(len(answer)):
            ids = [*prompt, *answer[:place]]
            p, q = (next_logits(model, ids).double().softmax(-1) for model in (target, draft))
            divergences.append(sum(float(a) * math.log(float(a) / float(b)) for a, b in zip(p, q, strict=True)))
            hits.append(int(q.argmax()) == answer[place])
        right += hits
        runs.append(hits.index(False) if False in hits else len(hits))
    return sum(divergences) / len(divergences), sum(right) / len(right), sum(runs) / len(runs)


@pytest.mark.parametrize("layers", [[0, 2, 3], [1]])
def test_closeness_by_its_definition(target: Any, layers: list[int]) -> None:
    found = closeness(keep_layers(target, layers), texts(target))
    expected = by_definition(target, without(target, layers))
    assert (found.kl, found.agreement, found.accepted) == pytest.approx(expected, rel=1e-4)


def test_every_step_takes_out_what_is_missed_least(target: Any, tmp_path: Path) -> None:
    before = next_logits(target, PROMPTS[0])
    found = search(target, texts(target), 1, tmp_path / "log.jsonl")
    assert torch.equal(next_logits(target, PROMPTS[0]), before)
    layers = list(range(DEPTH))
    for subset in found:
        trials = {layer: without(target, [each for each in layers if each != layer]) for layer in layers}
        results = {layer: by_definition(target, draft) for layer, draft in trials.items()}
        best = min(layers, key=lambda layer: results[layer][0])
        layers = [layer for layer in layers if layer != best]
        assert subset.layers == layers
        assert (subset.kl, subset.agreement, subset.accepted) == pytest.approx(results[best], rel=1e-4)
    assert len(layers) == 1


def test_a_stopped_search_goes_on(target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = search(target, texts(target), 1, tmp_path / "whole.jsonl")
    log = tmp_path / "log.jsonl"
    assert search(target, texts(target), 2, log) == whole[:2]
    log.write_bytes(log.read_bytes()[:-10])  # as a kill may leave it
    trials = Mock(wraps=closeness)
    monkeypatch.setattr(draft_layers, "closeness", trials)
    resumed = search(target, texts(target), 1, log)
    assert [subset.layers for subset in resumed] == [subset.layers for subset in whole]
    assert trials.call_count == 3 + 2
    assert log.read_text() == (tmp_path / "whole.jsonl").read_text()
    assert search(target, texts(target), 2, log) == whole
    assert trials.call_count == 3 + 2


def test_a_log_of_another_search_is_refused(tmp_path: Path) -> None:
    target, log = tiny_model(num_hidden_layers=3), tmp_path / "log.jsonl"
    search(target, texts(target), 2, log)
    before = log.read_text()
    with refused("out", "conflict"):
        search(target, texts(target)[:2], 1, log)
    assert log.read_text() == before
    assert [len(json.loads(line).get("layers", [])) for line in before.splitlines()] == [0, 2]
