"""`keepsight train-retrieval-head` on a tiny model and a draft head that were saved to folders."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from keepsight.commands import train_heads
from keepsight.commands.config import TrainRetrievalHead
from keepsight.commands.config_shared import ModelConfig
from keepsight.models.card import Provenance
from keepsight.models.retrieval_head import WEIGHTS, RetrievalHead, parameters
from keepsight.models.targets import load_target
from keepsight.train.dataset import Batch, hold_out
from keepsight.train.settings import RetrievalHeadSettings
from tests.models.retrieval_heads import LAYERS, provenance_of, tiny_draft_head
from tests.refused import refused
from tests.train.runs import numbered, samples, settings
from tests.train.test_retrieval_head import objective_of


def config(place: Path, out: Path, features="previous-step", train=None, **changes) -> TrainRetrievalHead:
    heads = RetrievalHeadSettings(features=features, queries=8, train=train or settings(steps=10))
    values: dict[str, Any] = {"data": str(place / "data"), "out": str(out), "head": str(draft(place))} | changes
    return TrainRetrievalHead(
        model=ModelConfig(id=str(place / "target"), device="cpu", dtype="float32"), retrieval_head=heads, **values
    )


def draft(place: Path) -> Path:
    """A draft head of the base model."""
    if not (place / "head").exists():
        tiny_draft_head(vocab_size=512).save(place / "head", Provenance("target"), "# A draft head\n")
    return place / "head"


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    train_heads.retrieval(config(place, place / "retrieval", title="A tiny head", data_notes="From nowhere."))
    return place / "retrieval"


def test_the_command_leaves_a_head_that_loads(place, trained):
    names = {*RetrievalHead.files, "README.md", "config.yaml", "training.png", "training"}
    assert {path.name for path in trained.iterdir()} == names
    target = load_target(str(place / "target"), device="cpu")
    head = RetrievalHead.load(trained, target.model)
    assert load_file(trained / WEIGHTS)["q_proj.weight"].dtype == torch.bfloat16
    assert (head.config.trained, head.config.feature_layers) == (64, LAYERS)
    origin, manifest = provenance_of(trained), json.loads((place / "data" / "manifest.json").read_text())
    assert origin.base_model == "target"
    assert origin.identity == replace(target.identity, data=manifest["digest"])
    assert origin.training["steps"] == 10
    assert origin.training["pruned from"] == "head"
    assert origin.training["longest sample (tokens)"] == 39
    assert f"{parameters(head):,} of the draft head's" in origin.training["pruning"]


def test_pruned_only_stands_beside_distilled(trained):
    rows = [json.loads(line) for line in (trained / "training" / "fidelity.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 4, 8, 10]
    assert rows[-1]["eval_kl"] < rows[0]["eval_kl"]
    assert 0 < rows[0]["eval_hit_6"] < 1
    card = (trained / "README.md").read_text()
    assert "# A tiny head" in card and "From nowhere." in card
    assert f"pruned only {rows[0]['eval_kl']:.3f}, distilled {rows[-1]['eval_kl']:.3f}" in card
    assert f"| 6 | 2 | {rows[0]['eval_hit_6']:.3f} | {rows[-1]['eval_hit_6']:.3f} |" in card
    assert (trained / "training.png").read_bytes().startswith(b"\x89PNG")


def test_a_retrieval_head_is_distilled_further_in_groups(place, trained, tmp_path):
    again = config(place, tmp_path / "groups", head=str(trained))
    again.retrieval_head.groups = 3
    train_heads.retrieval(again)
    target = load_target(str(place / "target"), device="cpu")
    head = RetrievalHead.load((tmp_path / "groups"), target.model)
    assert (head.config.groups, head.kv_heads) == (3, 6)
    before = load_file(trained / WEIGHTS)["q_proj.weight"]
    parts = load_file(tmp_path / "groups" / WEIGHTS)["q_proj.weight"].chunk(3)
    assert all(part.shape == before.shape and not torch.equal(part, before) for part in parts)
    assert not torch.equal(parts[0], parts[1])
    origin = provenance_of(tmp_path / "groups")
    assert (origin.training["distilled further from"], origin.training["groups of layers"]) == ("retrieval", 3)
    card = (tmp_path / "groups" / "README.md").read_text()
    assert "in nats: before " in card and "for each of 3 groups of neighbouring layers" in card


@pytest.mark.parametrize(
    ("changes", "field", "code"),
    [
        ({"features": "none"}, "retrieval_head.features", "conflict"),
        ({"groups": 4}, "retrieval_head.groups", "range"),
    ],
)
def test_a_head_that_does_not_fit_the_settings_is_refused(place, trained, tmp_path, changes, field, code):
    wrong = config(place, tmp_path / "head", head=str(trained))
    wrong.retrieval_head = replace(wrong.retrieval_head, **changes)
    with refused(field, code):
        train_heads.retrieval(wrong)


@pytest.mark.parametrize("lost", RetrievalHead.files)
def test_half_a_retrieval_head_is_not_taken_for_a_draft_head(place, trained, tmp_path, lost):
    (half := tmp_path / "half").mkdir()
    for name in {*RetrievalHead.files} - {lost}:
        (half / name).write_bytes((trained / name).read_bytes())
    with refused(lost, "missing"):
        train_heads.retrieval(config(place, tmp_path / "head", head=str(half)))


def test_the_first_measurement_is_of_the_pruned_draft_head(place, trained):
    target = load_target(str(place / "target"), device="cpu")
    objective = objective_of(
        RetrievalHead.from_draft(tiny_draft_head(vocab_size=512), "previous-step"), target.model, 8
    )
    rows = numbered(samples())
    losses = [
        objective.loss(Batch(torch.tensor([row.prompt_ids]), torch.tensor([row.answer_ids]))).item()
        for row in hold_out(rows, 2)[1].samples
    ]
    first = json.loads((trained / "training" / "fidelity.jsonl").read_text().splitlines()[0])
    assert first["eval_kl"] == pytest.approx(sum(losses) / 2, rel=1e-3)


def test_without_a_draft_head_the_projections_are_random(place, tmp_path, capsys):
    train_heads.retrieval(config(place, tmp_path / "head", "none", settings(steps=2), head=None))
    assert "head= is not set: the retrieval head starts from random projections" in capsys.readouterr().out
    head = RetrievalHead.load(tmp_path / "head")
    assert (head.config.features, head.config.trained, head.kv_heads) == ("none", 39, 2)
    assert "began with random projections" in provenance_of(tmp_path / "head").training["pruned from"]
    assert "hit rate, random" in (tmp_path / "head" / "README.md").read_text()


def test_training_on_longer_samples_is_remembered(place, tmp_path):
    short = tiny_draft_head(vocab_size=512, max_position_embeddings=32)
    short.save(tmp_path / "draft", Provenance("x"), "# A draft head\n")
    changed = config(place, tmp_path / "head", train=settings(steps=1, held_out=0), head=str(tmp_path / "draft"))
    train_heads.retrieval(changed)
    assert RetrievalHead.load(tmp_path / "head").config.trained == 39
    assert "Not measured." in (tmp_path / "head" / "README.md").read_text()


def test_a_finished_training_is_not_done_again_and_other_settings_do_not_go_on(place, trained):
    weights = (trained / WEIGHTS).read_bytes()
    train_heads.retrieval(config(place, trained, title="A tiny head", data_notes="From nowhere."))
    assert (trained / WEIGHTS).read_bytes() == weights
    changed = config(place, trained)
    changed.retrieval_head.queries = 9
    with refused("retrieval_head.queries", "conflict"):
        train_heads.retrieval(changed)


@pytest.mark.parametrize(
    ("changes", "field", "code"),
    [
        ({"kv_heads": 1}, "retrieval", "model"),
        ({"hidden_size": 16}, "retrieval", "model"),
    ],
)
def test_a_draft_head_of_another_target_is_refused(place, tmp_path, changes, field, code):
    other = tiny_draft_head(**{"vocab_size": 512} | changes)
    other.save(tmp_path / "draft", Provenance("x"), "# A draft head\n")
    with refused(field, code):
        train_heads.retrieval(config(place, tmp_path / "head", head=str(tmp_path / "draft")))
    assert not (tmp_path / "head").exists()
