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
from tests.train.runs import SHAPE, numbered, samples, settings


def test_what_was_seen_is_written_and_read() -> None:
    seen = prompt_digests(samples())
    assert len(seen) == 14
    assert digests_from_text(digests_as_text(seen)) == seen
    assert len(digests_as_text(seen)) == 14 * 8
    assert digests_as_text(None) == "" and digests_from_text("") is None
    with refused("trained_on", "file"):
        digests_from_text("!!")


def test_the_answer_and_the_number_of_a_sample_do_not_make_another_prompt() -> None:
    first, second = samples(2)
    assert prompt_digest(replace(first, index=9, answer_ids=[3])) == prompt_digest(first) != prompt_digest(second)


def test_a_later_stage_holds_out_what_the_earlier_held_out() -> None:
    rows = samples()
    trained, held_out = hold_out(rows, 4)
    seen = prompt_digests(trained.samples)
    for count in (4, 9):  # the earlier stage held out four
        again = hold_out(rows, count, trained=seen)
        assert [[*each.samples] for each in again] == [[*trained.samples], [*held_out.samples]]
    fewer = hold_out(rows, 2, trained=seen)[1].samples
    assert [row.index for row in fewer] == [12, 33]  # the longer ones of those
    assert [*hold_out(trained.samples, 4, trained=seen)[1].samples] == [*hold_out(trained.samples, 4)[1].samples]


def test_a_held_out_prompt_that_occurs_again_is_not_trained_on() -> None:
    rows = samples()
    twice = [*rows, *(replace(each, index=100 + each.index, answer_ids=[7]) for each in rows)]
    trained, held_out = hold_out(twice, 4)
    assert not prompt_digests(trained.samples) & prompt_digests(held_out.samples)
    assert len(trained.samples) == len(twice) - 2 * len(prompt_digests(held_out.samples))
    with refused("train.held_out", "range"):
        hold_out([rows[0], replace(rows[0], index=9)], 1)


@pytest.mark.parametrize(
    ("seen", "said", "is_new"),
    [
        (frozenset(), "4, none of them trained on before", True),
        (prompt_digests(samples()[:2]), "4, 2 of them trained on before", False),
        (None, "4; whether an earlier stage was trained on them is not recorded", False),
    ],
)
def test_a_card_says_how_many_were_seen(seen: Any, said: str, is_new: bool) -> None:
    assert held_out_text(samples()[:4], seen) == (said, is_new)


def stage(place: Path, out: Path, init: Path | None = None, **changes: Any) -> tuple[str, frozenset[bytes] | None]:
    """What the card says of the held-out samples, and what the adapter was trained on by then."""
    given: dict[str, Any] = {"train": settings(steps=1)} | changes
    command.run(
        command.Config(
            model=ModelConfig(id=str(place / "target"), device="cpu", dtype="float32"),
            data=str(place / "data"),
            out=str(out),
            init=str(init) if init else None,
            lookahead=SHAPE,
            **given,
        )
    )
    provenance = LookaheadAdapter.load(out).provenance
    card = (out / "README.md").read_text()
    assert f"- held-out samples: {provenance.training['held-out samples']}\n" in card
    return provenance.training["held-out samples"], digests_from_text(provenance.trained_on)


def test_stages_on_the_same_data_share_their_held_out_samples(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = numbered(samples())
    stage(place, place / "first")
    first = digests_from_text(LookaheadAdapter.load(place / "first").provenance.trained_on)
    assert first == prompt_digests(hold_out(rows, 2)[0].samples)
    with caplog.at_level(logging.WARNING, "keepsight"):
        said, seen = stage(place, tmp_path / "second", place / "first")
        assert (said, seen) == ("2, none of them trained on before", first)
        given = settings(steps=1, held_out=1)
        said, seen = stage(place, tmp_path / "third", place / "first", max_prompt_tokens=12, train=given)
        assert said == "1, 1 of them trained on before"
    assert caplog.messages == [f"held-out samples: {said}; their fidelity may be too high"]
    assert seen == first


def test_an_adapter_that_does_not_say_what_it_was_trained_on(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older = tmp_path / "older"
    stage(place, older)
    values = read_json(older / CONFIG, dict[str, Any])
    del values["provenance"]["trained_on"], values["provenance"]["training"]["held-out samples"]
    write_json(older / CONFIG, values)
    with caplog.at_level(logging.WARNING, "keepsight"):
        said, seen = stage(place, tmp_path / "second", older)
    assert said == "2; whether an earlier stage was trained on them is not recorded"
    assert seen is None
    assert [said in message for message in caplog.messages] == [True]
