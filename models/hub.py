"""Adapters and heads to and from the Hugging Face Hub, or the server that HF_ENDPOINT names.

Only the files of the kinds in `ARTIFACTS` are sent or fetched, each by its name. The token is the one the Hub's client
finds, HF_TOKEN or what `hf auth login` saved; it is neither printed nor stored.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, get_token, snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from keepsight import checkpoints
from keepsight.errors import UserError
from keepsight.files import file_digest, text_digest
from keepsight.models import draft_head_files, lookahead_files, retrieval_head_files
from keepsight.models.card import HUB_ID

CARD = "README.md"
_PNG = b"\x89PNG\r\n\x1a\n"
SHIPPED = "shipped:"
"""What a name begins with that stands for an artifact which comes with keepsight."""


@dataclass(frozen=True)
class ArtifactKind:
    """A kind of artifact.

    Attributes:
        name: Name for messages.
        files: Names of its required files, which no other kind has.
        check: Reads and verifies a folder.
        extra: Names of its optional files.
    """

    name: str
    files: tuple[str, ...]
    check: Callable[[Path], object]
    extra: tuple[str, ...] = ()


ARTIFACTS = (
    ArtifactKind("lookahead adapter", lookahead_files.FILES, lookahead_files.load_lookahead),
    ArtifactKind("draft head", draft_head_files.FILES, draft_head_files.load_draft_head, (draft_head_files.ORIGIN,)),
    ArtifactKind("retrieval head", retrieval_head_files.FILES, retrieval_head_files.load_retrieval_head),
)


def kind_of(folder: Path) -> ArtifactKind:
    """The kind of a folder: the one with most of its files there.

    Raises:
        UserError: it has no file of any kind.
    """
    found = [sum((folder / name).is_file() for name in kind.files) for kind in ARTIFACTS]
    if not any(found):
        kinds = "; ".join(f"{kind.name}: {', '.join(kind.files)}" for kind in ARTIFACTS)
        raise UserError(f"{folder}: holds nothing that can be pushed ({kinds}); name the folder that training wrote")
    return ARTIFACTS[found.index(max(found))]


@dataclass(frozen=True)
class Upload:
    """What a push would send.

    Attributes:
        folder: The adapter or head.
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

    @property
    def url(self) -> str:
        """The page of the branch on the Hub."""
        return f"{HfApi().endpoint}/{self.repo_id}" + (f"/tree/{self.revision}" if self.revision else "")

    def card(self) -> str:
        """The card as it is sent: it names the repository."""
        return (self.folder / CARD).read_text(encoding="utf-8").replace(HUB_ID, self.repo_id)

    def describe(self) -> str:
        """One line for each file (its size in bytes, its digest, its path), under a line that names the destination."""
        lines = [f"to {self.url} ({'public' if self.public else 'private'} if it has to be created):"]
        for path in (self.folder / name for name in self.files):
            size, digest = path.stat().st_size, file_digest(path)
            if path.name == CARD:
                size, digest = len(self.card().encode()), text_digest(self.card())
            lines.append(f"  {size:>12,} bytes  {digest}  {path}")
        lines += [f"  left out: {self.folder / name}" for name in self.left_out]
        return "\n".join(lines)


def plan_upload(folder: Path, repo_id: str, *, public: bool = False, revision: str | None = None) -> Upload:
    """Check an artifact's folder and list what `push` would send. Nothing is sent, and no network is needed.

    Raises:
        UserError: the folder is no complete, intact artifact with a card, one of its files is a link, or `repo_id` is
            no `user/name`.
    """
    check_repo_id(repo_id)
    kind = kind_of(folder)
    kind.check(folder)
    if not (folder / CARD).is_file():
        raise UserError(f"{folder}: {CARD} is missing; write the {kind.name}'s card (sources, licences, results) first")
    extra = [name for name in kind.extra if (folder / name).is_file()]
    pictures = sorted(path.name for path in folder.glob("[!.]*.png") if _is_picture(path))
    files = (*kind.files, *extra, CARD, *pictures)
    if links := [name for name in files if (folder / name).is_symlink()]:
        raise UserError(f"{folder / links[0]}: a link, and only regular files are sent; copy what it points to here")
    left_out = tuple(sorted(path.name for path in folder.iterdir() if path.name not in files))
    return Upload(folder, repo_id, files, left_out, public, revision)


