"""`keepsight train-retrieval-head` on a tiny target and a draft head that were saved to folders."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from keepsight.commands import train_retrieval_head as command
from keepsight.commands.config import ModelConfig
from keepsight.errors import UserError
from keepsight.models.card import Provenance
from keepsight.models.retrieval_head import CONFIG, WEIGHTS, RetrievalHead, parameters
from keepsight.models.targets import load_target
from keepsight.train.dataset import Batch, cut
from keepsight.train.retrieval_head import RetrievalObjective
from keepsight.train.settings import RetrievalHeadSettings
from tests.models.retrieval_heads import LAYERS, provenance_of, tiny_draft_head
from tests.tiny import save_tiny_target
from tests.train.runs import numbered, press_ctrl_c, samples, settings, write_data
from tests.train.test_retrieval_head import objective_of


class Disturbed(RetrievalObjective):
    """An objective to which something happens at the n-th training batch."""

    at, action, calls = 0, staticmethod(lambda _: None), 0

    def forward(self, *args, **kwargs):
        self.calls += 1
        if self.calls == self.at:
            type(self).action(self)
        return super().forward(*args, **kwargs)


def disturb(monkeypatch, at, action):
    kind = type("Disturbed", (Disturbed,), {"at": at, "action": staticmethod(action)})
    monkeypatch.setattr(command, "RetrievalObjective", kind)


def spoil(objective):
    with torch.no_grad():
        objective.head.q_proj.weight.fill_(torch.nan)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a draft head of it, and data that it answered."""
    folder = tmp_path_factory.mktemp("place")
    save_tiny_target(folder / "target")
    target = load_target(str(folder / "target"), device="cpu")
    tiny_draft_head(vocab_size=512).save(folder / "head", Provenance(target.name), "# A draft head\n")
    write_data(folder / "data", target)
    return folder


def config(place: Path, out: Path, features="previous-step", train=None, **changes) -> command.Config:
    heads = RetrievalHeadSettings(features=features, queries=8, train=train or settings(steps=10))
    values: dict[str, Any] = {"data": str(place / "data"), "out": str(out), "head": str(place / "head")} | changes
    return command.Config(
        model=ModelConfig(id=str(place / "target"), device="cpu", dtype="float32"), retrieval_head=heads, **values
    )


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    command.run(config(place, place / "retrieval", title="A tiny head", data_notes="From nowhere."))
    return place / "retrieval"


def test_the_command_leaves_a_head_that_loads(place, trained):
    assert {path.name for path in trained.iterdir()} == {*RetrievalHead.files, "README.md", "training.png", "training"}
    target = load_target(str(place / "target"), device="cpu")
    head = RetrievalHead.load(trained, target.model)
    assert load_file(trained / WEIGHTS)["q_proj.weight"].dtype == torch.bfloat16
    assert (head.config.trained, head.config.feature_layers) == (64, LAYERS)
    origin, manifest = provenance_of(trained), json.loads((place / "data" / "manifest.json").read_text())
    assert (origin.base_model, origin.base_version) == ("target", target.version)
    assert origin.data_digest == manifest["digest"]
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
    command.run(again)
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
    ("changes", "message"),
    [
        ({"features": "none"}, "head=.*retrieval: it was distilled with features previous-step; give retrieval_head"),
        ({"groups": 4}, r"^retrieval_head\.groups=4: the model has 3 layers with full attention"),
        ({"groups": 10**8}, r"^retrieval_head\.groups=100000000: the model has 3 layers"),
        ({"groups": 0}, "retrieval_head.groups=0 must be greater than or equal to 1"),
    ],
)
def test_a_head_that_does_not_fit_the_settings_is_refused(place, trained, tmp_path, changes, message):
    wrong = config(place, tmp_path / "head", head=str(trained))
    wrong.retrieval_head = replace(wrong.retrieval_head, **changes)
    with pytest.raises(UserError, match=message):
        command.run(wrong)


def test_a_new_head_has_no_more_groups_than_the_target_layers(place, tmp_path):
    wrong = config(place, tmp_path / "head", "none", head=None)
    wrong.retrieval_head.groups = 4
    with pytest.raises(UserError, match=r"^retrieval_head\.groups=4: the model has 3 layers with full attention"):
        command.run(wrong)


@pytest.mark.parametrize("lost", RetrievalHead.files)
def test_half_a_retrieval_head_is_not_taken_for_a_draft_head(place, trained, tmp_path, lost):
    (half := tmp_path / "half").mkdir()
    for name in {*RetrievalHead.files} - {lost}:
        (half / name).write_bytes((trained / name).read_bytes())
    with pytest.raises(UserError, match=rf"head=.*half: .*half: {lost} is missing; a retrieval head needs"):
        command.run(config(place, tmp_path / "head", head=str(half)))


