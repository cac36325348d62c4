"""What something was made with is compared with what is at hand, and a difference is said in words."""

import logging
from dataclasses import asdict

import pytest

from keepsight.errors import UserError
from keepsight.files import read_json, write_json
from keepsight.models.identity import Identity, MadeWith, identity_of, template_digest, tensors_digest, weights_digest
from tests.refused import refused
from tests.tiny import tiny_model, tiny_tokenizer

DIGEST = "sha256:" + "0123456789abcdef" * 4
OTHER = "sha256:" + "fedcba9876543210" * 4
MADE = Identity(model="c0ffee", template=DIGEST, adapters="", data="sha256:d")


def test_what_is_the_same_or_not_known_does_not_differ() -> None:
    assert MADE.difference(MADE) == ""
    assert MADE.difference(Identity()) == ""
    assert Identity().difference(MADE) == ""
    assert Identity(model="a", data="b").difference(Identity(model="a", template="c")) == ""


@pytest.mark.parametrize(
    ("present", "difference"),
    [
        (Identity(model="decaf"), "another base model (recorded: c0ffee, at hand: decaf): load that model"),
        (
            Identity(template=OTHER),
            "another tokenizer or chat template (recorded: sha256:0123456789ab, at hand: sha256:fedcba987654): use "
            "those of its base model",
        ),
        (
            Identity(adapters=DIGEST),
            "another set of active adapters (recorded: none, at hand: sha256:0123456789ab): activate those, and no "
            "others",
        ),
        (Identity(data=""), "other training data (recorded: sha256:d, at hand: none): use that data"),
        (
            Identity(model=f"{DIGEST} quantised by bitsandbytes 4bit", template=DIGEST),
            "another base model (recorded: c0ffee, at hand: sha256:0123456789ab quantised by bitsandbytes 4bit): load "
            "that model",
        ),
    ],
)
def test_a_difference_names_the_part_both_digests_and_what_to_do(present: Identity, difference: str) -> None:
    assert MADE.difference(present) == difference


def test_all_differences_are_said_in_one_line_with_the_remedy_that_was_asked_for() -> None:
    present = Identity(model="decaf", data="sha256:e")
    with pytest.raises(UserError) as caught:
        MADE.require(present, "runs/data: this data was made", "make it again")
    assert str(caught.value) == (
        "runs/data: this data was made with another base model (recorded: c0ffee, at hand: decaf): make it again; "
        "other training data (recorded: sha256:d, at hand: sha256:e): make it again"
    )


def test_a_warning_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "keepsight"):
        for _ in range(2):
            MADE.warn(Identity(model="decaf"), "the artifact of this test was trained", "evaluate it again")
        MADE.warn(MADE, "the artifact of this test was trained")
    (message,) = caplog.messages
    assert message.startswith("the artifact of this test was trained with another base model (recorded: c0ffee,")


def test_settings_are_compared_after_the_identity(tmp_path) -> None:
    path = tmp_path / "settings.json"
    write_json(path, asdict(MadeWith(MADE, {"seed": 1, "steps": 3})))
    made_with: MadeWith = read_json(path, MadeWith)
    made_with.require(MadeWith(MADE, {"seed": 1, "steps": 3}), "it began", "choose another out=")
    with refused("steps", "conflict"):
        made_with.require(MadeWith(MADE, {"seed": 1, "steps": 4}), "it began", "choose another out=")
    with refused("model", "conflict"):
        made_with.require(MadeWith(Identity("decaf"), {"seed": 1, "steps": 4}), "it began", "choose another out=")


def test_a_loaded_model_is_recognised_by_its_weights() -> None:
    model = tiny_model()
    tokenizer = tiny_tokenizer()
    identity = identity_of(model, tokenizer)
    assert identity == Identity(weights_digest(tiny_model()), template_digest(tokenizer), adapters="")
    assert identity_of(model).template is None
    assert identity_of(tiny_model(seed=1)).model != identity.model
    assert identity_of(tiny_model().bfloat16()).model != identity.model


def test_the_digest_of_a_tokenizer_covers_template_and_tokens() -> None:
    tokenizer = tiny_tokenizer()
    digests = {template_digest(tokenizer)}
    tokenizer.add_tokens(["<|extra|>"])
    digests.add(template_digest(tokenizer))
    tokenizer.chat_template = "{{ messages }}"
    digests.add(template_digest(tokenizer))
    assert len(digests) == 3


def test_the_digest_of_tensors_covers_names_shapes_dtypes_and_values() -> None:
    weight = next(tiny_model().parameters()).detach()
    digest = tensors_digest([("a", weight)])
    assert tensors_digest([("a", weight.clone())]) == digest
    digests = {
        digest,
        tensors_digest([("b", weight)]),
        tensors_digest([("a", weight.flatten())]),
        tensors_digest([("a", weight.bfloat16())]),
        tensors_digest([("a", weight + 1)]),
        tensors_digest([("a", weight), ("a", weight)]),
    }
    assert len(digests) == 6
