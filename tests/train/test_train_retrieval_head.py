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
from tests.train.runs import reindexed, rows, samples, settings
from tests.train.test_retrieval_head import objective_of


def config(workspace: Path, out: Path, features="previous-step", train=None, **changes) -> TrainRetrievalHead:
    values: dict[str, Any] = {
        "data": str(workspace / "data"),
        "out": str(out),
        "head": str(draft(workspace)),
    } | changes
    return TrainRetrievalHead(
        model=ModelConfig(id=str(workspace / "target"), device="cpu", dtype="float32"),
        retrieval_head=RetrievalHeadSettings(features=features, queries=8, train=train or settings(steps=10)),
        **values,
    )


def draft(workspace: Path) -> Path:
    """A draft head of the base model."""
    if not (workspace / "head").exists():
        tiny_draft_head(vocab_size=512).save(workspace / "head", Provenance("target"), "# A draft head\n")
    return workspace / "head"


def measurements(folder: Path) -> list[dict[str, Any]]:
    return rows(folder / "training" / "fidelity.jsonl")


@pytest.fixture(scope="module")
def trained_head(workspace: Path) -> Path:
    """The head that the command trains."""
    train_heads.retrieval(config(workspace, workspace / "retrieval", title="A tiny head", data_notes="From nowhere."))
    return workspace / "retrieval"


def test_the_command_leaves_a_head_that_loads(workspace, trained_head):
    names = {*RetrievalHead.files, "README.md", "config.yaml", "training.png", "training"}
    assert {path.name for path in trained_head.iterdir()} == names
    target = load_target(str(workspace / "target"), device="cpu")
    head = RetrievalHead.load(trained_head, target.model)
    assert load_file(trained_head / WEIGHTS)["q_proj.weight"].dtype == torch.bfloat16
    assert head.config.trained == 64
    assert head.config.feature_layers == LAYERS
    provenance = provenance_of(trained_head)
    manifest = json.loads((workspace / "data" / "manifest.json").read_text())
    assert provenance.base_model == "target"
    assert provenance.identity == replace(target.identity, data=manifest["digest"])
    assert provenance.training["steps"] == 10
    assert provenance.training["pruned from"] == "head"
    assert provenance.training["longest sample (tokens)"] == 39
    assert f"{parameters(head):,} of the draft head's" in provenance.training["pruning"]


def test_pruned_only_stands_beside_distilled(trained_head):
    fidelity = measurements(trained_head)
    assert [row["step"] for row in fidelity] == [0, 4, 8, 10]
    pruned = fidelity[0]
    distilled = fidelity[-1]
    assert distilled["eval_kl"] < pruned["eval_kl"]
    assert 0 < pruned["eval_hit_6"] < 1
    card = (trained_head / "README.md").read_text()
    assert "# A tiny head" in card
    assert "From nowhere." in card
    assert f"pruned only {pruned['eval_kl']:.3f}, distilled {distilled['eval_kl']:.3f}" in card
    assert f"| 6 | 2 | {pruned['eval_hit_6']:.3f} | {distilled['eval_hit_6']:.3f} |" in card
    assert (trained_head / "training.png").read_bytes().startswith(b"\x89PNG")


def test_a_retrieval_head_is_distilled_further_in_groups(workspace, trained_head, tmp_path):
    out = tmp_path / "groups"
    in_groups = config(workspace, out, head=str(trained_head))
    in_groups.retrieval_head.groups = 3
    train_heads.retrieval(in_groups)
    target = load_target(str(workspace / "target"), device="cpu")
    head = RetrievalHead.load(out, target.model)
    assert head.config.groups == 3
    assert head.kv_heads == 6
    weight_before = load_file(trained_head / WEIGHTS)["q_proj.weight"]
    group_weights = load_file(out / WEIGHTS)["q_proj.weight"].chunk(3)
    for weight in group_weights:
        assert weight.shape == weight_before.shape
        assert not torch.equal(weight, weight_before)
    assert not torch.equal(group_weights[0], group_weights[1])
    training = provenance_of(out).training
    assert training["distilled further from"] == "retrieval"
    assert training["groups of layers"] == 3
    card = (out / "README.md").read_text()
    assert "in nats: before " in card
    assert "for each of 3 groups of neighbouring layers" in card