def _is_picture(path: Path) -> bool:
    """Whether it is a regular file that begins as a PNG does."""
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
        raise UserError("no Hugging Face token: set HF_TOKEN or run `hf auth login`, with a token that may write")
    api = HfApi()
    with _hub_errors(f"cannot push {upload.folder} to {upload.repo_id}"):
        api.create_repo(upload.repo_id, private=not upload.public, exist_ok=True)
        if not upload.public and not api.model_info(upload.repo_id).private:
            raise UserError(f"{upload.repo_id} exists and is public: push with --public, or choose another name")
        if upload.revision:
            api.create_branch(upload.repo_id, branch=upload.revision, exist_ok=True)
        sent: dict[str, Path | bytes] = {name: upload.folder / name for name in upload.files}
        sent[CARD] = upload.card().encode()
        additions = [CommitOperationAdd(*pair) for pair in sent.items()]
        message = "Upload from keepsight"
        return api.create_commit(upload.repo_id, additions, commit_message=message, revision=upload.revision).commit_url


def fetch(reference: str, revision: str | None = None) -> Path:
    """The folder of an artifact: `reference` itself, one that comes with keepsight, or the Hub's, cached once fetched.

    Files are asked for by name, so a repository decides neither what is written nor where. Without network
    (or with HF_HUB_OFFLINE=1) the cached copy is used.

    Args:
        reference: A local folder, `shipped:NAME` for one that comes with keepsight, or a Hub id (`user/name`).
        revision: Branch, tag or commit on the Hub.

    Raises:
        UserError: it is neither a folder nor a Hub id, keepsight ships none of that name, the Hub and its cache do not
            have it, or it is a draft head without a safetensors file.
    """
    if reference.startswith(SHIPPED):
        return _shipped(reference.removeprefix(SHIPPED))
    if Path(reference).is_dir():
        return Path(reference)
    check_repo_id(reference)
    names = [name for kind in ARTIFACTS for name in (*kind.files, *kind.extra)]
    with _hub_errors(f"{reference!r} is no folder here and cannot be fetched from the Hub"):
        folder = Path(snapshot_download(reference, revision=revision, allow_patterns=[*names, CARD]))
    if {name for name in names if (folder / name).is_file()} == {draft_head_files.CONFIG}:
        advice = draft_head_files.how_to_convert(reference)
        raise UserError(f"{reference}: has no {draft_head_files.WEIGHTS}, which a draft head needs; {advice}")
    return folder


def fetch_pickled_head(reference: str, revision: str | None = None) -> Path:
    """The folder of a draft head that may be a pickle: `reference` itself, or the Hub's, cached once fetched.

    Raises:
        UserError: it is neither a folder nor a Hub id, or the Hub and its cache do not have it.
    """
    if Path(reference).is_dir():
        return Path(reference)
    check_repo_id(reference)
    names = [draft_head_files.CONFIG, draft_head_files.PICKLE]
    with _hub_errors(f"{reference!r} is no folder here and cannot be fetched from the Hub"):
        return Path(snapshot_download(reference, revision=revision, allow_patterns=names))


def _shipped(name: str) -> Path:
    folders = {path.name: path for path in sorted(Path(checkpoints.__path__[0]).iterdir()) if (path / CARD).is_file()}
    if name not in folders:
        raise UserError(f"{SHIPPED}{name}: keepsight ships no such artifact; it ships {', '.join(folders)}")
    return folders[name]


def check_repo_id(repo_id: str) -> None:
    """Check the form of a Hub id.

    Raises:
        UserError: it is no `user/name`.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        valid = False
    else:
        valid = repo_id.count("/") == 1
    if not valid:
        raise UserError(f"{repo_id!r} is neither a folder nor a Hub id; a Hub id looks like user/name")


@contextmanager
def _hub_errors(what: str) -> Iterator[None]:
    """Turn any failure into one line.

    Everything is caught, because the Hub's client also passes on the errors of its HTTP library, which differs between
    versions.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{what}: {reason[:400]}") from error
