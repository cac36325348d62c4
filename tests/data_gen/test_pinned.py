"""Data sets of the Hub that a mixture names by a branch: which commit is read, in a new run and in one that resumes."""

import json
import random
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from keepsight.data_gen import pinned as module
from keepsight.data_gen.hub_dataset import HubDataset
from keepsight.data_gen.pinned import commit_of, pinned
from keepsight.data_gen.prompts import Request
from keepsight.data_gen.store import DataSettings
from keepsight.errors import UserError

OLD, NEW = "c0ffee" * 6 + "c0ff", "beef" * 10
SOURCE = {"kind": "hub_dataset", "id": "ada/rows", "license": "mit", "prompt": "question"}


class Hub(ThreadingHTTPServer):
    """Says the commit of each branch of one data set, and its history, through the Hub's own interface."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.commits, self.asked = {"main": OLD, "v1": "1" * 40}, list[str]()


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        name = self.path.removeprefix("/api/datasets/ada/rows/").partition("?")[0]
        commit = self.server.commits.get(name.removeprefix("revision/"))
        found: Any = {"id": "ada/rows", "sha": commit} if commit else None
        if name == "commits/main":
            date = "2026-01-01T00:00:00.000Z"
            found = [{"id": each, "title": "", "message": "", "date": date, "authors": []} for each in (NEW, OLD)]
        body = json.dumps(found or {"error": "Revision Not Found"}).encode()
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        api = module.HfApi
        monkeypatch.setattr(module, "HfApi", lambda: api(endpoint=f"http://127.0.0.1:{server.server_port}"))
        yield server
        server.shutdown()


def begun(folder: Path, mixture: dict[str, Any]) -> None:
    settings = DataSettings("model", "version", "template", mixture, 0, 1, 1, 1)
    (folder / "manifest.json").write_text(json.dumps({"complete": False, "settings": asdict(settings)}))


def revisions(mixture: dict[str, Any]) -> list[str | None]:
    return [source.get("revision") for source in mixture["sources"]]


def test_branches_and_tags_become_commits(hub: Hub, tmp_path: Path) -> None:
    sources = [SOURCE, {**SOURCE, "revision": "v1"}, {**SOURCE, "revision": NEW}, {"kind": "needles"}]
    made = pinned({"max_tokens": 100, "sources": sources}, tmp_path)
    assert made["max_tokens"] == 100 and revisions(made) == [f"main@{OLD}", f"v1@{'1' * 40}", NEW, None]
    assert len(hub.asked) == 2


def test_the_start_of_a_commit_is_that_commit(hub: Hub, tmp_path: Path) -> None:
    mixture = {"sources": [{**SOURCE, "revision": OLD[:7]}]}
    first = pinned(mixture, tmp_path)
    assert revisions(first) == [f"{OLD[:7]}@{OLD}"] and len(hub.asked) == 1
    begun(tmp_path, first)
    assert pinned(mixture, tmp_path) == first and len(hub.asked) == 1


def test_a_tag_that_looks_like_the_start_of_a_commit_is_a_tag(hub: Hub, tmp_path: Path) -> None:
    hub.commits["20260101"] = NEW
    assert revisions(pinned({"sources": [{**SOURCE, "revision": "20260101"}]}, tmp_path)) == [f"20260101@{NEW}"]


def test_a_run_that_resumes_reads_the_rows_it_began_with(hub: Hub, tmp_path: Path) -> None:
    mixture = {"sources": [SOURCE, {**SOURCE, "revision": "v1"}]}
    first = pinned(mixture, tmp_path)
    begun(tmp_path, first)
    hub.commits["main"] = NEW
    hub.asked.clear()
    assert pinned(mixture, tmp_path) == first and not hub.asked
    assert revisions(pinned({"sources": [{**SOURCE, "revision": "main"}]}, tmp_path / "other")) == [f"main@{NEW}"]


def test_data_begun_without_the_hub_is_resumed_as_it_was_begun(hub: Hub, tmp_path: Path) -> None:
    begun(tmp_path, {"sources": [{**SOURCE, "revision": "main"}]})
    assert revisions(pinned({"sources": [SOURCE]}, tmp_path)) == ["main"] and not hub.asked


def test_a_revision_that_the_hub_does_not_know_stays_with_a_warning(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert revisions(pinned({"sources": [{**SOURCE, "revision": "v9"}]}, tmp_path)) == ["v9"]
    assert "data set ada/rows: the commit of v9 is unknown, its rows may change" in caplog.text


def test_folders_have_no_commit(hub: Hub, tmp_path: Path) -> None:
    mixture = {"sources": [{**SOURCE, "id": str(tmp_path)}]}
    assert pinned(mixture, tmp_path / "out") == mixture and not hub.asked


@pytest.mark.parametrize(
    ("revision", "asked"), [(f"main@{OLD}", OLD), (OLD, OLD), ("main", "main"), ("release@2", "release@2")]
)
def test_what_is_read_is_the_commit(revision: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def load_dataset(**options: Any) -> Any:
        given.update(options)
        raise ValueError("enough")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    source = HubDataset("ada/rows", "mit", revision=revision, prompt=f"column of {revision}")
    with pytest.raises(UserError, match="enough"):
        source.sample(Request(random.Random(0), 10, 10, len, 0, 0))
    assert given["revision"] == asked == commit_of(revision)