@pytest.mark.parametrize(
    ("changes", "field", "code"),
    [
        ({"features": "none"}, "retrieval_head.features", "conflict"),
        ({"groups": 4}, "retrieval_head.groups", "range"),
    ],
)
def test_a_head_that_does_not_fit_the_settings_is_refused(workspace, trained_head, tmp_path, changes, field, code):
    wrong = config(workspace, tmp_path / "head", head=str(trained_head))
    wrong.retrieval_head = replace(wrong.retrieval_head, **changes)
    with refused(field, code):
        train_heads.retrieval(wrong)


@pytest.mark.parametrize("lost", RetrievalHead.files)
def test_half_a_retrieval_head_is_not_taken_for_a_draft_head(workspace, trained_head, tmp_path, lost):
    incomplete = tmp_path / "incomplete"
    incomplete.mkdir()
    for name in {*RetrievalHead.files} - {lost}:
        (incomplete / name).write_bytes((trained_head / name).read_bytes())
    with refused(lost, "missing"):
        train_heads.retrieval(config(workspace, tmp_path / "head", head=str(incomplete)))


def test_the_first_measurement_is_of_the_pruned_draft_head(workspace, trained_head):
    target = load_target(str(workspace / "target"), device="cpu")
    pruned = RetrievalHead.from_draft(tiny_draft_head(vocab_size=512), "previous-step")
    objective = objective_of(pruned, target.model, 8)
    _, held_out = hold_out(reindexed(samples()), 2)
    losses = []
    for sample in held_out.samples:
        batch = Batch(torch.tensor([sample.prompt_ids]), torch.tensor([sample.answer_ids]))
        losses.append(objective.loss(batch).item())
    assert len(losses) == 2
    assert measurements(trained_head)[0]["eval_kl"] == pytest.approx(sum(losses) / 2, rel=1e-3)


def test_without_a_draft_head_the_projections_are_random(workspace, tmp_path, capsys):
    train_heads.retrieval(config(workspace, tmp_path / "head", "none", settings(steps=2), head=None))
    assert "head= is not set: the retrieval head starts from random projections" in capsys.readouterr().out
    head = RetrievalHead.load(tmp_path / "head")
    assert head.config.features == "none"
    assert head.config.trained == 39
    assert head.kv_heads == 2
    assert "began with random projections" in provenance_of(tmp_path / "head").training["pruned from"]
    assert "hit rate, random" in (tmp_path / "head" / "README.md").read_text()


def test_training_on_longer_samples_is_remembered(workspace, tmp_path):
    short_draft = tiny_draft_head(vocab_size=512, max_position_embeddings=32)
    short_draft.save(tmp_path / "draft", Provenance("x"), "# A draft head\n")
    one_step = settings(steps=1, held_out=0)
    train_heads.retrieval(config(workspace, tmp_path / "head", train=one_step, head=str(tmp_path / "draft")))
    assert RetrievalHead.load(tmp_path / "head").config.trained == 39
    assert "Not measured." in (tmp_path / "head" / "README.md").read_text()


def test_a_finished_training_is_not_done_again_and_other_settings_do_not_go_on(workspace, trained_head):
    weights = (trained_head / WEIGHTS).read_bytes()
    train_heads.retrieval(config(workspace, trained_head, title="A tiny head", data_notes="From nowhere."))
    assert (trained_head / WEIGHTS).read_bytes() == weights
    changed = config(workspace, trained_head)
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
def test_a_draft_head_of_another_target_is_refused(workspace, tmp_path, changes, field, code):
    other = tiny_draft_head(**{"vocab_size": 512} | changes)
    other.save(tmp_path / "draft", Provenance("x"), "# A draft head\n")
    with refused(field, code):
        train_heads.retrieval(config(workspace, tmp_path / "head", head=str(tmp_path / "draft")))
    assert not (tmp_path / "head").exists()
