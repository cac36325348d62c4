"""Push and fetch against a local server that plays the Hub's part."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from transformers import LlamaConfig

from keepsight.commands import report
from keepsight.commands.config import Push
from keepsight.commands.parse import parse
from keepsight.errors import UserError
from keepsight.models.card import CardBasics
from keepsight.models.draft_head import DraftHead
from keepsight.models.draft_head_card import draft_head_card
from keepsight.models.draft_head_files import save_draft_head
from keepsight.models.hub import Upload, fetch, kind_of, plan_upload, push
from keepsight.models.lookahead_card import lookahead_card
from keepsight.models.lookahead_files import FILES, Provenance, load_lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.models.retrieval_head import RetrievalHead
from keepsight.models.retrieval_head_files import save_retrieval_head
from keepsight.runtime.methods import LookaheadKV, SpeContext
from tests.models.conftest import PNG, TOKEN
from tests.models.fake_hub import COMMIT, REPO, FakeHub
from tests.models.public_heads import EAGLE1, LLAMA3, eagle1_tensors, eagle3_tensors, write_head


@pytest.fixture
def adapter(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    copy = tmp_path / "adapter"
    copy.mkdir()
    for path in saved.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    return copy


def _expected(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in (*FILES, "README.md", "loss.png")}


def test_push_sends_the_adapters_files_and_nothing_else(
    hub: FakeHub, saved: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url = push(plan_upload(saved, REPO))

    assert url == f"{hub.url}/{REPO}/commit/{COMMIT}"
    assert hub.files == _expected(saved)
    assert set(hub.blobs.values()) <= set(hub.files.values())
    about_the_repository = {route: token for route, token in hub.tokens.items() if REPO in route or "/repos/" in route}
    assert len(about_the_repository) >= 4
    assert set(about_the_repository.values()) == {f"Bearer {TOKEN}"}
    assert TOKEN not in "".join(capfd.readouterr())


def test_push_to_a_branch_of_a_private_repository(hub: FakeHub, saved: Path) -> None:
    upload = plan_upload(saved, REPO, revision="v2")
    push(upload)

    assert hub.created["visibility"] == "private"
    assert f"POST /api/models/{REPO}/branch/v2" in hub.requests
    assert f"POST /api/models/{REPO}/commit/v2" in hub.requests
    assert upload.url == f"{hub.url}/{REPO}/tree/v2"


def test_private_push_refuses_a_public_repository(hub: FakeHub, saved: Path) -> None:
    hub.exists_in_public = True
    with pytest.raises(UserError, match="is public"):
        push(plan_upload(saved, REPO))
    assert hub.files == {}


def test_the_card_that_is_sent_names_the_repository(hub: FakeHub, adapter: Path) -> None:
    card = lookahead_card(CardBasics("Tiny", Provenance("ada/tiny")), LookaheadSettings(), {})
    (adapter / "README.md").write_text(card)
    assert 'LookaheadKV.from_pretrained("FOLDER_OR_HUB_ID", budget=128)' in card
    upload = plan_upload(adapter, REPO)
    push(upload)

    sent = hub.files["README.md"].decode()
    assert f'LookaheadKV.from_pretrained("{REPO}", budget=128)' in sent
    assert "FOLDER_OR_HUB_ID" not in sent
    assert f"{len(sent.encode()):,} bytes  sha256:{hashlib.sha256(sent.encode()).hexdigest()}" in upload.describe()
    assert (adapter / "README.md").read_text() == card


def test_push_makes_private_repositories_unless_told_otherwise(hub: FakeHub, adapter: Path) -> None:
    report.push(parse(Push, [f"folder={adapter}", f"repo={REPO}"]))
    assert hub.created["visibility"] == "private"


@pytest.mark.parametrize(
    ("base", "given", "lines"),
    [
        ("Qwen/Qwen3-8B", None, ["base_model: Qwen/Qwen3-8B", "license: apache-2.0"]),
        ("meta-llama/Llama-3.1-8B-Instruct", None, ["license: llama3.1"]),
        ("meta-llama/Llama-3.1-8B-Instruct", "mit", ["license: mit"]),
        ("ada/tiny", None, ["license: other", "license_link: https://huggingface.co/ada/tiny"]),
        ("target", None, ["license: other", "license_name: license-of-the-base-model"]),
    ],
)
def test_the_card_has_the_licence_of_the_base_model(base: str, given: str | None, lines: list[str]) -> None:
    card = lookahead_card(CardBasics("Tiny", Provenance(base), license=given), LookaheadSettings(), {}).splitlines()
    assert set(lines) <= set(card)
    assert sum(line.startswith("license: ") for line in card) == 1
    assert any(line.startswith("base_model: ") for line in card) == ("/" in base)


def test_public_push_makes_a_public_repository_and_takes_one(hub: FakeHub, saved: Path) -> None:
    push(plan_upload(saved, REPO, public=True))
    assert hub.created.get("visibility", "public") == "public"
    hub.exists_in_public, hub.files = True, {}
    push(plan_upload(saved, REPO, public=True))
    assert hub.files == _expected(saved)


def test_links_hidden_files_and_what_is_no_picture_are_left_out(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(PNG)
    (adapter / "linked.png").symlink_to(tmp_path / "secret.png")
    (adapter / ".hidden.png").write_bytes(PNG)
    (adapter / "text.png").write_text("password")
    (adapter / "folder.png").mkdir()
    upload = plan_upload(adapter, REPO)
    assert upload.files == (*FILES, "README.md", "loss.png")
    assert {"linked.png", ".hidden.png", "text.png", "folder.png"} <= {*upload.left_out}


@pytest.mark.parametrize("name", [*FILES, "README.md"])
def test_a_link_in_place_of_an_adapters_file_is_refused(adapter: Path, tmp_path: Path, name: str) -> None:
    (adapter / name).rename(tmp_path / "elsewhere")
    (adapter / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"{re.escape(name)}: a link, and only regular files are sent"):
        plan_upload(adapter, REPO)


def test_plan_names_each_file_and_sends_nothing(hub: FakeHub, saved: Path) -> None:
    upload = plan_upload(saved, REPO)
    text = upload.describe()

    assert hub.requests == []
    assert TOKEN not in text
    assert f"to {hub.url}/{REPO} " in text
    for name, data in _expected(saved).items():
        line = next(line for line in text.splitlines() if line.endswith(f"  {saved / name}"))
        assert f"{len(data):,} bytes" in line
        assert f"sha256:{hashlib.sha256(data).hexdigest()}" in line
    assert upload.left_out == ("checkpoint-10", "pytorch_model.bin", "secret.txt")


def test_push_needs_a_token(hub: FakeHub, saved: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(UserError, match="HF_TOKEN"):
        push(plan_upload(saved, REPO))
    assert hub.requests == []


@pytest.mark.parametrize("name", [*FILES, "README.md"])
def test_an_incomplete_adapter_is_refused(adapter: Path, name: str) -> None:
    (adapter / name).unlink()
    with pytest.raises(UserError, match=re.escape(name)):
        plan_upload(adapter, REPO)


def test_a_pickle_under_an_adapters_name_is_refused(adapter: Path) -> None:
    pickle, config = adapter / "adapter_model.safetensors", adapter / "lookahead_config.json"
    pickle.write_bytes(b"\x80\x04N.")
    settings = json.loads(config.read_text())
    settings["digests"][pickle.name] = f"sha256:{hashlib.sha256(pickle.read_bytes()).hexdigest()}"
    del settings["_sha256"]
    config.write_text(json.dumps(settings))
    with pytest.raises(UserError, match="not a safetensors file"):
        plan_upload(adapter, REPO)


@pytest.mark.parametrize("repo_id", ["adapter", "a/b/c", "ada/../x", "https://hub/ada/x", ""])
def test_a_wrong_repository_name_is_refused(saved: Path, repo_id: str) -> None:
    with pytest.raises(UserError, match="user/name"):
        plan_upload(saved, repo_id)


def test_what_was_pushed_is_fetched(hub: FakeHub, saved: Path) -> None:
    push(plan_upload(saved, REPO))
    fetched = fetch(REPO)

    names = (*FILES, "README.md")
    assert {path.name: path.read_bytes() for path in fetched.iterdir()} == {n: (saved / n).read_bytes() for n in names}
    assert load_lookahead(fetched).digest == load_lookahead(saved).digest


def test_fetched_names_stay_in_their_folder(hub: FakeHub, saved: Path, tmp_path: Path) -> None:
    before = set(tmp_path.parent.iterdir())
    escapes = ("../escape.png", "../../../../escape.png", "/escape.png", "sub/README.md", "adapter_model.bin")
    hub.files = _expected(saved) | dict.fromkeys(escapes, b"\x80\x04N.")
    fetched = fetch(REPO)

    assert {path.name for path in fetched.rglob("*")} == {*FILES, "README.md"}
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith("escape")]
    assert set(tmp_path.parent.iterdir()) == before


def test_offline_uses_the_cache(hub: FakeHub, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = _expected(saved)
    fetched = fetch(REPO)
    requests = len(hub.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    assert fetch(REPO) == fetched
    assert len(hub.requests) == requests


def test_a_local_folder_is_taken_as_it_is(hub: FakeHub, saved: Path) -> None:
    assert fetch(str(saved)) == saved
    assert hub.requests == []


@pytest.mark.parametrize("reference", ["ada/unknown", "no/such/folder", "adapter-without-user"])
def test_what_cannot_be_found_is_named(hub: FakeHub, reference: str) -> None:
    with pytest.raises(UserError, match=re.escape(repr(reference))) as caught:
        fetch(reference)
    assert "\n" not in str(caught.value)


def test_a_hub_that_does_not_answer(saved: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="cannot push") as caught:
        push(Upload(saved, REPO, FILES, ()))
    assert TOKEN not in str(caught.value)
    with pytest.raises(UserError, match="cannot be fetched"):
        fetch(REPO)


def head_folder(kind: str, folder: Path) -> tuple[Path, tuple[str, ...]]:
    """A head of a kind, with things beside it, and the names of its own files."""
    if kind == "public draft head":
        write_head(folder, EAGLE1, eagle1_tensors(EAGLE1))
        (folder / "README.md").write_text("# Card")
        names: tuple[str, ...] = ("config.json", "model.safetensors", "README.md")
    elif kind == "draft head":
        provenance = Provenance("ada/tiny", training={"steps": 3})
        basics = CardBasics("Tiny", provenance, {"essays": 7}, "Public domain.", "apache-2.0")
        card = draft_head_card(basics, {"eval_acceptance_length": 2.5})
        save_draft_head(DraftHead(LlamaConfig.from_dict(LLAMA3)), folder, provenance, card)
        names = ("config.json", "model.safetensors", "keepsight.json", "README.md")
    else:
        head = RetrievalHead.from_draft(DraftHead(LlamaConfig.from_dict(LLAMA3)), "none")
        save_retrieval_head(head, folder, Provenance("ada/tiny"), "# Card")
        names = ("retrieval_head.safetensors", "retrieval_config.json", "README.md")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    (folder / "training").mkdir()
    return folder, names


@pytest.mark.parametrize("kind", ["public draft head", "draft head", "retrieval head"])
def test_heads_are_pushed_and_fetched_too(hub: FakeHub, tmp_path: Path, kind: str) -> None:
    folder, names = head_folder(kind, tmp_path / "head")
    upload = plan_upload(folder, REPO)
    assert kind.endswith(kind_of(folder).name)
    assert upload.files == names
    assert upload.left_out == ("pytorch_model.bin", "training")
    push(upload)

    assert hub.files == {name: (folder / name).read_bytes() for name in names} | {"README.md": upload.card().encode()}
    fetched = fetch(REPO)
    assert {path.name: path.read_bytes() for path in fetched.iterdir()} == hub.files
    kind_of(fetched).check(fetched)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "README.md"])
def test_an_incomplete_head_is_refused(tmp_path: Path, name: str) -> None:
    folder, _ = head_folder("draft head", tmp_path)
    (folder / name).unlink()
    with pytest.raises(UserError, match=re.escape("pytorch_model.bin" if name.startswith("model") else name)):
        plan_upload(folder, REPO)


def test_a_spoilt_head_is_refused(tmp_path: Path) -> None:
    tensors = eagle3_tensors(LLAMA3)
    tensors["fc.weight"][0] = float("nan")
    write_head(tmp_path, LLAMA3, tensors)
    (tmp_path / "README.md").write_text("# Card")
    with pytest.raises(UserError, match=r"tensor 'fc\.weight' holds NaN"):
        plan_upload(tmp_path, REPO)


def test_a_folder_of_no_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Card")
    with pytest.raises(
        UserError, match=r"holds nothing that can be pushed .*draft head: config\.json, model\.safetens"
    ):
        plan_upload(tmp_path, REPO)


def test_a_head_that_is_a_pickle_on_the_hub_is_refused_with_what_to_do(hub: FakeHub) -> None:
    hub.files = {"config.json": json.dumps(LLAMA3).encode(), "pytorch_model.bin": b"\x80\x04N."}
    with pytest.raises(
        UserError, match=f"{REPO}: has no model.safetensors.*keepsight convert {REPO} out=HEAD"
    ) as caught:
        fetch(REPO)
    assert "\n" not in str(caught.value)
    assert not [request for request in hub.requests if "pytorch_model.bin" in request]


def test_the_card_of_a_draft_head_says_what_it_is_and_how_it_fares(tmp_path: Path) -> None:
    folder, _ = head_folder("draft head", tmp_path)
    lines = (folder / "README.md").read_text().splitlines()
    assert lines[:2] == ["---", "base_model: ada/tiny"]
    measured = "| acceptance_length | 2.5000 |"
    for line in ("# Tiny", "license: apache-2.0", "- steps: 3", "| essays | 7 |", "Public domain.", measured):
        assert line in lines
    assert not [line for line in lines if "{" in line]


@pytest.mark.parametrize("make", [LookaheadKV, SpeContext], ids=["adapter", "retrieval head"])
def test_what_keepsight_ships_is_named_in_python(make: Any) -> None:
    kind = "lookahead" if make is LookaheadKV else "retrieval"
    method = make.from_pretrained(f"shipped:smollm2-135m-{kind}", budget=128)
    assert method.budget == 128
    assert fetch(f"shipped:smollm2-135m-{kind}").name == f"smollm2-135m-{kind}"


def test_what_keepsight_does_not_ship_is_refused() -> None:
    with pytest.raises(UserError, match=r"^shipped:none: keepsight ships no such artifact; it ships smollm2-135m-look"):
        fetch("shipped:none")
