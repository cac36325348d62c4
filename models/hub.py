"""Push artifacts to the Hugging Face Hub, or to the server that HF_ENDPOINT names; only their own files are sent."""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, get_token

from keepsight.errors import UserError, printable
from keepsight.files import at_home, bytes_digest, file_digest
from keepsight.models.artifacts import STAGE_SETTINGS, Artifact, check_repo_id, hub_errors
from keepsight.models.card import CARD, HUB_ID, read_card
from keepsight.models.draft_head import EagleHead
from keepsight.models.lookahead import LookaheadAdapter
from keepsight.models.retrieval_head import RetrievalHead

ARTIFACTS: tuple[type[Artifact], ...] = (LookaheadAdapter, EagleHead, RetrievalHead)
_PNG = b"\x89PNG\r\n\x1a\n"


def kind_of(folder: Path) -> type[Artifact]:
    """The kind of artifact in a folder: the one with most of its required files there.

    Raises:
        UserError: it has no file of any kind.
    """
    best_kind = None
    most_files = 0
    for kind in ARTIFACTS:
        files = sum((folder / name).is_file() for name in kind.files)
        if files > most_files:
            best_kind = kind
            most_files = files
    if best_kind is None:
        kinds = "; ".join(f"{kind.kind}: {', '.join(kind.files)}" for kind in ARTIFACTS)
        raise UserError(
            f"{folder}: has nothing that can be pushed ({kinds}); name the folder that training wrote",
            field="folder",
            code="missing",
        )
    return best_kind


@dataclass(frozen=True)
class Upload:
    """The destination and the files of a push.

    Attributes:
        folder: The artifact.
        repo_id: `user/name` on the Hub.
        files: Names of the files to send, all directly inside `folder`.
        left_out: Names of the files and folders that are not sent.
        public: Whether the repository may be public.
        revision: The branch; None for the main branch.
    """

    folder: Path
    repo_id: str
    files: tuple[str, ...]
    left_out: tuple[str, ...]
    public: bool = False
    revision: str | None = None

    def card(self) -> str:
        """The card as it is sent: it names the repository."""
        return read_card(self.folder).replace(HUB_ID, self.repo_id)

    def describe(self) -> str:
        """A line that names the destination, and one for each file: its size in bytes, its digest, its path."""
        url = f"{HfApi().endpoint}/{self.repo_id}"
        if self.revision:
            url += f"/tree/{self.revision}"
        visibility = "public" if self.public else "private"
        lines = [f"to {printable(url)} ({visibility} if it has to be created):"]
        for name in self.files:
            path = self.folder / name
            if name == CARD:
                card = self.card().encode()
                size = len(card)
                digest = bytes_digest([card])
            else:
                size = path.stat().st_size
                digest = file_digest(path)
            lines.append(f"  {size:>12,} bytes  {digest}  {printable(str(path))}")
        for name in self.left_out:
            lines.append(f"  left out: {printable(str(self.folder / name))}")
        return "\n".join(lines)


def plan_upload(folder: Path, repo_id: str, *, public: bool = False, revision: str | None = None) -> Upload:
    """Check an artifact's folder and list what `push` would send. Nothing is sent, and no network is needed.

    Raises:
        UserError: the folder is no complete, intact artifact with a card, one of its files is a link, or `repo_id` is
            not `user/name`.
    """
    check_repo_id(repo_id)
    folder = Path(at_home(folder))
    kind = kind_of(folder)
    kind.load(folder)
    if not (folder / CARD).is_file():
        raise UserError(
            f"{folder}: {CARD} is missing; write the {kind.kind}'s card (sources, licences, results) first",
            field=CARD,
            code="missing",
        )
    optional = [name for name in (*kind.optional, STAGE_SETTINGS) if (folder / name).is_file()]
    pictures = sorted(path.name for path in folder.glob("[!.]*.png") if _is_picture(path))
    files = (*kind.files, *optional, CARD, *pictures)
    for name in files:
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise UserError(
                f"{printable(str(path))}: only regular files are sent; put a copy here", field=path.name, code="file"
            )
    left_out = tuple(sorted(path.name for path in folder.iterdir() if path.name not in files))
    return Upload(folder, repo_id, files, left_out, public, revision)


def _is_picture(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(len(_PNG)) == _PNG


def push(upload: Upload) -> str:
    """Send the files of `upload` as one commit, making the repository and the branch when needed.

    Returns:
        The commit's page on the Hub.

    Raises:
        UserError: there is no token, the Hub refuses or does not answer, or the repository is public and must not be.
    """
    if get_token() is None:
        raise UserError(
            "no Hugging Face token: set HF_TOKEN or run `hf auth login`, with a token that may write",
            field="HF_TOKEN",
            code="missing",
        )
    api = HfApi()
    with hub_errors(f"cannot push {upload.folder} to {upload.repo_id}"):
        api.create_repo(upload.repo_id, private=not upload.public, exist_ok=True)
        if not upload.public and not api.model_info(upload.repo_id).private:
            raise UserError(
                f"{upload.repo_id} exists and is public: push with --public, or choose another name",
                field="public",
                code="conflict",
            )
        if upload.revision:
            api.create_branch(upload.repo_id, branch=upload.revision, exist_ok=True)
        additions = []
        for name in upload.files:
            content: Path | bytes = upload.folder / name
            if name == CARD:
                content = upload.card().encode()
            additions.append(CommitOperationAdd(name, content))
        commit = api.create_commit(
            upload.repo_id, additions, commit_message="Upload from keepsight", revision=upload.revision
        )
        return commit.commit_url
