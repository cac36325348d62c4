"""Every artifact: saved whole, verified when it is loaded, pushed and fetched; the Hub's part is played by a server."""

import copy
import hashlib
import itertools
import os
import pickle
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, constants
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from keepsight import LookaheadKV, SpeContext
from keepsight.errors import Code, UserError
from keepsight.files import file_digest, read_json, write_json
from keepsight.models.artifacts import Artifact, fetch, read_tensors
from keepsight.models.card import CardBasics, Provenance, with_evaluation
from keepsight.models.draft_head import DraftHead
from keepsight.models.hub import ARTIFACTS, Upload, kind_of, plan_upload, push
from keepsight.models.identity import Identity
from keepsight.models.lookahead import LookaheadAdapter
from tests.models.conftest import PNG, TOKEN
from tests.models.fake_hub import COMMIT, REPO, FakeHub
from tests.models.modules import random_module
from tests.models.public_heads import EAGLE1, LLAMA3, eagle1_tensors, eagle3_tensors, write_head, write_pickled_head
from tests.models.retrieval_heads import tiny_retrieval_head
from tests.refused import refused
from tests.tiny import tiny_model

KINDS = {kind.kind: kind for kind in ARTIFACTS}
FILE_WITH_DIGESTS = {
    "lookahead adapter": "lookahead_config.json",
    "draft head": "keepsight.json",
    "retrieval head": "retrieval_config.json",
}
ALL_FILES = [(kind, name) for kind in KINDS for name in KINDS[kind].files]
WEIGHTS = [(kind, name) for kind, name in ALL_FILES if name.endswith(".safetensors")]
FILES = LookaheadAdapter.files
ORIGIN = Provenance("ada/tiny", Identity("v1", "sha256:t", None, "sha256:d"), {"steps": 3}, "0.1.0")


def save_artifact(kind: str, folder: Path, seed: int = 7) -> Artifact:
    """Save an artifact of a kind, and return it."""
    torch.manual_seed(seed)
    artifact: Any
    if kind == "draft head":
        artifact = DraftHead(LlamaConfig.from_dict(LLAMA3))
    elif kind == "retrieval head":
        artifact = tiny_retrieval_head(seed=seed)
    else:
        artifact = random_module(seed=seed).adapter()
    artifact.save(folder, ORIGIN, "---\nlicense: apache-2.0\n---\n# Card\n")
    return artifact


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def record_digests_again(kind: str, folder: Path) -> None:
    """Those of the files as they are, as when a bad file was saved to begin with."""
    path = folder / FILE_WITH_DIGESTS[kind]
    config = read_json(path)
    for name in config["digests"]:
        config["digests"][name] = file_digest(folder / name)
    write_json(path, config)


def cannot_be_loaded(folder: Path, field: str, code: Code) -> None:
    with refused(field, code) as error:
        kind_of(folder).load(folder)
    assert str(error.value).startswith(str(folder))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_folder_holds_the_documented_files_and_comes_back(kind: str, tmp_path: Path) -> None:
    """Also through a pickle and a copy."""
    artifact = save_artifact(kind, tmp_path)
    cls = KINDS[kind]
    assert {path.name for path in tmp_path.iterdir()} == {*cls.files, *cls.optional, "README.md"}
    loaded = cls.load(tmp_path)
    for same in (loaded, pickle.loads(pickle.dumps(loaded)), copy.deepcopy(loaded)):
        assert type(same) is type(artifact)
        assert same.provenance == ORIGIN
        same.save_pretrained(tmp_path / "again")
        for name in cls.files:
            if name.endswith(".safetensors"):
                assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_a_used_adapter_can_be_pickled() -> None:
    """Its copies on models' devices stay behind."""
    artifact = random_module().adapter()
    model = tiny_model()
    with artifact.attached(model) as tokens:
        unpickled = pickle.loads(pickle.dumps(artifact))
    with unpickled.attached(model) as unpickled_tokens:
        assert torch.equal(unpickled_tokens, tokens)
        assert unpickled_tokens is not tokens


