"""What earlier stages were trained on is recorded with a module, and held out later only if nothing else is left."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepsight.commands import train as command
from keepsight.commands.config_shared import ModelConfig
from keepsight.files import read_json, write_json
from keepsight.models.lookahead import CONFIG, LookaheadAdapter
from keepsight.train.dataset import (
    digests_as_text,
    digests_from_text,
    held_out_text,
    hold_out,
    prompt_digest,
    prompt_digests,
)
from tests.refused import refused
from tests.train.runs import SHAPE, reindexed, samples, settings


def test_what_was_trained_on_is_written_and_read() -> None:
    digests = prompt_digests(samples())
    assert len(digests) == 14
    assert digests_from_text(digests_as_text(digests)) == digests
    assert len(digests_as_text(digests)) == 14 * 8
    assert digests_as_text(None) == ""
    assert digests_from_text("") is None
    with refused("trained_on", "file"):
        digests_from_text("!!")


def test_the_answer_and_the_number_of_a_sample_do_not_make_another_prompt() -> None:
    first, second = samples(2)
    assert prompt_digest(replace(first, index=9, answer_ids=[3])) == prompt_digest(first)
    assert prompt_digest(second) != prompt_digest(first)


def test_a_later_stage_holds_out_what_the_earlier_held_out() -> None:
    all_samples = samples()
    trained, held_out = hold_out(all_samples, 4)
    digests = prompt_digests(trained.samples)
    for count in (4, 9):  # the earlier stage held out four
        later_trained, later_held_out = hold_out(all_samples, count, trained=digests)
        assert list(later_trained.samples) == list(trained.samples)
        assert list(later_held_out.samples) == list(held_out.samples)

    _, two_held_out = hold_out(all_samples, 2, trained=digests)
    assert [sample.index for sample in two_held_out.samples] == [12, 33]  # the longer ones of those

    _, nothing_else_left = hold_out(trained.samples, 4, trained=digests)
    _, as_without_digests = hold_out(trained.samples, 4)
    assert list(nothing_else_left.samples) == list(as_without_digests.samples)


def test_a_held_out_prompt_that_occurs_again_is_not_trained_on() -> None:
    first_samples = samples()
    same_prompts = [replace(sample, index=100 + sample.index, answer_ids=[7]) for sample in first_samples]
    trained, held_out = hold_out([*first_samples, *same_prompts], 4)
    held_out_digests = prompt_digests(held_out.samples)
    assert not prompt_digests(trained.samples) & held_out_digests
    assert len(trained.samples) == 2 * len(first_samples) - 2 * len(held_out_digests)
    with refused("train.held_out", "range"):
        hold_out([first_samples[0], replace(first_samples[0], index=9)], 1)


@pytest.mark.parametrize(
    ("digests", "text", "is_new"),
    [
        (frozenset(), "4, none of them trained on before", True),
        (prompt_digests(samples()[:2]), "4, 2 of them trained on before", False),
        (None, "4; whether an earlier stage was trained on them is not recorded", False),
    ],
)
def test_a_card_says_how_many_were_trained_on(digests: Any, text: str, is_new: bool) -> None:
    assert held_out_text(samples()[:4], digests) == (text, is_new)


def train_stage(
    workspace: Path, out: Path, init: Path | None = None, **changes: Any
) -> tuple[str, frozenset[bytes] | None]:
    """What the card says of the held-out samples, and what the adapter was trained on by then."""
    values: dict[str, Any] = {"train": settings(steps=1)} | changes
    command.run(
        command.Config(
            model=ModelConfig(id=str(workspace / "target"), device="cpu", dtype="float32"),
            data=str(workspace / "data"),
            out=str(out),
            init=str(init) if init else None,
            lookahead=SHAPE,
            **values,
        )
    )
    provenance = LookaheadAdapter.load(out).provenance
    held_out = provenance.training["held-out samples"]
    assert f"- held-out samples: {held_out}\n" in (out / "README.md").read_text()
    return held_out, digests_from_text(provenance.trained_on)


def test_stages_on_the_same_data_share_their_held_out_samples(
    workspace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained, _ = hold_out(reindexed(samples()), 2)
    first_digests = prompt_digests(trained.samples)
    first = workspace / "first"
    train_stage(workspace, first)
    assert digests_from_text(LookaheadAdapter.load(first).provenance.trained_on) == first_digests
    with caplog.at_level(logging.WARNING, "keepsight"):
        held_out, digests = train_stage(workspace, tmp_path / "second", first)
        assert held_out == "2, none of them trained on before"
        assert digests == first_digests
        one_held_out = settings(steps=1, held_out=1)
        held_out, digests = train_stage(workspace, tmp_path / "third", first, max_prompt_tokens=12, train=one_held_out)
        assert held_out == "1, 1 of them trained on before"
    assert caplog.messages == [f"held-out samples: {held_out}; their fidelity may be too high"]
    assert digests == first_digests


def test_an_adapter_that_does_not_say_what_it_was_trained_on(
    workspace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older = tmp_path / "older"
    train_stage(workspace, older)
    values = read_json(older / CONFIG, dict[str, Any])
    del values["provenance"]["trained_on"]
    del values["provenance"]["training"]["held-out samples"]
    write_json(older / CONFIG, values)
    with caplog.at_level(logging.WARNING, "keepsight"):
        held_out, digests = train_stage(workspace, tmp_path / "second", older)
    assert held_out == "2; whether an earlier stage was trained on them is not recorded"
    assert digests is None
    (message,) = caplog.messages
    assert held_out in message