def test_the_first_measurement_is_of_the_pruned_draft_head(place, trained):
    target = load_target(str(place / "target"), device="cpu")
    objective = objective_of(
        RetrievalHead.from_draft(tiny_draft_head(vocab_size=512), "previous-step"), target.model, 8
    )
    rows = numbered(samples())
    losses = [
        objective.loss(Batch(torch.tensor([row.prompt_ids]), torch.tensor([row.answer_ids]))).item()
        for row in (rows[6], rows[13])
    ]
    first = json.loads((trained / "training" / "fidelity.jsonl").read_text().splitlines()[0])
    assert first["eval_kl"] == pytest.approx(sum(losses) / 2, rel=1e-3)


def test_interrupted_and_gone_on_with_is_the_same_as_not_interrupted(place, trained, tmp_path, monkeypatch):
    disturb(monkeypatch, 4, press_ctrl_c)
    with pytest.raises(UserError, match=r"interrupted at step 4; .*run the same command again"):
        command.run(config(place, tmp_path / "head"))
    assert provenance_of(tmp_path / "head").training["steps"] == 4
    monkeypatch.undo()
    command.run(config(place, tmp_path / "head"))
    assert (tmp_path / "head" / WEIGHTS).read_bytes() == (trained / WEIGHTS).read_bytes()
    command.run(config(place, tmp_path / "head"))
    assert (tmp_path / "head" / WEIGHTS).read_bytes() == (trained / WEIGHTS).read_bytes()


def test_a_loss_that_is_no_number_leaves_no_head(place, tmp_path, monkeypatch):
    disturb(monkeypatch, 3, spoil)
    with pytest.raises(UserError, match=r"the loss is nan at step 3 .*lower retrieval_head.train.learning_rate"):
        command.run(config(place, tmp_path / "head"))
    assert {path.name for path in (tmp_path / "head").iterdir()} == {"training"}


def test_without_a_draft_head_the_projections_are_random(place, tmp_path, capsys):
    command.run(config(place, tmp_path / "head", "none", settings(steps=2), head=None))
    assert "no head= is given: the retrieval head starts from random projections" in capsys.readouterr().out
    head = RetrievalHead.load(tmp_path / "head")
    assert (head.config.features, head.config.trained, head.kv_heads) == ("none", 39, 2)
    assert "began with random projections" in provenance_of(tmp_path / "head").training["pruned from"]
    assert "hit rate, random" in (tmp_path / "head" / "README.md").read_text()


def test_training_on_longer_samples_is_remembered(place, tmp_path):
    short = tiny_draft_head(vocab_size=512, max_position_embeddings=32)
    short.save(tmp_path / "draft", Provenance("x"), "# A draft head\n")
    changed = config(place, tmp_path / "head", train=settings(steps=1, held_out=0), head=str(tmp_path / "draft"))
    command.run(changed)
    assert RetrievalHead.load(tmp_path / "head").config.trained == 39
    assert "Not measured." in (tmp_path / "head" / "README.md").read_text()


def test_other_settings_do_not_go_on(place, trained, tmp_path):
    changed = config(place, trained)
    changed.retrieval_head.queries = 9
    with pytest.raises(UserError, match=r"began with retrieval_head\.queries=8, now it is 9"):
        command.run(changed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": "all"}, "features=all is unknown; choose one of previous-step, none"),
        ({"queries": 0}, "retrieval_head.queries=0 must be greater than or equal to 1"),
        ({"temperature": 0.0}, r"retrieval_head\.temperature=0\.0 must be greater than 0"),
        ({"answers": 1.5}, r"retrieval_head\.answers=1\.5 must be less than or equal to 1"),
        ({"max_tokens": 1}, "retrieval_head.max_tokens=1 must be greater than or equal to 2"),
    ],
)
def test_settings_out_of_range_are_named(place, tmp_path, changes, message):
    wrong = config(place, tmp_path / "head")
    wrong.retrieval_head = replace(wrong.retrieval_head, **changes)
    with pytest.raises(UserError, match=message):
        command.run(wrong)
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 1}, "head=.*: this retrieval head is for another model than .*: KV heads 1 against 2"),
        ({"hidden_size": 16}, "hidden size 16 against 32"),
        ({"vocab_size": 99}, "vocabulary 99 against 512"),
    ],
)
def test_a_draft_head_of_another_target_is_refused(place, tmp_path, changes, message):
    other = tiny_draft_head(**{"vocab_size": 512} | changes)
    other.save(tmp_path / "draft", Provenance("x"), "# A draft head\n")
    with pytest.raises(UserError, match=message):
        command.run(config(place, tmp_path / "head", head=str(tmp_path / "draft")))
    assert not (tmp_path / "head").exists()


def test_long_samples_are_cut_at_the_end():
    rows = samples(3)
    for row, short in zip(rows, cut(rows, 20), strict=True):
        ids = [*row.prompt_ids, *row.answer_ids]
        assert [*short.prompt_ids, *short.answer_ids] == ids[:20]
        assert short.answer_ids and short.prompt_ids == row.prompt_ids[:19]
    assert [*cut(rows, 100)] == rows


def test_the_configuration_names_the_weights(trained):
    assert list(json.loads((trained / CONFIG).read_text())["digests"]) == [WEIGHTS]
