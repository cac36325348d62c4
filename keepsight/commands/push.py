"""keepsight push: upload a lookahead adapter or a head to the Hugging Face Hub.

    keepsight push runs/adapter user/smollm2-135m-lookahead --dry-run
    keepsight push runs/adapter user/smollm2-135m-lookahead --public

Only the files of the adapter or head are uploaded, and PNG pictures beside them; links and hidden files are left out.
The repository is private unless --public is given. The token comes from HF_TOKEN or `hf auth login`.
"""

from dataclasses import dataclass
from pathlib import Path

from keepsight.models.hub import plan_upload, push

POSITIONAL = ("folder", "repo")


@dataclass
class Config:
    """Keys of `keepsight push`.

    Attributes:
        folder: The lookahead adapter, draft head or retrieval head.
        repo: user/name on the Hub; created if it does not exist.
        public: Create the repository as public, or push to one that is; otherwise it must be private.
        revision: Branch to push to; the repository's main one by default.
        dry_run: Print exactly what would be uploaded, and upload nothing.
    """

    folder: str = "???"
    repo: str = "???"
    public: bool = False
    revision: str | None = None
    dry_run: bool = False


def run(config: Config) -> None:
    """Show what is uploaded, then upload it."""
    upload = plan_upload(Path(config.folder), config.repo, public=config.public, revision=config.revision)
    print(upload.describe())
    print("dry run: nothing was uploaded" if config.dry_run else push(upload))
