"""Prefix files: a document that was read and evicted once, which an engine loads as the KV entries of placeholders.

A file is safetensors, named by the digest of its bytes. It holds either keys and values [L, K, B, d] of heads that all
keep B entries, or whole pages of heads that keep different numbers (`pages` [L, K], keys and values [total, d], by
layer and head). Its placeholder tokens spell the digest in special tokens that are never sampled: an engine finds the
file by the tokens alone, and its own prefix cache tells documents apart.
"""

import json
import math
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import NonNegativeInt, PositiveInt
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from keepsight.errors import UserError, one_line
from keepsight.files import at_home, atomic_file, from_json, hex_digest
from keepsight.models.identity import Identity

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DIGEST_BYTES = 16
ID = re.compile("[0-9a-f]{32}")
MAX_LETTERS = 16
PREFIX_HEADER = "Keepsight-Prefix"
"""The header of a request that names the prefix which its prompt follows."""
PREFIX_ROLES = ("system", "developer", "user")
"""Roles of messages whose first words may name a prefix; what answers and tools say is text."""
_NAMED = re.compile(r"\s*\[\[\s*keepsight\s*:([^\]]*)\]\]", re.IGNORECASE)
MARK = "\u2063keepsight\u2063"
"""Placeholder of the document while a chat template is rendered."""
EVICT = "keepsight_evict"
TEXT_BEFORE = "keepsight_before"
PLAIN_NAME = "keepsight_plain"
"""Fields of requests for eviction inside vLLM (`keepsight.serving.vllm.record`); clients must not send the last."""
PREFIX_ID = "keepsight"
WHOLE_PREFIX_ID = "keepsight_whole"
EVICTION_ERROR = "keepsight_error"
EVICTION_STATUS = "keepsight_status"
"""Fields of their replies: of an evicted prefix, of one to be evicted from, why there is none, and its HTTP status."""
CONTEXT_EXCEEDED = "context_length_exceeded"
"""OpenAI's code for a prompt that is too long."""
_METADATA_KEY = "keepsight_prefix"
_VERSION = 1
_CACHED_HEADERS = 4096
_CACHED_TENSORS = 64
"""Prefixes whose headers, and whose tensors, a store keeps in memory."""


@dataclass(frozen=True)
class Header:
    """The header of a prefix file; the digest that names the file covers all of it.

    Attributes:
        entries: B, the number of placeholder tokens, and the position of the next token.
        seen: N, tokens of the prompt that was read.
        shape: Layers, KV heads and head dimension of the model.
        page: Entries of a page where heads keep different numbers; 0 where all keep B.
        before: The rendered text before the document, which a request's own must equal.
        model: Name of the model that read it.
        identity: Of the model, by its weights, and where it is known of its tokenizer.
        rope: The model's parameters of rotary positions.
        method: The method that evicted, with its options.
        tokens: Digest of the tokens read.
        version: Version of the file format.
    """

    entries: PositiveInt
    seen: PositiveInt
    shape: tuple[PositiveInt, PositiveInt, PositiveInt]
    page: NonNegativeInt = 0
    before: str = ""
    model: str = ""
    identity: Identity = Identity()
    rope: dict[str, Any] | None = None
    method: str = ""
    tokens: str = ""
    version: int = _VERSION


# Names


def split_named(text: str) -> tuple[str, str] | None:
    """The id of the prefix that the first words of a text name, `[[keepsight:ID]]`, and the text after it; else None.

    Such words further on in a text are text.
    """
    named = _NAMED.match(text)
    return None if named is None else (named[1].strip(), text[named.end() :])


# Placeholders


