"""The search for a draft's layers against its definition: every trial a whole model, every token by itself."""

import copy
import json
import math
from pathlib import Path
from statistics import fmean
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


def greedy_answers(target: Any) -> list[list[int]]:
    """The base model's own greedy answers."""
    answers = []
    for prompt, length in zip(PROMPTS, LENGTHS, strict=True):
        ids = list(prompt)
        for _ in range(length):
            ids.append(int(next_logits(target, ids).argmax()))
        answers.append(ids[len(prompt) :])
    return answers


def texts(target: Any) -> list[Text]:
    return [read_answer(target, prompt, answer) for prompt, answer in zip(PROMPTS, greedy_answers(target), strict=True)]


@torch.no_grad()
def next_logits(model: Any, ids: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


def keeping(target: Any, layers: list[int]) -> Any:
    """A copy of the base model that skips all other layers."""
    model = copy.deepcopy(target)
    model.model.layers = nn.ModuleList(model.model.layers[layer] for layer in layers)
    model.config.num_hidden_layers = len(layers)
    return model


def divergence(target: Tensor, draft: Tensor) -> float:
    """KL(target || draft) of two distributions, term by term."""
    terms = [p * math.log(p / q) for p, q in zip(target.tolist(), draft.tolist(), strict=True)]
    return sum(terms)


def by_definition(target: Any, draft: Any) -> tuple[float, float, float]:
    """KL, agreement and accepted tokens, one token at a time."""
    divergences: list[float] = []
    agreements: list[bool] = []
    accepted: list[int] = []
    for prompt, answer in zip(PROMPTS, greedy_answers(target), strict=True):
        hits = []
        for position, token in enumerate(answer):
            ids = [*prompt, *answer[:position]]
            target_shares = next_logits(target, ids).double().softmax(-1)
            draft_shares = next_logits(draft, ids).double().softmax(-1)
            divergences.append(divergence(target_shares, draft_shares))
            hits.append(int(draft_shares.argmax()) == token)
        agreements += hits
        accepted.append(hits.index(False) if False in hits else len(hits))
    return fmean(divergences), fmean(agreements), fmean(accepted)


@pytest.mark.parametrize("layers", [[0, 2, 3], [1]])
def test_closeness_by_its_definition(target: Any, layers: list[int]) -> None:
    measured = closeness(keep_layers(target, layers), texts(target))
    expected = by_definition(target, keeping(target, layers))
    assert (measured.kl, measured.agreement, measured.accepted) == pytest.approx(expected, rel=1e-4)


def test_every_step_takes_out_what_is_missed_least(target: Any, tmp_path: Path) -> None:
    logits_before = next_logits(target, PROMPTS[0])
    subsets = search(target, texts(target), 1, tmp_path / "log.jsonl")
    assert torch.equal(next_logits(target, PROMPTS[0]), logits_before)
    layers = list(range(DEPTH))
    for subset in subsets:
        results = {}
        for layer in layers:
            remaining = [other for other in layers if other != layer]
            results[layer] = by_definition(target, keeping(target, remaining))
        removed = min(layers, key=lambda layer: results[layer][0])
        layers.remove(removed)
        assert subset.layers == layers
        assert (subset.kl, subset.agreement, subset.accepted) == pytest.approx(results[removed], rel=1e-4)
    assert len(layers) == 1


def test_a_stopped_search_goes_on(target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uninterrupted_log = tmp_path / "uninterrupted.jsonl"
    uninterrupted = search(target, texts(target), 1, uninterrupted_log)
    log = tmp_path / "log.jsonl"
    assert search(target, texts(target), 2, log) == uninterrupted[:2]
    log.write_bytes(log.read_bytes()[:-10])  # as a kill may leave it
    trials = Mock(wraps=closeness)
    monkeypatch.setattr(draft_layers, "closeness", trials)
    resumed = search(target, texts(target), 1, log)
    assert [subset.layers for subset in resumed] == [subset.layers for subset in uninterrupted]
    assert trials.call_count == 3 + 2
    assert log.read_text() == uninterrupted_log.read_text()
    assert search(target, texts(target), 2, log) == uninterrupted
    assert trials.call_count == 3 + 2


def test_a_log_of_another_search_is_refused(tmp_path: Path) -> None:
    target = tiny_model(num_hidden_layers=3)
    log = tmp_path / "log.jsonl"
    search(target, texts(target), 2, log)
    before = log.read_text()
    with refused("out", "conflict"):
        search(target, texts(target)[:2], 1, log)
    assert log.read_text() == before
    rows = [json.loads(line) for line in before.splitlines()]
    assert [len(row.get("layers", [])) for row in rows] == [0, 2]
