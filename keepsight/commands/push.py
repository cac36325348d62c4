"""keepsight push: upload a lookahead adapter or a head to the Hugging Face Hub.

    keepsight push runs/adapter user/smollm2-135m-lookahead --dry-run
    keepsight push runs/adapter user/smollm2-135m-lookahead private=false

Only the files of the adapter or head are uploaded. The token comes from HF_TOKEN or `hf auth login`.
"""

from dataclasses import dataclass
from pathlib import Path

from keepsight.commands.config import Recipe
from keepsight.models.hub import plan_upload, push

POSITIONAL = ("folder", "repo")


@dataclass
class Config(Recipe):
    """Keys of `keepsight push`.

    Attributes:
        folder: The lookahead adapter, draft head or retrieval head.
        repo: user/name on the Hub; created if it does not exist.
        private: Create the repository as private, and refuse an existing public one.
        revision: Branch to push to; the repository's main one by default.
        dry_run: Print exactly what would be uploaded, and upload nothing.
    """

    folder: str = "???"
    repo: str = "???"
    private: bool = True
    revision: str | None = None
    dry_run: bool = False


def run(config: Config) -> None:
    """Show what is uploaded, then upload it."""
    upload = plan_upload(Path(config.folder), config.repo, private=config.private, revision=config.revision)
    print(upload.describe())
    print("dry run: nothing was uploaded" if config.dry_run else push(upload))