def alphabet_of(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The ids that spell digests: up to 16 special tokens that no answer and no chat template uses, ascending.

    Raises:
        UserError: there are fewer than two.
    """
    template = str(tokenizer.chat_template or "")
    used = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    added: Any = tokenizer.added_tokens_decoder
    if not isinstance(added, dict):
        added = {}  # mistral-common's class has none

    unused_ids = []
    for id, token in sorted(added.items()):
        if token.special and id not in used and token.content not in template:
            unused_ids.append(id)
    if len(unused_ids) < 2:
        raise UserError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no special tokens that its chat template does not use; "
            "prefixes need at least two to spell their id",
            field="tokenizer",
            code="model",
        )
    return unused_ids[:MAX_LETTERS]


def letters_of_id(alphabet_size: int) -> int:
    """How many letters of an alphabet spell a digest."""
    return math.ceil(8 * DIGEST_BYTES / math.log2(alphabet_size))


def require_spellable(entries: int, alphabet: Sequence[int]) -> int:
    """How many of `entries` token ids spell a digest.

    Raises:
        UserError: they are too few.
    """
    letters = letters_of_id(len(alphabet))
    if entries < letters:
        raise UserError(
            f"{entries} entries cannot spell an id of {letters} letters; raise the budget to {letters}",
            field="budget",
            code="range",
        )
    return letters


def placeholders(digest: str, entries: int, alphabet: Sequence[int]) -> list[int]:
    """`entries` token ids that spell the digest, and repeat it; a `UserError` if there are too few to spell it."""
    letters = require_spellable(entries, alphabet)
    number = int(digest, 16)
    spelled = []
    for _ in range(letters):
        number, digit = divmod(number, len(alphabet))
        spelled.append(alphabet[digit])
    repeats = entries // letters + 1
    return (spelled * repeats)[:entries]


def digest_in(ids: Sequence[int] | None, alphabet: Sequence[int]) -> str | None:
    """The digest that a prompt's first tokens spell; None for an ordinary prompt."""
    letters = letters_of_id(len(alphabet))
    if not ids or len(ids) < letters:
        return None

    digits = {token: digit for digit, token in enumerate(alphabet)}
    number = 0
    for position, token in enumerate(ids[:letters]):
        if token not in digits:
            return None
        number += digits[token] * len(alphabet) ** position
    return f"{number:032x}" if number < 256**DIGEST_BYTES else None


def split_at_mark(text: str) -> tuple[str, str] | None:
    """The parts of a rendered text before and after MARK; None unless MARK occurs exactly once."""
    if text.count(MARK) != 1:
        return None
    before, _, after = text.partition(MARK)
    return before, after


# Files


def write_prefix(root: Path, header: Header, tensors: dict[str, Tensor]) -> str:
    """Write a prefix file, all of it or none; returns its digest, 32 hex digits."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # One key alone: safetensors writes several in any order, and equal prefixes would have several names.
    data = save(tensors, metadata={_METADATA_KEY: json.dumps(asdict(header), sort_keys=True)})
    digest = _digest(data)
    root.mkdir(parents=True, exist_ok=True)
    with atomic_file(file_of(root, digest)) as unfinished:
        unfinished.write_bytes(data)
    return digest


def file_of(root: Path, digest: str) -> Path:
    """Path of the file of a digest."""
    return root / f"{digest}.safetensors"


def transfer_config(*roots: str | Path) -> dict[str, Any]:
    """The `--kv-transfer-config` of vLLM for the prefixes of one folder or several."""
    names = [str(root) for root in roots]
    return {
        "kv_connector": "KeepsightConnector",
        "kv_connector_module_path": "keepsight.serving.vllm.connector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"root": names[0] if len(names) == 1 else names},
    }


def _digest(data: bytes) -> str:
    return hex_digest([data])[: 2 * DIGEST_BYTES]


class PrefixStore:
    """Reads the prefixes of a folder; the digest of a file's bytes must be its name.

    Args:
        root: The folder. Nothing outside it is read: names are hex digits, and links are refused.
        others: Further folders.
    """

    def __init__(self, root: str | Path, *others: str | Path) -> None:
        self.root = Path(at_home(root))
        self.others = [Path(at_home(other)) for other in others]
        self._headers: dict[str, Header] = {}
        self._tensors: OrderedDict[str, dict[str, Tensor]] = OrderedDict()

    def path(self, digest: str) -> Path:
        """The file of a digest; a `UserError` if it is no digest, or there is no such file."""
        if not ID.fullmatch(digest):
            raise UserError(
                f"keepsight: {digest[:64]!r} is not a prefix id; give the 32 hex digits that were printed",
                field="prefix",
                code="type",
            )
        for root in (self.root, *self.others):
            path = file_of(root, digest)
            if path.is_file() and not path.is_symlink():
                return path
        raise UserError(
            f"keepsight: there is no prefix {digest}; make it with `keepsight prefix`", field="prefix", code="unknown"
        )

    def header(self, digest: str) -> Header:
        """The header of a prefix; a `UserError` if there is no such prefix, or its file is damaged."""
        self.path(digest)  # it may have been removed
        if digest not in self._headers:
            self._read(digest)
        return self._headers[digest]

    def tensors(self, digest: str) -> dict[str, Tensor]:
        """The tensors of a prefix, of the shapes that its header gives.

        Raises:
            UserError: there is no such prefix, or its file is damaged.
        """
        self.path(digest)
        if digest not in self._tensors:
            self._tensors[digest] = self._read(digest)
            while len(self._tensors) > _CACHED_TENSORS:
                self._tensors.popitem(last=False)
        self._tensors.move_to_end(digest)
        return self._tensors[digest]

    def _read(self, digest: str) -> dict[str, Tensor]:
        """The tensors of a file; keeps its header. The file is read once: it cannot change after the check."""
        path = self.path(digest)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UserError(
                f"{path.name}: {error.strerror}; make the prefix again", field="prefix", code="file"
            ) from None
        if _digest(data) != digest:
            raise UserError(
                f"{path.name}: its contents differ from the digest it is named by; make the prefix again",
                field="prefix",
                code="file",
            )
        try:
            stored = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])  # as safetensors begins
            header = from_json(stored["__metadata__"][_METADATA_KEY].encode(), Header)
            if header.version != _VERSION:
                raise ValueError(f"version {header.version}, this keepsight reads {_VERSION}")
            tensors = load(data)
        except (SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path.name}: not a prefix file ({one_line(error)}); make it again", field="prefix", code="file"
            ) from None
        _check(path, header, tensors)
        self._headers[digest] = header
        if len(self._headers) > _CACHED_HEADERS:
            self._headers.pop(next(iter(self._headers)))
        return tensors


def _check(path: Path, header: Header, tensors: dict[str, Tensor]) -> None:
    """Refuse tensors that do not match the header."""
    layers, kv_heads, width = header.shape
    pages = tensors.get("pages", torch.zeros(1, dtype=torch.long))
    total = int(pages.sum())
    expected: dict[str, tuple[int, ...]] = {}
    if header.page:
        expected["keys"] = (total * header.page, width)
        expected["values"] = (total * header.page, width)
        expected["pages"] = (layers, kv_heads)
    else:
        expected["keys"] = (layers, kv_heads, header.entries, width)
        expected["values"] = (layers, kv_heads, header.entries, width)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != expected:
        raise UserError(
            f"{path.name}: holds {shapes} in place of {expected}; make the prefix again", field="prefix", code="file"
        )

    is_sound = tensors["keys"].is_floating_point() and tensors["values"].is_floating_point()
    if header.page:
        blocks = -(-total // (layers * kv_heads))
        fills_blocks = header.entries == blocks * header.page
        is_sound = is_sound and pages.dtype == torch.int64 and bool((pages > 0).all()) and fills_blocks
    if not is_sound:
        raise UserError(
            f"{path.name}: its tensors are not those of a prefix; make it again", field="prefix", code="file"
        )