def test_a_device_a_pipe_or_a_socket_is_neither_written_to_nor_replaced(kind: str, tmp_path: Path) -> None:
    artifact = save_artifact(kind, tmp_path / "saved")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "out").mkdir()
    pipe_in_folder = tmp_path / "out" / KINDS[kind].files[-1]
    os.mkfifo(pipe_in_folder)
    for folder in (Path("/dev/null"), tmp_path / "pipe", tmp_path / "out"):
        with pytest.raises(UserError, match="not a regular file"):
            artifact.save(folder, ORIGIN)
    assert Path("/dev/null").is_char_device()
    assert pipe_in_folder.is_fifo()
    assert [*(tmp_path / "out").iterdir()] == [pipe_in_folder]


def test_a_failed_write_changes_nothing(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = save_artifact(kind, tmp_path)
    (tmp_path / "training.png").write_bytes(b"picture")
    files = contents(tmp_path)

    def fail_for_lack_of_space(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(f"{type(artifact).__module__}.write_json", fail_for_lack_of_space)
        save_artifact(kind, tmp_path, seed=8)
    assert contents(tmp_path) == files
    save_artifact(kind, tmp_path, seed=8)
    assert (tmp_path / "training.png").read_bytes() == b"picture"


@pytest.mark.parametrize(("kind", "name"), ALL_FILES)
def test_a_missing_file_is_named(kind: str, name: str, tmp_path: Path) -> None:
    save_artifact(kind, tmp_path)
    (tmp_path / name).unlink()
    cannot_be_loaded(tmp_path, name, "missing")
    with refused(name, "missing"):
        plan_upload(tmp_path, REPO)


@pytest.mark.parametrize(("kind", "name"), WEIGHTS)
def test_changed_weights_are_refused(kind: str, name: str, tmp_path: Path) -> None:
    save_artifact(kind, tmp_path)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    cannot_be_loaded(tmp_path, name, "file")


FAULTS = ["no safetensors file", "NaN", "int8"]


@pytest.mark.parametrize(("weights", "fault"), zip(itertools.cycle(WEIGHTS), FAULTS * 2, strict=False))
def test_bad_weights_with_a_right_digest_are_refused(weights: tuple[str, str], fault: str, tmp_path: Path) -> None:
    kind, name = weights
    save_artifact(kind, tmp_path)
    path = tmp_path / name
    if fault == "no safetensors file":
        field = name
        path.write_bytes(b"\x80\x04N.")
    else:
        tensors = load_file(path)
        field = next(tensor_name for tensor_name, tensor in tensors.items() if tensor.is_floating_point())
        tensors[field] = tensors[field].to(torch.int8) if fault == "int8" else tensors[field].fill_(torch.nan)
        save_file(tensors, path)
    record_digests_again(kind, tmp_path)
    cannot_be_loaded(tmp_path, field, "file")
    with refused(field, "file"):
        plan_upload(tmp_path, REPO)


CONTENTS = ["{}", "{", "[" * 100_000, '{"a":' * 100_000, "NaN", "1e999", '"\\ud800"']


@pytest.mark.parametrize(("kind", "content"), zip(itertools.cycle(KINDS), CONTENTS, strict=False))
def test_a_configuration_that_is_none_is_named(kind: str, content: str, tmp_path: Path) -> None:
    save_artifact(kind, tmp_path)
    path = tmp_path / KINDS[kind].files[-1]
    for encoding in ("utf-8", "utf-16"):
        path.write_text(content, encoding=encoding)
        cannot_be_loaded(tmp_path, path.name, "file")


def test_a_configuration_with_a_byte_order_mark_is_read(kind: str, tmp_path: Path) -> None:
    save_artifact(kind, tmp_path)
    path = tmp_path / KINDS[kind].files[-1]
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    KINDS[kind].load(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"X4","shape":[8],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}',
        '{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}',
        '{"a":' * 1000,
        "[]",
    ],
)
def test_a_bad_header_of_tensors_is_one_line(header: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for length in (len(header), len(header) + 1000, 2**63):
        path.write_bytes(length.to_bytes(8, "little") + header.encode() + bytes(4))
        with refused("model.safetensors", "file") as error:
            read_tensors(path)
        assert len(str(error.value)) < 400


# Cards


@pytest.mark.parametrize(
    ("base", "license_of_user", "lines"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", None, ["license: llama3.1"]),
        ("meta-llama/Llama-3.1-8B-Instruct", "mit", ["license: mit"]),
        ("ada/tiny", None, ["license: other", "license_link: https://huggingface.co/ada/tiny"]),
        ("target", None, ["license: other", "license_name: license-of-the-base-model"]),
    ],
)
def test_the_card_has_the_licence_of_the_base_model(base: str, license_of_user: str | None, lines: list[str]) -> None:
    basics = CardBasics("Tiny", Provenance(base), license=license_of_user)
    card = tiny_retrieval_head().card(basics).splitlines()
    assert set(lines) <= set(card)
    assert sum(line.startswith("license: ") for line in card) == 1
    is_on_hub = "/" in base
    assert any(line.startswith("base_model: ") for line in card) == is_on_hub


def test_the_card_describes_the_training_and_escapes_names_from_outside(kind: str, tmp_path: Path) -> None:
    sources = {"essays": 7, "a|b\n<script>{{ 1 }}": 1}
    basics = CardBasics("Tiny\nmodel", ORIGIN, sources, "Public domain.")
    card = save_artifact(kind, tmp_path).card(basics, "| kl | 2.5 |")
    lines = card.splitlines()
    assert "# Tiny model" in lines
    assert "- steps: 3" in lines
    assert "Samples by source: essays (7); a\\|b \\<script>{{ 1 }} (1)." in lines
    assert "Public domain." in lines
    assert "| kl | 2.5 |" in lines
    assert "`v1`" in card
    evaluated = with_evaluation(with_evaluation(card, "| first |"), "| second |")
    assert evaluated.startswith(card)
    assert evaluated.count("## Evaluation") == 1
    assert "| first |" not in evaluated


def markup_of(lines: list[str]) -> list[tuple[bool, bool, bool]]:
    """Which lines are headings, fences of code, and fences of metadata."""
    return [(line.startswith("#"), line.startswith("```"), line == "---") for line in lines]


@pytest.mark.parametrize(
    "hostile",
    ["\n---\nlicense: mit\n---\n# A", "a\\|b|c", '`"\n```\n# A', "\x1b[2J\r\u202e", "[a](javascript:b)", "\ud800"],
)
def test_no_text_from_outside_breaks_a_card(kind: str, hostile: str, tmp_path: Path) -> None:
    """Its metadata are YAML, its tables have their columns, its headings and code are its own."""
    artifact = save_artifact(kind, tmp_path)
    harmless_origin = Provenance("ada/x", Identity("v", "t", "a", "d"), {"a": "b"}, "0")
    expected_lines = artifact.card(CardBasics("Of", harmless_origin, {"x": 3})).splitlines()

    identity = Identity(hostile, hostile, hostile, hostile)
    origin = Provenance(f"ada/x{hostile}", identity, {hostile: hostile}, hostile)
    card = artifact.card(CardBasics(f"Of {hostile}", origin, {hostile: 3}))
    lines = card.splitlines()
    assert markup_of(lines) == markup_of(expected_lines)
    assert ModelCard(card).data.get("license") == "other"
    (line_of_sources,) = [line for line in lines if line.startswith("Samples by source: ") and line.endswith(" (3).")]
    assert "](" not in line_of_sources
    assert "".join(lines).isprintable()


# Push


@pytest.fixture
def adapter(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    copy = tmp_path / "adapter"
    copy.mkdir()
    for path in saved.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    return copy


def files_to_push(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in (*FILES, "README.md", "loss.png")}


def test_push_sends_the_adapters_files_and_nothing_else(
    hub: FakeHub, saved: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    upload = plan_upload(saved, REPO)
    description = upload.describe()
    assert hub.requests == []
    assert f"to {hub.url}/{REPO} (private" in description
    for name, data in files_to_push(saved).items():
        line = next(line for line in description.splitlines() if line.endswith(f"  {saved / name}"))
        assert f"{len(data):,} bytes  sha256:{hashlib.sha256(data).hexdigest()}" in line
    assert upload.left_out == ("checkpoint-10", "pytorch_model.bin", "secret.txt")

    assert push(upload) == f"{hub.url}/{REPO}/commit/{COMMIT}"
    assert hub.files == files_to_push(saved)
    assert hub.created["visibility"] == "private"
    tokens = [token for route, token in hub.tokens.items() if REPO in route or "/repos/" in route]
    assert len(tokens) >= 4
    assert set(tokens) == {f"Bearer {TOKEN}"}
    output, errors = capfd.readouterr()
    assert TOKEN not in output + errors + description

    hub.exists_in_public = True
    hub.files = {}
    with refused("public", "conflict"):
        push(upload)
    assert hub.files == {}
    push(plan_upload(saved, REPO, public=True))
    assert hub.files == files_to_push(saved)


def test_links_hidden_files_and_other_content_are_left_out(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(PNG)
    (adapter / "linked.png").symlink_to(tmp_path / "secret.png")
    (adapter / ".hidden.png").write_bytes(PNG)
    (adapter / "text.png").write_text("password")
    (adapter / "folder.png").mkdir()
    (adapter / "line\n\x1b[2Jbreak").write_text("")
    upload = plan_upload(adapter, REPO)
    assert upload.files == (*FILES, "README.md", "loss.png")
    assert {"linked.png", ".hidden.png", "text.png", "folder.png"} <= {*upload.left_out}
    description = upload.describe()
    assert "\x1b" not in description
    assert r"line\n\x1b[2Jbreak" in description

    elsewhere = tmp_path / "elsewhere"
    for name in (FILES[1], "README.md"):
        (adapter / name).rename(elsewhere)
        (adapter / name).symlink_to(elsewhere)
        with pytest.raises(UserError, match=f"{re.escape(name)}: only regular files are sent"):
            plan_upload(adapter, REPO)
        (adapter / name).unlink()
        elsewhere.rename(adapter / name)
    (adapter / "README.md").unlink()
    with refused("README.md", "missing"):
        plan_upload(adapter, REPO)


def test_push_needs_a_token_and_a_hub(
    hub: FakeHub, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for repo_id in ("adapter", "ada/../x", "https://hub/ada/x"):
        with refused("artifact", "unknown"):
            plan_upload(saved, repo_id)
    with refused("folder", "missing"):
        plan_upload(tmp_path, REPO)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with refused("artifact", "service") as caught:
        push(Upload(saved, REPO, FILES, ()))
    assert TOKEN not in str(caught.value)
    with refused("artifact", "service"):
        fetch(REPO)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with refused("HF_TOKEN", "missing"):
        push(plan_upload(saved, REPO))
    assert hub.requests == []


def test_every_artifact_is_pushed_and_fetched(
    hub: FakeHub, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "saved"
    save_artifact(kind, saved)
    push(plan_upload(saved, REPO))
    fetched = fetch(REPO)
    assert kind_of(fetched) is KINDS[kind]
    assert contents(fetched) == hub.files
    requests = len(hub.requests)
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert fetch(REPO) == fetched
    assert len(hub.requests) == requests

    artifact = KINDS[kind].from_pretrained(saved)
    hub.files = {}
    artifact.push_to_hub(REPO)
    assert hub.created["visibility"] == "private"
    assert hub.files.keys() == {*artifact.files, *artifact.optional, "README.md"}
    assert f'from_pretrained("{REPO}"' in hub.files["README.md"].decode()
    assert "OR_HUB_ID" not in str(hub.files)
    constants.HF_HUB_CACHE = str(tmp_path / "other cache")
    assert KINDS[kind].from_pretrained(REPO).provenance == ORIGIN


# Fetch


def test_fetched_names_stay_in_their_folder(hub: FakeHub, saved: Path, tmp_path: Path) -> None:
    folders_beside = set(tmp_path.parent.iterdir())
    escapes = ("../escape.png", "../../../../escape.png", "/escape.png", "sub/README.md", "adapter_model.bin")
    hub.files = files_to_push(saved) | dict.fromkeys(escapes, b"\x80\x04N.")
    fetched = fetch(REPO)
    assert {path.name for path in fetched.rglob("*")} == {*FILES, "README.md"}
    assert not [*tmp_path.rglob("escape*")]
    assert set(tmp_path.parent.iterdir()) == folders_beside


def test_unknown_references_are_named(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    codes: dict[str, Code] = {
        "ada/unknown": "service",
        "no/such/folder": "unknown",
        str(tmp_path / "file"): "file",
        "shipped:../../x": "unknown",
    }
    for reference, code in codes.items():
        with refused("artifact", code) as error:
            fetch(reference)
        assert reference in str(error.value)


def test_public_heads_are_fetched_also_as_a_pickle(hub: FakeHub, tmp_path: Path) -> None:
    write_head(tmp_path / "public", EAGLE1, eagle1_tensors(EAGLE1))
    (tmp_path / "public" / "README.md").write_text("# Card")
    push(plan_upload(tmp_path / "public", REPO))
    assert hub.files.keys() == {"config.json", "model.safetensors", "README.md"}
    hub.files = contents(write_pickled_head(tmp_path / "pickled"))
    constants.HF_HUB_CACHE = str(tmp_path / "other cache")
    head = DraftHead.from_pretrained(REPO)
    assert torch.equal(head.lm_head.weight, eagle3_tensors(LLAMA3)["lm_head.weight"])


@pytest.mark.parametrize("method", [LookaheadKV, SpeContext])
def test_shipped_artifacts_are_named_in_python(method: Any) -> None:
    kind = "lookahead" if method is LookaheadKV else "retrieval"
    assert method.from_pretrained(f"shipped:smollm2-135m-{kind}", budget=128).budget == 128
    with refused("artifact", "unknown"):
        fetch("shipped:none")


# A Hub that fails

COMMIT_ROUTE = "POST /api/models/.*/commit/"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's pauses between tries take no time."""
    monkeypatch.setattr(time, "sleep", lambda _: None)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("route", "status"), [("POST /api/repos/create", 403), (COMMIT_ROUTE, 500), (COMMIT_ROUTE, None)]
)
def test_a_refusal_is_one_line_and_the_next_push_succeeds(
    hub: FakeHub, saved: Path, route: str, status: int | None
) -> None:
    hub.faults = [(route, status)] * 12  # more often than the client tries
    with refused("artifact", "service") as caught:
        push(plan_upload(saved, REPO))
    assert TOKEN not in str(caught.value)
    assert hub.files == {}, "a commit is all or nothing"
    hub.faults = [("POST /api/repos/create", 409), ("PUT /lfs/", 503)]  # another push made it; busy once
    hub.created = {"visibility": "private"}
    push(plan_upload(saved, REPO))
    assert set(FILES) < set(hub.files)


@pytest.mark.usefixtures("impatient")
def test_a_download_that_breaks_leaves_no_half_file(hub: FakeHub, saved: Path) -> None:
    push(plan_upload(saved, REPO))
    for fault in (("GET|HEAD", 401), ("GET .*/adapter_model.safetensors", None)):
        hub.faults = [fault] * 40
        with refused("artifact", "service") as caught:
            fetch(REPO)
        assert TOKEN not in str(caught.value)
    hub.faults = []
    fetched = fetch(REPO)
    for name in FILES:
        assert (fetched / name).read_bytes() == (saved / name).read_bytes()
