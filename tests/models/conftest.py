"""A Hub on the loopback, and an adapter to push there."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from keepsight.models.card import Provenance
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from tests.models.fake_hub import FakeHub
from tests.tiny import tiny_model

TOKEN = "hf_secretsecretsecret"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with FakeHub() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        for name, value in {
            "ENDPOINT": server.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_OFFLINE": False,
        }.items():
            monkeypatch.setattr(constants, name, value)
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter as training leaves it, with things beside it that are nobody else's business."""
    folder = tmp_path_factory.mktemp("runs") / "adapter"
    module = Lookahead(tiny_model(), LookaheadSettings(tokens=4, rank=2))
    module.adapter().save(folder, Provenance("ada/tiny"), "---\nlicense: apache-2.0\n---\n# Card\n")
    (folder / "loss.png").write_bytes(PNG)
    (folder / "secret.txt").write_text("password")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    (folder / "checkpoint-10").mkdir()
    (folder / "checkpoint-10" / "plot.png").write_bytes(PNG)
    return folder
