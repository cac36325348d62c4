"""Push and fetch when the Hub refuses, is busy, or breaks the connection; the client is the Hub's own."""

import time
from pathlib import Path

import pytest
import torch

from keepsight import LookaheadKV
from keepsight.errors import UserError
from keepsight.models.artifacts import fetch
from keepsight.models.hub import plan_upload, push
from keepsight.models.lookahead import LookaheadAdapter
from tests.models.conftest import TOKEN
from tests.models.fake_hub import REPO, FakeHub
from tests.tiny import prompt_ids, tiny_model

FILES = LookaheadAdapter.files
COMMIT_ROUTE = "POST /api/models/.*/commit/"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's pauses between tries take no time."""
    monkeypatch.setattr(time, "sleep", lambda _: None)


@pytest.mark.parametrize(
    ("route", "status"),
    [
        ("POST /api/repos/create", 401),
        ("POST /api/repos/create", 403),
        ("POST .*/objects/batch", 403),
        (COMMIT_ROUTE, 401),
        (COMMIT_ROUTE, 403),
        (COMMIT_ROUTE, 409),
        (COMMIT_ROUTE, 500),
    ],
)
def test_a_refusal_is_one_line_and_the_next_push_succeeds(hub: FakeHub, saved: Path, route: str, status: int) -> None:
    hub.faults = [(route, status)] * 12  # more often than the client tries
    with pytest.raises(UserError, match=f"cannot push {saved} to {REPO}: .*{status}") as caught:
        push(plan_upload(saved, REPO))
    assert "\n" not in str(caught.value) and TOKEN not in str(caught.value)
    assert hub.files == {}, "a commit is all or nothing"
    hub.faults = []
    push(plan_upload(saved, REPO))
    assert set(FILES) < set(hub.files)


def test_a_repository_that_another_push_has_just_made_is_taken(hub: FakeHub, saved: Path) -> None:
    hub.faults = [("POST /api/repos/create", 409)]
    hub.created = {"visibility": "private"}
    push(plan_upload(saved, REPO))
    assert set(FILES) < set(hub.files)


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_uploads_are_tried_again(hub: FakeHub, saved: Path, status: int) -> None:
    hub.faults = [("PUT /lfs/", status)] * 2
    push(plan_upload(saved, REPO))
    assert set(FILES) < set(hub.files)
    assert sum(request.startswith("PUT /lfs/") for request in hub.requests) == len(hub.blobs) + 2


@pytest.mark.parametrize("route", ["POST /api/repos/create", COMMIT_ROUTE])
def test_a_broken_connection_sends_nothing_and_is_one_line(hub: FakeHub, saved: Path, route: str) -> None:
    hub.faults = [(route, None)] * 12
    with pytest.raises(UserError, match=f"cannot push {saved} to {REPO}: ") as caught:
        push(plan_upload(saved, REPO))
    assert "\n" not in str(caught.value) and TOKEN not in str(caught.value)
    assert hub.files == {}


def test_a_download_that_breaks_leaves_no_half_file(hub: FakeHub, saved: Path) -> None:
    push(plan_upload(saved, REPO))
    hub.faults = [("GET .*/adapter_model.safetensors", None)] * 30
    with pytest.raises(UserError, match="cannot be fetched from the Hub"):
        fetch(REPO)
    hub.faults = []
    fetched = fetch(REPO)
    assert all((fetched / name).read_bytes() == (saved / name).read_bytes() for name in FILES)


@pytest.mark.parametrize("status", [401, 403, 404, 503])
def test_what_the_hub_does_not_give_is_one_line(hub: FakeHub, status: int) -> None:
    hub.faults = [("GET|HEAD", status)] * 40
    with pytest.raises(UserError, match=f"'{REPO}' is no folder here and cannot be fetched from the Hub: ") as caught:
        fetch(REPO)
    assert "\n" not in str(caught.value) and TOKEN not in str(caught.value)


def test_from_pretrained_takes_a_revision_of_the_hub(hub: FakeHub, saved: Path) -> None:
    push(plan_upload(saved, REPO, revision="v2"))
    here, there = (
        LookaheadKV.from_pretrained(name, budget=8, revision=revision)
        for name, revision in ((str(saved), None), (REPO, "v2"))
    )
    assert any("/revision/v2" in request for request in hub.requests)
    model, prompt = tiny_model(), prompt_ids(40)[0]
    kept = [method.start(model, prompt).logits for method in (here, there)]
    assert torch.equal(*kept)
